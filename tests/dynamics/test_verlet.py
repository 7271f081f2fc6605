"""Velocity Verlet, against ASE's."""

from __future__ import annotations

import numpy as np
import pytest
from ase import units
from ase.constraints import FixAtoms, FixCom
from ase.md.verlet import VelocityVerlet

import one_process
from nvdd import NVE, InputError

LONG = [("lj", 2.0, 200), pytest.param("mace", 0.5, 200, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("model", "timestep", "steps"), [*LONG, ("mace", 0.5, 15)])
def test_trajectory_is_ase_s(model, timestep, steps):
    one_process.compare(model, NVE(timestep), lambda atoms: VelocityVerlet(atoms, timestep * units.fs), steps)


@pytest.mark.parametrize("constraint", [FixAtoms([0, 3, 7]), FixCom()], ids=lambda c: type(c).__name__)
def test_constraints_are_ase_s(constraint):
    atoms = one_process.argon()
    atoms.set_constraint(constraint)
    atoms.set_momenta(atoms.get_momenta())  # which obeys the constraint
    run, _ = one_process.compare("lj", NVE(2.0), lambda a: VelocityVerlet(a, 2.0 * units.fs), 50, atoms)
    moved = run.to_atoms()[0]
    assert run.temperature[0] == pytest.approx(moved.get_temperature(), rel=1e-12)
    if isinstance(constraint, FixAtoms):
        assert (moved.positions[[0, 3, 7]] == atoms.positions[[0, 3, 7]]).all()
    else:
        assert np.abs(moved.get_center_of_mass() - atoms.get_center_of_mass()).max() < 1e-12


def test_energy_is_conserved_to_the_square_of_the_timestep():
    errors = []
    for timestep in (4.0, 2.0):
        run = one_process.Oscillators(NVE(timestep), 20, 100.0)
        energies: list[float] = []
        run.run(int(2000 / timestep), lambda state, run=run, seen=energies: seen.append(float(run.conserved)))
        errors.append(np.ptp(energies))
    assert 3.6 < errors[0] / errors[1] < 4.4


def test_timestep_must_be_positive():
    with pytest.raises(InputError, match=r"NVE: timestep must be positive \(fs\), got -1"):
        NVE(-1)
