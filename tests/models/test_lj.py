"""Lennard-Jones in one process: against brute force, against ASE, and what it says to bad options."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk
from ase.calculators.lj import LennardJones
from vesin import NeighborList

from nvdd.errors import InputError
from nvdd.models import load
from nvdd.models.base import Batch
from nvdd.models.lj import FAMILY, LennardJonesModelWrapper
from nvdd.models.lj_kernel import lj_energies, lj_gradient, lj_second
from nvdd.specs import SPEC_LJ_HALO
from reference import brute_force_lj

AR = {"epsilon": 0.0104, "sigma": 3.4}
# for arrays: absolute, in units of their largest element
EXACT = 1e-12


def fcc() -> Atoms:
    atoms = bulk("Ar", "fcc", 5.26, cubic=True).repeat(2)
    atoms.rattle(0.2, seed=1)
    return atoms


def triclinic() -> Atoms:
    atoms = fcc()
    tilt = np.array([[0, 0, 0], [6.0, 0, 0], [-5.0, 4.0, 0]])
    atoms.set_cell(atoms.cell.array + tilt, scale_atoms=True)
    return atoms


def left_handed() -> Atoms:
    atoms = triclinic()
    atoms.set_cell(atoms.cell.array[[1, 0, 2]])
    return atoms


def one_atom_cell() -> Atoms:
    return bulk("Ar", "fcc", 5.26)  # 3.7 A: self-images, several of each


def slab() -> Atoms:
    atoms = fcc()
    atoms.set_cell([*atoms.cell.array[:2], [0, 0, 0]])
    atoms.pbc = (True, True, False)
    return atoms


def wire_outside_its_cell() -> Atoms:
    atoms = fcc()
    atoms.pbc = (False, False, True)
    atoms.positions += [30.0, -17.0, 0.0]
    atoms.positions[::3] += 4 * atoms.cell.array[2]
    return atoms


def cluster() -> Atoms:
    return Atoms("Ar13", positions=np.random.default_rng(4).permutation(fcc().positions)[:13])


def isolated() -> Atoms:
    return Atoms("Ar")


def nothing() -> Atoms:
    return Atoms()


STRUCTURES = [
    fcc, triclinic, left_handed, one_atom_cell, slab, wire_outside_its_cell, cluster, isolated, nothing,
]  # fmt: skip


def alloy() -> Atoms:
    atoms = triclinic()
    atoms.symbols[::3] = "Ne"
    atoms.symbols[1::4] = "Kr"
    return atoms


def make_batch(atoms: Atoms, cutoff: float) -> Batch:
    """A Batch with edge vectors as a leaf, its neighbours from vesin."""
    i, j, shifts = [], [], np.zeros((0, 3))
    if len(atoms):
        # vesin wants a whole cell: the open axes get vectors that it doesn't use
        i, j, shifts = NeighborList(cutoff=cutoff, full_list=True).compute(
            points=atoms.positions, box=atoms.cell.complete().array, periodic=atoms.pbc, quantities="ijS"
        )
    i, j = (np.asarray(rows, dtype=np.int64) for rows in (i, j))
    vectors = atoms.positions[j] - atoms.positions[i] + np.asarray(shifts) @ atoms.cell.array
    batch = Batch.from_atoms(atoms)
    return Batch(
        positions=batch.positions,
        atomic_numbers=batch.atomic_numbers,
        cell=batch.cell,
        pbc=batch.pbc,
        neighbor_list=torch.tensor(np.stack([i, j], axis=1)),
        neighbor_list_shifts=torch.tensor(np.asarray(shifts, dtype=np.float64)),
        edge_vectors=torch.tensor(vectors, requires_grad=True),
    )


def evaluate(wrapper: LennardJonesModelWrapper, atoms: Atoms) -> dict[str, np.ndarray]:
    """Energies, forces and virial of the wrapper from one derivative by the edge vectors."""
    batch = make_batch(atoms, wrapper.model_config.neighbor_config.cutoff)
    energies = wrapper(batch)["energies"]
    vectors = batch.edge_vectors
    (gradient,) = torch.autograd.grad(energies.sum(), vectors)
    forces = torch.zeros(len(atoms), 3, dtype=gradient.dtype)
    forces.index_add_(0, batch.receivers, gradient).index_add_(0, batch.senders, -gradient)
    virial = (vectors.detach().T @ gradient).reshape(9)[[0, 4, 8, 5, 2, 1]]
    return {"energies": energies.detach().numpy(), "forces": forces.numpy(), "virial": virial.numpy()}


def compare(got: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    scale = np.abs(expected).max(initial=0.0)
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * scale)


def check(wrapper: LennardJonesModelWrapper, atoms: Atoms, reference: dict, tolerance: float = EXACT) -> None:
    got = evaluate(wrapper, atoms)
    compare(got["energies"], reference["energies"], tolerance)
    # forces of a perfect crystal cancel: measure them by what is summed
    force_scale = np.abs(reference["forces"]).max(initial=0.0) + 1.0 * (reference["n_edges"] > 0)
    np.testing.assert_allclose(got["forces"], reference["forces"], rtol=0, atol=tolerance * force_scale)
    if reference["stress"] is not None:
        compare(got["virial"], reference["stress"] * atoms.cell.volume, tolerance)


@pytest.mark.parametrize("shift", ["none", "energy", "smooth"])
@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda f: f.__name__)
def test_brute_force(structure, shift):
    atoms = structure()
    wrapper = LennardJonesModelWrapper(**AR, cutoff=8.5, shift=shift)
    reference = brute_force_lj(atoms.positions, atoms.numbers, atoms.cell, atoms.pbc, **AR, cutoff=8.5, shift=shift)
    check(wrapper, atoms, reference)


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda f: f.__name__)
def test_float32(structure):
    atoms = structure()
    wrapper = LennardJonesModelWrapper(**AR, cutoff=8.5, shift="smooth", dtype=torch.float32)
    reference = brute_force_lj(atoms.positions, atoms.numbers, atoms.cell, atoms.pbc, **AR, cutoff=8.5, shift="smooth")
    check(wrapper, atoms, reference, tolerance=1e-4)  # a virial is a small difference of large numbers
    assert wrapper(make_batch(atoms, 8.5))["energies"].dtype == torch.float32


def test_to_float32_and_back():
    wrapper = LennardJonesModelWrapper(**AR)
    assert wrapper.dtype == torch.float64
    exact = evaluate(wrapper, fcc())["energies"]
    assert wrapper.to(torch.float32).dtype == torch.float32
    rounded = evaluate(wrapper, fcc())["energies"]
    assert rounded.dtype == np.float32
    compare(rounded, exact, 1e-5)
    assert evaluate(wrapper.to(torch.float64), fcc())["energies"].dtype == np.float64


# what the reference itself is worth


@pytest.mark.parametrize("structure", [fcc, triclinic, one_atom_cell, slab, wire_outside_its_cell, cluster, alloy])
@pytest.mark.parametrize("shift", ["none", "energy", "smooth"])
def test_reference_against_ase(structure, shift):
    atoms = structure()
    if structure is alloy:
        atoms.symbols[:] = "Ar"
    cutoff = 8.5
    atoms.calc = LennardJones(**AR, rc=cutoff, smooth=shift == "smooth")
    got = brute_force_lj(atoms.positions, atoms.numbers, atoms.cell, atoms.pbc, **AR, cutoff=cutoff, shift=shift)
    six = (AR["sigma"] / cutoff) ** 6
    at_cutoff = 4 * AR["epsilon"] * (six**2 - six) if shift == "none" else 0.0  # ASE always shifts: undo it
    assert got["energy"] == pytest.approx(atoms.get_potential_energy() + at_cutoff * got["n_edges"] / 2, rel=1e-12)
    np.testing.assert_allclose(got["forces"], atoms.get_forces(), rtol=0, atol=1e-13)
    if shift != "none":
        np.testing.assert_allclose(got["energies"], atoms.get_potential_energies(), rtol=1e-12)
    if got["stress"] is None:
        assert atoms.cell.rank < 3
        return
    np.testing.assert_allclose(got["stress"], atoms.calc.results["stress"], rtol=0, atol=1e-15)
    np.testing.assert_allclose(got["stresses"], atoms.calc.results["stresses"], rtol=0, atol=1e-15)
    np.testing.assert_allclose(got["stresses"].sum(axis=0), got["stress"], rtol=0, atol=1e-16)


def test_reference_needs_no_periodic_zero_vectors():
    with pytest.raises(ValueError, match="zero or linearly dependent"):
        brute_force_lj(np.zeros((1, 3)), [18], np.zeros((3, 3)), True, **AR, cutoff=5.0)


# several species

SYMBOL_VALUES = {
    "epsilon": {"Ar": 0.0104, "Ne": 0.0031, "Kr": 0.0141},
    "sigma": {"Ar": 3.4, "Ne": 2.74, "Kr": 3.65},
}
NUMBER = {"Ne": 10, "Ar": 18, "Kr": 36}


@pytest.mark.parametrize("pair_coeffs", [None, {"Kr-Ne": (0.0071, 3.0)}])
@pytest.mark.parametrize("mixing", ["geometric", "arithmetic"])
@pytest.mark.parametrize("shift", ["none", "energy", "smooth"])
def test_species(mixing, shift, pair_coeffs):
    atoms = alloy()
    wrapper = LennardJonesModelWrapper(**SYMBOL_VALUES, cutoff=8.5, mixing=mixing, shift=shift, pair_coeffs=pair_coeffs)
    assert wrapper.model_config.elements == frozenset(NUMBER.values())
    by_number = {name: {NUMBER[s]: v for s, v in values.items()} for name, values in SYMBOL_VALUES.items()}
    reference = brute_force_lj(
        atoms.positions, atoms.numbers, atoms.cell, atoms.pbc, **by_number, cutoff=8.5, mixing=mixing, shift=shift,
        pair_coeffs=pair_coeffs and {(36, 10): pair_coeffs["Kr-Ne"]},
    )  # fmt: skip
    check(wrapper, atoms, reference)


@pytest.mark.parametrize(
    ("mixing", "epsilon", "sigma"),
    [("geometric", (0.0104 * 0.0031) ** 0.5, (3.4 * 2.74) ** 0.5), ("arithmetic", (0.0104 * 0.0031) ** 0.5, 3.07)],
)
def test_mixing_of_a_dimer(mixing, epsilon, sigma):
    wrapper = LennardJonesModelWrapper(**SYMBOL_VALUES, mixing=mixing)
    got = evaluate(wrapper, Atoms("ArNe", positions=[[0, 0, 0], [0, 0, 3.3]]))["energies"]
    half = 2 * epsilon * ((sigma / 3.3) ** 12 - (sigma / 3.3) ** 6)
    np.testing.assert_allclose(got, [half, half], rtol=1e-13)


def test_two_species_by_hand():
    atoms = Atoms("ArNeAr", positions=[[0, 0, 0], [3.1, 0, 0], [0, 4.0, 0]])
    wrapper = LennardJonesModelWrapper(
        epsilon={"Ar": 0.0104, "Ne": 0.0031}, sigma={"Ar": 3.4, "Ne": 2.74}, pair_coeffs={"Ne-Ar": (0.006, 3.0)}
    )

    def half(epsilon, sigma, r):
        return 2 * epsilon * ((sigma / r) ** 12 - (sigma / r) ** 6)

    ar_ne, ar_ar, ne_ar = half(0.006, 3.0, 3.1), half(0.0104, 3.4, 4.0), half(0.006, 3.0, (3.1**2 + 16) ** 0.5)
    expected = [ar_ne + ar_ar, ar_ne + ne_ar, ar_ar + ne_ar]
    np.testing.assert_allclose(evaluate(wrapper, atoms)["energies"], expected, rtol=1e-13)


def test_unknown_element():
    wrapper = LennardJonesModelWrapper(epsilon={"Ar": 0.0104}, sigma={"Ar": 3.4})
    with pytest.raises(InputError, match=r"no parameters for Ne, Kr.*given for Ar: add"):
        evaluate(wrapper, Atoms("ArNeKr", positions=np.eye(3) * 4))
    # where there is no check (a GPU): not a number, rather than another element's
    wrapper._check_elements = lambda numbers, species: None
    got = evaluate(wrapper, Atoms("ArArNe", positions=[[0, 0, 0], [4, 0, 0], [12, 0, 0]]))["energies"]
    assert np.isfinite(got[0]) and np.isnan(got[1:]).all()


# the ops


def op_arguments(dtype=torch.float64, n_edges: int = 30, n_species: int = 2) -> tuple:
    """Edges of 2 to 6 A in no order, for sigma about 3: on both sides of onset and cutoff."""
    rng = torch.Generator().manual_seed(3)
    rand = lambda *shape: torch.rand(*shape, generator=rng, dtype=torch.float64)
    directions = rand(n_edges, 3) - 0.5
    lengths = 2.5 + 3.5 * rand(n_edges, 1)
    vectors = (lengths * directions / directions.norm(dim=1, keepdim=True)).to(dtype).requires_grad_()
    n_atoms = 5
    receivers = torch.randint(n_atoms, (n_edges,), generator=rng)
    species = torch.randint(n_species, (n_atoms,), generator=rng)
    senders = torch.randint(n_species, (n_edges,), generator=rng) if n_species > 1 else None
    symmetric = lambda table: ((table + table.T) / 2).to(dtype)
    shape = (n_species, n_species)
    tables = symmetric(0.5 + rand(*shape)), symmetric(2.8 + 0.4 * rand(*shape)), symmetric(0.1 * rand(*shape))
    return vectors, receivers, species, senders, *tables, 5.5, 4.0


@pytest.mark.parametrize("n_species", [1, 2])
def test_gradcheck(n_species):
    vectors, *rest = op_arguments(n_species=n_species)
    torch.autograd.gradcheck(lambda v: lj_energies(v, *rest), vectors)
    torch.autograd.gradgradcheck(lambda v: lj_energies(v, *rest), vectors)


def test_gradient_by_autograd_of_torch():
    """The same energy in plain torch, with autograd's first and second derivatives."""
    vectors, receivers, species, senders, epsilon, sigma, offset, cutoff, onset = args = op_arguments()
    i, j = species[receivers], senders
    s = vectors.square().sum(dim=1)
    six = (sigma[i, j] ** 2 / s) ** 3
    t = ((s - onset**2) / (cutoff**2 - onset**2)).clamp(0, 1)
    edges = 0.5 * (1 - t) ** 2 * (1 + 2 * t) * (4 * epsilon[i, j] * (six**2 - six) - offset[i, j])
    expected = torch.zeros(5, dtype=torch.float64).index_add(0, receivers, edges)
    torch.testing.assert_close(lj_energies(*args), expected, rtol=1e-13, atol=1e-13)
    weights = torch.linspace(-1, 2, 5, dtype=torch.float64).requires_grad_()
    tangents = torch.linspace(-1, 1, vectors.numel(), dtype=torch.float64).reshape(vectors.shape)
    results = []
    for energies in (lj_energies(*args), expected):
        (first,) = torch.autograd.grad(energies @ weights, vectors, create_graph=True)
        results.append((first, *torch.autograd.grad((first * tangents).sum(), (weights, vectors))))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_third_derivative_and_gradient_by_parameters_raise():
    vectors, *rest = op_arguments()
    (first,) = torch.autograd.grad(lj_energies(vectors, *rest).sum(), vectors, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), vectors, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        torch.autograd.grad(second.sum(), vectors)
    rest[3].requires_grad_()
    with pytest.raises(NotImplementedError, match="no gradient by epsilon, sigma or offset"):
        lj_energies(vectors, *rest)


@pytest.mark.parametrize("n_edges", [0, 30])
@pytest.mark.parametrize("n_species", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_opcheck(dtype, n_species, n_edges):
    args = op_arguments(dtype, n_edges, n_species)
    weights = torch.linspace(-1, 2, 5, dtype=dtype).requires_grad_()
    torch.library.opcheck(lj_energies, args)
    torch.library.opcheck(lj_gradient, (weights, *args))
    torch.library.opcheck(lj_second, (torch.ones_like(args[0]).detach(), weights.detach(), args[0].detach(), *args[1:]))


def test_strided_inputs_and_types():
    vectors, receivers, *rest = op_arguments()
    expected = lj_energies(vectors, receivers, *rest)
    assert torch.equal(lj_energies(vectors.T.contiguous().T, receivers.repeat(2, 1).T[:, 0], *rest), expected)
    with pytest.raises(TypeError, match="float32 or float64"):
        lj_energies(vectors.half(), receivers, *rest)
    with pytest.raises(RuntimeError, match="Cannot convert Torch type"):
        lj_energies(vectors.float(), receivers, *rest)


def test_edges_beyond_the_cutoff_count_nothing():
    wrapper = LennardJonesModelWrapper(**AR, cutoff=8.5)
    with_skin = make_batch(fcc(), 9.5)
    assert with_skin.edge_vectors.shape[0] > make_batch(fcc(), 8.5).edge_vectors.shape[0]
    expected = wrapper(make_batch(fcc(), 8.5))["energies"]
    torch.testing.assert_close(wrapper(with_skin)["energies"], expected, rtol=1e-13, atol=0)


def test_compiles_in_one_graph():
    wrapper, batch = LennardJonesModelWrapper(**SYMBOL_VALUES, cutoff=8.5), make_batch(alloy(), 8.5)
    compiled = torch.compile(lambda: wrapper(batch)["energies"], fullgraph=True, backend="aot_eager")
    expected = wrapper(batch)["energies"]
    assert torch.equal(compiled(), expected)
    (want,) = torch.autograd.grad(expected.sum(), batch.edge_vectors)
    (got,) = torch.autograd.grad(compiled().sum(), batch.edge_vectors)
    assert torch.equal(got, want)


_COLD = """
import sys
import torch
from nvdd.models.lj_kernel import lj_energies
assert "warp" not in sys.modules
one = torch.ones(1, 1)
energies = lj_energies(torch.tensor([[2.0, 0, 0]]), *torch.zeros(2, 1, dtype=torch.int64), None, one, one, 0 * one, 3.0, 3.0)
import warp
level = ("log_level", 20) if hasattr(warp.config, "log_level") else ("quiet", False)
assert getattr(warp.config, level[0]) == level[1]
print(energies.item())
"""


def test_several_processes_with_a_cold_cache(tmp_path):
    """They compile the same kernel at once, without a word, and leave Warp's settings alone."""
    env = {**os.environ, "WARP_CACHE_PATH": str(tmp_path)}
    ranks = [
        subprocess.Popen([sys.executable, "-c", _COLD], env=env, text=True, stdout=-1, stderr=-1) for _ in range(2)
    ]
    for rank in ranks:
        out, err = rank.communicate(timeout=250)
        assert rank.returncode == 0, err
        assert err == ""
        assert float(out) == pytest.approx(2 * (2.0**-12 - 2.0**-6), rel=1e-6)


# options


def test_defaults_and_declarations():
    wrapper = LennardJonesModelWrapper(epsilon=0.01, sigma=3.0)
    assert wrapper.cutoff == wrapper.model_config.neighbor_config.cutoff == 9.0
    assert wrapper.model_config.elements is None
    assert wrapper.model_config.outputs == {"energy", "energies", "forces", "stress", "stresses"}
    assert wrapper.distribution_spec() is SPEC_LJ_HALO
    assert LennardJonesModelWrapper(**SYMBOL_VALUES).cutoff == pytest.approx(3 * 3.65, rel=1e-15)
    assert LennardJonesModelWrapper(shift="smooth").onset == pytest.approx(0.66 * 3.0)
    assert "sigma=3.0, cutoff=9.0" in repr(wrapper)


def test_options_from_strings():
    text = load("lj", epsilon="Ar:0.0104, Ne:0.0031", sigma="Ne:2.74,Ar:3.4", cutoff="8.5", shift="smooth", onset="6",
                mixing="arithmetic", pair_coeffs="Ar-Ne:0.0055:3.1", dtype=torch.float32)  # fmt: skip
    numbers = LennardJonesModelWrapper(
        epsilon={"Ar": 0.0104, "Ne": 0.0031}, sigma={"Ar": 3.4, "Ne": 2.74}, cutoff=8.5, shift="smooth", onset=6,
        mixing="arithmetic", pair_coeffs={"Ar-Ne": (0.0055, 3.1)}, dtype=torch.float32,
    )  # fmt: skip
    assert text.options == numbers.options
    assert text.dtype == torch.float32
    assert LennardJonesModelWrapper(epsilon="0.01", sigma=" 3.4 ").options["sigma"] == 3.4
    assert FAMILY.options.keys() == numbers.options.keys()


def test_options_rebuild_the_wrapper():
    for options in (
        {**SYMBOL_VALUES, "pair_coeffs": {"Ar-Ne": (0.0055, 3.1)}, "shift": "smooth"},
        {**AR, "cutoff": 8.5, "shift": "energy"},
    ):
        wrapper = LennardJonesModelWrapper(**options)
        again = LennardJonesModelWrapper(**json.loads(json.dumps(wrapper.options)))
        assert again.options == wrapper.options
        for name, value in wrapper.state_dict().items():
            torch.testing.assert_close(again.state_dict()[name], value, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sigma": -3.4}, r"sigma=-3\.4 is not a number >= 0"),
        ({"epsilon": "deep"}, "epsilon='deep' is not a number"),
        ({"epsilon": float("nan")}, "epsilon=nan"),
        ({"sigma": {"Ar": -1.0}, "epsilon": {"Ar": 1.0}}, r"sigma\[Ar\]=-1\.0"),
        ({"epsilon": {"Qq": 1.0}, "sigma": {"Qq": 1.0}}, "'Qq' in epsilon=.* is not a chemical symbol"),
        ({"epsilon": {"Ar": 1.0}, "sigma": {"Ne": 1.0}}, "not for the same elements"),
        ({"epsilon": {"Ar": 1.0}, "sigma": 3.4}, "not for the same elements"),
        ({"epsilon": {}, "sigma": {}}, "names no element"),
        ({"epsilon": "Ar:1,Ar:2", "sigma": "Ar:1"}, "cannot read 'Ar:2' in epsilon"),
        ({"epsilon": "Ar:1,Ne", "sigma": "Ar:1"}, "cannot read 'Ne' in epsilon"),
        ({"cutoff": 0}, r"cutoff=0\.0 A .* must be positive"),
        ({"cutoff": -2}, "cutoff=-2"),
        ({"sigma": 0}, r"cutoff=0\.0 A \(given: None\) must be positive"),
        ({"shift": "yes"}, "shift='yes' is not known; use one of none, energy, smooth"),
        ({"mixing": "sixthpower"}, "mixing='sixthpower' is not known; use one of geometric, arithmetic"),
        ({"onset": 2.0}, "onset=2.0 goes with shift='smooth', not with 'none'"),
        ({"shift": "smooth", "onset": 3.0}, r"onset=3\.0 A must be below the cutoff, 3\.0 A"),
        ({"pair_coeffs": {"Ar-Ne": (1, 1)}}, "'Ar-Ne', which is not two different elements of "),
        ({**SYMBOL_VALUES, "pair_coeffs": {"Ar-Ar": (1, 1)}}, "not two different elements"),
        ({**SYMBOL_VALUES, "pair_coeffs": "Ar-Ne:1"}, "cannot read 'Ar-Ne:1' in pair_coeffs"),
        ({**SYMBOL_VALUES, "pair_coeffs": {"Ar-Ne": 1.0}}, "not an epsilon and a sigma"),
        ({**SYMBOL_VALUES, "pair_coeffs": {"Ar-Ne": (1, -1)}}, r"pair_coeffs\[Ar-Ne\]=-1"),
        ({**SYMBOL_VALUES, "pair_coeffs": {"Ar-Ne": (1, 1), "Ne-Ar": (2, 1)}}, "has 'Ne-Ar' twice"),
        ({**SYMBOL_VALUES, "pair_coeffs": 3}, "pair_coeffs=3 is not a mapping"),
        ({"dtype": torch.float16}, r"dtype=torch\.float16 is not known"),
        ({"depth": 1.0}, "no option depth; there are epsilon, sigma, cutoff"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(InputError, match=message):
        load("lj", **options)


def test_no_checkpoints():
    with pytest.raises(InputError, match="lj:argon: Lennard-Jones has no checkpoints"):
        load("lj:argon")


@pytest.mark.parametrize("smooth", [False, True])
def test_from_ase_calculator(smooth):
    atoms = triclinic()
    atoms.calc = LennardJones(**AR, rc=8.0, smooth=smooth)
    wrapper = FAMILY.from_calculator(atoms.calc)
    got = evaluate(wrapper, atoms)
    compare(got["energies"], atoms.get_potential_energies(), EXACT)
    compare(got["forces"], atoms.get_forces(), EXACT)
    assert FAMILY.from_calculator(wrapper) is None
