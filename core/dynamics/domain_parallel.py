"""`DomainParallel`: runs a single-process integrator or optimiser over ranks, each with the atoms of its domain."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nvdd.communicator import Communicator
from nvdd.config import DomainConfig, StrategyKind
from nvdd.data import Batch
from nvdd.dynamics.base import BaseDynamics, Evaluator
from nvdd.dynamics.checkpoint import load_checkpoint
from nvdd.dynamics.failures import raise_together
from nvdd.dynamics.given import state_of
from nvdd.dynamics.hooks import Hook, Observation
from nvdd.dynamics.migration import Migration
from nvdd.dynamics.owned_graph import OwnedGraph
from nvdd.dynamics.sharded_batch import ShardedBatch
from nvdd.dynamics.state import DynamicsState
from nvdd.errors import InputError, NvddError
from nvdd.policy import ShardedStoragePolicy
from nvdd.runtime.model import DistributedModel


class DomainParallel:
    """Molecular dynamics or relaxation of atoms that stay on their ranks.

    Args:
        dynamics: an integrator or optimiser, unchanged from its use in one process.
        model: a model wrapper, or a `DistributedModel` of one.
        config: how the run is divided; its ``mesh`` are the ranks. None for one rank, or that of the `DistributedModel`.
        hooks: called after the steps that they are for, see `nvdd.dynamics.hooks`.

    Every rank makes one and calls its methods at once. Atoms move to the rank of another domain when they have left
    theirs; that, and the search for neighbours, is done when an atom has moved by half the skin, on which all ranks
    agree by one number a step. Forces, energies and trajectories don't depend on the number of ranks, to rounding.

    Attributes:
        batch: the `ShardedBatch` in hand; None before `partition`.
        comm: the ranks.
        restarted: whether the state came from a checkpoint, integrator and all.
        want_stress_at: number of a step after which the stress is wanted, beside those for which a hook needs it.

    Example::

        run = DomainParallel(dynamics=NVE(timestep=1.0), model=wrapper, config=DomainConfig(mesh=mesh))
        run.partition(Batch.from_atoms(atoms))  # those of rank 0 are taken
        run.run(1000)
        final = run.gather()  # a Batch on rank 0, None elsewhere

    Raises:
        InputError: ``dynamics`` is none, ``config`` beside a `DistributedModel`, which has its own, the
            strategy ``"graph"``, or a ``ghost_width`` below cutoff + skin.
    """

    def __init__(
        self,
        dynamics: BaseDynamics,
        model: Any,
        config: DomainConfig | None = None,
        hooks: Sequence[Hook] = (),
    ) -> None:
        self.dynamics = dynamics
        if not isinstance(dynamics, BaseDynamics):
            raise InputError(f"dynamics must be a BaseDynamics, for example NVE(1.0); got {dynamics!r}")
        if not hasattr(model, "shares"):
            model = DistributedModel(model, config)
        elif config is not None and config != model.config:
            raise InputError(
                "the DistributedModel has a DomainConfig already: leave out config=, or give the bare model"
            )
        self.model: DistributedModel = model
        self.config: DomainConfig = model.config
        self.comm: Communicator = model.comm
        if self.config.strategy is not StrategyKind.HALO:
            raise InputError(
                f"DomainParallel keeps atoms on the ranks of domains in space, and strategy {self.config.strategy.value!r} "
                "has every position on every rank: leave strategy out, or take NVDDCalculator and ASE's dynamics"
            )
        self.hooks = list(hooks)
        config, graphs = self.config, model.graphs
        width = graphs.width if config.ghost_width is None else config.ghost_width
        if width < graphs.width:
            raise InputError(
                f"DomainConfig: ghost_width {width!r} A is less than the model's cutoff and the skin together, "
                f"{graphs.width:g} A; leave it out"
            )
        sharded = isinstance(model.spec.distribution.policy, ShardedStoragePolicy)
        self.graph = OwnedGraph(self.comm, graphs.cutoff, config.skin, width, graphs.bonds, sharded, graphs.reach)
        self.graph.chooses = graphs.chooses
        hysteresis = config.skin / 2 if config.migration_hysteresis is None else config.migration_hysteresis
        grid = None if config.grid_dims is None else tuple(config.grid_dims)
        self.migration = Migration(self.comm, grid, config.balance, hysteresis, config.rebalance_every)
        self.evaluate = _RankEvaluator(dynamics, self._compute, self.comm)
        self.batch: ShardedBatch | None = None
        self.want_stress_at: int | None = None
        self.restarted = self._started = False
        self._opened: list[Hook] = []
        self._origin = (0, 0.0)  # step and fs from which this run counts its time
        self._stopped = False
        self._failure: Exception | None = None
        self._waited = self._since = 0.0
        self._closed = False

    # -- atoms

    def partition(
        self,
        batch: Batch | DynamicsState | None,
        *,
        velocities: Tensor | None = None,
        masses: Tensor | None = None,
        fixed: Tensor | None = None,
        fix_com: bool = False,
    ) -> ShardedBatch:
        """Divides atoms among the ranks; every rank calls it at once.

        Args:
            batch: all atoms, on rank 0; what other ranks give is not read.
            velocities: (n, 3) A per ASE time unit; None for ``batch.momenta`` over masses, or at rest.
            masses: (n,) amu; None for ``batch.masses``, or those of the elements.
            fixed: (n,) bool, atoms that don't move.
            fix_com: hold the centre of mass.

        Raises:
            InputError: on every rank, if rank 0's input can't be computed.
        """
        state = failure = None
        if self.comm.rank == 0:
            try:
                state = self._checked_state(batch, velocities, masses, fixed, fix_com)
            except Exception as error:
                failure = error
        raise_together(self.comm, failure)
        return self._adopt(ShardedBatch.scatter(state, self.comm))

    def _checked_state(self, batch, velocities, masses, fixed, fix_com) -> DynamicsState:
        if isinstance(batch, DynamicsState):
            state = batch
        elif isinstance(batch, Batch):
            state = state_of(batch, velocities, masses, fixed, fix_com, self.model.wrapper.model_config)
        else:
            raise InputError(f"partition takes a Batch on rank 0 (Batch.from_atoms(atoms)), got {type(batch).__name__}")
        if not len(state.ids):
            raise InputError("partition was given no atoms")
        if self.dynamics.needs_stress and bool((state.volume == 0).any()):
            raise InputError(
                f"{type(self.dynamics).__name__} needs a cell with three independent vectors; this one has no volume"
            )
        return state

    def take(self, batch: ShardedBatch) -> ShardedBatch:
        """Goes on with the atoms of another run on the same ranks, from step 0; instead of `partition`.

        Positions, velocities, cell and constraints are taken, not the state of the other integrator. The other run's
        atoms are left as they are. Every rank calls it at once.

        Raises:
            InputError: the other run has another number of ranks.
        """
        if batch.comm.size != self.comm.size or batch.comm.rank != self.comm.rank:
            raise InputError(
                f"take: these atoms are divided among {batch.comm.size} ranks, and this run has {self.comm.size}; gather them "
                "there, and partition them here"
            )
        return self._adopt(ShardedBatch(batch.state.fresh(), self.comm))

    def restart(self, path: str | Path, integrator: bool = True) -> ShardedBatch:
        """Goes on from a checkpoint, of a run on any number of ranks; instead of `partition`. Every rank calls it at once.

        Args:
            path: of the checkpoint.
            integrator: whether its thermostat, barostat, noise and step number go on, too; with parameters that may
                have changed, but for those that ``dynamics.must_agree`` names. False takes atoms, velocities and cell
                alone, for another integrator.

        Raises:
            InputError: it can't be read, or another integrator wrote it, or one with other parameters.
        """
        failure: Exception | None = None
        batch: Any = None
        parameters: Any = None
        try:
            batch, parameters = load_checkpoint(path, self.comm)
            if integrator:
                self._check_parameters(path, parameters)
        except Exception as error:
            failure = error
        raise_together(self.comm, failure)
        if not integrator:
            batch = ShardedBatch(batch.state.fresh(), self.comm)
        self._adopt(batch, restarted=integrator)
        if integrator:
            self.dynamics.resume(batch.state, parameters)
        return batch

    def _check_parameters(self, path: str | Path, before: dict[str, Any]) -> None:
        """Raises InputError where the state of the dynamics that wrote a checkpoint means nothing to this one."""
        wrote, mine = before.get("dynamics"), type(self.dynamics).__name__
        if wrote != mine:
            raise InputError(
                f"{path} was written by {wrote}, whose state {mine} can't take over; go on with {wrote}, or take its atoms "
                "alone: restart(path, integrator=False)"
            )
        now = self.dynamics.parameters()
        for name in self.dynamics.must_agree:
            if before.get(name) != now.get(name):
                raise InputError(
                    f"{path} was written by {wrote} with {name} = {before.get(name)}, and this one has {now.get(name)}; go on "
                    "with the same, or take its atoms alone: restart(path, integrator=False)"
                )

    def _adopt(self, batch: ShardedBatch, restarted: bool = False) -> ShardedBatch:
        """Atoms in blocks become those of domains."""
        self.batch, self.restarted = batch, restarted
        self._started, self._opened = False, []
        self._origin = (batch.state.step, batch.state.time)
        self.migration.divide(batch.state)
        self.graph.build(batch.state, self.migration.domains)
        self._set_clock()
        return batch

    @property
    def state(self) -> DynamicsState:
        """Atoms of this rank.

        Raises:
            NvddError: there are no atoms yet.
        """
        if self.batch is None:
            raise NvddError("there are no atoms yet: call partition(batch) first")
        return self.batch.state

    def gather(self) -> Batch | None:
        """All atoms, on rank 0; None elsewhere. Every rank calls it at once. See `ShardedBatch.gather`."""
        self.state  # noqa: B018
        return self.batch.gather()

    # -- steps

    def run(self, steps: int) -> bool:
        """Makes steps until all are done or the dynamics has converged; whether it has. Every rank calls it at once.

        Raises:
            InputError: a negative number of steps.
        """
        if steps < 0:
            raise InputError(f"the number of steps must be zero or more, got {steps}")
        self.start()
        self._agree_to_stop()  # what was set between two runs counts, too
        for _ in range(steps):
            if self.over:
                break
            self.step()
        self._settle()
        return self.dynamics.is_converged(self.state)

    @property
    def over(self) -> bool:
        """Whether the dynamics has converged, or a hook ends the run; the same on every rank."""
        return self._stopped or self.dynamics.is_converged(self.state)

    def start(self) -> None:
        """Computes the first forces, and calls the hooks for the state before the first step; once."""
        state = self.state
        if self._started:
            return
        # after an error this can be called again: what is open stays open
        for hook in [hook for hook in self.hooks if hook not in self._opened]:
            self._guarded(hook.open, self)
            self._settle()
            self._opened.append(hook)
        if self.restarted:  # forces and the integrator's state came with the atoms; the last run has logged them
            self._started = True
            return
        due = self._due(state.step)
        self.evaluate.want_stress = any(hook.needs_stress for hook in due)
        self.evaluate(state)
        self.dynamics.initialise(state, self.evaluate)
        self._started = True
        self._call(due)

    def step(self) -> None:
        """One step, and the hooks that are due after it. Every rank calls it at once."""
        self.start()
        state = self.state
        if self.graph.due:
            self._migrate()
        due = self._due(state.step + 1)
        self.evaluate.want_stress = any(hook.needs_stress for hook in due) or state.step + 1 == self.want_stress_at
        self.dynamics.step(state, self.evaluate)
        state.step += 1
        first, begun = self._origin
        state.time = begun + (state.step - first) * self.dynamics.timestep  # a running sum would gather rounding errors
        self._call(due)

    def compute_stress(self) -> None:
        """Brings ``state.stress`` of the present positions about, if the last step did not. Every rank calls it at once."""
        self.start()
        if self.state.stress is None:
            self.evaluate.want_stress = True
            self.evaluate(self.state)

    def _migrate(self) -> None:
        """Between steps, so that an integrator sees the same atoms throughout a step."""
        state = self.state
        load = None
        if self.config.balance_by == "time":
            now, waited = time.perf_counter(), self.comm.waited
            load = (now - self._since) - (waited - self._waited)
        self.migration.migrate(state, load)
        self.graph.build(state, self.migration.domains)
        self._set_clock()

    def _set_clock(self) -> None:
        self._since, self._waited = time.perf_counter(), self.comm.waited

    def _compute(self, state: DynamicsState, stress: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """Forces of this rank's atoms, its share of energy and virial."""
        found: Any = self.graph.update(state, self._failure is not None)
        if found is None:
            if self.graph.failed:
                self._settle()
            # atoms stay where they are in the middle of a step; the domains don't matter here
            self.graph.build(state, self.migration.domains)
            found, self.graph.due = self.graph.update(state), True
        batch, graph = found
        out = self.model.shares(batch, graph, {"forces", "virial"} if stress else {"forces"})
        return out["forces"], out["energy"], out.get("virial")

    # -- hooks

    def _due(self, step: int) -> list[Hook]:
        return [hook for hook in self.hooks if step % hook.every == 0]

    def _call(self, due: Iterable[Hook]) -> None:
        due = list(due)
        if not due:
            return
        seen = Observation.of(self) if any(hook.observes for hook in due) else None
        for hook in due:
            if hook.scope.runs_on(self.comm.rank):
                self._guarded(hook, self, seen)
        self._agree_to_stop()

    def _agree_to_stop(self) -> None:
        """One number: a hook that stops on one rank stops all, whatever the others found."""
        mine = torch.tensor(any(hook.stops for hook in self.hooks), dtype=torch.int64, device=self.comm.message_device)
        self._stopped = bool(self.comm.all_reduce(mine, "max", "stop"))

    def _guarded(self, function: Any, *arguments: Any) -> None:
        """What fails on one rank is kept until all ranks next talk, and then raised on all."""
        try:
            function(*arguments)
        except Exception as error:
            if getattr(error, "on_all_ranks", False) or self.comm.size == 1:
                raise
            self._failure = self._failure or error

    def _settle(self) -> None:
        failure, self._failure = self._failure, None
        raise_together(self.comm, failure)

    def close(self) -> None:
        """Ends the hooks: files are complete and closed. A second time it does nothing."""
        if not self._closed:
            self._closed = True
            for hook in self.hooks:
                hook.close()

    def __enter__(self) -> DomainParallel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _RankEvaluator(Evaluator):
    """Adds the shares of all ranks up, in one message."""

    def __init__(self, dynamics: BaseDynamics, compute: Any, comm: Communicator) -> None:
        super().__init__(dynamics, compute)
        self.comm = comm

    def collect(self, share: Tensor) -> Tensor:
        return self.comm.all_gather(share, "scalars")
