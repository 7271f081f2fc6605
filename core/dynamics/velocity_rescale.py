"""Thermostats that scale all velocities of a system alike: stochastic (CSVR, Bussi) and plain."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nvdd.dynamics.base import BaseDynamics, Evaluator
from nvdd.dynamics.checks import moving, not_at_rest, positive, relaxation_time, seed_of, whole
from nvdd.dynamics.state import BOLTZMANN, DynamicsState
from nvdd.dynamics.verlet import NVE


class _Rescaling(NVE):
    """Velocity Verlet after a factor for the velocities of each system, and the heat that this gives them."""

    holds_com = True

    def __init__(self, timestep: float, temperature: float) -> None:
        BaseDynamics.__init__(self, timestep)
        self.temperature = positive(type(self).__name__, "temperature", temperature, "K")

    def initialise(self, state: DynamicsState, evaluate: Evaluator) -> None:
        """Counts heat from zero.

        Raises:
            InputError: a system is at rest, so that no factor gives it a temperature.
        """
        who = type(self).__name__
        moving(who, state)
        super().initialise(state, evaluate)
        not_at_rest(who, evaluate.reduce(state, "kinetic_energy")["kinetic_energy"])
        state.system_state["heat"] = torch.zeros_like(state.energy)

    def _rescale(self, state: DynamicsState, kinetic: Tensor, ratio: Tensor) -> None:
        """Kinetic energies (n_systems,) times ``ratio``."""
        state.velocities = state.velocities * state.of_atoms(ratio.sqrt()).unsqueeze(1)
        state.system_state["heat"] = state.system_state["heat"] + (ratio - 1.0) * kinetic

    def conserved(self, state: DynamicsState, kinetic: Tensor) -> Tensor:
        """(n_systems,) eV: potential + kinetic energy - heat from the bath since the start."""
        return state.energy + kinetic - state.system_state["heat"]

    def parameters(self) -> dict[str, Any]:
        return super().parameters() | {"temperature_K": self.temperature}


class CSVR(_Rescaling):
    """Constant temperature and volume by stochastic velocity rescaling, also called the Bussi thermostat.

    The factor of each step is drawn such that the kinetic energy has its canonical distribution: Bussi, Donadio and
    Parrinello, J. Chem. Phys. 126, 014101 (2007), doi:10.1063/1.2408420, equation A7. Dynamics are disturbed less
    than by Langevin noise, and equilibration is as fast as the bath is strong.

    Args:
        timestep: fs.
        temperature: K. May be changed between steps.
        tau: fs, relaxation time of the kinetic energy. Default 100 time steps.
        seed: of the factors, 0 to 2**64 - 1.
    """

    def __init__(self, timestep: float, temperature: float, tau: float | None = None, seed: int = 0) -> None:
        super().__init__(timestep, temperature)
        self.tau = 100.0 * self.timestep if tau is None else tau
        self._kept = math.exp(-self.dt / relaxation_time("CSVR", "tau", self.tau, 0.0))
        self.seed = seed_of("CSVR", seed)

    def step(self, state: DynamicsState, evaluate: Evaluator) -> None:
        kinetic = evaluate.reduce(state, "kinetic_energy")["kinetic_energy"]
        self._rescale(state, kinetic, self._ratio(state, kinetic))
        super().step(state, evaluate)

    def _ratio(self, state: DynamicsState, kinetic: Tensor) -> Tensor:
        numbers = state.degrees_of_freedom.cpu().numpy()
        drawn = (*chi_squares(numbers, state.step, self.seed), numbers)
        first, others, freedom = (torch.as_tensor(x).to(kinetic.device) for x in drawn)
        mean = 0.5 * BOLTZMANN * self.temperature * freedom
        spread = (1.0 - self._kept) * mean / (kinetic * freedom)
        return self._kept + spread * (first**2 + others) + 2.0 * first * (self._kept * spread).sqrt()

    def parameters(self) -> dict[str, Any]:
        return super().parameters() | {"tau_fs": self.tau, "seed": self.seed}


class VelocityRescale(_Rescaling):
    """Velocity Verlet, with the temperature set to its target every few steps.

    Brings a system to a temperature. It samples no ensemble (the kinetic energy does not fluctuate): measure with
    another thermostat.

    Args:
        timestep: fs.
        temperature: K. May be changed between steps.
        interval: steps from one rescaling to the next.
    """

    def __init__(self, timestep: float, temperature: float, interval: int = 1) -> None:
        super().__init__(timestep, temperature)
        self.interval = whole("VelocityRescale", "interval", interval, 1)

    def step(self, state: DynamicsState, evaluate: Evaluator) -> None:
        if state.step % self.interval == 0:
            kinetic = evaluate.reduce(state, "kinetic_energy")["kinetic_energy"]
            target = 0.5 * BOLTZMANN * self.temperature * state.degrees_of_freedom
            self._rescale(state, kinetic, target / kinetic)
        super().step(state, evaluate)

    def parameters(self) -> dict[str, Any]:
        return super().parameters() | {"interval": self.interval}


def chi_squares(freedom: np.ndarray, step: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """For each system a normal number, and the sum of squares of ``freedom - 1`` more; (n_systems,) each.

    They depend on seed, step and system alone, so every rank draws the same.
    """
    first, others = np.empty(len(freedom)), np.empty(len(freedom))
    for system, degrees in enumerate(freedom):
        draw = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, system, step]))
        first[system] = draw.standard_normal()
        others[system] = 2.0 * draw.standard_gamma(0.5 * (degrees - 1.0)) if degrees > 1 else 0.0
    return first, others
