"""Sums of models over 1 to 4 ranks against each of them in one process, searched and differentiated by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ase import Atoms

import composed
import parity
from nvdd import Batch, DistributedModel, DistributedPipelineModel, DomainConfig, ModelOutputs, trace_and_validate
from nvdd.models.lj import LennardJonesModelWrapper
from nvdd.neighbors import attach_neighbors
from reference import brute_force_lj

RANKS = (1, 2, 3, 4)
# name -> structure; those of argon for toys and lj, of silica for networks
CASES = {
    "lj + lj": "triclinic",
    "mace + lj": "silica left-handed",
    "sevennet + lj": "silica unwrapped",
    "three": "silica left-handed",
    "mace + positions": "silica unwrapped",
    "toy + positions": "triclinic",
    "direct + lj": "triclinic",
    "internal + lj": "unwrapped",
    "policies": "triclinic",
    "energy of systems + lj": "triclinic",
    "wired": "triclinic",
    "wired, energies of both": "left-handed",
    "wired backwards": "triclinic",
    "wired to two": "triclinic",
    "wired, positions": "unwrapped",
    "wired, halo read": "triclinic",
    "wired, fixed": "triclinic",
    "wired, of systems": "triclinic",
    "wired, direct": "triclinic",
}


def check(ranks, world_size: int, name: str, atoms, **options) -> list[dict]:
    expected = composed.plain(name, atoms)
    parts = ranks.run(world_size, composed.on_rank, name, atoms, sorted(expected), options)
    composed.assert_equal(parts, expected)
    assert np.abs(expected["forces"]).max() > 1e-6 or len(expected["forces"]) == 1
    for part in parts:
        assert not part["setup"], "the second step must build no plan"
        assert part["builds"] == 1, "one partition and one halo for all blocks"
    return parts


# all of them by --run-slow; networks beside what `test_families` has, on one number of ranks
OFTEN = {"sevennet + lj": (2,), "three": (3,), "mace + positions": (2,), "mace + lj": (4,)}


@pytest.mark.parametrize(
    "world_size,name",
    [
        pytest.param(n, name, marks=() if n in OFTEN.get(name, RANKS) else pytest.mark.slow)
        for n in RANKS
        for name in CASES
    ],
)
def test_parity(ranks, world_size, name):
    check(ranks, world_size, name, parity.structure(CASES[name]), skin=0.5 if world_size % 2 else 1.0)


# aimnet takes each process seconds to import
FAMILIES = [
    pytest.param(n, name, marks=() if n in {"sevennet + d3": (2,), "aimnet2 + pme": (3,)}.get(name, (2, 4)) else pytest.mark.slow)
    for n in RANKS
    for name in ("mace + ewald", "mace + d3", "sevennet + d3", "aimnet2 + pme")
]


@pytest.mark.parametrize("world_size,name", FAMILIES)
def test_families(ranks, world_size, name):
    """Networks with dispersion and electrostatics; of AIMNet2's charges the forces, too."""
    check(ranks, world_size, name, charged(name), skin=0.5)


def charged(name: str):
    atoms = parity.structure("silica unwrapped").copy()
    if name == "mace + ewald":
        atoms.set_initial_charges(np.where(atoms.numbers == 14, 1.2, -1.1))
    return atoms


@pytest.mark.parametrize("skin", (0.0, 1.0))
@pytest.mark.parametrize("name", ("lj + lj", "wired to two"))
def test_skin(ranks, name, skin):
    expected = composed.plain(name, parity.structure("triclinic"))
    composed.assert_equal(
        ranks.run(3, composed.on_rank, name, parity.structure("triclinic"), sorted(expected), {"skin": skin}), expected
    )


# rows of the envelope; the sum with wires has no cell to need, that with positions has
ENVELOPE = ("left-handed", "slab", "wire", "tiny cell", "pair", "gas", "bar", "atom")


@pytest.mark.parametrize("structure", ENVELOPE)
@pytest.mark.parametrize("name,world_size", (("lj + lj", 4), ("wired, energies of both", 3)))
def test_envelope(ranks, name, structure, world_size):
    atoms = parity.structure(structure)
    expected = composed.plain(name, atoms)
    if atoms.cell.rank < 3:
        del expected["virial"]
    composed.assert_equal(ranks.run(world_size, composed.on_rank, name, atoms, sorted(expected), {}), expected)


@pytest.mark.parametrize("name", ("lj + lj", "wired", "wired, halo read", "wired, of systems", "energy of systems + lj", "direct + lj"))
@pytest.mark.parametrize("world_size", (1, 2, 3))
def test_several_systems(ranks, world_size, name):
    """Total charges are those of each system; on 2 ranks and more some rank lacks one."""
    atoms = [parity.structure(s) for s in ("tiny cell", "argon", "bar", "left-handed")]
    expected = composed.plain(name, atoms)
    assert expected["energy"].shape == (4,)
    composed.assert_equal(ranks.run(world_size, composed.on_rank, name, atoms, sorted(expected), {}), expected)


@pytest.mark.parametrize("name", ("mace + positions", "wired to two", "direct + lj", "aimnet2 + pme", "mace + ewald"))
def test_stress_by_finite_differences(name):
    """Of the energies of all blocks; a stress that a block predicts is that block's."""
    atoms = charged(name) if "mace" in name or "aimnet2" in name else parity.structure("triclinic").copy()
    found = DistributedModel(composed.pipeline(name))(Batch.from_atoms(atoms), {"stress"})["stress"][0].numpy()
    model = composed.PipelineModelWrapper([composed.lj(6.0)]) if name == "direct + lj" else composed.pipeline(name)
    if name == "direct + lj":
        found = (
            found
            - composed.pipeline(name)
            .composed_of[0](_neighbours(atoms, composed.pipeline(name)))["stress"][0]
            .detach()
            .numpy()
        )
    h, energy = 2e-4, DistributedModel(model)
    for a, b in ((0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1)):
        derivative = 0.0
        for step, weight in ((1, 8 / 12), (2, -1 / 12), (-1, -8 / 12), (-2, 1 / 12)):
            strain = np.zeros((3, 3))
            strain[a, b] += 0.5 * step * h
            strain[b, a] += 0.5 * step * h
            strained = atoms.copy()
            strained.set_cell(atoms.cell.array @ (np.eye(3) + strain), scale_atoms=True)
            derivative += weight * float(energy(Batch.from_atoms(strained), {"energy"})["energy"][0]) / h
        assert abs(derivative / atoms.get_volume() - found[a, b]) <= 1e-6 * np.abs(found).max() + 1e-9, (a, b)


def _neighbours(atoms, model):
    batch, block = Batch.from_atoms(atoms), model.composed_of[0]
    return attach_neighbors(batch, block.model_config.neighbor_config.cutoff, block.edge_layout)


def test_forces_by_finite_differences_through_wires():
    """Charges depend on all atoms of the system; the derivative goes through both layers that equilibrate them."""
    atoms = parity.structure("triclinic").copy()
    model = DistributedModel(composed.pipeline("wired"))
    out = model(Batch.from_atoms(atoms))
    forces = np.empty((len(atoms), 3))
    forces[out.ids.numpy()] = out["forces"].numpy()
    fixed = DistributedModel(composed.pipeline("wired, fixed"))(Batch.from_atoms(atoms))["forces"].numpy()
    lj = DistributedModel(composed.lj(5.0))(Batch.from_atoms(atoms))["forces"].numpy()
    assert np.abs(forces - fixed - lj).max() > 1e-2 * np.abs(forces).max(), "the part through the charges must count"
    for atom, axis in ((0, 0), (7, 1), (20, 2)):
        energies = []
        for step in (1e-4, 2e-4, -1e-4, -2e-4):
            moved = atoms.copy()
            moved.positions[atom, axis] += step
            energies.append(float(model(Batch.from_atoms(moved), {"energy"})["energy"][0]))
        numeric = -(8 * (energies[0] - energies[2]) - (energies[1] - energies[3])) / 12e-4
        assert abs(numeric - forces[atom, axis]) <= 1e-7 * np.abs(forces).max()


def test_one_halo_and_one_message_of_forces(ranks):
    """What is exchanged: the forces of both cutoffs in one message, and of the narrow one no more rows than it reads."""
    parts = ranks.run(4, composed.on_rank, "lj + lj", parity.structure("bar"), ["energy", "forces"], {})
    alone = ranks.run(4, narrow_halo_on_rank, parity.structure("bar"))
    for part, rows in zip(parts, alone, strict=True):
        assert part["sites"] == ["forces"]
        assert part["built"].get("plan of atoms") == 2, "one plan: its counts and its rows"
        assert part["built"].get("rows read of atoms") == 1, "the narrow block asks once for its part of it"
        assert part["halo"][1] == rows < part["halo"][0]


def narrow_halo_on_rank(comm, atoms):
    model = DistributedModel(composed.lj(4.3), DomainConfig(mesh=comm))
    return model(Batch.from_atoms(atoms), {"energy"}).n_halo


def test_exchanges_are_those_of_the_blocks(ranks):
    """MACE's fetches and folds, and nothing for lj beside the message of forces that both share."""
    quartz = parity.structure("quartz")
    both = ranks.run(2, composed.on_rank, "mace + lj", quartz, ["energy", "forces"], {})[0]
    mace = ranks.run(2, parity.on_rank, "mace", "quartz", {})[0]
    assert len(both["sites"]) == mace["exchanges"] and both["sites"].count("forces") == 1


def test_what_changes_between_calls(ranks):
    """Cell, species, periodicity, number of atoms: never an old one's neighbours in any block."""
    atoms, rng, steps = parity.structure("triclinic").copy(), np.random.default_rng(2), []
    for _ in range(2):
        atoms.set_cell(atoms.cell.array @ (np.eye(3) + rng.normal(scale=0.01, size=(3, 3))), scale_atoms=True)
        steps.append(atoms.copy())
    atoms.positions += rng.normal(scale=0.02, size=atoms.positions.shape)
    steps.append(atoms.copy())
    atoms.numbers[[0, 3]] = atoms.numbers[[3, 0]]
    steps.append(atoms.copy())
    del atoms[[1, 4]]
    atoms.pbc = (True, False, True)
    steps.append(atoms.copy())
    parts = ranks.run(3, sequence_on_rank, "wired", steps)
    for k, step in enumerate(steps):
        expected = composed.plain("wired", step)
        composed.assert_equal(
            [{"sites": (), **part[k]} for part in parts], {n: expected[n] for n in ("energy", "forces")}
        )


def sequence_on_rank(comm, name, steps):
    model, found = DistributedModel(composed.pipeline(name), DomainConfig(mesh=comm)), []
    for atoms in steps:
        out = model(Batch.from_atoms(atoms))
        found.append({"ids": out.ids.numpy(), **{k: v.numpy() for k, v in out.items()}})
    return found


@pytest.mark.parametrize("name", ("wired to two", "wired, of systems"))  # with cutoffs of their own, and with one for both
def test_differentiated_twice(ranks, name):
    """Training on forces: gradients of a function of forces by positions, through the wires, on 1 and 2 ranks."""
    atoms = parity.structure("triclinic")
    expected = _second(DistributedModel(composed.pipeline(name)), atoms)
    for part in ranks.run(2, second_on_rank, name, atoms):
        assert np.abs(part - expected).max() <= 1e-10 * np.abs(expected).max()
    batch = Batch.from_atoms(atoms)
    weights = np.random.default_rng(1).normal(size=batch.positions.shape)
    step = 1e-5 * weights / np.linalg.norm(weights)
    values = []
    for sign in (1, -1):
        moved = atoms.copy()
        moved.positions += sign * step
        values.append((composed.plain(name, moved)["forces"] ** 2).sum())
    assert abs((values[0] - values[1]) / 2 - (expected * step).sum()) <= 1e-5 * np.abs(expected * step).sum()


def second_on_rank(comm, name, atoms):
    return _second(DistributedModel(composed.pipeline(name), DomainConfig(mesh=comm)), atoms)


def _second(model, atoms):
    batch = Batch.from_atoms(atoms)
    batch.positions.requires_grad_(True)
    forces = model(batch, {"energy", "forces"}, create_graph=True)["forces"]
    (gradient,) = torch.autograd.grad(forces.square().sum(), batch.positions)
    return gradient.numpy()


def test_mace_and_lj_against_their_own_calculators():
    """The references of both families, each by itself."""
    atoms = parity.structure("silica left-handed")
    mace = parity.exact("mace", atoms)
    lj = composed.lj(7.3)
    alone = DistributedModel(lj)(Batch.from_atoms(atoms), {"energy", "forces"})
    out = DistributedPipelineModel(composed.pipeline("mace + lj"))(Batch.from_atoms(atoms), {"energy", "forces"})
    energy = mace.energy + float(alone["energy"][0])
    assert abs(float(out["energy"][0]) - energy) <= 1e-12 * abs(energy)
    assert (
        np.abs(out["forces"].numpy() - mace.forces - alone["forces"].numpy()).max() <= 1e-11 * np.abs(mace.forces).max()
    )


def test_two_cutoffs_equal_a_double_sum():
    """Brute force over all images of all pairs, for each cutoff."""
    atoms = parity.structure("triclinic")
    model = composed.PipelineModelWrapper([LennardJonesModelWrapper(**parity.LJ | {"cutoff": c}) for c in (4.4, 8.5)])
    tables = {k: {{"Ar": 18, "Ne": 10}[s]: v for s, v in parity.LJ[k].items()} for k in ("epsilon", "sigma")}
    sums = [
        brute_force_lj(atoms.positions, atoms.numbers, atoms.cell.array, atoms.pbc, tables["epsilon"], tables["sigma"], c,
                       mixing="arithmetic")
        for c in (4.4, 8.5)
    ]  # fmt: skip
    out = DistributedModel(model)(Batch.from_atoms(atoms), {"energy", "energies", "forces", "stress"})
    for key in ("energies", "forces"):
        expected = sums[0][key] + sums[1][key]
        assert np.abs(out[key].numpy() - expected).max() <= 1e-11 * np.abs(expected).max()
    expected = np.asarray(sums[0]["stress"] + sums[1]["stress"])[[[0, 5, 4], [5, 1, 3], [4, 3, 2]]]
    assert np.abs(out["stress"][0].numpy() - expected).max() <= 1e-11 * np.abs(expected).max()


@pytest.mark.parametrize("name", ("wired to two", "direct + lj", "policies"))
def test_the_forward_in_one_process_is_the_same_sum(name):
    """What `trace_and_validate` takes for the truth, against each block by itself."""
    atoms = parity.structure("triclinic")
    model = composed.pipeline(name)
    batch = attach_neighbors(Batch.from_atoms(atoms), model.model_config.neighbor_config.cutoff, model.edge_layout)
    batch.positions.requires_grad_(True)
    raw, expected = model(batch), composed.plain(name, atoms)
    energy = raw["energies"].sum()
    assert abs(energy.item() - expected["energy"][0]) <= 1e-12 * abs(expected["energy"][0])
    forces = raw["forces"] if "forces" in raw else -torch.autograd.grad(energy, batch.positions)[0]
    assert np.abs(forces.detach().numpy() - expected["forces"]).max() <= 1e-11 * np.abs(expected["forces"]).max()


class Branching(composed.Charges):
    """Charges of distances, which a rank without any edge makes without autograd."""

    def forward(self, data):
        if not data.edge_vectors.shape[0]:
            return ModelOutputs(charges=torch.zeros(data.n_atoms, dtype=torch.float64))
        decay = torch.exp(-data.edge_vectors.norm(dim=1))
        return ModelOutputs(charges=torch.zeros(data.n_atoms, dtype=torch.float64).index_add(0, data.receivers, decay))


class BranchingEnergy(Branching):
    outputs = {"energies": composed.PER_NODE}  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.model_config.outputs = frozenset({"energy", "energies", "forces"})

    def forward(self, data):
        return ModelOutputs(energies=super().forward(data)["charges"])


def branching_on_rank(comm, wired):
    atoms = Atoms("Ar3", [[1, 1, 1], [3, 1, 1], [25, 1, 1]], cell=[40, 10, 10])  # the last one by itself
    blocks = [Branching(), composed.Coulomb()] if wired else [BranchingEnergy()]
    config = DomainConfig(mesh=comm, grid_dims=(2, 1, 1)) if comm is not None else None
    model = DistributedModel(composed.PipelineModelWrapper(blocks, composed._shared() if wired else None), config)
    out = model(Batch.from_atoms(atoms), {"energy", "forces"})
    return {"ids": out.ids.numpy(), "sites": (), **{k: v.numpy() for k, v in out.items()}}


@pytest.mark.parametrize("wired", (True, False))
def test_a_rank_without_edges_where_a_model_branches(ranks, wired):
    """There the constant is right, and the rank still takes part in every exchange of the others' derivatives."""
    expected = branching_on_rank(None, wired)
    assert np.abs(expected["forces"]).max() > 0.01
    parts = ranks.run(2, branching_on_rank, wired, timeout=60.0)
    assert [len(p["ids"]) for p in parts] == [2, 1]
    composed.assert_equal(parts, {name: expected[name] for name in ("energy", "forces")})


@pytest.mark.parametrize("name,world_size", (("lj + lj", 3), ("policies", 2)))
def test_shares_of_atoms(ranks, name, world_size):
    """Energies and stresses of atoms over ranks, against one process."""
    atoms, wanted = parity.structure("triclinic"), ["energies", "forces", "stresses"]
    expected = composed.on_rank(None, name, atoms, wanted, {})
    parts = ranks.run(world_size, composed.on_rank, name, atoms, wanted, {})
    ids = np.concatenate([p["ids"] for p in parts])
    for key in wanted:
        found = np.empty_like(expected[key])
        found[ids] = np.concatenate([p[key] for p in parts])
        assert np.abs(found - expected[key]).max() <= 1e-11 * np.abs(expected[key]).max(), key
    stress = DistributedModel(composed.pipeline(name))(Batch.from_atoms(atoms), {"stress"})["stress"][0].numpy()
    assert np.abs(expected["stresses"].sum(0) - stress).max() <= 1e-11 * np.abs(stress).max()


def test_validator():
    """Ranks against that forward, in 20 geometries."""
    report = trace_and_validate("composed:wired_to_two", parity.structure("triclinic"), 2, md_steps=1)
    assert report.ok, report.summary()
    assert {c.output for c in report.attempts[-1].comparisons} >= {"energy", "energies", "forces", "charges", "virial"}
