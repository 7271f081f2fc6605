"""What each rank would own and read of a tiled structure: counted on the geometry of one cell, by periodicity.

Along one cell vector the atoms of a domain are, for each atom of the cell, a run of consecutive cells. Hence the
domain's atoms are a product of three runs for each atom of the cell, the rows that it reads are the union of such
boxes of cells, moved by the shifts of the cell's edges, and domains with the same runs have the same counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from nvdd.errors import InputError
from nvdd.index_partition import IndexPartitioner
from nvdd.neighbors import Edges, edges_within
from nvdd.partition import SpatialPartitioner, best_grid, boxes_of, is_balanced
from nvdd.planning.tiles import TiledStructure

MOST_BUILT = 4_000_000  # atoms whose owners are written down one by one, where no grid says who they are


@dataclass(frozen=True, eq=False)
class Loads:
    """Work of each rank.

    Attributes:
        owned: (P,) atoms that it owns.
        halo: (P,) remote rows that it reads.
        edges: (P,) edges into its atoms that it computes.
        grid: ranks along each cell vector; None for bisection and for a list of atoms.
        how: ``"grid"``, ``"rcb"``, ``"curve"`` or ``"blocks"``.
    """

    owned: np.ndarray
    halo: np.ndarray
    edges: np.ndarray
    grid: tuple[int, int, int] | None
    how: str

    @property
    def imbalance(self) -> float:
        """The largest number of owned atoms over the mean."""
        return float(self.owned.max() / self.owned.mean())


class LoadCounter:
    """Counts for any number of ranks, as `nvdd.runtime.graph.GraphBuilder` would divide the atoms.

    Args:
        tiled: the structure.
        cutoff: of the model, A.
        skin: A; rows within cutoff + skin are read.
        far_edges: whether the edges within the skin are computed, too; else those with r < cutoff.
    """

    def __init__(self, tiled: TiledStructure, cutoff: float, skin: float, far_edges: bool = False) -> None:
        self.tiled, self.cutoff, self.skin = tiled, cutoff, skin
        self.edges = _sorted(edges_within(tiled.positions, tiled.cell, tiled.pbc, cutoff + skin))
        vectors = tiled.positions[self.edges.sender] - tiled.positions[self.edges.receiver]
        vectors = vectors + self.edges.shift @ tiled.cell
        near = np.einsum("ij,ij->i", vectors, vectors) < (cutoff + skin * far_edges) ** 2
        self.degree = np.bincount(self.edges.receiver[near], minlength=len(tiled.positions))
        self._shift = np.rint(self.edges.shift).astype(np.int64)

    @property
    def n_edges(self) -> int:
        """Edges of all cells that are computed."""
        return int(self.degree.sum()) * self.tiled.n_cells

    def domains(self, n_ranks: int, grid: Sequence[int] | None = None, balance: str = "auto") -> Loads:
        """Of domains in space, with the arguments of `SpatialPartitioner`.

        Raises:
            InputError: as there; a bisection of more than 4 million atoms.
        """
        partitioner = SpatialPartitioner(n_ranks, grid, balance)
        if balance != "rcb":
            dims = partitioner.grid or best_grid(n_ranks, self.tiled.lengths)
            runs = [self._runs(axis, g) for axis, g in enumerate(dims)]
            owned = self._product([length for _, length in runs])
            kept = balance == "grid" or grid is not None or is_balanced(owned.max(), self.tiled.n_atoms, n_ranks)
            if kept or n_ranks == 1:
                edges = self._product([length for _, length in runs], self.degree)
                return Loads(owned, self._halo_of_grid(runs, dims), edges, dims, "grid")
        self._refuse_many(f"balance={balance!r} divides these atoms on {n_ranks} ranks by bisection", "balance='grid'")
        owner = SpatialPartitioner(n_ranks, balance="rcb").assign(
            self.tiled.build(), self.tiled.whole_cell, self.tiled.pbc
        )
        return self.of_owners(owner, n_ranks, "rcb")

    def parts_of_list(self, n_ranks: int, plan: str = "curve") -> Loads:
        """Of the strategy ``"graph"``, with the arguments of `IndexPartitioner`.

        Raises:
            InputError: as there; a curve through more than 4 million atoms.
        """
        partitioner = IndexPartitioner(n_ranks, plan)
        self._refuse_many("the strategy 'graph' gives each atom its rank by its place in a list", "strategy='halo'")
        pbc, cells = self.tiled.pbc[None], self.tiled.whole_cell[None]
        owner = partitioner.divide(self.tiled.build(), cells, pbc, [np.arange(self.tiled.n_atoms)])
        loads = self.of_owners(owner, n_ranks, plan)
        if not partitioner.reads_all:
            return loads
        halo = np.where(loads.owned > 0, self.tiled.n_atoms - loads.owned, 0)
        return Loads(loads.owned, halo, loads.edges, None, plan)

    def of_owners(self, owner: np.ndarray, n_ranks: int, how: str) -> Loads:
        """Of any owners (n_atoms,), in the order of `TiledStructure.build`."""
        n = len(self.tiled.positions)
        by_cell = np.ascontiguousarray(owner.reshape(*self.tiled.repeat, n).transpose(3, 0, 1, 2))
        number = np.arange(self.tiled.n_cells).reshape(self.tiled.repeat)
        halo = np.zeros(n_ranks, np.int64)
        starts = np.searchsorted(self.edges.sender, np.arange(n + 1))
        for sender in range(n):
            here, readers = by_cell[sender], []
            for e in range(starts[sender], starts[sender + 1]):
                there = np.roll(by_cell[self.edges.receiver[e]], tuple(self._shift[e]), (0, 1, 2))
                across = there != here
                readers.append(there[across] * self.tiled.n_cells + number[across])
            if readers:
                halo += np.bincount(np.unique(np.concatenate(readers)) // self.tiled.n_cells, minlength=n_ranks)
        owned = np.bincount(owner, minlength=n_ranks)
        edges = np.bincount(owner, weights=np.tile(self.degree, self.tiled.n_cells), minlength=n_ranks)
        return Loads(owned, halo, np.rint(edges).astype(np.int64), None, how)

    def _refuse_many(self, why: str, instead: str) -> None:
        if self.tiled.n_atoms > MOST_BUILT:
            raise InputError(
                f"{why}, which is counted up to {MOST_BUILT} atoms; these are {self.tiled.n_atoms}: repeat the cell less "
                f"often, or take {instead}"
            )

    # -- a grid

    def _runs(self, axis: int, g: int) -> tuple[np.ndarray, np.ndarray]:
        """(n, g) first cells and (n, g) lengths of the runs of cells that each atom of the cell has in each slice."""
        unit = self.tiled.along(axis)
        n, times = unit.shape
        grid = tuple(g if a == axis else 1 for a in range(3))
        box = boxes_of(np.repeat(unit.reshape(-1, 1), 3, 1), grid)[:, axis].reshape(n, times)
        atom = np.repeat(np.arange(n), times)
        length = np.bincount(atom * g + box.ravel(), minlength=n * g).reshape(n, g)
        first = np.zeros((n, g), np.int64)
        begins = box != np.roll(box, 1, axis=1)
        row, cell = np.nonzero(begins)
        first[row, box[row, cell]] = cell
        return first, length

    @staticmethod
    def _product(lengths: list[np.ndarray], weights: np.ndarray | None = None) -> np.ndarray:
        """(P,) sum over the cell's atoms of the product of their runs' lengths along the three axes."""
        a, b, c = (length.astype(np.int64) for length in lengths)
        a = a if weights is None else a * weights[:, None]
        found = np.zeros((a.shape[1], b.shape[1], c.shape[1]), np.int64)
        for i in range(len(a)):
            found += a[i][:, None, None] * b[i][:, None] * c[i]
        return found.ravel()

    def _halo_of_grid(self, runs: list[tuple[np.ndarray, np.ndarray]], grid: tuple[int, int, int]) -> np.ndarray:
        """(P,) halo rows, counted once for each kind of domain."""
        kinds, kind_of = zip(*(_kinds(*run, times) for run, times in zip(runs, self.tiled.repeat, strict=True)), strict=True)
        count = np.zeros([len(k) for k in kinds], np.int64)
        for place in np.ndindex(*count.shape):
            first, length = zip(*(kinds[axis][place[axis]] for axis in range(3)), strict=True)
            count[place] = self._halo_of_domain(np.stack(first, 1), np.stack(length, 1))
        return count[np.ix_(*kind_of)].reshape(grid).ravel()

    def _halo_of_domain(self, first: np.ndarray, length: np.ndarray) -> int:
        """Rows that a domain reads, whose atoms are runs of cells ``first``, ``length`` (n, 3)."""
        times = np.array(self.tiled.repeat)
        if (length == times).all():
            return 0
        there = (length > 0).all(1)
        used = np.flatnonzero(there[self.edges.receiver])
        receiver, sender = self.edges.receiver[used], self.edges.sender[used]
        own = np.flatnonzero(there)
        atom = np.concatenate([sender, own])
        low = np.concatenate([first[receiver] + self._shift[used], first[own]])
        size = np.concatenate([length[receiver], length[own]])
        if not len(used):
            return 0
        is_own = np.arange(len(atom)) >= len(used)
        low = low - low.min(0)
        span = (low + size).max(0)
        parts = [(atom, is_own, low, low + size)]
        for axis in np.flatnonzero(span > times):
            parts = [piece for part in parts for piece in _wrapped(part, axis, times[axis])]
        atom, is_own, low, high = (np.concatenate(p) for p in zip(*parts, strict=True))
        return _count_union(atom, is_own, low, high)


def _sorted(edges: Edges) -> Edges:
    order = np.argsort(edges.sender, kind="stable")
    return Edges(edges.receiver[order], edges.sender[order], edges.shift[order])


def _kinds(first: np.ndarray, length: np.ndarray, times: int) -> tuple[list[np.ndarray], np.ndarray]:
    """The different slices along an axis, each (2, n) first cells and lengths, and of each slice which one it is."""
    g = first.shape[1]
    base = np.arange(g) * times // g
    moved = np.where(length > 0, (first - base + times // 2) % times - times // 2, 0)
    moved = np.where(length == times, 0, moved)
    kinds, kind_of = np.unique(np.stack([moved, length]), axis=2, return_inverse=True)
    return list(np.moveaxis(kinds, 2, 0)), kind_of.ravel()


def _wrapped(part: tuple[np.ndarray, ...], axis: int, times: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Boxes cut where they leave the ``times`` cells of a periodic axis, and their rest at its beginning."""
    atom, is_own, low, high = part
    size = high[:, axis] - low[:, axis]
    low, high = low.copy(), high.copy()
    low[:, axis] = np.where(size >= times, 0, low[:, axis] % times)
    end = low[:, axis] + np.minimum(size, times)
    high[:, axis] = np.minimum(end, times)
    yield atom, is_own, low, high
    rest = end > times
    low, high = low[rest], high[rest]
    low[:, axis], high[:, axis] = 0, end[rest] - times
    yield atom[rest], is_own[rest], low, high


def _count_union(atom: np.ndarray, is_own: np.ndarray, low: np.ndarray, high: np.ndarray) -> int:
    """Cells, summed over atoms, that are in a box of the atom, but in none that is its own.

    Boxes are painted at their corners alone, on the planes that bound some box; sums along the axes fill them.
    """
    planes = [np.unique(np.concatenate([low[:, axis], high[:, axis]])) for axis in range(3)]
    shape = (int(atom.max()) + 1, *(len(p) for p in planes))
    corner = np.stack([[np.searchsorted(planes[a], side[:, a]) for a in range(3)] for side in (low, high)])
    painted = np.zeros(shape, np.int64)
    sign = np.where(is_own, -(len(atom) + 1), 1)
    for sides in np.ndindex(2, 2, 2):
        where = np.ravel_multi_index((atom, *(corner[sides[a], a] for a in range(3))), shape)
        weight = sign * (-1) ** sum(sides)
        painted += np.rint(np.bincount(where, weight, painted.size)).astype(np.int64).reshape(shape)
    for axis in (1, 2, 3):
        painted = painted.cumsum(axis)
    size = [np.append(np.diff(p), 0) for p in planes]
    return int(np.einsum("nabc,a,b,c->", (painted > 0).astype(np.int64), *size))
