"""Lennard-Jones between all pairs of a small box, for integrators that make many steps: no neighbour list, no ranks."""

from __future__ import annotations

import numpy as np
import torch
from ase import Atoms
from torch import Tensor

from nvdd import Batch
from nvdd.dynamics.base import BaseDynamics, Evaluator
from nvdd.dynamics.state import DynamicsState
from nvdd.dynamics.velocities import draw_velocities


class DenseRun:
    """A run of one box whose faces are more than two cutoffs apart, so that each pair has one image.

    Args:
        atoms: one species.
        dynamics: what is tested.
        epsilon, sigma, cutoff: eV, A.
        onset: A, where energy and forces begin to go to zero; None to cut them off.
        fix_com: hold the centre of mass.
    """

    def __init__(
        self,
        atoms: Atoms,
        dynamics: BaseDynamics,
        epsilon: float,
        sigma: float,
        cutoff: float,
        onset: float | None = None,
        fix_com: bool = True,
    ) -> None:
        self.dynamics = dynamics
        self.parameters = epsilon, sigma, cutoff, onset
        self.state = DynamicsState.from_batch(
            Batch.from_atoms(atoms),
            torch.from_numpy(atoms.get_masses()),
            torch.from_numpy(atoms.get_velocities()),
            fix_com=fix_com,
        )
        n = len(atoms)
        self.first, self.second = torch.triu_indices(n, n, 1)
        self.evaluate = Evaluator(dynamics, self._compute)
        self._begun = False

    def _compute(self, state: DynamicsState, stress: bool) -> tuple[Tensor, Tensor, Tensor]:
        epsilon, sigma, cutoff, onset = self.parameters
        cell = state.cell[0]
        heights = 1 / torch.linalg.inv(cell).norm(dim=0)
        if float(heights.min()) < 2 * cutoff:
            raise ValueError(f"the box has become too thin for one image of a pair: heights {heights.tolist()} A")
        apart = state.positions[self.second] - state.positions[self.first]
        apart = apart - torch.round(apart @ torch.linalg.inv(cell)) @ cell
        square = apart.square().sum(1)
        near = (square < cutoff**2).nonzero().squeeze(1)
        apart, square = apart[near], square[near]
        first, second = self.first[near], self.second[near]
        six = (sigma * sigma / square) ** 3
        energy, slope = 4 * epsilon * (six * six - six), -12 * epsilon * (2 * six * six - six) / square
        if onset is not None:
            t = ((square - onset**2) / (cutoff**2 - onset**2)).clamp(min=0)
            switch, steep = (1 - t) ** 2 * (1 + 2 * t), -6 * t * (1 - t) / (cutoff**2 - onset**2)
            energy, slope = switch * energy, switch * slope + steep * energy
        pull = 2 * slope.unsqueeze(1) * apart  # dE / d(apart)
        forces = torch.zeros_like(state.positions).index_add(0, first, pull).index_add(0, second, -pull)
        return forces, energy.sum().reshape(1), (apart.T @ pull).unsqueeze(0)

    def draw_velocities(self, kelvin: float, seed: int) -> None:
        draw_velocities(self.state, self.evaluate, kelvin, seed)

    def run(self, steps: int, every: int = 10) -> dict[str, np.ndarray]:
        """Makes steps; every so many of them conserved and kinetic energy, volume and pressure, in eV and A."""
        if not self._begun:
            self.evaluate.want_stress = True
            self.evaluate(self.state)
            self.dynamics.initialise(self.state, self.evaluate)
            self._begun = True
        rows = []
        for _ in range(steps):
            self.dynamics.step(self.state, self.evaluate)
            self.state.step += 1
            if self.state.step % every == 0:
                rows.append(self._measure())
        return dict(zip(("conserved", "kinetic", "volume", "pressure"), np.array(rows).T, strict=True))

    def _measure(self) -> tuple[float, ...]:
        state = self.state
        kinetic = self.evaluate.reduce(state, "kinetic_energy")["kinetic_energy"]
        volume, trace = float(state.volume), float(state.stress[0].trace())
        conserved = float(self.dynamics.conserved(state, kinetic))
        return conserved, float(kinetic), volume, (2 * float(kinetic) / volume - trace) / 3
