"""`ewald` and `pme` over ranks: against Ewald's sum written out, against one process, and against each other."""

from __future__ import annotations

import logging
import math
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from ase import Atoms

import coulomb
from coulomb import KE, MADELUNG, Case
from nvdd import Batch, DistributedModel, InputError
from nvdd.models import EwaldModelWrapper, PMEModelWrapper
from nvdd.neighbors import edges_within


def in_one_process(case: Case) -> dict[str, np.ndarray]:
    """The wrapper on plain tensors, with forces by positions and stress by a strain; nothing of the runtime."""
    from nvdd.neighbors import attach_neighbors

    wrapper, batch = case.wrapper(), Batch.from_atoms(case.atoms())
    attach_neighbors(batch, wrapper.model_config.neighbor_config.cutoff, wrapper.edge_layout)
    x = batch.positions.requires_grad_(True)
    strain = torch.zeros(batch.n_systems, 3, 3, dtype=torch.float64, requires_grad=True)
    even = 0.5 * (strain + strain.transpose(1, 2))
    volumes = torch.linalg.det(batch.cell).abs()
    batch.positions = x + torch.einsum("ni,nij->nj", x, even[batch.batch])
    batch.cell = batch.cell + batch.cell @ even
    energies = wrapper(batch)["energies"]
    forces, virial = torch.autograd.grad(energies.sum(), (x, strain))
    energy = torch.zeros(batch.n_systems, dtype=torch.float64).index_add(0, batch.batch, energies)
    out = {"energy": energy, "energies": energies, "forces": -forces, "stress": virial / volumes[:, None, None]}
    return {name: value.detach().numpy() for name, value in out.items()}


def assembled(parts: list[dict[str, Any]], n_atoms: int) -> dict[str, np.ndarray]:
    """Rows of all ranks in the user's order."""
    ids = np.concatenate([p["ids"] for p in parts])
    assert sorted(ids) == list(range(n_atoms))
    out = {}
    for name in ("energies", "forces"):
        if name in parts[0]:
            rows = np.concatenate([p[name] for p in parts])
            out[name] = np.empty_like(rows)
            out[name][ids] = rows
    for name in ("energy", "stress"):
        if name in parts[0]:
            out[name] = parts[0][name]
            for part in parts[1:]:
                np.testing.assert_array_equal(part[name], out[name])
    return out


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], what: Any) -> None:
    """Energy to 1e-12, the others to 1e-11 of their largest value."""
    for name, value in found.items():
        scale = np.abs(expected[name]).max()
        limit = 1e-12 if name == "energy" else 1e-11
        error = np.abs(value - expected[name]).max()
        # forces of atoms that symmetry holds in place are nothing but rounding
        assert error <= limit * scale + 1e-13, (name, error, scale, what)


PERIODIC = ("argon", "tiny cell", "triclinic", "atom in a box", "left-handed", "unwrapped", "gas", "bar")
LIGHT = {"gas": {"accuracy": 1e-3}, "atom in a box": {"accuracy": 1e-3}}
CASES = [
    *(Case("ewald", (name,), 0.3 * (k % 2), LIGHT.get(name, {})) for k, name in enumerate(PERIODIC)),
    *(Case("pme", (name,), 0.3 * (k % 2), {"accuracy": 1e-4} | LIGHT.get(name, {})) for k, name in enumerate(PERIODIC)),
    *(Case("pme", (name,), 0.3, {"accuracy": 1e-4, "distributed_fft": True}) for name in ("triclinic", "tiny cell", "bar")),
    Case("ewald", ("slab",), 0.0, {"slab": True, "accuracy": 1e-4}),
    Case("ewald", ("slab",), 0.5, {"slab": True, "accuracy": 1e-4}),
    Case("pme", ("slab",), 0.5, {"slab": True, "accuracy": 1e-3, "distributed_fft": True}),
    Case("ewald", ("triclinic", "tiny cell", "bar"), 0.2),
    Case("pme", ("tiny cell", "triclinic", "bar"), 0.2, {"accuracy": 1e-4}),
    Case("pme", ("tiny cell", "triclinic", "bar"), 0.2, {"accuracy": 1e-4, "distributed_fft": True}),
    Case("ewald", ("triclinic",), 0.1, domain={"skin": 1.0, "balance": "rcb"}),
    Case("ewald", ("bar",), 0.1, domain={"skin": 0.0}),
    Case("pme", ("triclinic",), 0.1, {"accuracy": 1e-4}, {"skin": 1.0, "balance": "rcb"}),
]


@cache
def expected() -> list[dict[str, np.ndarray]]:
    return [in_one_process(case) for case in CASES]


@pytest.mark.parametrize("world_size", (1, 2, 3, 4))
def test_parity(ranks, world_size):
    """Every case, on ranks as in one process; the second step makes no plan."""
    parts = ranks.run(world_size, coulomb.on_rank, CASES)
    for k, case in enumerate(CASES):
        mine = [part[k] for part in parts]
        assert len({len(m["exchanges"]) for m in mine}) == 1
        assert not mine[0]["setup"] or case.domain.get("skin") == 0
        assert_equal(assembled(mine, sum(map(len, case.atoms()))), expected()[k], (case, world_size))


def test_one_message_a_step(ranks):
    """Energy and forces of Ewald: structure factors, and the framework's own sum of energies."""
    case = Case("ewald", ("triclinic",), wanted=("energy", "forces"))
    for part in ranks.run(3, coulomb.on_rank, [case]):
        assert part[0]["reductions"] == {"nvdd::structure_factors, result 0": 1, "per-system outputs": 1}
        assert len(part[0]["exchanges"]) == 2, part[0]["exchanges"]  # positions, and their gradient


def test_mesh_is_divided_where_that_pays():
    """By its size, unless it is told."""
    large, small = [64, 64, 64], [32, 64, 64]
    for wrapper, sizes, n_ranks, divided in (
        (PMEModelWrapper(), large, 2, True),
        (PMEModelWrapper(), small, 2, False),
        (PMEModelWrapper(), large, 1, False),
        (PMEModelWrapper(distributed_fft=True), small, 2, True),
        (PMEModelWrapper(distributed_fft=True), small, 1, False),
        (PMEModelWrapper(distributed_fft=False), large, 2, False),
    ):
        assert wrapper._divides(sizes, n_ranks) is divided


def evaluate(wrapper: Any, atoms: Atoms, *wanted: str) -> dict[str, np.ndarray]:
    """On one rank."""
    out = DistributedModel(wrapper)(Batch.from_atoms(atoms), set(wanted or ("energy", "energies", "forces")))
    return {name: value.detach().numpy() for name, value in out.items()}


# -- against what is known ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cutoff", (5.0, 10.0))
@pytest.mark.parametrize("crystal", MADELUNG)
@pytest.mark.parametrize("wrapper,limit", ((EwaldModelWrapper, 1e-10), (PMEModelWrapper, 1e-6)), ids=("ewald", "pme"))
def test_madelung(wrapper, limit, crystal, cutoff):
    """With the accuracies of their own."""
    atoms, distance = coulomb.lattice(crystal)
    found = -evaluate(wrapper(cutoff=cutoff), atoms, "energy")["energy"][0] * distance / KE
    assert abs(found / MADELUNG[crystal] - 1) < limit


def test_stress_of_a_lattice():
    """E is proportional to 1 / a: three times the pressure times the volume is the energy."""
    atoms, _ = coulomb.lattice("CsCl")
    found = evaluate(EwaldModelWrapper(), atoms, "energy", "stress")
    assert abs(np.trace(found["stress"][0]) * atoms.get_volume() / -found["energy"][0] - 1) < 3e-9


@pytest.mark.parametrize("name,net", (("triclinic", 0.0), ("left-handed", 0.4), ("tiny cell", 1.0), ("bar", 0.2)))
def test_sum_written_out(name, net):
    """Truncated alike, so equal to rounding."""
    wrapper, atoms = EwaldModelWrapper(cutoff=6.0, accuracy=1e-7), coulomb.charged(name, net)
    exact = coulomb.ewald(atoms, wrapper.alpha, wrapper.cutoff, wrapper.k_cutoff)
    found = evaluate(wrapper, atoms, "energy", "energies", "forces", "virial")
    assert_equal(found, vars(exact) | {"virial": exact.virial[None]}, name)


def test_not_dependent_on_alpha():
    atoms = coulomb.melt()
    wrappers = (EwaldModelWrapper(), EwaldModelWrapper(cutoff=7.0), EwaldModelWrapper(cutoff=12.0, k_cutoff=6.0, alpha=0.5))
    first, *others = (evaluate(w, atoms, "energy", "energies", "forces", "stress") for w in wrappers)
    for other in others:
        for name in first:
            # charges of 1 e at 3 A: forces of 1 eV/A, of which what is left out may be more than of the energy
            assert np.abs(other[name] - first[name]).max() < 2e-9 * np.abs(first[name]).max(), name


@pytest.mark.parametrize("options,limit", (({}, 1e-7), ({"order": 6, "accuracy": 1e-9}, 2e-9), ({"order": 4, "accuracy": 1e-4}, 1e-4)))
def test_pme_against_ewald(options, limit):
    """Energy to the accuracy asked for; forces, of which errors cancel less, to some tens of it."""
    atoms = coulomb.melt()
    exact = evaluate(EwaldModelWrapper(accuracy=1e-12), atoms, "energy", "energies", "forces", "stress")
    found = evaluate(PMEModelWrapper(**options), atoms, "energy", "energies", "forces", "stress")
    for name, factor in (("energy", 10), ("energies", 10), ("forces", 50), ("stress", 50)):
        assert np.abs(found[name] - exact[name]).max() < factor * limit * np.abs(exact[name]).max(), name


def test_against_torch_pme():
    """An independent package's Ewald sum at its own splitting, and its mesh.

    Its Ewald sum differs from the one written out in numpy by as much, whatever its splitting and cutoffs.
    """
    torchpme = pytest.importorskip("torchpme", reason="torch-pme is not installed")
    atoms, cutoff, smearing = coulomb.melt(), 9.0, 1.25
    edges = edges_within(atoms.positions, atoms.cell.array, atoms.pbc, cutoff, np.arange(len(atoms)))
    x = torch.tensor(atoms.positions, requires_grad=True)
    cell = torch.tensor(atoms.cell.array)
    i, j = torch.from_numpy(edges.receiver), torch.from_numpy(edges.sender)
    r = (x[j] - x[i] + torch.from_numpy(edges.shift.astype(float)) @ cell).norm(dim=1)
    charges = torch.tensor(atoms.get_initial_charges())[:, None]
    make = lambda kind, **options: kind(
        torchpme.CoulombPotential(smearing=smearing), full_neighbor_list=True, **options
    ).to(torch.float64)
    for calculator, wrapper, limit in (
        (make(torchpme.EwaldCalculator, lr_wavelength=0.9), EwaldModelWrapper(), 2e-6),
        (make(torchpme.P3MCalculator, mesh_spacing=0.35, interpolation_nodes=5), PMEModelWrapper(), 2e-4),
    ):
        potential = calculator(charges=charges, cell=cell, positions=x, neighbor_indices=torch.stack([i, j], 1), neighbor_distances=r)
        energies = KE * (charges * potential).flatten()
        (gradient,) = torch.autograd.grad(energies.sum(), x, retain_graph=True)
        found = evaluate(wrapper, atoms)
        scale = energies.detach().abs().max()
        assert np.abs(found["energies"] - energies.detach().numpy()).max() < limit * scale, type(calculator)
        assert np.abs(found["forces"] + gradient.numpy()).max() < 3 * limit * gradient.abs().max()


# -- derivatives ----------------------------------------------------------------------------------------------------

OPTIONS = {"ewald": {"cutoff": 6.0, "accuracy": 1e-7}, "pme": {"cutoff": 6.0, "accuracy": 1e-5, "order": 6},
           "pme over ranks": {"cutoff": 6.0, "accuracy": 1e-5, "order": 6, "distributed_fft": True}}  # fmt: skip
H = 1e-3  # A, or strain


@pytest.mark.parametrize("model", OPTIONS)
def test_forces_and_stress_by_finite_differences(ranks, model):
    """On 2 ranks, all in one call: three atoms, all six strains, and the forces' own change along a direction."""
    name, atoms = model.split()[0], coulomb.charged("triclinic", 0.2)
    # nothing shall jump where a pair or a wave crosses its cutoff; of a coarse mesh derivatives are right, too
    options = OPTIONS[model] | {"accuracy": 1e-9} | ({"mesh_spacing": 0.8} if name == "pme" else {})
    moves = []
    for atom, axis in ((0, 0), (17, 1), (30, 2)):
        move = np.zeros((len(atoms), 3))
        move[atom, axis] = 1.0
        moves.append(("atom", (atom, axis), move))
    for a, b in ((0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1)):
        strain = np.zeros((3, 3))
        strain[a, b] += 0.5
        strain[b, a] += 0.5
        moves.append(("strain", (a, b), strain))
    moves.append(("hessian", None, coulomb.directions(len(atoms))))
    steps = [atoms]
    for kind, _, by in moves:
        for times in (1, -1, 2, -2):
            moved = atoms.copy()
            if kind == "strain":
                moved.set_cell(atoms.cell.array @ (np.eye(3) + times * H * by), scale_atoms=True)
            else:
                moved.positions += times * H * by
            steps.append(moved)
    found = ranks.run(2, coulomb.sequence_on_rank, name, options, steps)
    results = [assembled([part[k] for part in found], len(atoms)) for k in range(len(steps))]
    forces, (stress,) = results[0]["forces"], results[0]["stress"]
    second, again = ranks.run(2, coulomb.hessian_on_rank, name, options, atoms)
    np.testing.assert_array_equal(second, again)
    derivative = lambda k, key: sum(
        w * (results[4 * k + 1 + 2 * s][key] - results[4 * k + 2 + 2 * s][key]) for s, w in ((0, 8 / 12), (1, -1 / 12))
    ) / H  # fmt: skip
    for k, (kind, where, _) in enumerate(moves):
        if kind == "atom":
            assert abs(forces[where] + derivative(k, "energy")[0]) < 1e-6 * np.abs(forces).max(), where
        elif kind == "strain":
            assert abs(stress[where] - derivative(k, "energy")[0] / atoms.get_volume()) < 1e-6 * np.abs(stress).max(), where
        else:
            change = derivative(k, "forces")
            assert np.abs(second - change).max() < 1e-5 * np.abs(change).max()


@pytest.mark.parametrize("model", OPTIONS)
def test_cell_that_changes(ranks, model):
    """As in a run at constant pressure, and other charges: numbers of waves and mesh points change on all ranks."""
    name, options, rng = model.split()[0], OPTIONS[model], np.random.default_rng(4)
    atoms, steps = coulomb.charged("bar", 0.1), []
    for scale in (1.0, 1.04, 0.97, 1.1, 0.93):
        atoms.set_cell(atoms.cell.array @ (scale * np.eye(3) + rng.normal(scale=0.01, size=(3, 3))), scale_atoms=True)
        atoms.set_initial_charges(rng.permutation(atoms.get_initial_charges()))
        steps.append(atoms.copy())
    found = ranks.run(3, coulomb.sequence_on_rank, name, options, steps)
    for k, step in enumerate(steps):
        alone = evaluate(coulomb.WRAPPERS[name](**options), step, "energy", "energies", "forces", "stress")
        assert_equal(assembled([part[k] for part in found], len(step)), alone, (model, k))


@pytest.mark.parametrize("wrapper", (EwaldModelWrapper(cutoff=6.0), PMEModelWrapper(cutoff=6.0)), ids=("ewald", "pme"))
def test_charges_of_another_model(wrapper):
    """The energy by a charge is the potential there, of which its own energy is half."""
    from nvdd.neighbors import attach_neighbors

    batch = Batch.from_atoms(coulomb.charged("triclinic", 0.3))
    attach_neighbors(batch, 6.0, wrapper.edge_layout)
    charges = batch.node_fields["initial_charges"].requires_grad_(True)
    out = wrapper(batch)
    for total in (out["energy"].sum(), out["energies"].sum()):
        (by_charge,) = torch.autograd.grad(total, charges, retain_graph=True)
        torch.testing.assert_close(charges * by_charge, 2 * out["energies"], rtol=1e-11, atol=1e-12)


# -- slabs ----------------------------------------------------------------------------------------------------------


def test_slab_in_a_skewed_cell():
    """The same slab, however its plane is spanned: a cell that is long and thin, where the skew hides the shortest vector."""
    atoms = coulomb.charged("slab", 0.0)
    atoms.set_cell([30.0, 5.0, atoms.cell.lengths()[2]], scale_atoms=True)
    wrapper = EwaldModelWrapper(cutoff=6.0, accuracy=1e-8, slab=True)
    found = evaluate(wrapper, atoms)
    for n in (1, 6, -13):
        atoms.cell[0] += n * atoms.cell[1]
        skewed = evaluate(wrapper, atoms)
        atoms.cell[0] -= n * atoms.cell[1]
        assert abs(skewed["energy"] - found["energy"]) < 1e-7 * abs(found["energy"])
        assert np.abs(skewed["forces"] - found["forces"]).max() < 1e-6 * np.abs(found["forces"]).max()


def test_charges_that_vanish_later():
    """Each step is looked at, not the first alone."""
    wrapper, atoms = EwaldModelWrapper(cutoff=6.0, accuracy=1e-6), coulomb.charged("triclinic", 0.0)
    evaluate(wrapper, atoms)
    atoms.set_initial_charges(np.zeros(len(atoms)))
    with pytest.raises(InputError, match="all charges are zero"):
        evaluate(wrapper, atoms)


def test_mesh_with_fewer_planes_than_ranks_is_not_divided():
    """No rank is left without planes or waves."""
    wrapper = PMEModelWrapper(distributed_fft=True)
    assert wrapper._divides([8, 12, 4], 8) and not wrapper._divides([8, 12, 40], 9) and not wrapper._divides([64] * 3 + [4, 64, 64], 8)
    automatic = PMEModelWrapper()
    assert automatic._divides([64, 64, 64], 4) and not automatic._divides([16, 16, 16] * 300, 4)


@pytest.mark.parametrize("net", (0.0, 0.5))
@pytest.mark.parametrize("wrapper", (EwaldModelWrapper, PMEModelWrapper))
def test_slab_does_not_depend_on_what_is_above(wrapper, net):
    """The third vector, where the slab is, how it is turned: nothing of that is physics. Forces are derivatives."""
    atoms = coulomb.charged("slab", net)
    one = wrapper(cutoff=6.0, accuracy=1e-8, slab=True)
    found = evaluate(one, atoms)
    moved = atoms.copy()
    moved.positions += [3.0, -20.0, 1000.0]
    moved.cell[2] = 0
    moved.rotate(40, (1, 2, 3), rotate_cell=True)
    other = evaluate(wrapper(cutoff=8.0, accuracy=1e-9, slab=True), moved)
    assert np.abs(other["energies"] - found["energies"]).max() < 2e-7 * np.abs(found["energies"]).max()
    turned = Atoms("Ar" * len(atoms), found["forces"])
    turned.rotate(40, (1, 2, 3))
    assert np.abs(other["forces"] - turned.positions).max() < 2e-6 * np.abs(found["forces"]).max()
    for atom in (0, 9):
        energies = {}
        for times in (1, -1):
            step = atoms.copy()
            step.positions[atom, 2] += times * H
            energies[times] = evaluate(one, step, "energy")["energy"][0]
        slope = (energies[1] - energies[-1]) / (2 * H)
        assert abs(found["forces"][atom, 2] + slope) < 1e-4 * np.abs(found["forces"]).max()


def test_charged_sheets():
    """Opposite charges on two sheets: the field between them is 2 pi ke q / A of each, at any distance."""
    area = 9.0
    atoms = Atoms("NaCl", [(0.0, 0.0, 0.0), (0.0, 0.0, 40.0)], cell=[3.0, 3.0, 0.0], pbc=(True, True, False))
    near = atoms.copy()
    near.positions[1, 2] -= 10.0
    wrapper = EwaldModelWrapper(cutoff=8.0, slab=True)
    for second, sign in ((-1.0, 1.0), (1.0, -1.0)):  # alike ones repel: there is no background
        energies = []
        for case in (near, atoms):
            case.set_initial_charges([1.0, second])
            energies.append(evaluate(wrapper, case, "energy")["energy"][0])
        assert abs((energies[1] - energies[0]) / (sign * 2 * math.pi * KE * 10.0 / area) - 1) < 1e-8


# -- what is refused, and said ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", (EwaldModelWrapper, PMEModelWrapper))
def test_refused(wrapper):
    atoms = coulomb.melt()
    without = atoms.copy()
    del without.arrays["initial_charges"]
    zero = atoms.copy()
    zero.set_initial_charges(np.zeros(len(atoms)))
    opened = atoms.copy()
    opened.pbc = (True, True, False)
    for case, options, words in (
        (without, {}, "the atoms have no charges; give them by atoms.set_initial_charges"),
        (zero, {}, "all charges are zero"),
        (opened, {}, r"needs periodicity along all three cell vectors; these atoms have pbc \(T, T, F\).*slab=True"),
        (atoms, {"slab": True}, r"slab=True is for periodicity along the first two.*these atoms have \(T, T, T\)"),
    ):
        with pytest.raises(InputError, match=words):
            evaluate(wrapper(**options), case)
    for options, words in (
        ({"cutoff": -1}, "cutoff=-1 must be a number above 0"),
        ({"accuracy": "high"}, "accuracy='high' must be a number"),
        ({"accuracy": 1.0}, "above 1e-15 and below 0.1"),
        ({"slab": "no"}, "slab='no' must be True or False"),
    ):
        with pytest.raises(InputError, match=words):
            wrapper(**options)


def test_refused_by_one_of_them():
    for build, words in (
        (lambda: PMEModelWrapper(order=5), "order=5 must be one of 4, 6, 8"),
        (lambda: PMEModelWrapper(order=8.0), "order=8.0 must be one of 4, 6, 8"),
        (lambda: PMEModelWrapper(mesh_spacing=0), "mesh_spacing=0 must be a number above 0"),
        (lambda: evaluate(PMEModelWrapper(mesh_spacing=1e-3), coulomb.melt()), "points in cells of this size"),
        (lambda: evaluate(EwaldModelWrapper(k_cutoff=500.0), coulomb.melt()), "waves in cells of this size; use pme"),
    ):
        with pytest.raises(InputError, match=words):
            build()


def test_net_charge_is_said_once(caplog):
    model = DistributedModel(EwaldModelWrapper(cutoff=6.0))
    with caplog.at_level(logging.WARNING, "nvdd"):
        for _ in range(2):
            model(Batch.from_atoms(coulomb.charged("triclinic", 0.25)))
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == "ewald: the net charge is +0.25 e; energies are those with a uniform background that neutralises it"
