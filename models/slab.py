"""A slab, periodic along two cell vectors, as layers far apart in a cell that is periodic along three."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nvdd.context import context_of
from nvdd.shard_tensor import to_local

_MARGIN = 1.2
_MOST_REDUCTIONS = 100  # of a cell, which takes some few


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
    """(n_systems,) length of the shortest reciprocal vector in the plane of a and b (n_systems, 3), 1/A.

    Reciprocal vectors are lattice vectors turned by 90 degrees, times 2 pi over the area. Of these the shortest is found
    by Lagrange's and Gauss's reduction, however skewed the cell.
    """
    area = torch.linalg.vector_norm(torch.linalg.cross(a, b), dim=1)
    shorter, longer = a.cpu(), b.cpu()
    for _ in range(_MOST_REDUCTIONS):
        swap = (shorter.square().sum(1) > longer.square().sum(1))[:, None]
        shorter, longer = torch.where(swap, longer, shorter), torch.where(swap, shorter, longer)
        steps = ((shorter * longer).sum(1) / shorter.square().sum(1)).round()
        if not steps.any():
            break
        longer = longer - steps[:, None] * shorter
    return 2 * math.pi / area * torch.linalg.vector_norm(shorter, dim=1).to(area.device)
