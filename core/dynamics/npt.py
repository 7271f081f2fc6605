"""Constant pressure: the equations of Martyna, Tobias and Klein (MTK)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from nvdd.dynamics.base import BaseDynamics, Evaluator
from nvdd.dynamics.chains import NoseHooverChain
from nvdd.dynamics.checks import finite, moving, not_at_rest, positive, relaxation_time, whole
from nvdd.dynamics.host import host, scale_velocities, times
from nvdd.dynamics.scalars import kinetic_tensor
from nvdd.dynamics.state import BOLTZMANN, GPA, DynamicsState
from nvdd.dynamics.strain import CellModes, Flow, flow
from nvdd.errors import InputError


class NPH(BaseDynamics):
    """Constant pressure and enthalpy: a cell that moves, without a thermostat.

    Martyna, Tobias and Klein, J. Chem. Phys. 101, 4177 (1994), doi:10.1063/1.467468; the integrator is that of
    Tuckerman et al., J. Phys. A 39, 5629 (2006), doi:10.1088/0305-4470/39/19/S18. With the strain rate
    ``e = g / W`` of a symmetric cell momentum g, and N_f degrees of freedom,

        x' = v + e x,   v' = F / m - (e + tr(e) / N_f) v,   h' = h e,
        g' = sum(m v v) - V (stress + pressure) + sum(m v^2) / N_f,   W = (N_f + 3) k T tau^2 / 3,

    in which g is confined to what ``mode`` lets the cell do; rotations are no part of it. Positions scale about the
    origin with the cell, so atoms must not be fixed. Conserved is the enthalpy with the kinetic energy of the cell.

    Args:
        timestep: fs.
        pressure: GPa.
        tau: fs, sets the cell's mass W, with the temperature that the atoms have at the start. Default 1000 time steps.
            The volume of a material of bulk modulus B swings with a period of about ``2 pi tau sqrt((N_f + 3) k T / 9 B V)``.
        mode: ``"iso"``: volume alone; ``"aniso"``: stretching along x, y and z; ``"full"``: all six strains.
        axes: for ``"aniso"``, along which of x, y, z. A slab's cell that must keep its height takes (True, True, False).

    Raises:
        InputError: a value that makes no sense; from `initialise`: fixed atoms, or a cell that is open along a
            direction that would be strained.
    """

    needs_stress = True
    holds_com = True
    must_agree: ClassVar[tuple[str, ...]] = ("mode", "axes")
    scalars = {"kinetic_tensor": kinetic_tensor}  # noqa: RUF012

    def __init__(
        self,
        timestep: float,
        pressure: float = 0.0,
        tau: float | None = None,
        mode: str = "iso",
        axes: Sequence[bool] = (True, True, True),
    ) -> None:
        super().__init__(timestep)
        who = type(self).__name__
        self.pressure = finite(who, "pressure", pressure, "GPa")
        self.tau_cell = 1000.0 * self.timestep if tau is None else tau
        self._tau = relaxation_time(who, "the barostat's tau", self.tau_cell, self.timestep)
        self.modes = CellModes(who, mode, axes)

    def initialise(self, state: DynamicsState, evaluate: Evaluator) -> None:
        """The cell begins at rest."""
        who = type(self).__name__
        moving(who, state)
        if (state.n_fixed > 0).any():
            raise InputError(
                f"{who}: atoms are fixed, but a cell that changes moves them all; run at constant volume, or free them"
            )
        self.modes.check(state)
        if state.fix_com:
            evaluate.remove_drift(state)
        freedom = host(state.degrees_of_freedom)
        state.system_state["cell_mass"] = (freedom + 3.0) * self._thermal(state, evaluate) * self._tau**2 / 3.0
        state.system_state["cell_momentum"] = torch.zeros(state.n_systems, 3, 3, dtype=torch.float64)

    def resume(self, state: DynamicsState, before: Mapping[str, Any]) -> None:
        """The cell's mass is that of the present ``tau``; the cell goes on at the rate at which it moves."""
        self._scale_mass(state, (self.tau_cell / before["tau_cell_fs"]) ** 2)

    @staticmethod
    def _scale_mass(state: DynamicsState, ratio: float) -> None:
        if ratio != 1.0:
            inner = state.system_state
            inner["cell_mass"] = host(inner["cell_mass"]) * ratio
            inner["cell_momentum"] = host(inner["cell_momentum"]) * ratio

    def _thermal(self, state: DynamicsState, evaluate: Evaluator) -> Tensor:
        """(n_systems,) k T in eV, for the cell's mass."""
        kinetic = host(evaluate.reduce(state, "kinetic_energy")["kinetic_energy"])
        if (kinetic == 0).any():
            raise InputError(
                f"{type(self).__name__}: the atoms of system {int((kinetic == 0).nonzero()[0])} are at rest, and its "
                "cell would have no mass; draw velocities first (draw_velocities)"
            )
        return 2.0 * kinetic / host(state.degrees_of_freedom)

    def step(self, state: DynamicsState, evaluate: Evaluator) -> None:
        half, freedom = 0.5 * self.dt, host(state.degrees_of_freedom)
        self._barostat_bath(state)
        kinetic = self._bath(state, self._kinetic(state, evaluate), freedom)
        self._push_cell(state, kinetic, freedom, half)
        kick, drift = self._flows(state, freedom)
        self._kick(state, kick, half)
        self._drift(state, drift)
        evaluate(state)
        self._kick(state, kick, half)
        kinetic = self._kinetic(state, evaluate)
        self._push_cell(state, kinetic, freedom, half)
        self._bath(state, kinetic, freedom)
        self._barostat_bath(state)

    @staticmethod
    def _kinetic(state: DynamicsState, evaluate: Evaluator) -> Tensor:
        return host(evaluate.reduce(state, "kinetic_tensor")["kinetic_tensor"])

    def _bath(self, state: DynamicsState, kinetic: Tensor, freedom: Tensor) -> Tensor:
        """The thermostat of the atoms over half a step: the (n_systems, 3, 3) kinetic tensor after it."""
        return kinetic

    def _barostat_bath(self, state: DynamicsState) -> None:
        """The thermostat of the cell over half a step."""

    def _push_cell(self, state: DynamicsState, kinetic: Tensor, freedom: Tensor, dt: float) -> None:
        """The cell's momentum under the difference of inner and outer pressure."""
        volume = torch.linalg.det(host(state.cell)).abs()[:, None, None]
        extra = kinetic.diagonal(dim1=1, dim2=2).sum(1) / freedom
        unit = torch.eye(3, dtype=torch.float64)
        force = kinetic - volume * (host(cast(Tensor, state.stress)) + self.pressure * GPA * unit) + extra[:, None, None] * unit
        momentum = state.system_state["cell_momentum"]
        state.system_state["cell_momentum"] = host(momentum) + dt * self.modes.project(force)

    def _flows(self, state: DynamicsState, freedom: Tensor) -> tuple[Flow, Flow]:
        """What the strain rate does to velocities over half a step, and to positions and cell over a step."""
        inner = state.system_state
        rates, axes = torch.linalg.eigh(host(inner["cell_momentum"]) / host(inner["cell_mass"])[:, None, None])
        damping = rates + (rates.sum(1) / freedom).unsqueeze(1)
        return flow(-0.5 * self.dt * damping, axes), flow(self.dt * rates, axes)

    @staticmethod
    def _kick(state: DynamicsState, kick: Flow, dt: float) -> None:
        accelerations = state.forces / state.masses.unsqueeze(1)
        state.velocities = times(state, state.velocities, kick.growth) + dt * times(state, accelerations, kick.source)

    def _drift(self, state: DynamicsState, drift: Flow) -> None:
        moved = self.dt * times(state, state.velocities, drift.source)
        state.positions = times(state, state.positions, drift.growth) + moved
        state.cell = state.cell @ drift.growth.to(state.cell.device)

    def conserved(self, state: DynamicsState, kinetic: Tensor) -> Tensor:
        """(n_systems,) eV: potential + kinetic energy + pressure * volume + kinetic energy of the cell."""
        inner = state.system_state
        cell = 0.5 * host(inner["cell_momentum"]).square().sum((1, 2)) / host(inner["cell_mass"])
        return state.energy + kinetic + self.pressure * GPA * state.volume + cell.to(kinetic.device)

    def parameters(self) -> dict[str, Any]:
        return super().parameters() | {
            "pressure_GPa": self.pressure,
            "tau_cell_fs": self.tau_cell,
            "mode": self.modes.mode,
            "axes": list(self.modes.axes),
        }


class NPT(NPH):
    """Constant temperature and pressure: `NPH` with a Nose-Hoover chain for the atoms and another one for the cell.

    Args:
        timestep: fs.
        temperature: K.
        pressure: GPa.
        tau: fs, of the atoms' thermostat. Default 100 time steps.
        tau_cell: fs, of the barostat and its thermostat. Default 1000 time steps.
        mode, axes: as for `NPH`.
        chain_length: links of each chain.
        substeps: divides the chains' time steps.
    """

    must_agree = (*NPH.must_agree, "chain_length")

    def __init__(
        self,
        timestep: float,
        temperature: float,
        pressure: float = 0.0,
        tau: float | None = None,
        tau_cell: float | None = None,
        mode: str = "iso",
        axes: Sequence[bool] = (True, True, True),
        chain_length: int = 3,
        substeps: int = 1,
    ) -> None:
        super().__init__(timestep, pressure, tau_cell, mode, axes)
        self.temperature = positive("NPT", "temperature", temperature, "K")
        self.tau = 100.0 * self.timestep if tau is None else tau
        length, substeps = whole("NPT", "chain_length", chain_length, 1), whole("NPT", "substeps", substeps, 1)
        self.chain = NoseHooverChain(relaxation_time("NPT", "tau", self.tau, self.timestep), length, substeps)
        self.cell_chain = NoseHooverChain(self._tau, length, substeps)

    @property
    def thermal(self) -> float:
        """k T in eV."""
        return BOLTZMANN * self.temperature

    def initialise(self, state: DynamicsState, evaluate: Evaluator) -> None:
        """Cell and chains begin at rest.

        Raises:
            InputError: as `NPH`; a system is at rest, which the chain can't heat.
        """
        super().initialise(state, evaluate)
        not_at_rest("NPT", evaluate.reduce(state, "kinetic_energy")["kinetic_energy"])
        state.system_state["thermostat"] = self.chain.at_rest(state.n_systems)
        state.system_state["cell_thermostat"] = self.cell_chain.at_rest(state.n_systems)

    def resume(self, state: DynamicsState, before: Mapping[str, Any]) -> None:
        """As `NPH.resume`; the mass is that of the present temperature, too."""
        super().resume(state, before)
        self._scale_mass(state, self.temperature / before["temperature_K"])

    def _thermal(self, state: DynamicsState, evaluate: Evaluator) -> Tensor:
        return torch.full((state.n_systems,), self.thermal, dtype=torch.float64)

    def _bath(self, state: DynamicsState, kinetic: Tensor, freedom: Tensor) -> Tensor:
        double = kinetic.diagonal(dim1=1, dim2=2).sum(1)
        state.system_state["thermostat"], factor = self.chain.propagate(
            host(state.system_state["thermostat"]),
            double,
            freedom,
            self.thermal,
            0.5 * self.dt,
        )
        scale_velocities(state, factor)
        return kinetic * factor.square()[:, None, None]

    def _barostat_bath(self, state: DynamicsState) -> None:
        inner = state.system_state
        momentum, mass = host(inner["cell_momentum"]), host(inner["cell_mass"])
        inner["cell_thermostat"], factor = self.cell_chain.propagate(
            host(inner["cell_thermostat"]),
            momentum.square().sum((1, 2)) / mass,
            torch.full_like(mass, self.modes.freedom),
            self.thermal,
            0.5 * self.dt,
        )
        inner["cell_momentum"] = momentum * factor[:, None, None]

    def conserved(self, state: DynamicsState, kinetic: Tensor) -> Tensor:
        """(n_systems,) eV: that of `NPH`, and the energy of both chains."""
        inner = state.system_state
        cell_freedom = torch.full((state.n_systems,), float(self.modes.freedom), dtype=torch.float64)
        chains = self.chain.energy(host(inner["thermostat"]), host(state.degrees_of_freedom), self.thermal)
        chains = chains + self.cell_chain.energy(host(inner["cell_thermostat"]), cell_freedom, self.thermal)
        return super().conserved(state, kinetic) + chains.to(kinetic.device)

    def parameters(self) -> dict[str, Any]:
        return super().parameters() | {
            "temperature_K": self.temperature,
            "tau_fs": self.tau,
            "chain_length": self.chain.length,
        }
