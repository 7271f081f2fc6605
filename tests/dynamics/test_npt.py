"""Constant pressure: against ASE's Martyna-Tobias-Klein, and what both conserve."""

from __future__ import annotations

import numpy as np
import pytest
from ase import Atoms, units
from ase.build import bulk
from ase.constraints import FixAtoms, FixCom
from ase.md.nose_hoover_chain import MTKNPT, IsotropicMTKNPT, MaskedMTKNPT

import one_process
import parity
from nvdd import NPH, NPT, InputError, Simulation

KELVIN, GPA, TAU, TAU_CELL = 90.0, 0.05, 100.0, 300.0


def ase_npt(kind: type, freedom: int, **options):
    """ASE's, with the degrees of freedom of a cell that does not rotate: it counts 9 of a full cell, and gives the
    first link of an isotropic one the mass of 9."""

    def make(atoms):
        dynamics = kind(
            atoms,
            2.0 * units.fs,
            temperature_K=KELVIN,
            pressure_au=GPA * units.GPa,
            tdamp=TAU * units.fs,
            pdamp=TAU_CELL * units.fs,
            **options,
        )
        barostat = dynamics._barostat
        barostat._R[0] = freedom * barostat._kT * barostat._pdamp**2
        if kind is not IsotropicMTKNPT:
            barostat._cell_dof = freedom
        return dynamics

    return make


def brick() -> Atoms:
    atoms = bulk("Ar", "fcc", a=5.3, cubic=True).repeat(2)
    atoms.set_cell(atoms.cell.array * [[1.0], [1.03], [0.98]], scale_atoms=True)
    atoms.rattle(0.1, seed=2)
    return one_process.heated(atoms, 80.0, 3)


@pytest.mark.parametrize(
    ("mode", "axes", "make", "atoms"),
    [
        ("iso", (True, True, True), ase_npt(IsotropicMTKNPT, 1), one_process.argon),
        ("full", (True, True, True), ase_npt(MTKNPT, 6), one_process.argon),
        ("aniso", (True, True, True), ase_npt(MaskedMTKNPT, 3, mask=(True, True, True)), brick),
        ("aniso", (True, False, True), ase_npt(MaskedMTKNPT, 2, mask=np.array([True, False, True])), brick),
    ],
    ids=["iso", "full", "aniso", "two axes"],
)
def test_trajectory_and_conserved_energy_are_ase_s(mode, axes, make, atoms):
    dynamics = NPT(2.0, KELVIN, GPA, tau=TAU, tau_cell=TAU_CELL, mode=mode, axes=axes)
    run, reference = one_process.compare("lj", dynamics, make, 100, atoms())
    assert run.conserved[0] == pytest.approx(reference.get_conserved_energy(), abs=1e-10)
    assert np.abs(run.to_atoms()[0].cell.array - atoms().cell.array).max() > 1e-3


@pytest.mark.parametrize(
    "dynamics",
    [
        NPH(2.0, GPA, tau=TAU_CELL, mode="full"),
        NPT(2.0, KELVIN, GPA, tau=TAU, tau_cell=TAU_CELL, mode="full"),
        NPT(2.0, KELVIN, GPA, tau=TAU, tau_cell=TAU_CELL),
    ],
    ids=["NPH", "NPT full", "NPT iso"],
)
def test_conserved_energy_does_not_drift(dynamics):
    """The potential energy swings a hundred times as far."""
    atoms = one_process.argon()
    atoms.set_constraint(FixCom())
    smooth = parity.wrapper("lj").__class__(epsilon=0.0104, sigma=3.4, cutoff=7.0, shift="smooth")
    run = Simulation(atoms, smooth, dynamics)
    conserved, energies, volumes = [], [], []

    def note(run: Simulation) -> None:
        conserved.append(run.conserved[0])
        energies.append(float(run.state.energy))
        volumes.append(float(run.state.volume))

    run.run(150, note)
    assert np.ptp(conserved) < 0.01 * np.ptp(energies)
    assert np.ptp(volumes) > 0.002 * volumes[0]


def test_shape_is_kept_by_a_cell_that_only_swells():
    atoms = one_process.argon()
    run = Simulation(atoms, parity.wrapper("lj"), NPT(2.0, KELVIN, 0.5, tau_cell=100.0))
    run.run(50)
    after = run.to_atoms()[0].cell
    growth = after.array / np.where(atoms.cell.array == 0, 1, atoms.cell.array)
    used = growth[atoms.cell.array != 0]
    assert abs(used[0] - 1) > 1e-3 and np.ptp(used) < 1e-12


def slab() -> Atoms:
    atoms = bulk("Ar", "fcc", a=5.3, cubic=True).repeat(2)
    atoms.center(vacuum=8.0, axis=2)
    atoms.pbc = (True, True, False)
    return one_process.heated(atoms, 50.0, 1)


def test_a_slab_is_strained_in_its_plane():
    atoms = slab()
    run = Simulation(
        atoms, parity.wrapper("lj"), NPT(2.0, 50.0, tau_cell=100.0, mode="aniso", axes=(True, True, False))
    )
    run.run(50)
    after = run.to_atoms()[0].cell.array
    assert after[2].tolist() == atoms.cell.array[2].tolist()
    assert abs(after[0, 0] / atoms.cell.array[0, 0] - 1) > 1e-3


def test_what_is_refused():
    run = lambda atoms, dynamics: Simulation(atoms, parity.wrapper("lj"), dynamics).run(1)
    for dynamics in (NPT(2.0, 50.0), NPT(2.0, 50.0, mode="full")):
        with pytest.raises(InputError, match=r"the cell of system 0 .* can't be strained along x, y, z"):
            run(slab(), dynamics)
    fixed = one_process.argon()
    fixed.set_constraint(FixAtoms([0]))
    with pytest.raises(InputError, match="NPT: atoms are fixed, but a cell that changes moves them all"):
        run(fixed, NPT(2.0, 50.0))
    with pytest.raises(InputError, match="NPH: the atoms of system 0 are at rest, and its cell would have no mass"):
        run(one_process.argon(kelvin=0.0), NPH(2.0))
    with pytest.raises(InputError, match="mode must be one of iso, aniso, full, got 'cubic'"):
        NPT(2.0, 50.0, mode="cubic")
    with pytest.raises(InputError, match=r"axes=\(True, False, True\) goes with mode='aniso', not with 'full'"):
        NPT(2.0, 50.0, mode="full", axes=(True, False, True))
    with pytest.raises(InputError, match=r"axes must say for each of x, y, z whether it may stretch"):
        NPT(2.0, 50.0, mode="aniso", axes=(False, False, False))
    with pytest.raises(InputError, match=r"the barostat's tau = 2 fs is too short for a timestep of 2 fs"):
        NPT(2.0, 50.0, tau_cell=2.0)
    with pytest.raises(InputError, match=r"pressure must be a finite number \(GPa\), got nan"):
        NPT(2.0, 50.0, float("nan"))
