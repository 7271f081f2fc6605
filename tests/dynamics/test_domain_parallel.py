"""Trajectories over ranks, against ASE's integrator with one process."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from ase import units
from ase.md.verlet import VelocityVerlet

import md
import parity
from nvdd_ase import NVDDCalculator

STEPS, TIMESTEP = 200, 4.0


@cache
def reference(model: str):
    atoms = start(model).copy()
    with NVDDCalculator(parity.wrapper(model)) as calculator:
        atoms.calc = calculator
        VelocityVerlet(atoms, TIMESTEP * units.fs).run(STEPS)
        atoms.get_forces()
        atoms.calc = None
    return atoms


@cache
def start(model: str):
    return md.hot_argon()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_velocity_verlet_is_ase_s(ranks, size):
    """On 1 to 4 ranks with migrations: 200 steps to 1e-8 A."""
    parts = ranks.run(
        size, md.run_on_rank, "lj", start("lj"), md.Verlet(TIMESTEP), STEPS, {"skin": 0.6, "migration_hysteresis": 0.1}
    )
    expected = reference("lj")
    assert np.abs(parts[0]["positions"] - expected.positions).max() < 1e-8
    assert np.abs(parts[0]["velocities"] - expected.get_velocities()).max() < 1e-8
    assert parts[0]["evaluations"] == STEPS + 1
    assert all(part["steps"] == STEPS and part["builds"] < STEPS / 4 for part in parts)
    migrated = sum(part["migrated"] for part in parts)
    assert migrated > 10 if size > 1 else migrated == 0
    assert max(part["owned"] for part in parts) < 1.3 * len(expected) / size
