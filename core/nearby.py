"""Edges that are made a part at a time, for models with so many that a list of them all would be most of the memory.

`Points` are the atoms and images near a rank's atoms, which stay while nothing has moved far; `Nearby` are they at one
step, where edges are counted once and made for some receivers whenever they are read.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from nvdd.cell_list import CellList, Edges, Placed
from nvdd.neighbors import points_around

EDGES_AT_ONCE = 4_000_000  # where the user gives no number; some 150 bytes of each are in use at a time


def block_size(edges_at_once: int | None) -> int:
    """Edges in a block, of what `DomainConfig.edges_at_once` says."""
    return EDGES_AT_ONCE if edges_at_once in (None, sys.maxsize) else edges_at_once


@dataclass(frozen=True, eq=False)
class Points:
    """Atoms, and images of atoms, that may be senders of this rank's edges.

    Attributes:
        row: (P,) local rows of the atoms; the first ``n_receivers`` points are the owned atoms, in their order.
        image: (P, 3) float64 whole cells from where the atom's position is to the point.
        n_receivers: owned atoms, without a phantom.
    """

    row: Tensor
    image: Tensor
    n_receivers: int


class Nearby:
    """The points of one step.

    Args:
        points: of this rank.
        positions: (n_padded, 3) A.
        cell: (n_systems, 3, 3) A.
        system: (n_padded,) of each row.
    """

    def __init__(self, points: Points, positions: Tensor, cell: Tensor, system: Tensor) -> None:
        row = points.row
        x = positions.detach().to(torch.float64).index_select(0, row)
        cell = cell.detach().to(positions.device, torch.float64)
        self.placed = Placed(x, points.image, row, system.index_select(0, row), cell)
        self.n_receivers = points.n_receivers
        self._found: dict[tuple[float, int], EdgeBlocks] = {}

    @property
    def n_edges(self) -> int:
        """Edges of the largest cutoff with which `blocks` was called."""
        return max((blocks.n_edges for blocks in self._found.values()), default=0)

    def blocks(self, cutoff: float, at_once: int) -> EdgeBlocks:
        """The edges with r < ``cutoff`` (A), at most ``at_once`` of them in a block of several receivers."""
        key = (cutoff, at_once)
        if key not in self._found:
            self._found[key] = EdgeBlocks(self.placed, self.n_receivers, *key)
        return self._found[key]


@dataclass(eq=False)
class EdgeBlocks:
    """Edges into the first points, in blocks of all edges of some receivers.

    Args:
        placed: the points.
        n_receivers: how many of them are receivers.
        cutoff: A.
        at_once: edges in a block, unless one receiver has more.

    Attributes:
        n_edges: of all blocks.
        bounds: of each block the first receiver, and the one after the last; there is at least one block, if of no edges.
    """

    placed: Placed
    n_receivers: int
    cutoff: float
    at_once: int
    n_edges: int = field(init=False)
    bounds: list[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self._list = CellList(self.placed, self.cutoff)
        self._counts = self._list.count(self.n_receivers)
        ends = self._counts.sum(1).cumsum(0).cpu().numpy()
        self.n_edges = int(ends[-1]) if len(ends) else 0
        self.bounds = cut(ends, self.at_once)
        self._only: Edges | None = None

    def edges(self, block: int) -> Edges:
        """The edges of a block; kept if there is no other."""
        if len(self.bounds) > 1:
            return self._search(block)
        self._only = self._only or self._search(block)
        return self._only

    def shifts(self, block: int) -> Tensor:
        """(E, 3) whole cells of each edge, from one user's position to the other's."""
        return self._search(block, shifts=True).shifts

    def starts(self, block: int) -> Tensor:
        """(n + 1,) where the edges of each receiver of a block begin."""
        begin, end = self.bounds[block]
        ends = self._counts[begin:end].sum(1).cumsum(0)
        return torch.cat([ends.new_zeros(1), ends])

    def _search(self, block: int, shifts: bool = False) -> Edges:
        begin, end = self.bounds[block]
        return self._list.edges(begin, self._counts[begin:end], shifts)


def cut(ends: np.ndarray, at_once: int) -> list[tuple[int, int]]:
    """Runs of receivers with at most ``at_once`` edges, or one receiver with more; ``ends`` (n,) are sums of their numbers."""
    n, begin, done, bounds = len(ends), 0, 0, []
    while begin < n:
        end = max(begin + 1, int(np.searchsorted(ends, done + at_once, "right")))
        bounds.append((begin, end))
        begin, done = end, int(ends[end - 1])
    return bounds or [(0, 0)]


def points_read(
    positions: np.ndarray,
    cells: np.ndarray,
    pbc: np.ndarray,
    system: np.ndarray,
    mine: np.ndarray,
    reach: float,
    device: torch.device,
) -> tuple[np.ndarray, np.ndarray]:
    """(P,) atoms and (P, 3) images: a rank's own ones, then every other that is within ``reach`` of one of these.

    Args:
        positions: (N, 3) A.
        cells: (n_systems, 3, 3) A.
        pbc: (n_systems, 3) bool.
        system: (N,) of each atom.
        mine: (n,) the rank's atoms, ascending.
        reach: A.
        device: where to look.
    """
    parts = []
    for k in range(len(cells)):
        atoms = np.flatnonzero(system == k)
        own = np.flatnonzero(np.isin(atoms, mine, assume_unique=True))
        found, image = points_around(positions[atoms], cells[k], pbc[k], reach, own)
        parts.append((atoms[found[: len(own)]], atoms[found[len(own) :]], image[: len(own)], image[len(own) :]))
    own, others, own_image, image = (np.concatenate(part) for part in zip(*parts, strict=True))
    order = np.argsort(own)
    atom, image = np.concatenate([own[order], others]), np.concatenate([own_image[order], image])
    kept = within_reach(positions[atom], image, system[atom], cells, len(mine), reach, device)
    return atom[kept], image[kept]


def within_reach(
    x: np.ndarray,
    image: np.ndarray,
    system: np.ndarray,
    cells: np.ndarray,
    n_receivers: int,
    reach: float,
    device: torch.device,
) -> np.ndarray:
    """(P,) bool: the receivers, which are the first points, and the points within ``reach`` (A) of one.

    Args:
        x: (P, 3) A, where the user has the atoms.
        image: (P, 3) whole cells from there.
        system: (P,).
        cells: (n_systems, 3, 3) A.
    """
    put = lambda array: torch.from_numpy(np.ascontiguousarray(array)).to(device)
    placed = Placed(*map(put, (x, image, np.arange(len(x)), system, cells)))
    kept = np.ones(len(x), bool)
    if n_receivers:
        near = CellList(placed.part(0, n_receivers), reach).near(placed.part(n_receivers))
        kept[n_receivers:] = near.cpu().numpy()
    return kept
