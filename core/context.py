"""`current_dd_context`: the distributed forward that is running, as seen from inside it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from nvdd.communicator import Communicator
from nvdd.errors import DistributedOpError
from nvdd.plan import ExchangePlan
from nvdd.policy import StoragePolicy
from nvdd.roles import ShardMeta
from nvdd.shard_tensor import ShardTensor


@dataclass(frozen=True, eq=False)
class DDContext:
    """One forward (and the backward that belongs to it) of one model on this rank.

    Attributes:
        meta: the partition.
        model: name of the wrapper's class, for messages.
    """

    meta: ShardMeta
    model: str = ""

    @property
    def comm(self) -> Communicator:
        """The ranks."""
        return self.meta.comm

    @property
    def plan(self) -> ExchangePlan:
        """The halo exchange of atom rows."""
        return self.meta.plan

    @property
    def rank(self) -> int:
        """This rank."""
        return self.meta.comm.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.meta.comm.size

    @property
    def policy(self) -> StoragePolicy:
        """The storage policy of the model's spec."""
        return self.meta.policy

    @property
    def n_systems(self) -> int:
        """Systems in the batch, on all ranks together."""
        return self.meta.n_systems

    @property
    def n_owned(self) -> int:
        """Rows of owned atoms, the phantom of a rank without atoms included."""
        return self.meta.n_owned

    @property
    def n_halo(self) -> int:
        """Remote rows that this rank reads."""
        return self.meta.n_halo

    @property
    def n_padded(self) -> int:
        """Owned and halo rows."""
        return self.meta.n_padded

    @property
    def n_counted(self) -> int:
        """Owned rows that count in sums: the first ones, without a phantom."""
        return self.meta.n_counted

    @property
    def n_rows(self) -> int:
        """Rows of the model's per-atom tensors: ``n_owned`` or ``n_padded``, as the policy lays them out."""
        return self.meta.n_rows


# The forwards that this thread is in, innermost last.
_entered: ContextVar[tuple[DDContext, ...]] = ContextVar("nvdd_entered", default=())
# Those of all threads: autograd runs backward of CUDA tensors on threads of its own, which have entered none.
_running: list[DDContext] = []
_lock = threading.Lock()


@contextmanager
def enter(context: DDContext) -> Iterator[DDContext]:
    """Makes ``context`` the current one in this block, on this thread and in what autograd runs for it."""
    token = _entered.set((*_entered.get(), context))
    with _lock:
        _running.append(context)
    try:
        yield context
    finally:
        with _lock:
            _running.remove(context)
        _entered.reset(token)


def current_dd_context() -> DDContext | None:
    """The context of the forward that calls this, or None in a single process.

    Raises:
        DistributedOpError: called from autograd's own thread while two models of this process run at once, so that it
            is unknown whose backward this is.
    """
    entered = _entered.get()
    if entered:
        return entered[-1]
    if torch._C._current_graph_task_id() == -1:  # not inside a backward
        return None
    with _lock:
        running = list(_running)
    if len(running) > 1:
        raise DistributedOpError(
            f"current_dd_context() on autograd's thread, while {len(running)} models of this process run at once "
            f"({', '.join(c.model or 'a model' for c in running)}): whose backward this is is unknown. Keep the context "
            "that the forward had, or pass a ShardTensor, which knows its own"
        )
    return running[0] if running else None


def context_of(values: Iterable[Any]) -> DDContext | None:
    """The context that the first ShardTensor among ``values`` belongs to, else the current one."""
    for value in values:
        if isinstance(value, ShardTensor):
            with _lock:
                return next((c for c in _running if c.meta is value._meta), None) or DDContext(value._meta)
    return current_dd_context()
