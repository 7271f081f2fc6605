"""Dynamics in one process: what a script sees."""

from __future__ import annotations

import numpy as np
import pytest
from ase.constraints import FixAtoms, FixCom, FixedPlane

import one_process
import parity
from nvdd import FIRE, NVE, InputError, Simulation
from nvdd.dynamics.hooks import Hook
from nvdd.dynamics.logs import StopWhen


class Closes(Hook):
    closed = False

    def __call__(self, run, seen) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def test_structures_come_back_as_they_were_given():
    atoms = one_process.argon(1)
    atoms.info["name"] = "argon"
    atoms.set_array("label", np.arange(4))
    before = atoms.copy()
    run = Simulation([atoms, one_process.argon(2)], parity.wrapper("lj"), NVE(1.0))
    run.run(3)
    first, second = run.to_atoms()
    assert (len(first), len(second)) == (4, 32) and run.state.step == 3
    assert first.info["name"] == "argon" and (first.arrays["label"] == np.arange(4)).all()
    assert np.abs(first.positions - before.positions).max() > 1e-3
    assert atoms == before  # the user's own
    assert run.kinetic_energy == pytest.approx([first.get_kinetic_energy(), second.get_kinetic_energy()], rel=1e-12)


def test_steps_are_counted_on_and_shown():
    run, seen = Simulation(one_process.argon(1), parity.wrapper("lj"), NVE(1.0)), []
    run.run(2, lambda run: seen.append(run.state.step))
    assert not run.run(1, lambda run: seen.append(run.state.step))
    assert seen == [1, 2, 3]
    assert Simulation(one_process.argon(1, 0.0), parity.wrapper("lj"), FIRE(1.0)).run(5, seen.append)


def test_hooks_stop_it_and_are_closed(tmp_path):
    """Also where each step is shown."""
    shown = []
    hooks = [StopWhen(lambda seen: seen.step >= 2), last := Closes()]
    with Simulation(one_process.argon(1), parity.wrapper("lj"), NVE(1.0), hooks) as run:
        assert not run.run(5, shown.append) and run.state.step == 2
        assert not run.run(5, shown.append) and run.state.step == 2
    assert last.closed


def test_constraints():
    atoms = one_process.argon(1)
    atoms.set_constraint(FixedPlane(0, (0, 0, 1)))
    with pytest.raises(InputError, match="constraint FixedPlane is not known to nvdd's dynamics"):
        Simulation(atoms, parity.wrapper("lj"), NVE(1.0))
    held, free = one_process.argon(1), one_process.argon(1)
    held.set_constraint(FixCom())
    with pytest.raises(InputError, match="some systems hold their centre of mass"):
        Simulation([held, free], parity.wrapper("lj"), NVE(1.0))
    held.set_constraint([FixAtoms([0]), FixAtoms([2])])
    assert Simulation([held, free], parity.wrapper("lj"), NVE(1.0)).state.fixed.nonzero().flatten().tolist() == [0, 2]


def test_velocities_that_are_none():
    atoms = one_process.argon(1)
    atoms.set_velocities(np.full((4, 3), np.nan))
    with pytest.raises(InputError, match="velocities are not all finite numbers"):
        Simulation(atoms, parity.wrapper("lj"), NVE(1.0))
