"""Langevin dynamics."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from nvdd.dynamics.base import BaseDynamics, Evaluator
from nvdd.dynamics.checks import moving, not_negative, positive, seed_of
from nvdd.dynamics.random import normal
from nvdd.dynamics.state import FS, DynamicsState
from nvdd.dynamics.velocities import thermal_velocity
from nvdd.dynamics.verlet import drift, kick

NOISE_STREAM = 0  # of random numbers; see nvdd.dynamics.random


def _heat(state: DynamicsState) -> Tensor:
    """(n_systems,) eV that the bath has given to the atoms in this step."""
    return state.sum_systems(state.node_state["heat"])


class Langevin(BaseDynamics):
    """Constant temperature and volume by friction and noise, in the splitting BAOAB: kick, drift, bath, drift, kick.

    Leimkuhler and Matthews, J. Chem. Phys. 138, 174102 (2013), doi:10.1063/1.4802990. Averages over configurations are
    exact for oscillators at any stable time step; otherwise their error is of the order of ``timestep**2``, or of
    ``timestep**4`` where friction is strong. Averages over velocities (the temperature) and motion in time have an
    error of the order of ``timestep**2`` for oscillators, too. The noise of an atom depends on the seed, the step and
    its global id, and on nothing else.

    Where the centre of mass is held (``state.fix_com``), noise and friction act on the motion relative to it.
    Without, it diffuses, and all 3 n degrees of freedom have the temperature.

    Conserved is the energy less the heat taken from the bath (Bussi and Parrinello, Phys. Rev. E 75, 056707 (2007),
    doi:10.1103/PhysRevE.75.056707); its drift measures the error of the time step.

    Args:
        timestep: fs.
        temperature: K. May be changed between steps.
        friction: 1/fs; velocities are forgotten after ``1 / friction``. 0.01 is usual; 0.001 disturbs diffusion less.
        seed: of the noise, 0 to 2**64 - 1.
    """

    scalars = {"heat": _heat}  # noqa: RUF012

    def __init__(self, timestep: float, temperature: float, friction: float = 0.01, seed: int = 0) -> None:
        super().__init__(timestep)
        self.temperature = not_negative("Langevin", "temperature", temperature, "K")
        self.friction = positive("Langevin", "friction", friction, "1/fs")
        self.seed = seed_of("Langevin", seed)
        self._kept = math.exp(-self.dt * self.friction / FS)  # of a velocity after one step

    def initialise(self, state: DynamicsState, evaluate: Evaluator) -> None:
        """Brings the centre of mass to rest where it is held; counts heat from zero."""
        moving("Langevin", state)
        if state.fix_com:
            evaluate.remove_drift(state)
        state.node_state["heat"] = torch.zeros_like(state.masses)
        state.system_state["heat"] = torch.zeros_like(state.energy)

    def step(self, state: DynamicsState, evaluate: Evaluator) -> None:
        kick(state, 0.5 * self.dt)
        drift(state, 0.5 * self.dt)
        self._bath(state, evaluate)
        drift(state, 0.5 * self.dt)
        heat = evaluate(state, "heat")["heat"]
        kick(state, 0.5 * self.dt)
        state.system_state["heat"] = state.system_state["heat"] + heat

    def _bath(self, state: DynamicsState, evaluate: Evaluator) -> None:
        """Exact solution of the Ornstein-Uhlenbeck process over a time step."""
        before = state.velocities.square().sum(1)
        noise = normal(state.ids, state.step, self.seed, NOISE_STREAM)
        width = math.sqrt(1.0 - self._kept**2) * thermal_velocity(state, self.temperature)
        state.velocities = self._kept * state.velocities + width * noise * state.free
        if state.fix_com:
            evaluate.remove_drift(state)
        state.node_state["heat"] = 0.5 * state.masses * (state.velocities.square().sum(1) - before)

    def conserved(self, state: DynamicsState, kinetic: Tensor) -> Tensor:
        """(n_systems,) eV: potential + kinetic energy - heat from the bath since the start."""
        return state.energy + kinetic - state.system_state["heat"]

    def parameters(self) -> dict[str, Any]:
        return super().parameters() | {
            "temperature_K": self.temperature,
            "friction_per_fs": self.friction,
            "seed": self.seed,
        }
