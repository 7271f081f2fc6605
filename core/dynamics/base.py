"""`BaseDynamics`, which integrators and optimisers implement for one process, and `Evaluator`, which it is given.

An integrator says what it needs of all atoms together; it never talks to other ranks::

    class VelocityVerlet(BaseDynamics):
        def step(self, state, evaluate):
            state.velocities += 0.5 * self.dt * state.forces / state.masses[:, None]
            state.positions += self.dt * state.velocities
            evaluate(state)
            state.velocities += 0.5 * self.dt * state.forces / state.masses[:, None]

With a global scalar: ``scalars = {"kinetic": kinetic_energy}`` in the class, then ``evaluate(state, "kinetic")``
(in the message that sums the energy, computed after the forces) or ``evaluate.reduce(state, "kinetic")`` (a message
of its own).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from nvdd.dynamics.scalars import kinetic_energy, total_momentum
from nvdd.dynamics.state import FS, DynamicsState
from nvdd.errors import InputError

Share = Callable[[DynamicsState], Tensor]


class BaseDynamics:
    """One algorithm that moves atoms, written for one process.

    It keeps its parameters in attributes and everything that changes in the state: ``state.node_state`` (per atom),
    ``state.system_state`` (per system). One object may so serve several runs.

    Args:
        timestep: fs.

    Attributes:
        dt: the time step in ASE's unit.
        scalars: name -> function of the state that gives the (n_systems, ...) sum over the atoms at hand. It may read
            positions, velocities, forces and the dictionaries of the state, not energy or stress.
        maxima: the same for (n_systems, ...) maxima.
        needs_stress: whether `step` reads ``state.stress``.
        kinetic: whether velocities are those of atoms in time (not so in an optimiser).
        must_agree: names in `parameters` that a restart can't change, because the state has another form or meaning with
            others; all else may change, see `resume`.
        holds_com: whether a front end holds the centre of mass unless it is told otherwise: the algorithm sets a
            temperature, to which a drift of the whole does not belong, and keeps the total momentum.

    Raises:
        InputError: ``timestep`` is not positive.
    """

    # of the class or, where they are methods, of the object
    scalars: Mapping[str, Share] = {}
    maxima: Mapping[str, Share] = {}
    needs_stress = False
    kinetic = True
    holds_com = False
    must_agree: ClassVar[tuple[str, ...]] = ()

    def __init__(self, timestep: float) -> None:
        if not timestep > 0 or timestep == float("inf"):
            raise InputError(f"{type(self).__name__}: timestep must be positive (fs), got {timestep!r}")
        self.timestep = float(timestep)
        self.dt = self.timestep * FS

    def initialise(self, state: DynamicsState, evaluate: Evaluator) -> None:
        """Makes ``state.node_state`` and ``state.system_state``; energy and forces are there, stress if needed.

        Called once, before the first step; after a restart, which brings them, `resume` is called instead. ``evaluate`` is
        there for sums over all atoms.
        """

    def resume(self, state: DynamicsState, before: Mapping[str, Any]) -> None:
        """Makes parameters that have changed since a checkpoint count in the state that it brought.

        Args:
            state: with ``node_state`` and ``system_state`` of the checkpoint.
            before: `parameters` of the run that wrote it; those of ``must_agree`` are the same as now.
        """

    def step(self, state: DynamicsState, evaluate: Evaluator) -> None:
        """Moves the atoms by one step, in place. On return forces and energy are those of ``state.positions``.

        ``state.step`` is the number of steps done before this one; the caller counts. ``evaluate`` computes forces and
        sums over all atoms.
        """
        raise NotImplementedError

    def conserved(self, state: DynamicsState, kinetic: Tensor) -> Tensor:
        """(n_systems,) eV, what this algorithm conserves in ``state``, given ``kinetic`` (n_systems,) eV, the energy of all
        atoms' motion."""
        return state.energy + kinetic

    def is_converged(self, state: DynamicsState) -> bool:
        """Whether the run is over, from what all ranks have alike; an optimiser says so."""
        return False

    def parameters(self) -> dict[str, Any]:
        """What a log or a checkpoint says about the algorithm."""
        return {"dynamics": type(self).__name__, "timestep_fs": self.timestep}


class Evaluator:
    """Computes forces of a state, and sums over all atoms; given to `BaseDynamics.step`.

    This one is for one process. Over ranks `collect` gathers the shares of all of them, and nothing else differs.

    Args:
        dynamics: whose ``scalars`` and ``maxima`` may be asked for.
        compute: function of the state and of whether the stress is wanted. It gives the forces of the atoms at hand
            (n, 3) eV/A, the share of the energy (n_systems,) eV, and that of the virial (n_systems, 3, 3) eV or None;
            virial = stress * volume, positive under tension.

    Attributes:
        want_stress: that stress is computed although the dynamics does not read it, for a log.
        n_evaluations: how often forces were computed.
    """

    def __init__(self, dynamics: BaseDynamics, compute: Callable[[DynamicsState, bool], tuple]) -> None:
        self.dynamics, self.compute = dynamics, compute
        self.want_stress = False
        self.n_evaluations = 0
        self._sums = {"momentum": total_momentum, "kinetic_energy": kinetic_energy, **dynamics.scalars}
        self._maxima = dict(dynamics.maxima)

    def __call__(self, state: DynamicsState, *names: str) -> dict[str, Tensor]:
        """Sets ``state.forces``, ``state.energy`` and, if it is wanted, ``state.stress`` for the state's positions.

        Args:
            state: positions and cell may have changed since the last call.
            names: scalars and maxima to combine over all atoms, computed with the new forces; in the same message, but
                in one of their own where ``state.fix_com`` holds, since the forces are known after the first.

        Returns:
            (n_systems, ...) totals by name, the same on every rank to the last bit.
        """
        stress = self.dynamics.needs_stress or self.want_stress
        forces, energy, virial = self.compute(state, stress)
        self.n_evaluations += 1
        state.forces = forces * state.free
        shares = {"energy": energy}
        if state.fix_com:
            weights = torch.ones_like(state.masses) if self.dynamics.kinetic else state.masses
            shares["com"] = _com_share(state, weights)
        if virial is not None:
            shares["virial"] = virial
        totals = self._combine(shares, state, () if state.fix_com else names)
        state.energy = totals.pop("energy")
        if state.fix_com:
            state.forces = _com_held(state, totals.pop("com"))
            if names:
                totals |= self._combine({}, state, names)
        state.stress = totals.pop("virial") / state.volume[:, None, None] if virial is not None else None
        return totals

    def reduce(self, state: DynamicsState, *names: str) -> dict[str, Tensor]:
        """Totals of scalars and maxima, in one message; beside the dynamics' own there are ``kinetic_energy``
        (n_systems,) eV and ``momentum`` (n_systems, 3) amu A/time."""
        return self._combine({}, state, names)

    def remove_drift(self, state: DynamicsState, systems: Tensor | None = None) -> None:
        """Takes the velocity of the centre of mass off every atom that moves; one message.

        Args:
            state: ``state.velocities`` is set.
            systems: (n_systems,) bool, of which; None for all.
        """
        drift = self.reduce(state, "momentum")["momentum"] / state.total_mass.unsqueeze(1)
        if systems is not None:
            drift = drift * systems.unsqueeze(1)
        state.velocities = state.velocities - state.of_atoms(drift) * state.free

    def collect(self, share: Tensor) -> Tensor:
        """(k,) numbers of this rank -> (n_ranks, k) of all."""
        return share.unsqueeze(0)

    def _combine(self, shares: dict[str, Tensor], state: DynamicsState, names: tuple[str, ...]) -> dict[str, Tensor]:
        largest = {}
        for name in names:
            if name in self._sums:
                shares[name] = self._sums[name](state)
            elif name in self._maxima:
                largest[name] = self._maxima[name](state)
            else:
                raise InputError(
                    f"{type(self.dynamics).__name__} asks for {name!r}; it declares {sorted(self._sums | self._maxima)}"
                )
        parts = {**shares, **largest}
        everyone = self.collect(torch.cat([p.to(torch.float64).reshape(-1) for p in parts.values()]))
        columns = everyone.split([p.numel() for p in parts.values()], 1)
        return {
            name: (column.amax(0) if name in largest else column.sum(0)).reshape(parts[name].shape)
            for name, column in zip(parts, columns, strict=True)
        }


def _com_share(state: DynamicsState, weights: Tensor) -> Tensor:
    """(n_systems, 4) sums over the atoms at hand of w F and w m.

    The centre of mass stays if the forces' effect on it is taken off: with masses in time (w = 1), or where forces are
    the directions of an optimiser's steps (w = m, as ASE's FixCom has it: doi:10.1021/jp9722824, equations 3 and 7).
    """
    columns = torch.cat([state.forces, state.masses.unsqueeze(1)], 1)
    return state.sum_systems(weights.unsqueeze(1) * columns)


def _com_held(state: DynamicsState, totals: Tensor) -> Tensor:
    """Forces less each atom's share, by mass; ``totals`` are those of `_com_share`."""
    per_mass = state.of_atoms(totals[:, :3] / totals[:, 3:])
    return state.forces - state.masses.unsqueeze(1) * per_mass * state.free
