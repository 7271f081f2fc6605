"""Messages as operators of ``torch.library``, which a compiled forward can hold: ``nvdd::exchange``, ``nvdd::all_reduce``.

They take the ranks by number, since an operator takes no objects. Each takes the result of the one before it in the
forward as ``after``: that keeps their order, which all ranks must have in common, whatever a compiler moves.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nvdd.communicator import Communicator
from nvdd.errors import DistributedOpError

_ranks: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()
_numbers = itertools.count()


@torch.library.custom_op("nvdd::exchange", mutates_args=())
def exchange(
    send: Tensor, after: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], ranks: int, site: str
) -> Tensor:
    """`Communicator.exchange` of the ranks of that number."""
    return _ranks[ranks].exchange(send, send_counts, recv_counts, site)


@exchange.register_fake
def _(send, after, send_counts, recv_counts, ranks, site):
    return send.new_empty((sum(recv_counts), *send.shape[1:]))


@torch.library.custom_op("nvdd::all_reduce", mutates_args=())
def all_reduce(value: Tensor, after: Tensor, op: str, ranks: int, site: str) -> Tensor:
    """`Communicator.all_reduce` of the ranks of that number."""
    return _ranks[ranks].all_reduce(value, op, site)


@all_reduce.register_fake
def _(value, after, op, ranks, site):
    return torch.empty_like(value, memory_format=torch.contiguous_format)


def _keep_exchange(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, _, ctx.sent, ctx.received, ctx.ranks, ctx.site = inputs


def _exchange_back(ctx: Any, grad: Tensor) -> tuple:
    back = exchange(grad.contiguous(), grad, ctx.received, ctx.sent, ctx.ranks, "adjoint of " + ctx.site)
    return back, None, None, None, None, None


def _keep_all_reduce(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, _, ctx.op, ctx.ranks, ctx.site = inputs


def _all_reduce_back(ctx: Any, grad: Tensor) -> tuple:
    if ctx.op != "sum":
        raise DistributedOpError(f"nvdd::all_reduce of {ctx.op!r} ({ctx.site}) has no derivative")
    return all_reduce(grad.contiguous(), grad, "sum", ctx.ranks, "adjoint of " + ctx.site), None, None, None, None


exchange.register_autograd(_exchange_back, setup_context=_keep_exchange)
all_reduce.register_autograd(_all_reduce_back, setup_context=_keep_all_reduce)


class TracedRanks:
    """Stands for a `Communicator` while a forward is traced: its messages become operators of the trace.

    Attributes:
        rank, size, device, backend, message_device: those of the ranks.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm  # kept alive as long as what was traced may run
        self._number = next((n for n, known in _ranks.items() if known is comm), None)
        if self._number is None:
            self._number = next(_numbers)
            _ranks[self._number] = comm
        self.rank, self.size, self.device = comm.rank, comm.size, comm.device
        self.backend, self.message_device = comm.backend, comm.message_device
        self._last: Tensor | None = None

    def begin(self) -> None:
        """Starts a forward."""
        self._last = None

    def exchange(
        self, send: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], site: str, setup: bool = False
    ) -> Tensor:
        """As `Communicator.exchange`."""
        if self.size == 1:
            return send.new_empty((0, *send.shape[1:]))
        send = send.contiguous()
        self._last = exchange(send, self._after(send), list(send_counts), list(recv_counts), self._number, site)
        return self._last

    def all_reduce(self, value: Tensor, op: str = "sum", site: str = "") -> Tensor:
        """As `Communicator.all_reduce`."""
        if self.size == 1:
            return value.clone()
        value = value.detach().contiguous()
        self._last = all_reduce(value, self._after(value), op, self._number, site)
        return self._last

    def _after(self, first: Tensor) -> Tensor:
        """What the next message waits for; nothing is derived by it."""
        return (first if self._last is None else self._last).detach()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise DistributedOpError(
            f"a compiled forward knows exchanges and sums over ranks, and this model needs Communicator.{name}; "
            "leave compile out for it"
        )
