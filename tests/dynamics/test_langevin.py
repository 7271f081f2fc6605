"""Langevin dynamics: the splitting step by step, and the exact ensemble of oscillators."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from ase import units
from scipy import stats

import one_process
from nvdd import InputError, Langevin, Simulation
from nvdd.dynamics.random import normal


def test_a_step_is_baoab():
    """Written out in numpy, with the numbers of (seed, step, id)."""
    timestep, kelvin, friction, seed = 3.0, 150.0, 0.02, 11
    run = one_process.Oscillators(Langevin(timestep, kelvin, friction, seed), 5, kelvin)
    x, v = run.state.positions.numpy().copy(), run.state.velocities.numpy().copy()
    run.run(3)
    dt, mass = timestep * units.fs, 39.948
    kept = math.exp(-friction / units.fs * dt)
    for step in range(3):
        v = v - 0.5 * dt * run.spring * x / mass
        x = x + 0.5 * dt * v
        noise = normal(torch.arange(5), step, seed).numpy()
        v = kept * v + math.sqrt(units.kB * kelvin / mass * (1 - kept**2)) * noise
        x = x + 0.5 * dt * v
        v = v - 0.5 * dt * run.spring * x / mass
    np.testing.assert_allclose(run.state.positions, x, rtol=0, atol=1e-14)
    np.testing.assert_allclose(run.state.velocities, v, rtol=0, atol=1e-14)


def test_oscillators_are_sampled_exactly():
    """Positions are normal with variance k T / spring at a time step of a sixth of the period: BAOAB's merit.

    5 % of that would be 5 standard errors.
    """
    kelvin = 120.0
    period = 2 * math.pi * math.sqrt(39.948 / 0.5) / units.fs
    run = one_process.Oscillators(Langevin(period / 6, kelvin, 1.0 / period, seed=2), 1000, kelvin)
    run.state.positions *= 1.6
    positions = []
    run.run(120, lambda state: state.step % 20 == 0 and state.step > 20 and positions.append(state.positions.clone()))
    values = torch.stack(positions).flatten().numpy()
    spread = math.sqrt(units.kB * kelvin / run.spring)
    assert abs(values.var() / spread**2 - 1) < 0.05
    assert stats.kstest(values, stats.norm(scale=spread).cdf).pvalue > 1e-3


def test_heat_is_accounted_for():
    """What is conserved swings with the square of the time step and stays; the energy itself does not."""
    run = one_process.Oscillators(Langevin(2.0, 300.0, 0.05, seed=1), 200, 30.0)
    conserved, energies = [], []

    def note(state) -> None:
        conserved.append(float(run.conserved))
        energies.append(float(state.energy + run.kinetic))

    run.run(300, note)
    assert np.ptp(energies) > 1.0 and np.ptp(conserved) < 1e-3 * np.ptp(energies)


def test_centre_of_mass_stays_where_it_is_held():
    from ase.constraints import FixCom

    import parity

    atoms = one_process.argon()
    atoms.set_constraint(FixCom())
    run = Simulation(atoms, parity.wrapper("lj"), Langevin(4.0, 90.0, 0.05))
    run.run(20)
    moved = run.to_atoms()[0]
    assert np.abs(moved.get_center_of_mass() - atoms.get_center_of_mass()).max() < 1e-12
    assert np.abs(moved.positions - atoms.positions).max() > 0.1
    assert run.temperature[0] == pytest.approx(moved.get_temperature(), rel=1e-12)


def test_what_is_refused():
    with pytest.raises(InputError, match=r"Langevin: friction must be a positive number \(1/fs\), got 0"):
        Langevin(1.0, 300.0, 0)
    with pytest.raises(InputError, match=r"temperature must be a number that is zero or above \(K\), got -3"):
        Langevin(1.0, -3)
    with pytest.raises(InputError, match="Langevin: seed must be a whole number"):
        Langevin(1.0, 300.0, seed=-1)
