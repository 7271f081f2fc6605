"""A slab, periodic along two cell vectors, as layers far apart in a cell that is periodic along three."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nvdd.context import context_of
from nvdd.shard_tensor import to_local

_FURTHEST = 4  # of in-plane reciprocal vectors; a cell more skewed than this has a less skewed equal
_MARGIN = 1.2


def extended_cell(
    cell: Tensor, positions: Tensor, system: Tensor, cutoff: float, accuracy: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The cell in which layers don't feel each other, once the slab term has taken off their dipoles' field.

    What is left of it decays as ``exp(-g d)`` with the distance d between layers, g the shortest wave vector in the plane
    (Smith, Proc. R. Soc. A 375 (1981) 475; Yeh and Berkowitz 1999), so d is chosen for the accuracy, and above the cutoff.

    Args:
        cell: (n_systems, 3, 3); the third vector is not used.
        positions: (n_atoms, 3).
        system: (n_atoms,).

    Returns:
        (n_systems, 3, 3) with the third vector along the normal; (n_systems, 3) normals; (n_systems,) middles of the slabs
        along them, A.
    """
    a, b = cell[:, 0], cell[:, 1]
    normal = torch.linalg.cross(a, b)
    normal = normal / torch.linalg.vector_norm(normal, dim=1, keepdim=True)
    low, high = _extent(positions, normal, system)
    plain = to_local(cell).detach()
    gap = (_MARGIN * -math.log(accuracy) / _shortest_wave(plain[:, 0], plain[:, 1])).clamp_min(cutoff)
    length = high - low + gap
    return torch.stack([a, b, normal * length[:, None]], 1), normal, 0.5 * (low + high)


def _extent(positions: Tensor, normal: Tensor, system: Tensor) -> tuple[Tensor, Tensor]:
    """(n_systems,) lowest and highest place of an atom of any rank along the normal."""
    context = context_of((positions,))
    rows, systems, along = to_local(positions).detach(), to_local(system), to_local(normal).detach()
    if context is not None:
        rows, systems = rows[: context.n_counted], systems[: context.n_counted]
    z = (rows * along[systems]).sum(1)
    ends = z.new_full((2, len(along)), -math.inf)
    ends[0].scatter_reduce_(0, systems, z, "amax")
    ends[1].scatter_reduce_(0, systems, -z, "amax")
    if context is not None:
        ends = context.comm.all_reduce(ends, "max", "extent of the slab")
    return -ends[1], ends[0]


def _shortest_wave(a: Tensor, b: Tensor) -> Tensor:
    """(n_systems,) length of the shortest reciprocal vector in the plane of a and b (n_systems, 3), 1/A."""
    area = torch.linalg.vector_norm(torch.linalg.cross(a, b), dim=1)
    steps = torch.arange(-_FURTHEST, _FURTHEST + 1, dtype=a.dtype, device=a.device)
    vectors = steps[:, None, None, None] * a + steps[None, :, None, None] * b  # reciprocal ones, turned by 90 degrees
    lengths = torch.linalg.vector_norm(vectors, dim=-1).reshape(len(steps) ** 2, len(a))
    return 2 * math.pi / area * lengths.masked_fill(lengths == 0, math.inf).amin(0)
