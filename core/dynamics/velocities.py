"""Initial velocities."""

from __future__ import annotations

import torch
from torch import Tensor

from nvdd.dynamics.base import Evaluator
from nvdd.dynamics.checks import moving, not_negative
from nvdd.dynamics.random import normal
from nvdd.dynamics.state import BOLTZMANN, DynamicsState
from nvdd.errors import InputError

VELOCITY_STREAM = 1  # of random numbers; see nvdd.dynamics.random


def draw_velocities(
    state: DynamicsState,
    evaluate: Evaluator,
    temperature: float,
    seed: int = 0,
    *,
    zero_momentum: bool | None = None,
    exact: bool = False,
) -> None:
    """Gives every atom that can move a velocity of the Maxwell-Boltzmann distribution.

    The velocity of an atom depends on the seed, the step and its global id, so it is the same on any number of ranks.

    Args:
        state: ``state.velocities`` is set.
        evaluate: sums momentum and kinetic energy over all atoms.
        temperature: K.
        seed: 0 to 2**64 - 1.
        zero_momentum: take off the velocity of each system's centre of mass; None: of those systems that have no fixed
            atoms, and more than one atom.
        exact: scale velocities to a kinetic energy of exactly ``degrees_of_freedom / 2 k T``; otherwise it has the
            fluctuation that belongs to the temperature.

    Raises:
        InputError: the temperature is negative, a system has no atom that can move, or one alone, which
            ``zero_momentum=True`` would leave at rest.
    """
    not_negative("draw_velocities", "temperature", temperature, "K")
    moving("draw_velocities", state)
    alone = state.n_atoms - state.n_fixed < 2
    if zero_momentum and bool(alone.any()):
        raise InputError(
            f"draw_velocities: zero_momentum leaves the only atom of system {int(alone.nonzero()[0])} that can move at rest; "
            "leave it out"
        )
    if zero_momentum is None:
        still = (state.n_fixed == 0) & ~alone
    else:
        still = torch.full_like(alone, zero_momentum or state.fix_com)
    noise = normal(state.ids, state.step, seed, VELOCITY_STREAM)
    state.velocities = noise * thermal_velocity(state, temperature) * state.free
    if bool(still.any()):
        evaluate.remove_drift(state, still)
    if exact and temperature > 0:
        kinetic = evaluate.reduce(state, "kinetic_energy")["kinetic_energy"]
        target = 0.5 * BOLTZMANN * temperature * state.degrees_of_freedom
        state.velocities = state.velocities * state.of_atoms((target / kinetic).sqrt()).unsqueeze(1)


def thermal_velocity(state: DynamicsState, temperature: float) -> Tensor:
    """(n, 1) standard deviation of a component of each atom's velocity, ``sqrt(k T / m)``."""
    return torch.sqrt(BOLTZMANN * temperature / state.masses).unsqueeze(1)


def temperature(state: DynamicsState, kinetic: Tensor) -> Tensor:
    """(n_systems,) K, from the kinetic energy (n_systems,) eV of all atoms."""
    return 2.0 * kinetic / (BOLTZMANN * state.degrees_of_freedom.to(kinetic.device))
