"""Fetch and fold, sum over ranks and broadcast: pairs of operations that are each other's adjoint.

Because each one's backward is the other one, gradients of any order come out right.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import Function

from nvdd.communicator import Communicator
from nvdd.plan import ExchangePlan


class _Fetch(Function):
    @staticmethod
    def forward(ctx, owned: Tensor, plan: ExchangePlan, site: str) -> Tensor:
        ctx.plan, ctx.site = plan, site
        halo = plan.comm.exchange(owned.index_select(0, plan.send_index), plan.send_counts, plan.recv_counts, site)
        return torch.cat([owned, halo])

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _Fold.apply(grad, ctx.plan, "fold of " + ctx.site), None, None


class _Fold(Function):
    @staticmethod
    def forward(ctx, padded: Tensor, plan: ExchangePlan, site: str) -> Tensor:
        ctx.plan, ctx.site = plan, site
        owned = padded[: plan.n_owned]
        back = plan.comm.exchange(padded[plan.n_owned :], plan.recv_counts, plan.send_counts, site)
        if not plan.boundary.numel():
            return owned.clone()
        # several ranks may read one row: their shares are summed in float64
        wide = torch.float64 if back.dtype in (torch.float32, torch.float16, torch.bfloat16) else back.dtype
        total = owned.index_select(0, plan.boundary).to(wide)
        total.index_add_(0, plan.boundary_slot, back.to(wide))
        return owned.index_copy(0, plan.boundary, total.to(owned.dtype))

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _Fetch.apply(grad, ctx.plan, "fetch of " + ctx.site), None, None


class _Redistribute(Function):
    @staticmethod
    def forward(ctx, rows: Tensor, send_counts, recv_counts, comm: Communicator, site: str) -> Tensor:
        ctx.arguments = recv_counts, send_counts, comm, "adjoint of " + site
        return comm.exchange(rows, send_counts, recv_counts, site)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _Redistribute.apply(grad.contiguous(), *ctx.arguments), None, None, None, None


class _AllReduce(Function):
    @staticmethod
    def forward(ctx, partial: Tensor, comm: Communicator, site: str) -> Tensor:
        ctx.comm, ctx.site = comm, site
        return comm.all_reduce(partial, "sum", site)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _Broadcast.apply(grad, ctx.comm, ctx.site), None, None


class _Broadcast(Function):
    @staticmethod
    def forward(ctx, replicated: Tensor, comm: Communicator, site: str) -> Tensor:
        ctx.comm, ctx.site = comm, site
        return replicated.view_as(replicated)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _AllReduce.apply(grad, ctx.comm, ctx.site + " (adjoint)"), None, None


class _Shared(Function):
    @staticmethod
    def forward(ctx, value: Tensor, comm: Communicator, site: str) -> Tensor:
        ctx.comm, ctx.site = comm, site
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad: Tensor):
        # as if rank 0 had sent the value to all: the sum over ranks of gradients counts it once
        grad = _Broadcast.apply(grad, ctx.comm, ctx.site)
        return grad * (1.0 if ctx.comm.rank == 0 else 0.0), None, None


class _CountedOnce(Function):
    @staticmethod
    def forward(ctx, value: Tensor, comm: Communicator) -> Tensor:
        return value.clone() if comm.rank == 0 else torch.zeros_like(value)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None  # of the sum, which all ranks have alike, as they have the value


def fetch(owned: Tensor, plan: ExchangePlan, site: str = "fetch") -> Tensor:
    """(n_owned, ...) -> (n_padded, ...): owned rows followed by the halo rows from their owners."""
    _check_rows(owned, plan.n_owned, "owned", plan)
    return _Fetch.apply(owned, plan, site)


def fold(padded: Tensor, plan: ExchangePlan, site: str = "fold") -> Tensor:
    """(n_padded, ...) -> (n_owned, ...): halo rows added to the rows of their owners, in float64."""
    _check_rows(padded, plan.n_padded, "owned and halo", plan)
    return _Fold.apply(padded, plan, site)


def fold_packed(fields: Sequence[Tensor], plan: ExchangePlan, site: str = "fold") -> list[Tensor]:
    """`fold` of several fields of one dtype in one message each way."""
    if len(fields) == 1:
        return [fold(fields[0], plan, site)]
    shapes = [f.shape[1:] for f in fields]
    flat = [f.reshape(f.shape[0], -1) for f in fields]
    parts = fold(torch.cat(flat, 1), plan, site).split([f.shape[1] for f in flat], 1)
    return [part.reshape(part.shape[0], *shape) for part, shape in zip(parts, shapes, strict=True)]


def correct(padded: Tensor, plan: ExchangePlan, site: str = "halo correction") -> Tensor:
    """(n_padded, ...) -> (n_padded, ...): halo rows summed into their owners, then refreshed from them."""
    return fetch(fold(padded, plan, site + ", reverse"), plan, site + ", forward")


def fold_extremum(padded: Tensor, plan: ExchangePlan, op: str, site: str) -> Tensor:
    """(n_padded, ...) -> (n_owned, ...): the largest (``"amax"``) or smallest of a row and its halo copies.

    Not differentiable: the handlers give the gradient to the rows that attain it.
    """
    _check_rows(padded, plan.n_padded, "owned and halo", plan)
    padded = padded.detach()
    back = plan.comm.exchange(padded[plan.n_owned :], plan.recv_counts, plan.send_counts, site)
    at = plan.send_index.view(-1, *[1] * (back.dim() - 1)).expand_as(back)
    return padded[: plan.n_owned].scatter_reduce(0, at, back, op)


def redistribute(
    rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], comm: Communicator, site: str
) -> Tensor:
    """Rows to the ranks that get them, in the order of these ranks; its adjoint sends them back.

    Args:
        rows: (sum(send_counts), ...).
        send_counts, recv_counts: rows to and from each rank; none to oneself.

    Returns:
        (sum(recv_counts), ...) rows in the order of the ranks that sent them.
    """
    return _Redistribute.apply(rows, send_counts, recv_counts, comm, site)


def gather_shares(share: Tensor, comm: Communicator, site: str) -> Tensor:
    """(...) of each rank -> (n_ranks, ...) of all, differentiable to any order."""
    slots = share.new_zeros(comm.size, *share.shape)
    return sum_over_ranks(slots.index_copy(0, torch.tensor([comm.rank], device=share.device), share[None]), comm, site)


def sum_over_ranks(partial: Tensor, comm: Communicator, site: str = "sum over ranks") -> Tensor:
    """Each rank's share -> the total, the same on every rank; its adjoint is `broadcast`."""
    return _AllReduce.apply(partial, comm, site)


def broadcast(replicated: Tensor, comm: Communicator, site: str = "broadcast") -> Tensor:
    """A value that all ranks have alike, for use with what each has of its own; its adjoint is `sum_over_ranks`."""
    return _Broadcast.apply(replicated, comm, site)


def shared(value: Tensor, comm: Communicator, site: str = "parameter") -> Tensor:
    """A parameter, for use with what all ranks have alike.

    The gradient of a parameter is a share on each rank, to be summed over ranks. What is the same everywhere gives
    the same gradient everywhere, which the sum must count once.
    """
    return _Shared.apply(value, comm, site)


def counted_once(value: Tensor, comm: Communicator) -> Tensor:
    """A share of each rank, to be summed over ranks, of a value that all have alike."""
    return _CountedOnce.apply(value, comm)


def _check_rows(tensor: Tensor, rows: int, what: str, plan: ExchangePlan) -> None:
    if tensor.shape[:1] != (rows,):
        raise ValueError(
            f"rank {plan.comm.rank}: a tensor of shape {tuple(tensor.shape)} was given where {rows} {what} rows of "
            f"{plan.kind} are expected"
        )
