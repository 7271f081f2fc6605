"""What optimisers have in common: convergence, systems side by side, constraints."""

from __future__ import annotations

import numpy as np
import pytest
from ase.constraints import FixAtoms, FixCom
from ase.optimize import FIRE as AseFIRE
from ase.optimize import LBFGS as AseLBFGS

import one_process
import parity
from nvdd import FIRE, FIRE2, LBFGS, Simulation

OPTIMISERS = {"FIRE": FIRE, "FIRE2": FIRE2, "LBFGS": LBFGS}


@pytest.mark.parametrize("cell", [None, "frechet"], ids=["atoms", "cell"])
@pytest.mark.parametrize("name", OPTIMISERS)
def test_systems_relax_side_by_side_as_alone(name, cell):
    """One is done before the other and is left as it is; velocities of an earlier run are none of theirs."""
    near, far = one_process.argon(1, 0.01), one_process.argon(1, 0.3, seed=5)
    fmax = 4e-3
    both = Simulation([near, far], parity.wrapper("lj"), OPTIMISERS[name](fmax, cell))
    assert both.run(400)
    steps = []
    for atoms, together in zip((near, far), both.to_atoms(), strict=True):
        alone = Simulation(atoms, parity.wrapper("lj"), OPTIMISERS[name](fmax, cell))
        assert alone.run(400)
        steps.append(alone.state.step)
        mine = alone.to_atoms()[0]
        assert np.abs(mine.positions - together.positions).max() < 1e-8
        assert np.abs(mine.cell.array - together.cell.array).max() < 1e-8
        assert (mine.get_momenta() == atoms.get_momenta()).all()
        mine.calc = one_process.NVDDCalculator(parity.wrapper("lj"))
        assert np.linalg.norm(mine.get_forces(), axis=1).max() < fmax * 1.05
    assert steps[0] < steps[1] == both.state.step


@pytest.mark.parametrize("name", OPTIMISERS)
def test_fixed_atoms_stay(name):
    atoms = one_process.argon(1, 0.2)
    atoms.set_constraint(FixAtoms([1, 2]))
    run = Simulation(atoms, parity.wrapper("lj"), OPTIMISERS[name](1e-3))
    assert run.run(300)
    moved = run.to_atoms()[0].positions - atoms.positions
    assert (moved[[1, 2]] == 0).all() and np.abs(moved[[0, 3]]).max() > 1e-3


@pytest.mark.parametrize(("name", "ase"), [("FIRE", AseFIRE), ("LBFGS", AseLBFGS)])
def test_the_centre_of_mass_stays_where_ase_holds_it(name, ase):
    """Of atoms of different masses, step for step as ASE's FixCom has it."""
    atoms = one_process.argon(1, 0.2)
    atoms.set_masses([40.0, 10.0, 20.0, 4.0])
    atoms.set_constraint(FixCom())
    run, _ = one_process.compare("lj", OPTIMISERS[name](1e-9), lambda atoms: ase(atoms, logfile=None), 30, atoms)
    assert np.abs(run.to_atoms()[0].get_center_of_mass() - atoms.get_center_of_mass()).max() < 1e-12


def test_a_converged_structure_is_left_alone():
    atoms = one_process.argon(1, 0.0)
    run = Simulation(atoms, parity.wrapper("lj"), FIRE(0.05))
    assert run.run(100) and run.state.step == 0


def test_energy_goes_down_to_the_enthalpy_of_the_pressure():
    from ase import units

    from nvdd import CellRelaxation

    run = Simulation(one_process.argon(1, 0.1), parity.wrapper("lj"), LBFGS(1e-5, CellRelaxation(pressure=0.3)))
    before = run.conserved[0]
    assert run.run(300)
    atoms = run.to_atoms()[0]
    atoms.calc = one_process.NVDDCalculator(parity.wrapper("lj"))
    stress = atoms.get_stress(voigt=False)
    assert np.abs(stress / units.GPa + 0.3 * np.eye(3)).max() < 1e-3
    enthalpy = atoms.get_potential_energy() + 0.3 * units.GPa * atoms.get_volume()
    assert run.conserved[0] == pytest.approx(enthalpy, abs=1e-9) and enthalpy < before - 0.02
