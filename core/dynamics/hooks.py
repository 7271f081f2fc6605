"""Hooks: what happens beside the dynamics, after the steps that it is for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nvdd.dynamics.scalars import kinetic_tensor, longest
from nvdd.dynamics.state import BOLTZMANN
from nvdd.errors import InputError

if TYPE_CHECKING:
    from nvdd.dynamics.domain_parallel import DomainParallel


class HookScope(str, Enum):
    """Which ranks call a hook, and what it may do."""

    LOCAL = "local"  # every rank, with its own atoms; must not talk to other ranks
    GLOBAL = "global"  # every rank at once, with totals over all atoms; may call collective methods such as gather
    RANK_ZERO = "rank_zero"  # rank 0 alone, with totals over all atoms; must not talk to other ranks

    def runs_on(self, rank: int) -> bool:
        """Whether that rank calls it."""
        return self is not HookScope.RANK_ZERO or rank == 0


class Hook:
    """Called as ``hook(run, seen)`` after every ``every``-th step, and before the first one.

    ``run`` is the `DomainParallel`, ``seen`` an `Observation` (the same on every rank), None if the hook does not
    observe. An exception ends the run on every rank.

    Attributes:
        every: steps between calls.
        scope: `HookScope`.
        observes: whether it is given an `Observation`, which costs one message.
        needs_stress: whether the stress is computed for the steps at which it is called.
        stops: True to end the run after this step. One rank on which it is True is enough.

    Raises:
        InputError: ``every`` is no positive whole number.
    """

    scope = HookScope.GLOBAL
    observes = True
    needs_stress = False
    stops = False

    def __init__(self, every: int = 1) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise InputError(f"{type(self).__name__}: every must be a positive whole number of steps, got {every!r}")
        self.every = every

    def open(self, run: DomainParallel) -> None:
        """Called on every rank before the first step of a run."""

    def __call__(self, run: DomainParallel, seen: Observation | None) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Called on every rank when the run is closed."""


class Callback(Hook):
    """Calls a function of your own: ``function(run, seen)``."""

    def __init__(self, function: Any, every: int = 1, scope: HookScope | str = HookScope.GLOBAL) -> None:
        super().__init__(every)
        self.function, self.scope = function, HookScope(scope)

    def __call__(self, run: DomainParallel, seen: Observation | None) -> None:
        self.function(run, seen)


@dataclass(frozen=True, eq=False)
class Observation:
    """Totals over all atoms after a step; tensors (n_systems, ...) on the host, the same on every rank.

    Attributes:
        step: steps done.
        time: fs.
        energy, kinetic: eV.
        conserved: eV, what the integrator conserves.
        temperature: K, with the degrees of freedom that the constraints leave.
        pressure: eV/A^3, with the kinetic part; None if no stress was computed or a system is not periodic in 3D.
        stress: (n_systems, 3, 3) eV/A^3, potential part, or None.
        volume: A^3.
        density: g/cm^3.
        fmax: eV/A, the largest force.
        owned: (n_ranks,) atoms of each rank.
    """

    step: int
    time: float
    energy: Tensor
    kinetic: Tensor
    conserved: Tensor
    temperature: Tensor
    pressure: Tensor | None
    stress: Tensor | None
    volume: Tensor
    density: Tensor
    fmax: Tensor
    owned: Tensor

    @property
    def imbalance(self) -> float:
        """Atoms of the fullest rank over the mean."""
        return float(self.owned.max() / self.owned.to(torch.float64).mean())

    @classmethod
    def of(cls, run: DomainParallel) -> Observation:
        """One message; every rank calls it at once."""
        state, comm = run.state, run.comm
        parts = [kinetic_tensor(state).reshape(-1), longest(state, state.forces)]
        parts.append(state.sum_systems(state.masses))
        parts.append(torch.tensor([len(state.ids)], dtype=torch.float64, device=state.positions.device))
        everyone = comm.all_gather(torch.cat(parts), "observation")
        n = state.n_systems
        tensor = everyone[:, : 9 * n].sum(0).reshape(n, 3, 3)
        kinetic = 0.5 * tensor.diagonal(dim1=1, dim2=2).sum(1)
        volume, pressure = state.volume, None
        bulk = bool(state.pbc.all()) and bool((volume > 0).all())
        if state.stress is not None and bulk:
            total = tensor / volume[:, None, None] - state.stress
            pressure = (total.diagonal(dim1=1, dim2=2).sum(1) / 3.0).cpu()
        return cls(
            step=state.step,
            time=state.time,
            energy=state.energy.cpu(),
            kinetic=kinetic.cpu(),
            conserved=run.dynamics.conserved(state, kinetic).cpu(),
            temperature=(2.0 * kinetic / (BOLTZMANN * state.degrees_of_freedom)).cpu(),
            pressure=pressure,
            stress=None if state.stress is None else state.stress.cpu(),
            volume=volume.cpu(),
            density=(everyone[:, 10 * n : 11 * n].sum(0) / volume * 1.66053906660).cpu(),
            fmax=everyone[:, 9 * n : 10 * n].amax(0).cpu(),
            owned=everyone[:, -1].to(torch.int64).cpu(),
        )
