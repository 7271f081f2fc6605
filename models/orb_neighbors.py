"""The nearest neighbours of each atom, as Orb takes them."""

from __future__ import annotations

import torch
from torch import Tensor

from nvdd.models.base import Batch
from nvdd.shard_tensor import ShardTensor, like, to_local

_SAME = 1e-9  # A; distances and components nearer than this are equal where neighbours are chosen


def nearest(data: Batch, most: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The edge index (2, E') and vectors (E', 3) of the ``most`` nearest neighbours of each atom.

    Where the last of them is one of several at the same distance, the choice is by direction: the same on every rank
    and in any order of atoms.
    """
    edge_index, vectors = data.edge_index, data.edge_vectors.to(dtype)
    centres = to_local(data.receivers)
    counts = torch.bincount(centres, minlength=1)
    if not len(centres) or int(counts.max()) <= most:
        return edge_index, vectors
    v = to_local(vectors).detach().double()
    order = torch.arange(len(centres), device=centres.device)
    for key in (*(v / _SAME).round().unbind(1), (v.norm(dim=1) / _SAME).round(), centres):
        order = order[key[order].argsort(stable=True)]
    first = counts.cumsum(0) - counts
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device) - first[centres[order]]
    near = place < most
    near = like(near, vectors) if isinstance(vectors, ShardTensor) else near
    return edge_index[:, near], vectors[near]
