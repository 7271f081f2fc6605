"""Custom operations as models bring them, whose kernels dispatch cannot see into; in plain torch, with autograd."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("nvddtest::messages", mutates_args=())
def messages(x: Tensor, e: Tensor, w: Tensor, senders: Tensor, receivers: Tensor) -> Tensor:
    """Gather, multiply, scatter in one go: (rows of x, 4), sums over the edges into each row of ``tanh(x_j) w * e``."""
    return torch.zeros(x.shape[0], w.shape[1], dtype=x.dtype).index_add(
        0, receivers, (x[senders].tanh() @ w) * e[:, :1]
    )


def _messages_backward(ctx, grad):
    # in differentiable operations, so that it can be differentiated again
    x, e, w, senders, receivers = ctx.saved_tensors
    t = x[senders].tanh()
    by_edge = grad[receivers]
    dt = (by_edge * e[:, :1]) @ w.T * (1 - t**2)
    de = ((t @ w) * by_edge).sum(1, keepdim=True)
    de = torch.cat([de, torch.zeros_like(e[:, 1:])], 1)
    return torch.zeros_like(x).index_add(0, senders, dt), de, t.T @ (by_edge * e[:, :1]), None, None


def _save_all(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


messages.register_autograd(_messages_backward, setup_context=_save_all)
messages.register_fake(lambda x, e, w, senders, receivers: x.new_empty(x.shape[0], w.shape[1]))


@torch.library.custom_op("nvddtest::cube_and_mean", mutates_args=())
def cube_and_mean(e: Tensor) -> tuple[Tensor, Tensor]:
    """Row by row: the cube, and the mean over features."""
    return e**3, e.mean(1)


cube_and_mean.register_autograd(
    lambda ctx, cube, mean: 3 * ctx.saved_tensors[0] ** 2 * cube + mean[:, None] / 3, setup_context=_save_all
)


@torch.library.custom_op("nvddtest::structure_sum", mutates_args=())
def structure_sum(x: Tensor, k: Tensor) -> Tensor:
    """(k,) sums over atoms of cos(x . k), as in an Ewald sum; ``k`` (K, 3)."""
    return torch.cos(x @ k.T).sum(0)


def _structure_backward(ctx, grad):
    x, k = ctx.saved_tensors
    weight = -torch.sin(x @ k.T) * grad
    return weight @ k, weight.T @ x


structure_sum.register_autograd(_structure_backward, setup_context=_save_all)


@torch.library.custom_op("nvddtest::pair_table", mutates_args=())
def pair_table(table: Tensor, e: Tensor, senders: Tensor, receivers: Tensor) -> Tensor:
    """Like AIMNet2's convolution: ``table`` has a row for each atom and a last one of zeros, and so has the result."""
    return torch.zeros_like(table).index_add(0, receivers, table[senders] * e[:, :1] * table[receivers])


def _pair_backward(ctx, grad):
    table, e, senders, receivers = ctx.saved_tensors
    by_edge = grad[receivers]
    d = torch.zeros_like(table).index_add(0, senders, by_edge * e[:, :1] * table[receivers])
    d = d.index_add(0, receivers, by_edge * e[:, :1] * table[senders])
    de = (by_edge * table[senders] * table[receivers]).sum(1, keepdim=True)
    return d, torch.cat([de, torch.zeros_like(e[:, 1:])], 1), None, None


pair_table.register_autograd(_pair_backward, setup_context=_save_all)


@torch.library.custom_op("nvddtest::scale", mutates_args=())
def scale(x: Tensor, s: Tensor) -> Tensor:
    """Row by row, with one factor for all."""
    return x * s


scale.register_autograd(
    lambda ctx, g: (g * ctx.saved_tensors[1], (g * ctx.saved_tensors[0]).sum()), setup_context=_save_all
)


@torch.library.custom_op("nvddtest::add_in_place", mutates_args=("x",))
def add_in_place(x: Tensor, y: Tensor) -> None:
    """An operation that changes an argument."""
    x.add_(y)


@torch.jit.script
def scripted_gather(x: Tensor, index: Tensor) -> Tensor:
    """A free scripted function that reads rows by an index."""
    return torch.index_select(x, 0, index)


@torch.jit.script
def scripted_square(x: Tensor) -> Tensor:
    """A free scripted function that works row by row."""
    return x * x
