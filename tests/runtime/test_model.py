"""DistributedModel on 1 to 4 ranks against the models' own single-process calculators, in the user's order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import parity
from nvdd import Batch, DistributedModel, DomainConfig
from nvdd.communicator import Communicator
from nvdd.errors import InputError
from nvdd.models.lj import LennardJonesModelWrapper
from nvdd.neighbors import attach_neighbors

RANKS = (1, 2, 3, 4)
LJ_STRUCTURES = (
    "argon", "triclinic", "left-handed", "unwrapped", "slab", "wire", "tiny cell", "pair", "gas", "bar", "atom",
)  # fmt: skip
# exchanges in a step that rebuilds nothing
MOST_EXCHANGES = {
    "lj": 1,
    "dftd3": 3,  # coordination numbers, their gradient, forces
    "dftd3-zero": 3,
    "aimnet2": 12,  # features and charges of 3 passes and of short-range Coulomb, their gradients, forces
    "mace": 5,
    "mace-l3": 5,
    "7net-0": 11,
    "7net-0/float64": 11,
    "7net-mf-0": 11,
    "7net-l3i5": 11,
}


def on(often: dict[str, tuple[int, ...]], every: tuple[int, ...] = RANKS) -> list:
    """(number of ranks, name) for all of both; slow where another number of ranks in CI takes the same path.

    What is slow in CI is to build a network once more on each further rank, and the evaluations of large networks.
    """
    return [
        pytest.param(n, name, marks=() if n in few else pytest.mark.slow) for n in every for name, few in often.items()
    ]


def check(ranks, world_size: int, model: str, structure: str, **options) -> list[dict]:
    """Evaluates, compares and returns what the ranks gave."""
    parts = ranks.run(world_size, parity.on_rank, model, structure, options)
    found = parity.assemble(parts, len(parity.structure(structure)))
    parity.assert_parity(found, parity.reference(model, structure), tight=model not in parity.SEVENN)
    exchanges = {p["exchanges"] for p in parts}
    assert len(exchanges) == 1, "ranks must take part in the same exchanges"
    if world_size == 1:
        assert exchanges == {0}
    elif model in MOST_EXCHANGES and not options.get("halo_correction"):
        assert exchanges.pop() <= MOST_EXCHANGES[model], parts[0]["sites"]
    assert not parts[0]["setup"], "the second step must build no plan"
    return parts


@pytest.mark.parametrize("skin", (0.5, 1.0))
@pytest.mark.parametrize("structure", LJ_STRUCTURES)
@pytest.mark.parametrize("world_size", RANKS)
def test_lj(ranks, world_size, structure, skin):
    check(ranks, world_size, "lj", structure, skin=skin)


@pytest.mark.parametrize("drops", (True, False))
def test_far_edges_go_only_to_models_that_drop_them(drops):
    wrapper = LennardJonesModelWrapper(epsilon=0.0104, sigma=3.4, cutoff=6.0)
    config = wrapper.model_config.neighbor_config
    assert config.drops_far_edges
    wrapper.model_config.neighbor_config = replace(config, drops_far_edges=drops)
    near, far = (attach_neighbors(Batch.from_atoms(parity.structure("argon")), cutoff) for cutoff in (6.0, 7.0))
    out = DistributedModel(wrapper, DomainConfig(skin=1.0))(Batch.from_atoms(parity.structure("argon")))
    assert len(far.neighbor_list) > 1.2 * len(near.neighbor_list)
    assert out.n_edges == len((far if drops else near).neighbor_list)
    assert float(out["energy"]) == pytest.approx(float(wrapper(near)["energies"].sum()), rel=1e-13)


@pytest.mark.parametrize("balance", ("grid", "rcb"))
@pytest.mark.parametrize("structure", ("triclinic", "slab", "gas", "wire", "unwrapped"))
@pytest.mark.parametrize("world_size", (3, 4))
def test_lj_balance(ranks, world_size, structure, balance):
    check(ranks, world_size, "lj", structure, balance=balance)


@pytest.mark.parametrize("grid", ((4, 1, 1), (1, 2, 2), (1, 1, 4)))
def test_lj_grid_thinner_than_the_cutoff(ranks, grid):
    check(ranks, 4, "lj", "triclinic", grid_dims=grid)


# each option of the network once, the plain one and ZBL on all numbers of ranks
MACE = {name: RANKS if name in ("mace", "mace-zbl") else (2,) for name in parity.MACE}


@pytest.mark.parametrize("world_size,model", on(MACE))
def test_mace(ranks, world_size, model):
    check(ranks, world_size, model, "quartz", skin=1.0 if world_size == 2 else 0.5)


@pytest.mark.parametrize("world_size,structure", on(dict.fromkeys(("quartz slab", "quartz unit", "silane-like"), (2, 4))))
def test_mace_structures(ranks, world_size, structure):
    check(ranks, world_size, "mace-zbl", structure, skin=1.0)


@pytest.mark.parametrize("structure", LJ_STRUCTURES)
@pytest.mark.parametrize("world_size", RANKS)
def test_dftd3(ranks, world_size, structure):
    """Pairs, coordination numbers and triples with a cutoff each; 2 and 3 ranks with domains thinner than all of them."""
    check(ranks, world_size, "dftd3", structure, skin=1.0 if world_size == 2 else 0.5)


@pytest.mark.parametrize("options", ({"grid_dims": (1, 1, 4)}, {"balance": "rcb"}, {"halo_correction": True}), ids=str)
@pytest.mark.parametrize("model", parity.DFTD3)
def test_dftd3_options(ranks, model, options):
    check(ranks, 4, model, "triclinic", **options)


@pytest.mark.parametrize("structure", ("quartz", "silica left-handed", "silica wire", "silica tiny", "silica gas", "silica pair", "silica atom"))  # fmt: skip
@pytest.mark.parametrize("world_size", (1, 2, 3))
def test_aimnet2(ranks, world_size, structure):
    """Charges are equilibrated over all ranks in each layer."""
    check(ranks, world_size, "aimnet2", structure, skin=1.0 if world_size == 2 else 0.5)


@pytest.mark.parametrize("model,structure", (("aimnet2", "silica bar"), ("aimnet2-open", "quartz unit")))
def test_aimnet2_options(ranks, model, structure):
    """Domains thinner than the cutoff; two charge channels."""
    check(ranks, 3, model, structure, grid_dims=(1, 1, 3))


# the rest of the envelope for both kinds of network
SILICA = ("left-handed", "unwrapped", "wire", "tiny", "gas", "pair", "atom")


@pytest.mark.parametrize("world_size,structure", on(dict.fromkeys(SILICA, (2, 4))))
def test_mace_envelope(ranks, world_size, structure):
    check(ranks, world_size, "mace", f"silica {structure}")


@pytest.mark.parametrize("structure", SILICA)
@pytest.mark.parametrize("world_size", (2, 4))
def test_sevennet_envelope(ranks, world_size, structure):
    """In float64 against the wrapper alone, since a few atoms say little about the noise of float32."""
    check(ranks, world_size, "7net-0/float64", f"silica {structure}")


@pytest.mark.parametrize("options", ({"grid_dims": (1, 1, 4)}, {"balance": "rcb"}), ids=str)
@pytest.mark.parametrize("model", ("mace", "7net-0/float64"))
def test_domains_thinner_than_the_cutoff(ranks, model, options):
    """Slices of 4.4 A; the halo of a rank reaches across its neighbours."""
    check(ranks, 4, model, "silica bar", **options)


@pytest.mark.parametrize("world_size", RANKS)
def test_sevennet(ranks, world_size):
    check(ranks, world_size, "7net-0", "quartz", skin=0.5)


@pytest.mark.parametrize("world_size,structure", on({"quartz unit": (2,)}))  # without it: as test_sevennet
def test_sevennet_skin(ranks, world_size, structure):
    check(ranks, world_size, "7net-0", structure, skin=1.0)


@pytest.mark.parametrize("world_size,model", on({"7net-mf-0": (2,), "7net-l3i5": (2,)}))
def test_sevennet_others(ranks, world_size, model):
    check(ranks, world_size, model, "quartz unit", skin=1.0 if world_size == 2 else 0.5)


CORRECTED = {"lj": "triclinic", "mace-zbl": "quartz", "7net-0": "quartz unit"}


@pytest.mark.parametrize("world_size,model", on({"lj": (1, 2, 3), "mace-zbl": (2, 3), "7net-0": (2,)}, (1, 2, 3)))
def test_halo_correction(ranks, world_size, model):
    """The seeds' mode: owned and halo rows, partial sums back to their owners, halo rows refreshed."""
    check(ranks, world_size, model, CORRECTED[model], halo_correction=True)


# a strain so small that no pair crosses the cutoffs of D3, where its energy jumps
STRAINED = {"lj": ("triclinic", 1e-4, 1e-6), "dftd3": ("quartz unit", 2e-6, 1e-6), "dftd3-zero": ("quartz unit", 2e-6, 1e-6),
            "aimnet2": ("quartz unit", 1e-4, 1e-6), "mace-zbl": ("quartz unit", 2e-4, 1e-6), "7net-0/float64": ("quartz unit", 1e-4, 1e-6),
            "7net-0": ("quartz unit", 4e-3, 1e-3)}  # fmt: skip


# that of 7net-0 in float64 says more, and is as long
@pytest.mark.parametrize("model", [pytest.param(m, marks=pytest.mark.slow) if m == "7net-0" else m for m in STRAINED])
def test_stress_by_finite_differences(ranks, model):
    """All six components on 2 ranks, triclinic: central differences of fourth order in the strain."""
    structure, h, tolerance = STRAINED[model]
    atoms = parity.structure(structure)
    stress = parity.assemble(ranks.run(2, parity.on_rank, model, structure, {}), len(atoms)).stress
    numeric = np.zeros((3, 3))
    for a, b in ((0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1)):
        derivative = 0.0
        for steps, weight in ((1, 8 / 12), (2, -1 / 12)):
            for sign in (1, -1):
                strain = np.zeros((3, 3))
                strain[a, b] += 0.5 * sign * steps * h
                strain[b, a] += 0.5 * sign * steps * h
                parts = ranks.run(2, parity.on_rank, model, structure, {}, strain)
                derivative += sign * weight * float(parts[0]["energy"][0]) / h
        numeric[a, b] = numeric[b, a] = derivative / atoms.get_volume()
    error = np.abs(numeric - stress).max()
    assert error <= tolerance * np.abs(stress).max(), (numeric, stress)


SEVERAL = {
    "lj": ["slab", "atom", "tiny cell", "pair"],
    "dftd3": ["slab", "atom", "tiny cell", "pair"],
    "aimnet2": ["silica wire", "silica atom", "silica tiny", "silica pair"],
    "mace": ["silica wire", "silica atom", "silica tiny", "silica pair"],
    "7net-0/float64": ["silica wire", "silica atom", "silica tiny", "silica pair"],
}


def test_model_on_another_device_than_the_ranks():
    import toys

    with pytest.raises(InputError, match="model is on meta and its ranks compute on cpu"):
        DistributedModel(toys.MessagePassing().to("meta"), DomainConfig(mesh=Communicator(None)))


# aimnet takes each process seconds to import; a network of 5 layers, each evaluation
@pytest.mark.parametrize("world_size,model", on({m: {"aimnet2": (1, 2, 3), "7net-0/float64": (2, 4)}.get(m, RANKS) for m in SEVERAL}))
def test_several_systems(ranks, world_size, model):
    """In one batch as each alone; on 2 ranks and more some rank lacks a system."""
    names = SEVERAL[model]
    parts = ranks.run(world_size, parity.several_on_rank, model, names)
    first = 0
    for k, name in enumerate(names):
        last = first + len(parity.structure(name))
        mine = []
        for part in parts:
            rows = (part["ids"] >= first) & (part["ids"] < last)
            mine.append({"ids": part["ids"][rows] - first, "energy": part["energy"][k : k + 1],
                         "energies": part["energies"][rows], "forces": part["forces"][rows]})  # fmt: skip
        assert world_size == 1 or last - first > 1 or any(not len(m["ids"]) for m in mine)
        expected = replace(parity.reference(model, name), stress=None, stresses=None)
        parity.assert_parity(parity.assemble(mine, last - first), expected, tight=model not in parity.SEVENN)
        first = last


def changes(name: str) -> list:
    """A structure as in a run at constant pressure, then changed in every other way between calls."""
    atoms, rng, steps = parity.structure(name).copy(), np.random.default_rng(4), []
    for _ in range(4):
        atoms.set_cell(atoms.cell.array @ (np.eye(3) + rng.normal(scale=0.01, size=(3, 3))), scale_atoms=True)
        atoms.positions += rng.normal(scale=0.02, size=atoms.positions.shape)
        steps.append(atoms.copy())
    atoms.wrap()
    steps.append(atoms.copy())
    atoms.numbers[[0, -1]] = atoms.numbers[[-1, 0]]
    steps.append(atoms.copy())
    del atoms[[1, 4]]
    steps.append(atoms.copy())
    atoms.extend(parity.structure(name)[1:2])
    steps.append(atoms.copy())
    atoms.pbc = (True, False, True)
    steps.append(atoms.copy())
    return steps


@pytest.mark.parametrize(
    "world_size,model",
    on({"lj": (2, 3), "dftd3": (2, 3), "aimnet2": (2,), "mace": (2, 3), "7net-0/float64": (3,)}, (2, 3)),
)
def test_what_changes_between_calls(ranks, world_size, model):
    """Cell (NPT), wrapping, species, number of atoms, periodicity: never an old one's numbers."""
    steps = changes("triclinic" if model in ("lj", "dftd3") else "silica bar")
    parts = ranks.run(world_size, parity.sequence_on_rank, model, steps)
    energies = set()
    for k, atoms in enumerate(steps):
        expected = replace(parity.exact(model, atoms), stress=None, stresses=None)
        found = parity.assemble([part[k] for part in parts], len(atoms))
        parity.assert_parity(found, expected, tight=model not in parity.SEVENN)
        energies.add(round(found.energy, 6))
    assert len(energies) >= len(steps) - 1, "only wrapping leaves the energy as it is"
