"""`IndexPartitioner`: which rank owns each atom where every rank knows all positions (graph partition)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nvdd.cells import Frame
from nvdd.errors import InputError
from nvdd.partition import unit_coordinates

GRAPH_PLANS = ("curve", "blocks")
_BITS = 16  # of a coordinate along the curve
_GROWN = 1.10  # the order is made anew when this times the first number of rows is read


class IndexPartitioner:
    """Divides a list of atoms into runs of equal length.

    Args:
        n_ranks: number of ranks.
        plan: ``"blocks"``: runs of the input's order, of which each rank reads every row of the others, as an
            all-gather gives it; ``"curve"``: runs along a Hilbert curve through the atoms, system after system, of
            which a rank reads the rows that its edges need.

    Owners are fixed while a run goes on: atoms don't change ranks because they move. With ``"curve"`` they are drawn
    anew for other systems, and when `observe` has been told of 1.1 times the rows that were read at first. No result
    depends on that.

    Raises:
        InputError: less than one rank, or another plan.
    """

    def __init__(self, n_ranks: int, plan: str = "curve") -> None:
        if n_ranks < 1:
            raise InputError(f"the number of ranks must be at least 1, got {n_ranks}")
        if plan not in GRAPH_PLANS:
            raise InputError(f"graph_plan must be one of {', '.join(map(repr, GRAPH_PLANS))}, got {plan!r}")
        self.n_ranks, self.plan = n_ranks, plan
        self.n_orders = 0
        self._owner = np.zeros(0, np.int64)
        self._for: tuple[np.ndarray, ...] | None = None
        self._rows_at_first: int | None = None

    @property
    def reads_all(self) -> bool:
        """Whether a rank reads all rows of the others, and not those alone that its edges need."""
        return self.plan == "blocks"

    def divide(
        self, positions: np.ndarray, cells: np.ndarray, pbc: np.ndarray, members: Sequence[np.ndarray]
    ) -> np.ndarray:
        """(N,) owner rank of each atom: ``positions``, ``cells``, ``pbc``, ``members`` as in `SpatialPartitioner.divide`."""
        n = len(positions)
        sizes = np.full(self.n_ranks, n // self.n_ranks)
        sizes[: n % self.n_ranks] += 1
        runs = np.repeat(np.arange(self.n_ranks), sizes)
        if self.reads_all or self.n_ranks == 1 or n == 0:
            return runs
        system = np.empty(n, np.int64)
        for k, atoms in enumerate(members):
            system[atoms] = k
        now = (system, pbc.copy())
        if self._for is None or not all(map(np.array_equal, self._for, now)):
            order = [a[hilbert_order(*unit_coordinates(positions[a], Frame.of(cells[k], pbc[k])))] for k, a in enumerate(members) if len(a)]
            self._owner = np.empty(n, np.int64)
            self._owner[np.concatenate(order)] = runs
            self._for, self._rows_at_first = now, None
            self.n_orders += 1
        return self._owner.copy()

    def observe(self, n_rows: int) -> None:
        """To be told, on all ranks alike, how many rows all ranks together read of others under the last owners: ``n_rows``."""
        if self._rows_at_first is None:
            self._rows_at_first = n_rows
        elif n_rows > _GROWN * self._rows_at_first:
            self._for = None


def hilbert_order(unit: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """(N,) indices of points in the order in which a Hilbert curve comes by them.

    A long body is cut across into pieces about as long as they are wide. The curve through a piece ends beside the
    beginning of the next one. It crosses the shortest axis first, so that a few runs are cut across the longer ones.

    Args:
        unit: (N, 3) coordinates in [0, 1].
        lengths: (3,) A that they span.
    """
    axes = np.argsort(-lengths, kind="stable")
    n_pieces = max(1, round(lengths[axes[0]] / max(lengths[axes[1]], 1e-9 * lengths[axes[0]])))
    n_pieces = min(n_pieces, max(1, len(unit)))
    along = np.clip(unit[:, axes], 0.0, 1.0)
    piece = np.minimum((along[:, 0] * n_pieces).astype(np.int64), n_pieces - 1)
    along[:, 0] = along[:, 0] * n_pieces - piece
    return np.lexsort((_hilbert_index(along), piece))


def _hilbert_index(unit: np.ndarray) -> np.ndarray:
    """(N,) places along a Hilbert curve through the unit cube, from one end of the first axis to the other."""
    most = 2**_BITS - 1
    x = np.minimum(unit * 2**_BITS, most).astype(np.int64).T.copy()
    # from coordinates to the transposed index: Skilling, AIP Conf. Proc. 707, 381 (2004)
    bit = 1 << (_BITS - 1)
    while bit > 1:
        low = bit - 1
        for axis in range(3):
            there = (x[axis] & bit).astype(bool)
            swapped = np.where(there, 0, (x[0] ^ x[axis]) & low)
            x[0] = np.where(there, x[0] ^ low, x[0] ^ swapped)
            x[axis] ^= swapped
        bit >>= 1
    x[1] ^= x[0]
    x[2] ^= x[1]
    flip = np.zeros_like(x[0])
    bit = 1 << (_BITS - 1)
    while bit > 1:
        flip ^= np.where(x[2] & bit, bit - 1, 0)
        bit >>= 1
    x ^= flip
    key = np.zeros_like(x[0])
    for level in range(_BITS - 1, -1, -1):
        for axis in range(3):
            key = (key << 1) | ((x[axis] >> level) & 1)
    return key
