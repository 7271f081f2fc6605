"""Stochastic and plain velocity rescaling."""

from __future__ import annotations

import numpy as np
import pytest
from ase import units
from ase.md.bussi import Bussi
from scipy import stats

import one_process
import parity
from nvdd import CSVR, NPT, InputError, Langevin, NoseHoover, Simulation, VelocityRescale
from nvdd.dynamics.velocity_rescale import chi_squares


class Numbers:
    """Gives ASE the random numbers of (seed, step)."""

    def __init__(self, freedom: float, seed: int) -> None:
        self.freedom, self.seed, self.step = freedom, seed, 0

    def standard_normal(self) -> float:
        self.first, self.others = (float(x[0]) for x in chi_squares(np.array([self.freedom]), self.step, self.seed))
        self.step += 1
        return self.first

    def standard_gamma(self, shape: float) -> float:
        assert shape == (self.freedom - 1) / 2
        return self.others / 2


def test_trajectory_is_ase_s():
    def bussi(atoms):
        numbers = Numbers(3.0 * len(atoms), 7)
        return Bussi(atoms, 2.0 * units.fs, 120.0, 60.0 * units.fs, rng=numbers)

    run, reference = one_process.compare("lj", CSVR(2.0, 120.0, tau=60.0, seed=7), bussi, 100)
    assert float(run.state.system_state["heat"]) == pytest.approx(reference.transferred_energy, abs=1e-10)


def test_kinetic_energy_is_canonical():
    """Many systems of few atoms, long after the start, at another temperature than that of the start."""
    n, n_systems, kelvin = 4, 300, 150.0
    run = one_process.Oscillators(CSVR(5.0, kelvin, tau=10.0, seed=1), n, 300.0, n_systems=n_systems)
    seen = []
    run.run(80, lambda state: state.step in (40, 80) and seen.append(run.kinetic.numpy()))
    values = np.concatenate(seen)
    expected = stats.gamma(3 * n / 2, scale=units.kB * kelvin)
    assert stats.kstest(values, expected.cdf).pvalue > 1e-3
    assert abs(values.mean() / expected.mean() - 1) < 0.06


def test_heat_is_accounted_for():
    run = one_process.Oscillators(CSVR(1.0, 300.0, tau=30.0, seed=1), 30, 30.0)
    conserved, energies = [], []

    def note(state) -> None:
        conserved.append(float(run.conserved))
        energies.append(float(state.energy + run.kinetic))

    run.run(300, note)
    assert np.ptp(energies) > 0.3 and np.ptp(conserved) < 2e-3 * np.ptp(energies)


def test_plain_rescaling_sets_the_temperature():
    atoms = one_process.argon()
    run = Simulation(atoms, parity.wrapper("lj"), VelocityRescale(2.0, 33.0, interval=4))
    seen = []
    run.run(9, lambda run: seen.append(run.temperature[0]))
    # set before the moves of steps 0, 4 and 8
    assert abs(np.array(seen)[[0, 4, 8]] - 33.0).max() < 1.0
    assert abs(seen[3] - 33.0) > abs(seen[4] - 33.0)


def test_what_is_refused():
    still = one_process.argon(kelvin=0.0)
    for dynamics in (CSVR(1.0, 300.0), VelocityRescale(1.0, 300.0), NoseHoover(1.0, 300.0), NPT(1.0, 300.0)):
        with pytest.raises(InputError, match=r"scales velocities, but those of system 0 are all zero"):
            Simulation(still, parity.wrapper("lj"), dynamics).run(1)
    with pytest.raises(InputError, match="CSVR: temperature must be a positive number"):
        CSVR(1.0, 0.0)
    for seed in (2**64, -1, 1.5, True):
        for integrator in (CSVR, Langevin):
            with pytest.raises(InputError, match=rf"{integrator.__name__}: seed must be .* from 0 to 2\*\*64 - 1, got {seed}"):
                integrator(1.0, 300.0, seed=seed)
    with pytest.raises(InputError, match="VelocityRescale: interval must be a whole number from 1 on, got 0"):
        VelocityRescale(1.0, 300.0, interval=0)
