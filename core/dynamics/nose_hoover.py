"""Constant temperature by a Nose-Hoover chain."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nvdd.dynamics.base import BaseDynamics, Evaluator
from nvdd.dynamics.chains import NoseHooverChain
from nvdd.dynamics.checks import moving, not_at_rest, positive, relaxation_time, whole
from nvdd.dynamics.host import host, scale_velocities
from nvdd.dynamics.state import BOLTZMANN, DynamicsState
from nvdd.dynamics.verlet import NVE


class NoseHoover(NVE):
    """Constant temperature and volume (NVT), deterministic and time-reversible; see `nvdd.dynamics.chains`.

    Velocity Verlet between two half steps of the chain, which scales all velocities of a system alike. Conserved is
    the energy of atoms and chain.

    Stiff or small systems that this does not mix well (a crystal near 0 K, a few atoms) are better served by Langevin.

    Args:
        timestep: fs.
        temperature: K.
        tau: fs, sets the mass of the links. The kinetic energy swings around its mean with a period of 4.4 tau (free
            atoms) to 6.3 tau (a harmonic crystal). Default 100 time steps.
        chain_length: number of links.
        substeps: divides the chain's time step.
    """

    holds_com = True
    must_agree = ("chain_length",)

    def __init__(
        self,
        timestep: float,
        temperature: float,
        tau: float | None = None,
        chain_length: int = 3,
        substeps: int = 1,
    ) -> None:
        BaseDynamics.__init__(self, timestep)
        self.temperature = positive("NoseHoover", "temperature", temperature, "K")
        self.tau = 100.0 * self.timestep if tau is None else tau
        self.chain = NoseHooverChain(
            relaxation_time("NoseHoover", "tau", self.tau, self.timestep),
            whole("NoseHoover", "chain_length", chain_length, 1),
            whole("NoseHoover", "substeps", substeps, 1),
        )

    def initialise(self, state: DynamicsState, evaluate: Evaluator) -> None:
        """The chain begins at rest.

        Raises:
            InputError: a system is at rest, which the chain can't heat.
        """
        moving("NoseHoover", state)
        super().initialise(state, evaluate)
        not_at_rest("NoseHoover", evaluate.reduce(state, "kinetic_energy")["kinetic_energy"])
        state.system_state["thermostat"] = self.chain.at_rest(state.n_systems)

    def step(self, state: DynamicsState, evaluate: Evaluator) -> None:
        self._bath(state, evaluate)
        super().step(state, evaluate)
        self._bath(state, evaluate)

    def _bath(self, state: DynamicsState, evaluate: Evaluator) -> None:
        kinetic = host(evaluate.reduce(state, "kinetic_energy")["kinetic_energy"])
        state.system_state["thermostat"], factor = self.chain.propagate(
            host(state.system_state["thermostat"]),
            2.0 * kinetic,
            host(state.degrees_of_freedom),
            BOLTZMANN * self.temperature,
            0.5 * self.dt,
        )
        scale_velocities(state, factor)

    def conserved(self, state: DynamicsState, kinetic: Tensor) -> Tensor:
        """(n_systems,) eV: potential + kinetic energy + that of the chain."""
        links, freedom = host(state.system_state["thermostat"]), host(state.degrees_of_freedom)
        return (
            state.energy + kinetic + self.chain.energy(links, freedom, BOLTZMANN * self.temperature).to(kinetic.device)
        )

    def parameters(self) -> dict[str, Any]:
        return super().parameters() | {
            "temperature_K": self.temperature,
            "tau_fs": self.tau,
            "chain_length": self.chain.length,
        }
