"""Charges onto a mesh and values off it, by B-splines: each is the other's transpose.

Both take derivatives by the scaled coordinates, of any order, so that each one's derivative is written in the two and can
be differentiated any number of times. Several systems have meshes of their own, one after the other in one flat array.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nvdd import splines

_BLOCK = 1 << 22  # numbers in a block of atoms by mesh points on a CPU
_BLOCK_ON_GPU = 1 << 26
_VALUE = [0, 0, 0]


def n_points(sizes: list[int]) -> int:
    """Points of all meshes; ``sizes`` are those along the three axes of each system, one after the other."""
    return sum(math.prod(sizes[i : i + 3]) for i in range(0, len(sizes), 3))


@torch.library.custom_op("nvdd::spread_on_mesh", mutates_args=())
def spread_on_mesh(
    scaled: Tensor, charges: Tensor, more: Tensor, system: Tensor, sizes: list[int], order: int, derivatives: list[int]
) -> Tensor:
    """All sums over atoms in one flat array, so that over ranks they are one message.

    Args:
        scaled: (n, 3) coordinates in cell vectors.
        charges: (n, m), one column for each of the derivatives.
        more: (n, l) further per-atom values to be summed into systems.
        system: (n,) system of each atom.
        sizes: mesh points along each axis of each system.
        order: of the splines.
        derivatives: how often each column's spline is differentiated along each axis, (3 m,); ``[0, 0, 0]`` is a charge.

    Returns:
        (n_points + n_systems l,): values at the points, then the further sums as (n_systems, l).
    """
    mesh = scaled.new_zeros(n_points(sizes))
    for atoms, first, shape in _blocks(scaled, system, sizes, order):
        points, splined = _around(scaled[atoms], shape, order, derivatives)
        values = sum(s * charges[atoms, m, None, None, None] for m, s in enumerate(splined))
        mesh.index_add_(0, points.add_(first).reshape(-1), values.reshape(-1))
    sums = more.new_zeros(len(sizes) // 3, more.shape[1]).index_add(0, system, more)
    return torch.cat([mesh, sums.reshape(-1)])


@torch.library.custom_op("nvdd::read_off_mesh", mutates_args=())
def read_off_mesh(
    scaled: Tensor, mesh: Tensor, system: Tensor, sizes: list[int], order: int, derivatives: list[int]
) -> Tensor:
    """(n, m) values and derivatives by the scaled coordinates at the atoms, from (n_points,) values on the meshes."""
    out = scaled.new_zeros(len(scaled), len(derivatives) // 3)
    for atoms, first, shape in _blocks(scaled, system, sizes, order):
        points, splined = _around(scaled[atoms], shape, order, derivatives)
        values = mesh[points.add_(first)]
        out[atoms] = torch.stack([(values * s).sum((1, 2, 3)) for s in splined], 1)
    return out


def potential(scaled: Tensor, mesh: Tensor, system: Tensor, sizes: list[int], order: int) -> Tensor:
    """(n,) values at the atoms."""
    return read_off_mesh(scaled, mesh, system, sizes, order, _VALUE)[:, 0]


def spread(scaled: Tensor, charges: Tensor, more: Tensor, system: Tensor, sizes: list[int], order: int) -> Tensor:
    """Charges (n,) on the meshes, then the sums of ``more``; see `spread_on_mesh`."""
    return spread_on_mesh(scaled, charges.unsqueeze(1), more, system, sizes, order, _VALUE)


# -- derivatives


def _further(derivatives: Sequence[int]) -> list[int]:
    """Each of the derivatives once more along each axis."""
    return [d + (a == axis) for i in range(0, len(derivatives), 3) for axis in range(3) for a, d in enumerate(derivatives[i : i + 3])]


def _gradient(ctx, scaled: Tensor, mesh: Tensor, system: Tensor, by: Tensor) -> Tensor:
    """(n, 3) of sum_m by_m read_off_mesh_m by the scaled coordinates."""
    along = read_off_mesh(scaled, mesh, system, ctx.sizes, ctx.order, _further(ctx.derivatives))
    return (along.view(len(scaled), len(ctx.derivatives) // 3, 3) * by.unsqueeze(2)).sum(1)


def _save_spread(ctx, inputs, output) -> None:
    scaled, charges, more, system, ctx.sizes, ctx.order, ctx.derivatives = inputs
    ctx.save_for_backward(scaled, charges, system)
    ctx.width = more.shape[1]


def _spread_backward(ctx, grad: Tensor):
    scaled, charges, system = ctx.saved_tensors
    cut = n_points(ctx.sizes)
    mesh, sums = grad[:cut].contiguous(), grad[cut:].view(len(ctx.sizes) // 3, ctx.width)
    by_scaled = by_charges = by_more = None
    if ctx.needs_input_grad[0]:
        by_scaled = _gradient(ctx, scaled, mesh, system, charges)
    if ctx.needs_input_grad[1]:
        by_charges = read_off_mesh(scaled, mesh, system, ctx.sizes, ctx.order, ctx.derivatives)
    if ctx.needs_input_grad[2]:
        by_more = sums.index_select(0, system)
    return by_scaled, by_charges, by_more, None, None, None, None


def _save_read(ctx, inputs, output) -> None:
    scaled, mesh, system, ctx.sizes, ctx.order, ctx.derivatives = inputs
    ctx.save_for_backward(scaled, mesh, system)


def _read_backward(ctx, grad: Tensor):
    scaled, mesh, system = ctx.saved_tensors
    by_scaled = by_mesh = None
    if ctx.needs_input_grad[0]:
        by_scaled = _gradient(ctx, scaled, mesh, system, grad)
    if ctx.needs_input_grad[1]:
        none = grad.new_zeros(len(grad), 0)
        by_mesh = spread_on_mesh(scaled, grad.contiguous(), none, system, ctx.sizes, ctx.order, ctx.derivatives)
    return by_scaled, by_mesh, None, None, None, None


spread_on_mesh.register_autograd(_spread_backward, setup_context=_save_spread)
read_off_mesh.register_autograd(_read_backward, setup_context=_save_read)


@spread_on_mesh.register_fake
def _(scaled, charges, more, system, sizes, order, derivatives):
    return scaled.new_empty(n_points(sizes) + len(sizes) // 3 * more.shape[1])


@read_off_mesh.register_fake
def _(scaled, mesh, system, sizes, order, derivatives):
    return scaled.new_empty(len(scaled), len(derivatives) // 3)


# -- places


def _blocks(
    scaled: Tensor, system: Tensor, sizes: list[int], order: int
) -> Iterator[tuple[slice | Tensor, int, list[int]]]:
    """Blocks of atoms of one system, where its mesh begins, its points along each axis."""
    step = max(1, (_BLOCK_ON_GPU if scaled.is_cuda else _BLOCK) // order**3)
    first = 0
    for index in range(len(sizes) // 3):
        shape = sizes[3 * index : 3 * index + 3]
        if len(sizes) == 3:
            parts = [slice(i, min(i + step, len(scaled))) for i in range(0, len(scaled), step)]
        else:
            parts = [p for p in (system == index).nonzero().squeeze(1).split(step) if len(p)]
        yield from ((part, first, shape) for part in parts)
        first += math.prod(shape)


def _around(scaled: Tensor, shape: list[int], order: int, derivatives: list[int]) -> tuple[Tensor, list[Tensor]]:
    """(n, order, order, order) mesh points around each atom, and for each of the derivatives the weights there."""
    n = torch.tensor(shape, dtype=scaled.dtype).to(scaled.device, non_blocking=True)
    place = (scaled - scaled.floor()) * n
    below = place.floor()
    fraction, below = place - below, below.long()
    steps = torch.arange(order, device=scaled.device)
    i, j, k = ((below[:, axis, None] - steps) % shape[axis] for axis in range(3))
    points = ((i * shape[1])[:, :, None, None] + j[:, None, :, None]) * shape[2] + k[:, None, None, :]
    tables: dict[tuple[int, int], Tensor] = {}

    def along(axis: int, times: int) -> Tensor:
        if (axis, times) not in tables:
            tables[axis, times] = splines.weights(fraction[:, axis], order, times) * float(shape[axis]) ** times
        return tables[axis, times]

    splined = []
    for m in range(0, len(derivatives), 3):
        x, y, z = (along(axis, derivatives[m + axis]) for axis in range(3))
        splined.append((x[:, :, None] * y[:, None, :])[:, :, :, None] * z[:, None, None, :])
    return points, splined
