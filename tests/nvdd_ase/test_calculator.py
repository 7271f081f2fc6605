"""`NVDDCalculator`: its numbers, when it computes, what it refuses, from where it can be used."""

from __future__ import annotations

import code
import copy
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule
from ase.calculators.calculator import PropertyNotImplementedError
from ase.calculators.emt import EMT
from ase.calculators.lj import LennardJones

import builders
import parity
import user_models
from nvdd.errors import InputError, MissingDependencyError
from nvdd_ase import NVDDCalculator

SUPPORT = str(Path(user_models.__file__).parent)
LJ = {"model": "lj", "model_options": parity.LJ}
PAIRS = {"model": "py:user_models:ChargedPairs"}
TROUBLED = {"model": "py:user_models:Troubled"}


def argon(seed: int = 1) -> Atoms:
    """32 atoms of argon and neon with a charge and weights."""
    atoms = bulk("Ar", cubic=True, a=5.3).repeat(2)
    atoms.rattle(0.1, seed=seed)
    atoms.numbers[::3] = 10
    atoms.info["charge"] = 1.5
    atoms.set_array("weight", np.linspace(1.0, 2.0, len(atoms)))
    return atoms


def results(atoms: Atoms) -> parity.Results:
    """All results, by ASE's own methods."""
    has_volume = abs(np.linalg.det(atoms.cell.array)) > 0
    return parity.Results(
        atoms.get_potential_energy(),
        atoms.get_potential_energies(),
        atoms.get_forces(),
        atoms.get_stress(voigt=False) if has_volume else None,
        atoms.get_stresses(voigt=False) if has_volume else None,
    )


def evaluations(calculator: NVDDCalculator) -> int:
    """How many times the ranks have evaluated the model since they started."""
    (count,) = {rank["evaluations"] for rank in calculator.report()}
    return count


def assert_charged_pairs(atoms: Atoms) -> None:
    energy, forces = user_models.charged_pairs_reference(atoms)
    assert abs(atoms.get_potential_energy() - energy) <= 1e-12 * abs(energy)
    np.testing.assert_allclose(atoms.get_forces(), forces, rtol=0, atol=1e-12 * np.abs(forces).max())


# -- numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ("triclinic", "left-handed", "unwrapped", "slab", "wire", "tiny cell", "gas"))
@pytest.mark.parametrize("ranks", (1, 2))
def test_lj(shared, ranks, structure):
    atoms = parity.structure(structure).copy()
    positions, cell = atoms.positions.copy(), atoms.cell.copy()
    atoms.calc = shared(**LJ, ranks=ranks)
    parity.assert_parity(results(atoms), parity.reference("lj", structure), tight=True)
    assert (atoms.positions == positions).all() and (atoms.cell == cell).all()


def test_mace(shared):
    """On 2 ranks: test_from_mace_calculator."""
    atoms = parity.structure("quartz unit").copy()
    atoms.calc = shared("py:parity:wrapper", ranks=1, model_options={"name": "mace-zbl"})
    parity.assert_parity(results(atoms), parity.reference("mace-zbl", "quartz unit"), tight=True)


@pytest.mark.parametrize("ranks", (1, 2))
def test_sevennet(shared, ranks):
    atoms = parity.structure("quartz unit").copy()
    atoms.calc = shared("sevenn:7net-0", ranks=ranks)
    assert atoms.calc.description["dtype"] == "float32"
    parity.assert_parity(results(atoms), parity.reference("7net-0", "quartz unit"), tight=False)


def test_sevennet_in_float64_and_with_an_option():
    """Weights that sevenn itself only runs in float32: compared with the bare wrapper, without nvdd's runtime."""
    atoms = parity.structure("quartz unit").copy()
    expected = builders.evaluate(parity.wrapper("7net-mf-0/float64"), atoms)
    options = {"model_options": {"modal": "PBE"}, "dtype": "float64"}
    with NVDDCalculator("sevenn:7net-mf-0", **options) as atoms.calc:
        assert atoms.calc.description["dtype"] == "float64"
        found = results(atoms)
    assert abs(found.energy - expected.energy[0]) <= 1e-12 * abs(found.energy)
    np.testing.assert_allclose(found.energies, expected.energies, rtol=1e-12)
    np.testing.assert_allclose(found.forces, expected.forces, rtol=0, atol=1e-11)
    symmetric = (expected.stress[0] + expected.stress[0].T) / 2  # the model is equivariant to 1e-10 only
    np.testing.assert_allclose(found.stress, symmetric, rtol=0, atol=1e-12)


@pytest.mark.parametrize("ranks", (1, 2))
def test_every_property(shared, ranks):
    atoms = argon()
    calculator = atoms.calc = shared(**LJ, ranks=ranks)
    n = len(atoms)
    shapes = {"energies": (n,), "forces": (n, 3), "stress": (6,), "stresses": (n, 6)}
    assert set(calculator.implemented_properties) == {"energy", "free_energy", *shapes}
    for name in calculator.implemented_properties:
        value = calculator.get_property(name, atoms)
        assert np.shape(value) == shapes.get(name, ()), name
        assert np.asarray(value).dtype == np.float64 and np.isfinite(value).all(), name
    assert type(calculator.results["energy"]) is float
    assert atoms.get_potential_energy(force_consistent=True) == atoms.get_potential_energy()
    np.testing.assert_allclose(atoms.get_stresses().sum(0), atoms.get_stress(), rtol=1e-10)
    np.testing.assert_allclose(atoms.get_potential_energies().sum(), atoms.get_potential_energy(), rtol=1e-12)
    with pytest.raises(PropertyNotImplementedError):
        atoms.get_dipole_moment()


@pytest.mark.parametrize("ranks", (1, 2))
def test_results_belong_to_the_user(shared, ranks):
    atoms = argon()
    atoms.calc = shared(**LJ, ranks=ranks)
    forces, held = atoms.get_forces(), atoms.calc.results["forces"]
    kept = forces.copy()
    forces[:] = 0
    assert (atoms.get_forces() == kept).all()
    atoms.positions[0] += 0.3
    assert np.abs(atoms.get_forces() - kept).max() > 1e-3
    assert (held == kept).all(), "an evaluation must not write into the results of the one before"


@pytest.mark.parametrize("ranks", (1, 2))
def test_no_volume_no_stress(shared, ranks):
    atoms = molecule("H2O")
    atoms.numbers[:] = 18
    atoms.positions *= 4
    calculator = atoms.calc = shared(**LJ, ranks=ranks)
    for cell in ([0, 0, 0], [9, 9, 0], [[9, 0, 0], [0, 9, 0], [9, 9, 0]]):
        atoms.cell = np.diag(cell) if np.ndim(cell) == 1 else cell
        energy = atoms.get_potential_energy()
        assert np.isfinite(energy) and "stress" not in calculator.results
        for get in (atoms.get_stress, atoms.get_stresses):
            with pytest.raises(PropertyNotImplementedError, match="three independent vectors"):
                get()
        assert atoms.get_potential_energy() == energy
    atoms.cell = [9, 9, 9]
    assert np.isfinite(atoms.get_stress()).all()


# -- when it computes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", (1, 2))
def test_computes_when_something_changed_and_only_then(shared, ranks):
    atoms = argon()
    atoms.calc = shared(**PAIRS, ranks=ranks)
    done = evaluations(atoms.calc) if atoms.calc.results else None
    atoms.get_potential_energy()
    done = evaluations(atoms.calc)

    def computes(n: int) -> None:
        nonlocal done
        assert_charged_pairs(atoms)
        done += n
        assert evaluations(atoms.calc) == done

    computes(0)
    atoms.get_stress(), atoms.get_potential_energies(), atoms.get_forces()
    computes(0)
    atoms.get_stresses()  # not computed unless asked for
    computes(1)
    atoms.get_stresses(), atoms.get_stress()
    atoms.positions += 0.0
    atoms.info["comment"] = "not read by the model"
    atoms.set_initial_magnetic_moments(np.ones(len(atoms)))
    atoms.set_velocities(np.ones((len(atoms), 3)))
    computes(0)

    atoms.positions[5] += 1e-9
    computes(1)
    atoms.positions[5] -= 1e-9
    computes(1)
    atoms.positions[:] = atoms.positions[::-1].copy()
    computes(1)
    atoms.set_cell(atoms.cell.array * 1.01, scale_atoms=True)
    computes(1)
    atoms.cell[2, 0] += 0.5
    computes(1)
    atoms.pbc = (True, False, True)
    computes(1)
    atoms.pbc = True
    atoms.info["charge"] = -2
    computes(1)
    atoms.info["charge"] = np.array(3.0)
    computes(1)
    atoms.info["charge"][...] = 4.0  # in place: Atoms.copy shares what info holds
    computes(1)
    atoms.arrays["weight"] = np.linspace(2.0, 1.0, len(atoms))
    computes(1)
    atoms.arrays["weight"][7] = 9.0
    computes(1)
    atoms.numbers[3] = 2  # this model doesn't care, but another would
    computes(1)
    computes(0)


@pytest.mark.parametrize("ranks", (1, 2))
def test_numbers_count(shared, ranks):
    atoms = argon()
    atoms.calc = shared(**LJ, ranks=ranks)
    before = atoms.get_potential_energy()
    atoms.numbers[1] = 28 - atoms.numbers[1]
    fresh = atoms.copy()
    fresh.calc = shared(**LJ, ranks=1, skin=0.0)
    assert abs(atoms.get_potential_energy() - before) > 1e-4
    assert abs(atoms.get_potential_energy() - fresh.get_potential_energy()) < 1e-11


@pytest.mark.parametrize("ranks", (1, 2))
def test_number_of_atoms_may_change(shared, ranks):
    calculator = shared(**PAIRS, ranks=ranks)
    large, one = argon().repeat((1, 1, 2)), argon()[[4]]
    for atoms in (argon(), large, argon()[[3, 9, 1]], one, large[::-1]):
        atoms.info["charge"] = 0.5
        atoms.calc = calculator
        assert_charged_pairs(atoms)
    del atoms[:20]
    assert_charged_pairs(atoms)
    atoms += argon(seed=2)
    assert_charged_pairs(atoms)


def test_inputs_that_the_model_reads_must_be_there_and_be_numbers(shared):
    atoms = argon()
    calculator = atoms.calc = shared(**PAIRS, ranks=2)
    assert_charged_pairs(atoms)
    pids = [rank["pid"] for rank in calculator.report()]
    for bad in ("two", None, float("nan"), [[1], [1, 2]], {"a": 1}):
        atoms.info["charge"] = bad
        if bad is not None:
            with pytest.raises(InputError, match=r"atoms.info\['charge'\], which must be finite numbers"):
                atoms.get_forces()
    atoms.info["charge"] = 1.0
    weights = atoms.arrays.pop("weight")
    atoms.set_array("weight", np.array(["a"] * len(atoms)))
    with pytest.raises(InputError, match=r"atoms.arrays\['weight'\]"):
        atoms.get_forces()
    atoms.arrays["weight"] = weights.astype(">f8")  # as some file formats are read
    assert_charged_pairs(atoms)
    assert [rank["pid"] for rank in calculator.report()] == pids, "no rank was asked"
    for missing, where in (("charge", "info"), ("weight", "arrays")):
        incomplete = atoms.copy()
        getattr(incomplete, where).pop(missing)
        incomplete.calc = shared(**PAIRS, ranks=1)
        with pytest.raises(InputError, match=rf"reads atoms.{where}\['{missing}'\], which these atoms don't have"):
            incomplete.get_forces()
    del atoms.info["charge"]
    with pytest.raises(InputError, match="which these atoms don't have"):
        atoms.get_forces()
    atoms.info["charge"] = 1.0
    assert_charged_pairs(atoms)


# -- several calculators, several ways to make one -----------------------------------------------------------------


def test_two_calculators_are_independent(shared):
    """The same model with other options, and another model, in turns; each on its own atoms, and on the same."""
    first = shared(**PAIRS, ranks=2)
    second = shared(**PAIRS, ranks=1, model_options={"cutoff": 4.2, "scale": 3.0}, dtype="float32")
    third = shared(**LJ, ranks=2)
    atoms = argon()
    for step in range(3):
        atoms.positions[step] += 0.3
        atoms.info["charge"] = 1.0 + step
        atoms.calc = first
        assert_charged_pairs(atoms)
        atoms.calc = third
        lj = atoms.get_forces()
        atoms.calc = second
        _, expected = user_models.charged_pairs_reference(atoms, 4.2, 3.0)
        np.testing.assert_allclose(atoms.get_forces(), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
        atoms.calc = shared(**LJ, ranks=1)
        np.testing.assert_allclose(atoms.get_forces(), lj, rtol=0, atol=1e-11 * np.abs(lj).max())


def test_from_mace_calculator():
    theirs, atoms = parity.calculator("mace"), parity.structure("quartz unit").copy()
    parameters = [p.detach().clone() for p in theirs.models[0].parameters()]
    with NVDDCalculator.from_calculator(theirs, ranks=2) as atoms.calc:
        parity.assert_parity(results(atoms), parity.reference("mace", "quartz unit"), tight=True)
    assert all(torch.equal(a, b) for a, b in zip(parameters, theirs.models[0].parameters(), strict=True))


def test_from_sevennet_calculator():
    theirs, atoms = parity.calculator("7net-0"), parity.structure("quartz unit").copy()
    with NVDDCalculator.from_calculator(theirs, dtype="float64") as atoms.calc:
        double = results(atoms)
    assert next(theirs.model.parameters()).dtype == torch.float32, "theirs is not cast"
    with NVDDCalculator.from_calculator(theirs) as atoms.calc:
        parity.assert_parity(results(atoms), parity.reference("7net-0", "quartz unit"), tight=False)
        assert 0 < np.abs(double.forces - atoms.get_forces()).max() < 1e-4


@pytest.mark.parametrize("smooth", (False, True))
def test_from_lennard_jones(smooth):
    theirs = LennardJones(epsilon=0.0104, sigma=3.4, rc=7.0, smooth=smooth)
    atoms = argon()
    atoms.calc = theirs
    expected = results(atoms)
    with NVDDCalculator.from_calculator(theirs) as atoms.calc:
        found = results(atoms)
    for name in ("energy", "energies", "forces", "stress", "stresses"):
        a, b = np.asarray(getattr(found, name)), np.asarray(getattr(expected, name))
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-11 * np.abs(b).max(), err_msg=name)


def test_from_a_calculator_that_no_family_knows():
    with pytest.raises(InputError, match=r"no model family takes a ase.calculators.emt.EMT; .*lj, mace, .*sevenn.*wrap"):
        NVDDCalculator.from_calculator(EMT())
    with pytest.raises(InputError, match="from_calculator"):
        NVDDCalculator(EMT())


def test_ones_own_model_by_name():
    atoms = argon()
    with NVDDCalculator("py:user_models:READY", dtype="float32") as atoms.calc:
        assert atoms.calc.description["dtype"] == "float32"
        _, expected = user_models.charged_pairs_reference(atoms, cutoff=4.0)
        np.testing.assert_allclose(atoms.get_forces(), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert user_models.READY.dtype == torch.float64, "the module's own model is not cast"


@pytest.mark.parametrize("ranks", (1, 2))
def test_wrapper_object(ranks):
    atoms, wrapper = argon(), user_models.ChargedPairs(scale=2.0).train()
    with NVDDCalculator(wrapper, ranks=ranks, dtype="float32") as atoms.calc:
        energy, _ = user_models.charged_pairs_reference(atoms, scale=2.0)
        assert abs(atoms.get_potential_energy() / energy - 1) < 1e-6
    assert wrapper.dtype == torch.float64 and wrapper.training and wrapper.scale.requires_grad


def test_skin_and_grid():
    """Neither changes results; the report shows that they are used."""
    atoms = parity.structure("triclinic").copy()
    expected = parity.reference("lj", "triclinic")
    inside = atoms.get_scaled_positions(wrap=True)[:, 2] < 0.5
    with NVDDCalculator(**LJ, ranks=2, skin=1.0, grid=(1, 1, 2), balance="grid") as atoms.calc:
        for step in (0.05, 0.05, -0.1):
            atoms.get_forces()
            atoms.positions[0, 0] += step
        parity.assert_parity(results(atoms), expected, tight=True)
        report = atoms.calc.report()
    assert [rank["rebuilds"] for rank in report] == [1, 1]
    assert [rank["owned"] for rank in report] == [inside.sum(), (~inside).sum()]


def test_skin_zero_searches_every_time(shared):
    atoms = argon()
    atoms.calc = shared(**LJ, ranks=1, skin=0.0)
    before = atoms.calc.report()[0].get("rebuilds", 0)
    for _ in range(3):
        atoms.positions[0, 0] += 1e-3
        atoms.get_forces()
    assert atoms.calc.report()[0]["rebuilds"] == before + 3


# -- what it refuses ---------------------------------------------------------------------------------------------

BAD_ARGUMENTS = [
    ({"ranks": 0}, r"ranks must be a whole number of at least 1, got 0"),
    ({"ranks": -2}, r"got -2"),
    ({"ranks": 2.0}, r"whole number.*got 2\.0"),
    ({"ranks": "2"}, r"whole number.*got '2'"),
    ({"ranks": True}, r"whole number.*got True"),
    ({"model": "lennard:x"}, r"unknown model family 'lennard' in 'lennard:x'; known: .*lj.*mace.*sevenn.*py:module"),
    ({"model": "py:user_models"}, r"'py:user_models'.*py:module:attribute"),
    ({"model": 42}, r"model must be 'family:checkpoint'.*got 42"),
    ({"model": user_models.ChargedPairs}, r"ChargedPairs is a class: give an instance"),
    ({"model": user_models.READY, "model_options": {"cutoff": 3.0}}, r"\{'cutoff': 3\.0\}.*is built already"),
    ({"dtype": "float16"}, r"dtype must be one of float32, float64 or None.*got 'float16'"),
    ({"device": "gpu"}, r"device must be 'cpu', 'cuda'.*got 'gpu'"),
    ({"skin": -0.1}, r"skin must be zero or positive \(A\), got -0\.1"),
    ({"skin": float("nan")}, r"skin must be a finite number of A.*got nan"),
    ({"skin": float("inf")}, r"skin must be a finite number of A.*got inf"),
    ({"skin": "thick"}, r"skin must be a finite number of A.*got 'thick'"),
    ({"skin": None}, r"skin must be a finite number of A.*got None"),
    (
        {"grid": (3, 1, 1)},
        r"grid \(3, 1, 1\) must be three positive whole numbers with product \d, the number of ranks",
    ),
    ({"grid": (2, 1)}, r"grid \(2, 1\)"),
    ({"grid": (-1, -1, 1)}, r"grid \(-1, -1, 1\)"),
    ({"grid": (1.5, 1, 1)}, r"grid \(1\.5, 1, 1\)"),
    ({"grid": 2}, r"grid 2 must be"),
    ({"grid": "abc"}, r"grid 'abc' must be"),
    ({"balance": "fair"}, r"balance must be one of auto, grid, rcb, got 'fair'"),
    ({"strategy": "magic"}, r"strategy must be one of 'halo', 'graph', got 'magic'"),
    ({"strategy": "graph", "graph_plan": "ring"}, r"graph_plan must be one of 'curve', 'blocks', got 'ring'"),
    ({"strategy": "graph", "balance": "rcb"}, r"in equal parts, and balance='rcb'"),
    ({"timeout": 0}, r"timeout must be a positive number of seconds.*got 0"),
    ({"start_timeout": "soon"}, r"start_timeout must be a positive number of seconds.*got 'soon'"),
    ({"rank": 2}, r"no argument 'rank'; did you mean ranks\?.*model_options="),
    ({"epsilon": 2}, r"no argument 'epsilon'; there are model, ranks.*model_options="),
    ({"model_options": {"epsilom": 1.0}}, r"lj: no option epsilom; there are epsilon, sigma, cutoff"),
    ({"model": "mace:x.model", "model_options": {"modal": "PBE"}}, r"mace: no option modal; there are head"),
    ({"model": "sevenn:7net-0", "model_options": {"head": "a"}}, r"sevenn: no option head; there are modal"),
]


@pytest.mark.parametrize("ranks", (1, 2))
@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS, ids=[str(b[0]) for b in BAD_ARGUMENTS])
def test_bad_arguments_start_no_rank(monkeypatch, arguments, message, ranks):
    def never(*_, **__):
        raise AssertionError("a rank was started")

    monkeypatch.setattr(subprocess, "Popen", never)
    with pytest.raises(InputError, match=message):
        NVDDCalculator(**{"model": "lj", "ranks": ranks, **arguments})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ("cuda", "cuda:1"))
@pytest.mark.parametrize("ranks", (1, 2))
def test_no_gpu(ranks, device):
    with pytest.raises(InputError, match=f"device '{device}'.*sees no GPU.*device='cpu'"):
        NVDDCalculator("lj", ranks=ranks, device=device)


@pytest.mark.parametrize("ranks", (1, 2))
def test_missing_package(monkeypatch, ranks):
    monkeypatch.setattr("nvdd.models.registry.ModelFamily.installed", lambda family: False)
    with pytest.raises(MissingDependencyError, match=r"'mace:x.model' needs the package 'mace'.*pip install"):
        NVDDCalculator("mace:x.model", ranks=ranks)


BAD_MODELS = [
    ("mace:/no/such.model", None, r"no MACE model file '/no/such.model'.*names:"),
    ("mace", None, r"'mace' needs a model: mace:FILE.model"),
    ("sevenn:/no/such.pth", None, r"no SevenNet checkpoint file '/no/such.pth'.*names: 7net"),
    ("sevenn:7net-mf-0", None, r"several fidelities; choose modal= from \[.*'PBE'"),
    ("lj:argon", None, r"lj:argon: Lennard-Jones has no checkpoints"),
    ("lj", {"epsilon": -1}, r"epsilon=-1 is not a number >= 0"),
    ("py:no_such_module:make", None, r"no module 'no_such_module' on the path.*PYTHONPATH"),
    ("py:user_models:nothing", None, r"module 'user_models' has no 'nothing'"),
    ("py:user_models:not_a_wrapper", None, r"gave a int, not a wrapper with a model_config"),
    ("py:user_models:SPEC_MPNN_HALO", None, r"neither a wrapper nor a function that makes one"),
    ("py:user_models:ChargedPairs", {"cut": 1.0}, r"unexpected keyword argument 'cut'; its arguments are \(cutoff"),
    ("py:user_models:READY", {"cutoff": 1.0}, r"takes no options, got \{'cutoff': 1\.0\}"),
]


@pytest.mark.parametrize(("model", "options", "message"), BAD_MODELS)
def test_models_that_can_not_be_built(model, options, message):
    with pytest.raises(InputError, match=message):
        NVDDCalculator(model, model_options=options)


def test_model_that_can_not_be_built_on_ranks():
    model, _, message = BAD_MODELS[0]
    start = time.monotonic()
    with pytest.raises(InputError, match=message) as caught:
        NVDDCalculator(model, ranks=2)
    print(f"{model}: {time.monotonic() - start:.1f} s to the error, the start of the ranks included")
    assert any("in phase 'setup'" in note for note in caught.value.__notes__)


def _positions(value: float, atom: int = 5):
    def change(atoms: Atoms) -> None:
        atoms.positions[atom, 1] = value

    return change


def _cell(cell, pbc=True):
    def change(atoms: Atoms) -> None:
        atoms.set_cell(cell)
        atoms.pbc = pbc

    return change


BAD_ATOMS = {
    "NaN": (_positions(np.nan), r"1 of 32 atoms have positions that are not finite numbers: 5 \(Ar\): \[.*nan"),
    "inf": (_positions(-np.inf), r"not finite numbers: 5 \(Ar\)"),
    "singular": (
        _cell([[9, 0, 0], [0, 9, 0], [9, 9, 0]]),
        r"linearly dependent.*\n.*9.*\n.*\n.*\n?.*switch off periodi",
    ),
    "two of three singular": (_cell([[9, 0, 0], [18, 0, 0], [0, 0, 9]], (1, 1, 0)), r"linearly dependent"),
    "no vector": (_cell([9, 9, 0]), r"axis 2 is periodic but its cell vector is zero; set the cell or pbc\[2\]"),
    "no cell": (_cell([0, 0, 0], (0, 1, 0)), r"axis 1 is periodic but its cell vector is zero"),
    "NaN in the cell": (_cell([9, np.nan, 9]), r"cell has entries that are not finite numbers"),
    "unknown": (lambda atoms: atoms.numbers.__setitem__(2, 79), r"the model does not know Au; it knows Ne, Ar"),
    "none": (lambda atoms: atoms.__delitem__(slice(None)), r"there are no atoms"),
}


@pytest.mark.parametrize("ranks", (1, 2))
@pytest.mark.parametrize("case", BAD_ATOMS)
def test_bad_atoms_reach_no_rank(shared, case, ranks):
    change, message = BAD_ATOMS[case]
    good = argon()
    calculator = good.calc = shared(**LJ, ranks=ranks)
    expected = good.get_forces()
    before = [(rank["pid"], rank["evaluations"]) for rank in calculator.report()]
    bad = good.copy()
    bad.calc = calculator
    change(bad)
    for get in (bad.get_potential_energy, bad.get_forces, bad.get_stress, bad.get_forces):
        with pytest.raises(InputError, match=message):
            get()
    assert [(rank["pid"], rank["evaluations"]) for rank in calculator.report()] == before
    assert (good.get_forces() == expected).all()


def test_open_axes_need_no_vectors(shared):
    """What is an error on a periodic axis is none on an open one."""
    atoms = parity.structure("pair").copy()
    atoms.calc = shared(**LJ, ranks=2)
    expected = parity.reference("lj", "pair").forces
    for cell in ([0, 0, 0], [5, 0, 5], [[9, 0, 0], [0, 9, 0], [9, 9, 0]]):
        atoms.cell = np.diag(cell) if np.ndim(cell) == 1 else cell
        np.testing.assert_allclose(atoms.get_forces(), expected, rtol=0, atol=1e-15)


def test_what_was_set_at_the_start_stays(shared):
    calculator = shared(**LJ, ranks=1)
    with pytest.raises(InputError, match="ranks can't be set later: make a new NVDDCalculator"):
        calculator.set(ranks=3)
    assert calculator.set() == {}


# -- copies of ranks, and where they look for files ----------------------------------------------------------------


def test_ranks_find_a_relative_checkpoint_from_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(builders.random_mace(), "my.model")
    atoms = parity.structure("quartz unit").copy()
    with NVDDCalculator("mace:my.model") as atoms.calc:
        expected = atoms.get_forces()
        elsewhere = copy.deepcopy(atoms)
        monkeypatch.chdir("/")
        elsewhere.positions += 0.1  # not what is in the results
        np.testing.assert_allclose(elsewhere.get_forces(), expected, rtol=0, atol=1e-10)


# -- hosts: a script, standard input, a notebook -------------------------------------------------------------------

USER_MODULE = """
from user_models import ChargedPairs

def make(scale):
    return ChargedPairs(scale=scale)
"""
SCRIPT = """
import numpy as np
from ase.build import bulk
from nvdd_ase import NVDDCalculator

atoms = bulk("Ar", cubic=True, a=5.3).repeat((2, 1, 1))
atoms.info["charge"] = 1.0
atoms.set_array("weight", np.ones(len(atoms)))
atoms.rattle(0.1)
energies = []
for ranks in (1, 2):
    atoms.calc = calculator = NVDDCalculator("py:my_models:make", ranks=ranks, model_options={"scale": 2.0})
    energies.append(atoms.get_potential_energy())
assert abs(energies[1] / energies[0] - 1) < 1e-12 and energies[0] > 1
print(*[rank["pid"] for rank in calculator.report()])
"""


def run_python(arguments: list[str], cwd: Path, stdin: str = "") -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": SUPPORT}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, input=stdin, env=environment, capture_output=True, text=True, timeout=120
    )


def assert_no_process(pids: list[int]) -> None:
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_script_without_a_guard(tmp_path):
    """Started from another folder than its own, where the user's module is; an exception ends it."""
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "my_models.py").write_text(USER_MODULE)
    (tmp_path / "there" / "script.py").write_text(SCRIPT + "raise SystemExit(3)\n")
    done = run_python(["there/script.py"], cwd=tmp_path)
    assert (done.returncode, done.stderr) == (3, "")
    assert_no_process([int(pid) for pid in done.stdout.split()])


def test_standard_input(tmp_path):
    (tmp_path / "my_models.py").write_text(USER_MODULE)
    done = run_python(["-"], cwd=tmp_path, stdin=SCRIPT + "1 / 0\n")
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr and done.stderr.count("Error") == 1
    assert_no_process([int(pid) for pid in done.stdout.split()])


def test_interactive_namespace(tmp_path, monkeypatch, capsys):
    """As in a notebook: no file behind ``__main__``, the folder is on the path as an empty string."""
    (tmp_path / "my_models.py").write_text(USER_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    notebook = code.InteractiveInterpreter({"__name__": "__main__"})
    for cell in SCRIPT.strip().split("\n\n"):
        notebook.runcode(compile(cell, "<cell>", "exec"))
    pids = [int(pid) for pid in capsys.readouterr().out.split()]
    assert len(pids) == 2, "the cells ran to their end"
    cells = """
        from user_models import ChargedPairs

        class Own(ChargedPairs):
            pass

        try:
            NVDDCalculator(Own(), ranks=2)
        except Exception as error:
            print(type(error).__name__, error)
        with NVDDCalculator(Own(), ranks=1) as atoms.calc:
            assert abs(2 * atoms.get_potential_energy() / energies[0] - 1) < 1e-12
        calculator.close()
        print("done")
    """
    notebook.runcode(compile(textwrap.dedent(cells), "<cell>", "exec"))
    out = capsys.readouterr()
    assert "InputError" in out.out and "'Own' is defined in the script or notebook itself" in out.out, out
    assert "move it to a module" in out.out and out.out.endswith("done\n"), out
    assert_no_process(pids)
