"""`SpatialPartitioner`: which rank owns each atom."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence

import numpy as np

from nvdd.cells import Frame
from nvdd.errors import InputError

BALANCES = ("auto", "grid", "rcb")
_TOLERATED = 1.10  # "auto" keeps the grid while no rank has more than this times the mean


class SpatialPartitioner:
    """Divides a system among ranks by position.

    Args:
        n_ranks: number of ranks.
        grid: ranks along each cell vector, for example (2, 1, 2); None to choose the grid with the least
            surface between domains, in A^2.
        balance: ``"grid"``: equal boxes in scaled coordinates; ``"rcb"``: recursive bisection along the longest
            edge, with equal numbers of atoms on both sides; ``"auto"``: the grid, unless a rank gets more than
            1.1 times the mean.

    The owner of an atom depends on positions and cell only, so ranks that have the same input agree without
    talking.

    Raises:
        InputError: less than one rank, another ``balance``, a grid whose product is not ``n_ranks``, or a
            grid with ``"rcb"``.
    """

    def __init__(self, n_ranks: int, grid: Sequence[int] | None = None, balance: str = "auto") -> None:
        if n_ranks < 1:
            raise InputError(f"the number of ranks must be at least 1, got {n_ranks}")
        if balance not in BALANCES:
            raise InputError(f"balance must be one of {', '.join(BALANCES)}, got {balance!r}")
        if grid is not None:
            given, grid = grid, _whole_numbers(grid)
            if len(grid) != 3 or min(grid) < 1 or math.prod(grid) != n_ranks:
                raise InputError(
                    f"grid {given!r} must be three positive whole numbers with product {n_ranks}, the number of ranks"
                )
            if balance == "rcb":
                raise InputError("give either grid= or balance='rcb', not both")
        self.n_ranks, self.grid, self.balance = n_ranks, grid, balance

    def assign(self, positions: np.ndarray, cell: np.ndarray, pbc: np.ndarray) -> np.ndarray:
        """(N,) owner rank of each atom at ``positions`` (N, 3), A, for ``cell`` (3, 3), A, and ``pbc`` (3,)."""
        n = len(positions)
        if self.n_ranks == 1 or n == 0:
            return np.zeros(n, np.int64)
        frame = Frame.of(cell, pbc)
        unit, lengths = unit_coordinates(positions, frame)
        if self.balance == "rcb":
            return _bisect(unit, lengths, self.n_ranks)
        grid = self.grid or best_grid(self.n_ranks, lengths)
        owner = number_of(boxes_of(unit, grid), grid)
        largest = np.bincount(owner, minlength=self.n_ranks).max()
        if self.balance == "auto" and self.grid is None and not is_balanced(largest, n, self.n_ranks):
            return _bisect(unit, lengths, self.n_ranks)
        return owner

    def divide(
        self, positions: np.ndarray, cells: np.ndarray, pbc: np.ndarray, members: Sequence[np.ndarray]
    ) -> np.ndarray:
        """(N,) owner rank of each atom of several systems, each divided by itself.

        Args:
            positions: (N, 3) A.
            cells: (n_systems, 3, 3) A.
            pbc: (n_systems, 3) bool.
            members: of each system the indices of its atoms.
        """
        owner = np.zeros(len(positions), np.int64)
        for k, atoms in enumerate(members):
            owner[atoms] = self.assign(positions[atoms], cells[k], pbc[k])
        return owner


def unit_coordinates(positions: np.ndarray, frame: Frame) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates in [0, 1] on every axis, and the extent of each axis in A."""
    scaled, _ = frame.wrap(positions)
    lengths = frame.heights.copy()
    for axis in np.flatnonzero(~frame.pbc):
        low, high = scaled[:, axis].min(), scaled[:, axis].max()
        extent = max(high - low, 1e-9)
        scaled[:, axis] = (scaled[:, axis] - low) / extent
        lengths[axis] = extent * frame.heights[axis]
    return scaled, lengths


def _whole_numbers(values: Sequence[int]) -> tuple[int, ...]:
    """The values as ints, or () if they are not whole numbers."""
    try:
        return tuple(operator.index(value) for value in values)
    except TypeError:
        return ()


def best_grid(n_ranks: int, lengths: np.ndarray) -> tuple[int, int, int]:
    """The grid of ``n_ranks`` boxes whose inner faces have the least area, for a body of ``lengths`` (3,) A."""
    area = lambda axis: np.prod(np.delete(lengths, axis))

    def surface(grid: tuple[int, int, int]) -> float:
        return sum((g - 1 if g == 1 else g) * area(axis) for axis, g in enumerate(grid))

    grids = [g for g in itertools.product(*3 * (_divisors(n_ranks),)) if g[0] * g[1] * g[2] == n_ranks]
    # of equal surfaces the one with the thicker slices
    thinnest = lambda g: min((length / n for length, n in zip(lengths, g, strict=True) if n > 1), default=0.0)
    return min(grids, key=lambda g: (round(surface(g), 9), -round(thinnest(g), 9), g[::-1]))


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def is_balanced(largest: int, n_atoms: int, n_ranks: int) -> bool:
    """Whether ``balance="auto"`` keeps a grid in which one rank has ``largest`` atoms."""
    return bool(largest <= max(_TOLERATED * n_atoms / n_ranks, -(-n_atoms // n_ranks)))


def boxes_of(unit: np.ndarray, grid: tuple[int, int, int]) -> np.ndarray:
    """(N, 3) along each axis the box of a grid in which coordinates in [0, 1] are."""
    return np.maximum(np.minimum((unit * np.array(grid)).astype(np.int64), np.array(grid) - 1), 0)


def number_of(box: np.ndarray, grid: tuple[int, int, int]) -> np.ndarray:
    """(N,) the rank of boxes (N, 3) of a grid."""
    return (box[:, 0] * grid[1] + box[:, 1]) * grid[2] + box[:, 2]


def _bisect(unit: np.ndarray, lengths: np.ndarray, n_ranks: int) -> np.ndarray:
    """Recursive coordinate bisection (Berger and Bokhari, IEEE Trans. Comput. 36, 570, 1987)."""
    owner = np.zeros(len(unit), np.int64)
    stack = [(np.arange(len(unit)), 0, n_ranks)]
    while stack:
        atoms, first, count = stack.pop()
        if count == 1:
            owner[atoms] = first
            continue
        left = count // 2
        points = unit[atoms]
        extent = (np.ptp(points, axis=0) if len(atoms) else np.zeros(3)) * lengths
        axis = int(np.argmax(extent))
        # a stable sort, so that atoms at equal coordinates are divided alike on every rank
        order = atoms[np.argsort(points[:, axis], kind="stable")]
        cut = round(len(atoms) * left / count)
        stack += [(order[:cut], first, left), (order[cut:], first + left, count - left)]
    return owner
