"""Structures and runs of one process for tests of integrators and optimisers, beside ASE's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from ase import Atoms, units
from ase.build import bulk

import parity
from builders import quartz
from nvdd import Batch, Simulation
from nvdd.dynamics.base import BaseDynamics, Evaluator
from nvdd.dynamics.state import DynamicsState
from nvdd_ase import NVDDCalculator

TOLERANCE = 1e-8  # A, of a trajectory of 200 steps


def argon(repeat: int = 2, stdev: float = 0.1, kelvin: float = 80.0, seed: int = 0) -> Atoms:
    """Rattled and sheared fcc argon, 32 atoms, with velocities."""
    atoms = bulk("Ar", "fcc", a=5.3, cubic=True).repeat(repeat)
    shear = np.array([[1.02, 0.03, 0.0], [0.0, 0.99, 0.02], [0.01, 0.0, 1.0]])
    atoms.set_cell(atoms.cell.array @ shear, scale_atoms=True)
    atoms.rattle(stdev, seed=seed)
    return heated(atoms, kelvin, seed)


def silica(kelvin: float = 300.0) -> Atoms:
    """Quartz of 9 atoms for the MACE of random weights, with velocities."""
    return heated(quartz(stdev=0.05), kelvin, 1)


def heated(atoms: Atoms, kelvin: float, seed: int) -> Atoms:
    spread = np.sqrt(units.kB * kelvin / atoms.get_masses())[:, None]
    atoms.set_velocities(spread * np.random.default_rng(seed).normal(size=(len(atoms), 3)))
    return atoms


SYSTEMS = {"lj": argon, "mace": silica}


def compare(
    model: str, dynamics: BaseDynamics, make_ase: Callable[[Atoms], Any], steps: int, atoms: Atoms | None = None
) -> tuple[Simulation, Any]:
    """Runs both, asserts that positions, cells and, in dynamics, velocities agree; gives both runs back."""
    atoms = SYSTEMS[model]() if atoms is None else atoms
    run = Simulation(atoms, parity.wrapper(model), dynamics)
    run.run(steps)
    other = atoms.copy()
    other.calc = NVDDCalculator(parity.wrapper(model))
    reference = make_ase(other)
    if dynamics.kinetic:
        reference.run(run.state.step)
    else:
        reference.run(fmax=1e-12, steps=run.state.step)
    mine = run.to_atoms()[0]
    assert np.abs(mine.positions - atoms.positions).max() > 0.01  # something has happened
    assert np.abs(mine.positions - other.positions).max() < TOLERANCE
    assert np.abs(mine.cell.array - other.cell.array).max() < TOLERANCE
    if dynamics.kinetic:
        assert np.abs(mine.get_velocities() - other.get_velocities()).max() < TOLERANCE
    return run, reference


class Oscillators:
    """Independent oscillators of one spring constant in three dimensions: every answer is known."""

    def __init__(self, dynamics: BaseDynamics, n: int, kelvin: float, spring: float = 0.5, n_systems: int = 1) -> None:
        self.dynamics, self.spring, self.kelvin = dynamics, spring, kelvin
        systems = [Atoms("Ar" * n, positions=np.zeros((n, 3))) for _ in range(n_systems)]
        masses = torch.full((n * n_systems,), 39.948, dtype=torch.float64)
        self.state = DynamicsState.from_batch(Batch.from_atoms(systems), masses)
        generator = torch.Generator().manual_seed(1)
        noise = lambda: torch.randn(n * n_systems, 3, generator=generator, dtype=torch.float64)
        self.state.positions = np.sqrt(units.kB * kelvin / spring) * noise()
        self.state.velocities = np.sqrt(units.kB * kelvin / 39.948) * noise()
        self.evaluate = Evaluator(dynamics, self._compute)

    def _compute(self, state: DynamicsState, stress: bool):
        x = state.positions
        return -self.spring * x, 0.5 * self.spring * state.sum_systems(x.square().sum(1)), None

    def run(self, steps: int, on_step: Callable[[DynamicsState], Any] | None = None) -> None:
        self.evaluate(self.state)
        self.dynamics.initialise(self.state, self.evaluate)
        for _ in range(steps):
            self.dynamics.step(self.state, self.evaluate)
            self.state.step += 1
            if on_step is not None:
                on_step(self.state)

    @property
    def kinetic(self) -> torch.Tensor:
        return self.evaluate.reduce(self.state, "kinetic_energy")["kinetic_energy"]

    @property
    def conserved(self) -> torch.Tensor:
        return self.dynamics.conserved(self.state, self.kinetic)
