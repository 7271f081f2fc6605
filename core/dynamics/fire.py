"""FIRE: relaxation by damped dynamics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nvdd.dynamics.base import Evaluator
from nvdd.dynamics.cell_relaxation import CellRelaxation
from nvdd.dynamics.checks import positive, whole
from nvdd.dynamics.host import for_atoms, host
from nvdd.dynamics.relaxation import Relaxation, bounded
from nvdd.dynamics.state import DynamicsState

# rows of system_state["fire"]: time step, mixing, downhill steps in a row, whether a step was taken
_DT, _MIXING, _DOWNHILL, _BEGUN = range(4)


class FIRE(Relaxation):
    """Fast inertial relaxation engine: Bitzek et al., Phys. Rev. Lett. 97, 170201 (2006),
    doi:10.1103/PhysRevLett.97.170201.

    Step for step that of ``ase.optimize.FIRE``, whose names and defaults these are; masses are 1, times are without
    unit. Decisions are taken for each system, from its forces and velocities alone.

    Args:
        fmax: eV/A, largest force that an atom may have at the end; with a cell also a row of the cell's forces, the virial
            over the number of atoms.
        cell: None for a fixed cell; ``"frechet"``, ``"unit"`` or a `CellRelaxation`.
        dt, dtmax: first and largest time step.
        maxstep: A, largest length of a step of all coordinates together.
        Nmin: downhill steps before the time step grows.
        finc, fdec: factors by which it grows and shrinks.
        astart, fa: first mixing of the velocity with the direction of the force, and the factor by which it goes down.
    """

    def __init__(
        self,
        fmax: float = 0.05,
        cell: CellRelaxation | str | None = None,
        *,
        dt: float = 0.1,
        maxstep: float = 0.2,
        dtmax: float = 1.0,
        Nmin: int = 5,
        finc: float = 1.1,
        fdec: float = 0.5,
        astart: float = 0.1,
        fa: float = 0.99,
    ) -> None:
        super().__init__(fmax, cell)
        numbers = {
            "dt": dt, "maxstep": maxstep, "dtmax": dtmax, "finc": finc, "fdec": fdec, "astart": astart, "fa": fa
        }  # fmt: skip
        who = type(self).__name__
        checked = [positive(who, name, value) for name, value in numbers.items()]
        self._dt, self._maxstep, self._dtmax, self._finc, self._fdec, self._astart, self._fa = checked
        self._Nmin = whole(who, "Nmin", Nmin, 0)
        self.scalars = {"products": self._products}

    def initialise(self, state: DynamicsState, evaluate: Evaluator) -> None:
        """Begins at rest, whatever velocities the atoms have; those are left as they are."""
        super().initialise(state, evaluate)
        state.node_state["descent_velocity"] = torch.zeros_like(state.positions)
        state.system_state["cell_velocity"] = torch.zeros_like(self.cell_forces(state))
        first = torch.tensor([self._dt, self._astart, 0.0, 0.0], dtype=torch.float64)
        state.system_state["fire"] = first.expand(state.n_systems, 4).clone()
        self._note(state, evaluate)

    def step(self, state: DynamicsState, evaluate: Evaluator) -> None:
        force_squared, speed_squared, power = self._totals(state)
        dt, mixing, downhill, begun = host(state.system_state["fire"]).unbind(1)
        first, ahead = begun == 0, (power > 0) & (begun > 0)
        # new velocity = keep * velocity + turn * force
        keep = torch.where(ahead, 1.0 - mixing, 0.0)
        turn = torch.where(ahead, mixing * (speed_squared / force_squared).sqrt(), 0.0)
        grow = ahead & (downhill > self._Nmin)
        mixing = torch.where(grow, mixing * self._fa, torch.where(ahead | first, mixing, self._astart))
        dt = torch.where(
            grow, (dt * self._finc).clamp(max=self._dtmax), torch.where(ahead | first, dt, dt * self._fdec)
        )
        turn = turn + dt
        square = keep**2 * speed_squared + 2.0 * keep * turn * power + turn**2 * force_squared
        self._keep(state, dt, mixing, torch.where(ahead, downhill + 1.0, 0.0))
        self._go(state, keep, turn, dt * bounded(dt * square.clamp(min=0.0).sqrt(), self._maxstep))
        evaluate(state)
        self._note(state, evaluate)

    # -- what all ranks know ----------------------------------------------------------------------------------------

    def _products(self, state: DynamicsState) -> Tensor:
        """(n_systems, 3) of atoms: F . F, v . v, F . v."""
        force, velocity = self.atom_forces(state), state.node_state["descent_velocity"]
        pairs = torch.stack([force * force, velocity * velocity, force * velocity], 1)
        return state.sum_systems(pairs.sum(2))

    def _note(self, state: DynamicsState, evaluate: Evaluator) -> None:
        totals = evaluate.reduce(state, "products", "atom_fmax")
        force, velocity = self.cell_forces(state), host(state.system_state["cell_velocity"])
        pairs = torch.stack([force * force, velocity * velocity, force * velocity], 1)
        state.system_state["products"] = host(totals["products"]) + pairs.sum((2, 3))
        self.note_fmax(state, totals["atom_fmax"])

    def _totals(self, state: DynamicsState) -> tuple[Tensor, Tensor, Tensor]:
        """F . F, v . v, F . v with the cell's; a force of zero stands for a system that does not move."""
        force, speed, power = host(state.system_state["products"]).unbind(1)
        return torch.where(force > 0, force, 1.0), speed, power

    def _keep(self, state: DynamicsState, dt: Tensor, mixing: Tensor, downhill: Tensor) -> None:
        after = torch.stack([dt, mixing, downhill, torch.ones_like(dt)], 1)
        active = self.active(state).unsqueeze(1)
        state.system_state["fire"] = torch.where(active, after, host(state.system_state["fire"]))

    # -- moves ------------------------------------------------------------------------------------------------------

    def _turn(self, state: DynamicsState, keep: Tensor, turn: Tensor) -> None:
        """Velocity of each system that has not converged: ``keep * velocity + turn * force``."""
        active = self.active(state)
        keep, turn = torch.where(active, keep, 1.0), torch.where(active, turn, 0.0)
        velocity = state.node_state["descent_velocity"]
        state.node_state["descent_velocity"] = for_atoms(state, keep) * velocity + for_atoms(
            state, turn
        ) * self.atom_forces(state)
        cell = host(state.system_state["cell_velocity"])
        state.system_state["cell_velocity"] = keep[:, None, None] * cell + turn[:, None, None] * self.cell_forces(state)

    def _go(self, state: DynamicsState, keep: Tensor, turn: Tensor, time: Tensor) -> None:
        self._turn(state, keep, turn)
        self._travel(state, time)

    def _travel(self, state: DynamicsState, time: Tensor) -> None:
        """Coordinates along the velocity, for ``time`` (n_systems,)."""
        time = torch.where(self.active(state), time, 0.0)
        atoms = for_atoms(state, time) * state.node_state["descent_velocity"]
        self.move(state, atoms, time[:, None, None] * host(state.system_state["cell_velocity"]))

    def parameters(self) -> dict[str, Any]:
        return super().parameters() | {"maxstep_A": self._maxstep}


class FIRE2(FIRE):
    """FIRE with the corrections of Guénolé et al., Comput. Mater. Sci. 175, 109584 (2020),
    doi:10.1016/j.commatsci.2020.109584: a step uphill is taken back by half before the velocity is set to zero.

    Step for step that of ``ase.optimize.FIRE2``. With ``use_abc`` velocities are corrected for the bias of the first
    steps (ABC-FIRE: Echeverri Restrepo and Andric, Comput. Mater. Sci. 218, 111978 (2023),
    doi:10.1016/j.commatsci.2022.111978), and ``maxstep`` bounds each component.

    Args:
        fmax, cell: as for `FIRE`.
        dtmin: smallest time step.
        use_abc: ABC-FIRE.
        dt, maxstep, dtmax, Nmin, finc, fdec, astart, fa: as for `FIRE`.
    """

    def __init__(
        self,
        fmax: float = 0.05,
        cell: CellRelaxation | str | None = None,
        *,
        dt: float = 0.1,
        maxstep: float = 0.2,
        dtmax: float = 1.0,
        dtmin: float = 2e-3,
        Nmin: int = 20,
        finc: float = 1.1,
        fdec: float = 0.5,
        astart: float = 0.25,
        fa: float = 0.99,
        use_abc: bool = False,
    ) -> None:
        super().__init__(
            fmax, cell, dt=dt, maxstep=maxstep, dtmax=dtmax, Nmin=Nmin, finc=finc, fdec=fdec, astart=astart, fa=fa
        )
        self._dtmin = positive("FIRE2", "dtmin", dtmin)
        self._use_abc = use_abc

    def step(self, state: DynamicsState, evaluate: Evaluator) -> None:
        _, _, power = self._totals(state)
        dt, mixing, downhill, begun = host(state.system_state["fire"]).unbind(1)
        ahead, uphill = (power > 0) & (begun > 0), ~(power > 0) & (begun > 0)
        downhill = torch.where(ahead, downhill + 1.0, 0.0)
        grow = ahead & (downhill > self._Nmin)
        mixing = torch.where(grow, mixing * self._fa, torch.where(uphill, self._astart, mixing))
        dt = torch.where(grow, (dt * self._finc).clamp(max=self._dtmax), dt)
        dt = torch.where(uphill, (dt * self._fdec).clamp(min=self._dtmin), dt)
        if bool((uphill & self.active(state)).any()):
            self._take_back(state, evaluate, torch.where(uphill, 0.5 * dt, 0.0), uphill)
        force_squared, speed_squared, power = self._totals(state)
        self._keep(state, dt, mixing, downhill)
        pushed = speed_squared + 2.0 * dt * power + dt**2 * force_squared  # (v + dt F)^2
        turn = mixing * (pushed.clamp(min=0.0) / force_squared).sqrt()
        if self._use_abc:
            self._go_abc(state, dt, mixing.clamp(min=1e-10), turn, downhill)
        else:
            keep, turn = 1.0 - mixing, (1.0 - mixing) * dt + turn
            square = keep**2 * speed_squared + 2.0 * keep * turn * power + turn**2 * force_squared
            self._go(state, keep, turn, dt * bounded(dt * square.clamp(min=0.0).sqrt(), self._maxstep))
        evaluate(state)
        self._note(state, evaluate)

    def _take_back(self, state: DynamicsState, evaluate: Evaluator, time: Tensor, uphill: Tensor) -> None:
        """Systems that went uphill go back for ``time`` and stop; the forces are new after it."""
        self._travel(state, -time)
        keep = torch.where(uphill, 0.0, 1.0)
        self._turn(state, keep, torch.zeros_like(keep))
        evaluate(state)
        self._note(state, evaluate)

    def _go_abc(self, state: DynamicsState, dt: Tensor, mixing: Tensor, turn: Tensor, downhill: Tensor) -> None:
        unbias = 1.0 / (1.0 - (1.0 - mixing) ** (downhill + 1.0))
        self._turn(state, unbias * (1.0 - mixing), unbias * ((1.0 - mixing) * dt + turn))
        most = torch.where(self.active(state), self._maxstep / dt, torch.inf)
        atoms, cell = for_atoms(state, most), most[:, None, None]
        velocity = state.node_state["descent_velocity"]
        state.node_state["descent_velocity"] = torch.maximum(torch.minimum(velocity, atoms), -atoms)
        velocity = host(state.system_state["cell_velocity"])
        state.system_state["cell_velocity"] = torch.maximum(torch.minimum(velocity, cell), -cell)
        self._travel(state, dt)
