"""Velocity Verlet, and the two moves that the other integrators share."""

from __future__ import annotations

from nvdd.dynamics.base import BaseDynamics, Evaluator
from nvdd.dynamics.state import DynamicsState


def kick(state: DynamicsState, dt: float) -> None:
    """``v += dt F / m``; ``dt`` in ASE's unit of time."""
    state.velocities += dt * state.forces / state.masses.unsqueeze(1)


def drift(state: DynamicsState, dt: float) -> None:
    """``x += dt v``."""
    state.positions += dt * state.velocities


class NVE(BaseDynamics):
    """Constant energy and volume: velocity Verlet (Swope et al., J. Chem. Phys. 76, 637 (1982), doi:10.1063/1.442716).

    Conserves potential + kinetic energy, but for an oscillation of the order of ``timestep**2``.

    Args:
        timestep: fs.
    """

    def initialise(self, state: DynamicsState, evaluate: Evaluator) -> None:
        """Brings the centre of mass to rest where ``state.fix_com`` holds it."""
        if state.fix_com:
            evaluate.remove_drift(state)

    def step(self, state: DynamicsState, evaluate: Evaluator) -> None:
        kick(state, 0.5 * self.dt)
        drift(state, self.dt)
        evaluate(state)
        kick(state, 0.5 * self.dt)
