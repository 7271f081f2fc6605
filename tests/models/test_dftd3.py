"""DFTD3ModelWrapper in one process against s-dftd3 (the `dftd3` package), its options, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, fcc111, molecule
from ase.units import Bohr, Hartree

from builders import evaluate, make_batch
from nvdd import Batch, DistributedModel, DomainConfig, NeighborConfig
from nvdd.errors import InputError, MissingDependencyError
from nvdd.models.configuration import rebuild
from nvdd.models.dftd3 import FAMILY, DFTD3ModelWrapper
from nvdd.models.dftd3_terms import coordination_numbers
from nvdd.models.registry import load
from nvdd.specs import SPEC_DFTD3_HALO

pytest.importorskip("tad_dftd3")
interface = pytest.importorskip("dftd3.interface")

SHORT = {"cutoff": 12.0, "cutoff_cn": 8.0, "cutoff_atm": 7.0}
DEFAULT = {"cutoff": 60 * Bohr, "cutoff_cn": 40 * Bohr, "cutoff_atm": 40 * Bohr}
PARAMETERS = {
    "bj": interface.RationalDampingParam,
    "bjm": interface.ModifiedRationalDampingParam,
    "zero": interface.ZeroDampingParam,
    "zerom": interface.ModifiedZeroDampingParam,
}


def sheared(atoms: Atoms, stdev: float) -> Atoms:
    atoms.rattle(stdev, seed=1)
    atoms.set_cell(atoms.cell.array @ np.array([[1, 0.1, 0], [0, 1, 0.05], [0.02, 0, 1]]), scale_atoms=True)
    return atoms


def ice_like() -> Atoms:
    """Two water molecules in a small triclinic cell: many images."""
    atoms = molecule("H2O")
    atoms += Atoms("OHH", molecule("H2O").positions @ np.diag([1, -1, 1]) + [1.5, 2.2, 1.9])
    atoms.set_cell([[4.4, 0.2, 0], [0, 4.5, 0.4], [0.3, 0, 4.6]])
    atoms.pbc = True
    return atoms


def slab() -> Atoms:
    atoms = fcc111("Pt", (1, 1, 3), vacuum=6.0)
    atoms += Atoms("CO", [atoms.positions[-1] + [0.1, 0, 1.9], atoms.positions[-1] + [0.1, 0.2, 3.05]])
    atoms.pbc = (True, True, False)
    return atoms


MOLECULES = {
    "water": lambda: molecule("H2O"),
    "bicyclobutane": lambda: molecule("bicyclobutane"),
    "caged": lambda: molecule("C60") + Atoms("U", [(0.2, 0.1, 0)]),  # more neighbours than any reference system
}
CRYSTALS = {
    "silicon": lambda: sheared(bulk("Si", "diamond", a=5.43, cubic=True), 0.1),
    "gold": lambda: sheared(bulk("Au", "fcc", a=3.9, cubic=True), 0.1),
    "ice": ice_like,
    "salt": lambda: sheared(bulk("NaCl", "rocksalt", a=5.6), 0.1),
    "slab": slab,
}


def assert_equals_s_dftd3(atoms: Atoms, functional: str, damping: str, atm: bool, cutoffs: dict[str, float]) -> None:
    """Energy to 1e-8 Ha, forces and stress to 5e-8 of their largest: covalent radii differ in the tenth digit (the Bohr)."""
    periodic = (atoms.cell.array / Bohr, atoms.pbc) if atoms.pbc.any() else ()
    theirs = interface.DispersionModel(atoms.numbers, atoms.positions / Bohr, *periodic)
    bohr = {name: length / Bohr for name, length in cutoffs.items()}
    theirs.set_realspace_cutoff(disp2=bohr["cutoff"], disp3=bohr["cutoff_atm"], cn=bohr["cutoff_cn"])
    wanted = theirs.get_dispersion(PARAMETERS[damping](method=functional, atm=atm), grad=True)
    mine = evaluate(DFTD3ModelWrapper(functional, damping=damping, atm=atm, **cutoffs), atoms)
    assert abs(mine.energy[0] / Hartree - wanted["energy"]) < 1e-8
    forces = -wanted["gradient"] * Hartree / Bohr
    assert np.abs(mine.forces - forces).max() <= 5e-8 * np.abs(forces).max() + 1e-9
    if atoms.cell.rank == 3:
        stress = wanted["virial"] * Hartree / atoms.get_volume()
        assert np.abs(mine.stress[0] - stress).max() <= 5e-8 * np.abs(stress).max()


@pytest.mark.parametrize("atm", (False, True), ids=("pairs", "triples"))
@pytest.mark.parametrize("damping", PARAMETERS)
@pytest.mark.parametrize("name", MOLECULES)
def test_molecules_equal_s_dftd3(name, damping, atm):
    assert_equals_s_dftd3(MOLECULES[name](), "pbe", damping, atm, DEFAULT)


@pytest.mark.parametrize("atm", (False, True), ids=("pairs", "triples"))
@pytest.mark.parametrize("damping", PARAMETERS)
@pytest.mark.parametrize("name", CRYSTALS)
def test_crystals_equal_s_dftd3(name, damping, atm):
    assert_equals_s_dftd3(CRYSTALS[name](), "b3lyp", damping, atm, SHORT)


@pytest.mark.parametrize("damping", ("bj", "zero"))
def test_default_cutoffs_equal_s_dftd3(damping):
    """60 Bohr for pairs and 40 for coordination numbers, which one list for both would change."""
    assert_equals_s_dftd3(CRYSTALS["silicon"](), "pbe", damping, False, DEFAULT)
    wrapper = DFTD3ModelWrapper("pbe", damping=damping)
    assert (wrapper.cutoff, wrapper.cutoff_cn, wrapper.cutoff_atm) == pytest.approx(tuple(DEFAULT.values()), rel=1e-12)
    assert wrapper.model_config.neighbor_config.cutoff == wrapper.cutoff
    polluted = DFTD3ModelWrapper("pbe", damping=damping, cutoff_cn=wrapper.cutoff)
    atoms = CRYSTALS["silicon"]()
    assert abs(evaluate(polluted, atoms).energy[0] - evaluate(wrapper, atoms).energy[0]) > 1e-6


@pytest.mark.parametrize("functional", ("pbe", "pbesol", "rpbe", "revpbe", "r2scan", "scan", "b3lyp", "pbe0", "hse06", "tpss", "b3-lyp"))  # fmt: skip
def test_usual_functionals(functional):
    assert_equals_s_dftd3(MOLECULES["bicyclobutane"](), functional, "bj", True, SHORT)


def test_forces_are_derivatives():
    """Of energies with weights, so that each atom's own share is differentiated, too."""
    wrapper = DFTD3ModelWrapper("pbe", damping="zero", atm=True, **SHORT)
    batch = make_batch(wrapper, CRYSTALS["ice"]())
    leaf, weights = batch.edge_vectors, torch.linspace(-1, 2, batch.n_atoms, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((weights * wrapper(batch)["energies"]).sum(), leaf)
    direction = torch.randn(leaf.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values, origin, h = [], leaf.detach().clone(), 1e-5
    for step in (1, -1, 2, -2):
        batch._edge_vectors = origin + step * h * direction
        values.append((weights * wrapper(batch)["energies"]).sum().item())
    numeric = (8 * (values[0] - values[1]) - (values[2] - values[3])) / (12 * h)
    assert numeric == pytest.approx((gradient * direction).sum().item(), rel=1e-7)


def test_a_second_derivative_is_an_error():
    """Not a number without the part that is missing."""
    wrapper = DFTD3ModelWrapper("pbe", **SHORT)
    batch = make_batch(wrapper, MOLECULES["water"]())
    (gradient,) = torch.autograd.grad(wrapper(batch)["energies"].sum(), batch.edge_vectors, create_graph=True)
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.autograd.grad(gradient.square().sum(), batch.edge_vectors)


def test_coordination_number_of_methane():
    """Four neighbours of carbon, one of hydrogen."""
    wrapper = DFTD3ModelWrapper("pbe", **SHORT)
    batch = make_batch(wrapper, molecule("CH4"))
    cn = coordination_numbers(batch.edge_vectors.detach(), batch.receivers, batch.senders, batch.atomic_numbers,
                              wrapper.radii, wrapper.cutoff_cn, batch.n_atoms)  # fmt: skip
    np.testing.assert_allclose(cn.numpy(), [4, 1, 1, 1, 1], atol=0.03)


def test_several_systems_equal_each_alone():
    wrapper = DFTD3ModelWrapper("pbe", atm=True, **SHORT)
    systems = [CRYSTALS["ice"](), Atoms("Xe", cell=[20, 20, 20], pbc=True), CRYSTALS["salt"]()]
    together, alone = evaluate(wrapper, systems), [evaluate(wrapper, s) for s in systems]
    np.testing.assert_allclose(together.energy, [r.energy[0] for r in alone], rtol=1e-13)
    np.testing.assert_allclose(together.forces, np.concatenate([r.forces for r in alone]), atol=1e-14)
    assert alone[1].energy[0] == 0.0


@pytest.mark.parametrize(("listed", "at_once"), [(False, 1), (False, 1000), (True, 1000)])
def test_some_receivers_at_a_time(listed, at_once):
    """Triples too: without a list of pairs, and with parts of one, as from LAMMPS."""
    wrapper, wanted = DFTD3ModelWrapper("pbe", damping="zero", atm=True, **SHORT), {"energy", "forces", "stress", "stresses"}
    batch = Batch.from_atoms([CRYSTALS["ice"](), Atoms("Xe", cell=[20, 20, 20], pbc=True), CRYSTALS["salt"]()])
    whole = evaluate(wrapper, batch.to_atoms())
    if listed:
        wrapper.model_config.neighbor_config = NeighborConfig(wrapper.cutoff)
    model = DistributedModel(wrapper, DomainConfig(max_edges_per_chunk=at_once))
    found = model(batch, wanted)
    assert (model.graphs.update(batch).topology.candidates.shape == (2, 0)) is not listed
    assert found.n_edges > 3000
    np.testing.assert_allclose(found["energy"], whole.energy, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(found["forces"], whole.forces, rtol=0, atol=1e-11 * np.abs(whole.forces).max())
    scale = np.abs(whole.stress).max()
    np.testing.assert_allclose(found["stress"], whole.stress, rtol=0, atol=1e-11 * scale)
    by_system = torch.zeros(3, 3, 3, dtype=torch.float64).index_add(0, batch.batch, found["stresses"])
    np.testing.assert_allclose(by_system, found["stress"], rtol=0, atol=1e-12 * scale)


def test_always_float64():
    wrapper = DFTD3ModelWrapper("pbe", **SHORT)
    before = evaluate(wrapper, MOLECULES["water"]())
    wrapper.to(torch.float32).half()
    assert wrapper.dtype is torch.float64 and wrapper.c6.dtype is torch.float64
    after = evaluate(load("dftd3:pbe", dtype=torch.float32, **SHORT), MOLECULES["water"]())
    assert before.energy == after.energy == evaluate(wrapper, MOLECULES["water"]()).energy
    assert wrapper.to("meta").c6.device.type == "meta"


def test_parameters_of_ones_own():
    by_name = evaluate(DFTD3ModelWrapper("pbe", **SHORT), MOLECULES["bicyclobutane"]())
    for parameters in ({"s8": 0.7875, "a1": 0.4289, "a2": 4.4407}, "s8:0.7875, a1:0.4289,a2:4.4407"):
        own = DFTD3ModelWrapper(parameters=parameters, **SHORT)
        assert evaluate(own, MOLECULES["bicyclobutane"]()).energy == by_name.energy


def test_family():
    wrapper = load("dftd3:pbe", damping="zero", atm="true", cutoff="9.5", cutoff_cn="8")
    assert wrapper.atm and wrapper.damping == "zero" and wrapper.cutoff == 9.5
    assert wrapper.distribution_spec() is SPEC_DFTD3_HALO and "functional='pbe'" in repr(wrapper)
    again = rebuild("dftd3", FAMILY.configuration(wrapper), torch.float64)
    again.load_state_dict(wrapper.state_dict())
    assert again.options == wrapper.options
    atoms = MOLECULES["water"]()
    assert evaluate(again, atoms).energy == evaluate(wrapper, atoms).energy
    own = DFTD3ModelWrapper(parameters="s8:1,rs6:1.2", damping="zerom", **SHORT)
    assert rebuild("dftd3", FAMILY.configuration(own), torch.float64).coefficients == own.coefficients


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"functional": "pbx"}, "no parameters for a functional 'pbx'; known are pbe"),
        ({"functional": "slaterdirac"}, "'slaterdirac' has no parameters for damping='bj'; use damping='zero'"),
        ({"functional": "pbe", "damping": "d4"}, "damping='d4' is not known; use one of bj, bjm, zero, zerom"),
        ({}, "give a functional, as in dftd3:pbe, or parameters=, not neither"),
        ({"functional": "pbe", "parameters": {"s8": 1}}, "not both"),
        ({"parameters": {"s8": 1.0, "b": 2}}, "no parameter b; there are s6"),
        ({"parameters": {"s8": 1.0}}, "damping='bj' needs a1, a2 among the parameters"),
        ({"parameters": {"s8": 1.0, "a1": "x", "a2": 1}}, "are not all numbers"),
        ({"parameters": "s8=1"}, "cannot read parameters='s8=1'"),
        ({"functional": "pbe", "cutoff": "-3"}, "cutoff='-3' is not a positive length in A; leave it out for 60 Bohr"),
        ({"functional": "pbe", "atm": "maybe"}, "atm='maybe' is neither true nor false"),
    ],
)
def test_refused(arguments, message):
    with pytest.raises(InputError) as error:
        DFTD3ModelWrapper(**arguments)
    assert message in str(error.value)


def test_elements_without_reference_data():
    wrapper = DFTD3ModelWrapper("pbe", **SHORT)
    for symbol in ("Rf", "X"):
        with pytest.raises(InputError, match=f"no reference data for {symbol}; D3 has the elements from hydrogen"):
            wrapper(make_batch(wrapper, Atoms(["O", symbol], [(0, 0, 0), (0, 0, 2.0)])))


def test_without_the_package(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "tad_dftd3", None)
    with pytest.raises(
        MissingDependencyError, match=r"takes its reference data from tad-dftd3, which can't be imported .*: pip install 'tad-dftd3"
    ):
        DFTD3ModelWrapper("pbe")
