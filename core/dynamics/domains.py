"""`Domains`: who owns which part of space, found and moved by all ranks together without any of them having all atoms."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from nvdd.cells import Frame
from nvdd.communicator import Communicator
from nvdd.partition import best_grid

_BINS, _ROUNDS = 64, 4  # of the search for a plane: to 64^-4 = 6e-8 of the extent


@dataclass(frozen=True, eq=False)
class Domains:
    """Boxes that fill space, one a rank, divided by nested planes.

    Coordinates are those of `nvdd.cells.Frame`: along periodic axes in cell vectors, wrapped into [0, 1); along open
    axes in A. So domains follow the cell where it is periodic.

    Attributes:
        axis, plane: (n_ranks - 1,) of each division.
        children: (n_ranks - 1, 2) what lies below and above it: another division, or ``~rank``.
        low, high: (n_ranks, 3) the boxes; infinite on open sides.
    """

    axis: np.ndarray
    plane: np.ndarray
    children: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @classmethod
    def of_cuts(cls, cuts: list[tuple[int, float, int, int]], pbc: np.ndarray, n_ranks: int) -> Domains:
        """From (axis, plane, child below, child above) of each division, the root first."""
        low = np.tile(np.where(pbc, 0.0, -np.inf), (n_ranks, 1))
        high = np.tile(np.where(pbc, 1.0, np.inf), (n_ranks, 1))

        def descend(node: int, lower: np.ndarray, upper: np.ndarray) -> None:
            if node < 0:
                low[~node], high[~node] = lower, upper
                return
            axis, plane, below, above = cuts[node]
            for child, bound in ((below, upper), (above, lower)):
                kept = bound[axis]
                bound[axis] = plane
                descend(child, lower.copy(), upper.copy())
                bound[axis] = kept

        descend(0 if cuts else ~0, low[0].copy(), high[0].copy())
        axis, plane, below, above = zip(*cuts, strict=True) if cuts else ((), (), (), ())
        children = np.array([below, above], np.int64).T.reshape(-1, 2)
        return cls(np.array(axis, np.int64), np.array(plane, float), children, low, high)

    def owner(self, points: np.ndarray) -> np.ndarray:
        """(n,) the rank in whose box each point (n, 3) is."""
        node = np.full(len(points), 0 if len(self.axis) else ~0, np.int64)
        while (inner := np.flatnonzero(node >= 0)).size:
            at = node[inner]
            above = points[inner, self.axis[at]] >= self.plane[at]
            node[inner] = self.children[at, above.astype(np.int64)]
        return ~node

    def beside(self, points: np.ndarray, rank: int, pbc: np.ndarray) -> np.ndarray:
        """(n, 3) the points' periodic images that are nearest to the middle of a rank's box."""
        # boxes are finite along periodic axes
        middle = 0.5 * (np.where(pbc, self.low[rank], 0.0) + np.where(pbc, self.high[rank], 0.0))
        return points - np.where(pbc, np.rint(points - middle), 0.0)

    def outside(self, points: np.ndarray, rank: int, pbc: np.ndarray, heights: np.ndarray) -> np.ndarray:
        """(n,) A by which each point is outside of a rank's box, along the axis where it is most."""
        near = self.beside(points, rank, pbc)
        over = np.maximum(self.low[rank] - near, near - self.high[rank]) * heights
        whole = pbc & (self.high[rank] - self.low[rank] >= 1.0)  # of an axis that is not divided
        return np.where(whole, 0.0, np.maximum(over, 0.0)).max(1, initial=0.0)


def grid_domains(comm: Communicator, points: np.ndarray, frame: Frame, grid: tuple[int, ...] | None) -> Domains:
    """Equal boxes; ranks are numbered with the last axis fastest. Every rank calls it at once with its points (n, 3)."""
    low, high = _extent(comm, points)
    low, high = np.where(frame.pbc, 0.0, low), np.where(frame.pbc, 1.0, high)
    lengths = np.maximum(high - low, 1e-9) * frame.heights
    grid = grid or best_grid(comm.size, lengths)
    cuts: list[tuple[int, float, int, int]] = []

    def divide(first: tuple[int, ...], count: tuple[int, ...]) -> int:
        axis = next((a for a in range(3) if count[a] > 1), None)
        if axis is None:
            return ~((first[0] * grid[1] + first[1]) * grid[2] + first[2])
        half = count[axis] // 2
        at = first[axis] + half
        node = len(cuts)
        cuts.append((axis, low[axis] + (high[axis] - low[axis]) * at / grid[axis], 0, 0))
        put = lambda values, value: (*values[:axis], value, *values[axis + 1 :])
        below = divide(first, put(count, half))
        above = divide(put(first, at), put(count, count[axis] - half))
        cuts[node] = (*cuts[node][:2], below, above)
        return node

    divide((0, 0, 0), tuple(grid))
    return Domains.of_cuts(cuts, frame.pbc, comm.size)


def balanced_domains(comm: Communicator, points: np.ndarray, weights: np.ndarray, frame: Frame) -> Domains:
    """Recursive bisection (Berger and Bokhari, IEEE Trans. Comput. 36, 570, 1987) with equal weight on both sides.

    Every rank calls it at once with its points (n, 3) and their weights (n,). All divisions of one depth are found
    together: a few messages of some hundred numbers each.
    """
    cuts: list[tuple[int, float, int, int]] = []
    level = [(np.arange(len(points)), 0, comm.size, -1, 0)]  # points here, first rank, ranks, parent, its side
    while level:
        for _, first, count, parent, side in level:
            node = ~first if count == 1 else len(cuts)
            if count > 1:
                cuts.append((0, 0.0, 0, 0))
            if parent >= 0:
                children = list(cuts[parent][2:])
                children[side] = node
                cuts[parent] = (*cuts[parent][:2], *children)
        open_ones = [entry for entry in level if entry[2] > 1]
        if not open_ones:
            break
        axes, planes = _planes(comm, points, weights, frame, open_ones)
        base, level = len(cuts) - len(open_ones), []
        for k, (rows, first, count, _, _) in enumerate(open_ones):
            cuts[base + k] = (int(axes[k]), float(planes[k]), *cuts[base + k][2:])
            above = points[rows, axes[k]] >= planes[k]
            half = count // 2
            level.append((rows[~above], first, half, base + k, 0))
            level.append((rows[above], first + half, count - half, base + k, 1))
    return Domains.of_cuts(cuts, frame.pbc, comm.size)


def _planes(comm: Communicator, points, weights, frame: Frame, nodes: list) -> tuple[np.ndarray, np.ndarray]:
    """Axis and plane of each node: across its longest extent, with the share of its ranks on each side."""
    boxes = np.array([_bounds(points[rows]) for rows, *_ in nodes])
    low, high = -_reduced(comm, -boxes[:, 0], "max"), _reduced(comm, boxes[:, 1], "max")
    empty = ~np.isfinite(low).all(1)
    low[empty], high[empty] = 0.0, 1.0
    axes = np.argmax((high - low) * frame.heights, axis=1)
    each = np.arange(len(nodes))
    start, width = low[each, axes], np.maximum(high[each, axes] - low[each, axes], 1e-12) * (1 + 1e-12)
    share = np.array([(count // 2) / count for _, _, count, *_ in nodes])
    before = np.zeros(len(nodes))
    target = None
    for _ in range(_ROUNDS):
        table = np.zeros((len(nodes), _BINS))
        for k, (rows, *_) in enumerate(nodes):
            bins = np.floor((points[rows, axes[k]] - start[k]) / width[k] * _BINS).astype(np.int64)
            inside = (bins >= 0) & (bins < _BINS)
            table[k] = np.bincount(bins[inside], weights[rows][inside], minlength=_BINS)
        table = _reduced(comm, table, "sum")
        if target is None:
            target = share * table.sum(1)
        reached = before[:, None] + np.cumsum(table, 1)
        at = np.minimum((reached < target[:, None] - 1e-9).sum(1), _BINS - 1)
        upper = reached[each, at]
        before = upper - table[each, at]
        start, width = start + at * width / _BINS, width / _BINS
    # what is left in the last bin goes to the side that it fits better
    return axes, np.where(target - before < upper - target, start, start + width)


def imbalance(comm: Communicator, load: float) -> float:
    """Largest load of a rank over the mean; 1 if there is none. Every rank calls it at once."""
    loads = comm.all_gather(torch.tensor([load], dtype=torch.float64, device=comm.message_device), "loads").cpu()
    return float(loads.max() / loads.mean()) if float(loads.sum()) > 0 else 1.0


def _bounds(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if not len(points):
        return np.full(3, np.inf), np.full(3, -np.inf)
    return points.min(0), points.max(0)


def _extent(comm: Communicator, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lowest and highest coordinates of the points of all ranks; 0 and 1 if there are none."""
    low, high = _bounds(points)
    both = _reduced(comm, np.concatenate([-low, high]), "max")
    return (-both[:3], both[3:]) if np.isfinite(both).all() else (np.zeros(3), np.ones(3))


def _reduced(comm: Communicator, values: np.ndarray, op: str) -> np.ndarray:
    message = torch.from_numpy(np.ascontiguousarray(values)).to(comm.message_device)
    return comm.all_reduce(message, op, "domains").cpu().numpy()
