"""Pairs of edges at one atom: angles, or the triples of three-body terms."""

from __future__ import annotations

import torch
from torch import Tensor


def pairs_at_atoms(centre: Tensor, n_atoms: int) -> tuple[Tensor, Tensor]:
    """(A,) and (A,): the ordered pairs of different edges with the same centre, in the order of the first.

    Args:
        centre: (S,) row of the atom at which each edge ends.
        n_atoms: number of rows of atoms.
    """
    order = centre.argsort(stable=True)
    count = torch.bincount(centre, minlength=n_atoms)
    begin = count.cumsum(0) - count
    partners = count[centre]
    one = torch.arange(len(centre), device=centre.device).repeat_interleave(partners)
    place = torch.arange(len(one), device=one.device) - (partners.cumsum(0) - partners)[one]
    other = order[begin[centre[one]] + place]
    different = one != other
    return one[different], other[different]
