"""`CellList`: points in boxes, so that those near a receiver are found without a list of all pairs (linked cells: Quentrec
and Brot, J. Comput. Phys. 13, 430, 1973). Memory is that of the points; edges are made when asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nvdd.cell_list_kernels import near_kernel
from nvdd.errors import InputError
from nvdd.warp_runtime import Arrays, launch, warp

_PART = 4  # boxes along a cutoff
_NO_LIMIT = 2**62
_FEW = 4096  # boxes that may be there whatever the number of points
_MARGIN = 1e-9  # A, and as a part of the cutoff, for what is rounded in sorting points into boxes


@dataclass(frozen=True, eq=False)
class Placed:
    """Points: atoms, or periodic images of them.

    Attributes:
        x: (P, 3) float64 A, where the user has the atom.
        image: (P, 3) float64 whole cells from there to the point.
        row: (P,) int64 the atom's row.
        system: (P,) int64 the atom's system.
        cell: (n_systems, 3, 3) float64 A.
    """

    x: Tensor
    image: Tensor
    row: Tensor
    system: Tensor
    cell: Tensor

    def part(self, begin: int, end: int | None = None) -> Placed:
        """Some of the points."""
        cut = slice(begin, end)
        return Placed(self.x[cut], self.image[cut], self.row[cut], self.system[cut], self.cell)


class Edges(NamedTuple):
    """Directed edges, grouped by receiver.

    Attributes:
        vectors: (E, 3) float64 A, sender minus receiver.
        receivers: (E,) int64 which of the receivers.
        senders: (E,) int64 rows.
        shifts: (E, 3) float64 whole cells; None unless asked for.
    """

    vectors: Tensor
    receivers: Tensor
    senders: Tensor
    shifts: Tensor | None


class CellList:
    """Senders in boxes.

    Args:
        points: the senders.
        cutoff: A.

    Raises:
        InputError: a point is not at a finite place.
    """

    def __init__(self, points: Placed, cutoff: float) -> None:
        self.points, self.cutoff = points, float(cutoff)
        self._loose = self.cutoff * (1 + _MARGIN) + _MARGIN
        self.device = points.x.device
        self._where = where = _where(points)
        self._low, self._width, self._boxes = self._grid(where)
        box = ((where - self._low[points.system]) / where.new_tensor(self._width)).floor().to(torch.int64)
        top = torch.tensor(self._boxes, device=self.device) - 1
        x, y, z = torch.minimum(box.clamp(min=0), top).unbind(1)
        nx, ny, nz = self._boxes
        key = ((points.system * nx + x) * ny + y) * nz + z
        key, order = key.sort(stable=True)
        n_boxes = len(points.cell) * nx * ny * nz
        self._first = torch.searchsorted(key, torch.arange(n_boxes + 1, device=self.device))
        self._sorted = [t.index_select(0, order).contiguous() for t in (where, points.x, points.image)]
        self._order, self._row = order, points.row.index_select(0, order)
        reach = [math.ceil(self._loose / w) for w in self._width[:2]]
        self._columns = [min(n, 2 * r + 1) for n, r in zip(self._boxes, reach, strict=False)]
        self._reach = reach

    def _grid(self, where: Tensor) -> tuple[Tensor, list[float], list[int]]:
        """Low corners of the systems (n_systems, 3), edges of a box and numbers of boxes, the same in all of them."""
        points, n_systems = self.points, len(self.points.cell)
        empty = where.new_zeros(n_systems, 3)
        if not len(where):
            return empty, [self.cutoff] * 3, [1, 1, 1]
        of_each = points.system[:, None].expand(-1, 3)
        low = empty.scatter_reduce(0, of_each, where, "amin", include_self=False)
        extent = (empty.scatter_reduce(0, of_each, where, "amax", include_self=False) - low).amax(0).tolist()
        if not all(map(math.isfinite, extent)):
            raise InputError("a position or the cell is not a finite number: relax the structure first, or take a smaller timestep")
        width = self._loose / _PART
        count = lambda: [int(e / width) + 1 for e in extent]
        while n_systems * math.prod(count()) > max(_FEW, 4 * len(where)):  # a wide, empty space
            width *= 1.26
        return low, [width] * 3, count()

    def count(self, n: int) -> Tensor:
        """(n, columns) int32: how many points the first ``n`` points have within the cutoff, by columns of boxes."""
        counts = torch.empty(n, self._columns[0] * self._columns[1], dtype=torch.int32, device=self.device)
        self._launch(self.points, self._where, 0, counts.shape, counts=counts)
        return counts

    def near(self, places: Placed) -> Tensor:
        """(n,) bool: whether there is a point within the cutoff of each of ``places``, which are none of the points."""
        counts = torch.empty(len(places.x), self._columns[0] * self._columns[1], dtype=torch.int32, device=self.device)
        self._launch(places, _where(places), 0, counts.shape, most=1, counts=counts)
        return counts.any(1)

    def edges(self, begin: int, counts: Tensor, shifts: bool = False) -> Edges:
        """The edges into the points from ``begin`` on, of which ``counts`` are rows of `count`; all of these rows' points."""
        totals = counts.reshape(-1).cumsum(0, dtype=torch.int64)
        place = (totals - counts.reshape(-1)).view(counts.shape)
        n = int(totals[-1]) if len(totals) else 0
        new = lambda dtype, *shape: torch.empty(n, *shape, dtype=dtype, device=self.device)
        out = Edges(
            new(torch.float64, 3), new(torch.int64), new(torch.int64), new(torch.float64, 3) if shifts else None
        )
        if n:
            self._launch(self.points, self._where, begin, counts.shape, place=place, edges=out)
        return out

    def _launch(
        self,
        receivers: Placed,
        where: Tensor,
        begin: int,
        threads: tuple[int, ...],
        most: int = _NO_LIMIT,
        counts: Tensor | None = None,
        place: Tensor | None = None,
        edges: Edges | None = None,
    ) -> None:
        """Fills ``counts``, or from their sums ``place`` the edges; of receivers that are the points, or are none of them."""
        if not threads[0] * threads[1]:
            return
        wp, new, kept = warp(), where.new_empty, []

        def array(tensor: Tensor, dtype: Any) -> Any:
            kept.append(tensor.contiguous())
            return Arrays.of(kept[-1], dtype)

        vec, whole = lambda t: array(t, wp.vec3d), lambda t: array(t, wp.int64)
        index, table = new(0, dtype=torch.int64), new(0, 1, dtype=torch.int64)
        vectors, to, sender, shifts = edges or (new(0, 3), index, index, None)
        launch(
            near_kernel(),
            tuple(threads),
            [int(edges is not None), begin, self.cutoff, self._loose, most, int(receivers is not self.points),
             vec(where), vec(receivers.x), vec(receivers.image), whole(receivers.system), array(self.points.cell, wp.mat33d),
             vec(self._low), wp.vec3d(*self._width), wp.vec3i(*self._boxes), wp.vec2i(*self._columns), wp.vec2i(*self._reach),
             whole(self._first), whole(self._order), *map(vec, self._sorted), whole(self._row),
             whole(table if place is None else place)],
            [array(new(0, 1, dtype=torch.int32) if counts is None else counts, wp.int32), vec(vectors), whole(to), whole(sender),
             vec(new(0, 3) if shifts is None else shifts)],
            self.device,
        )  # fmt: skip


def _where(points: Placed) -> Tensor:
    """(P, 3) A."""
    cell = points.cell[0] if len(points.cell) == 1 else points.cell.index_select(0, points.system)
    if cell.dim() == 2:
        return points.x + points.image @ cell
    return points.x + torch.einsum("pi,pij->pj", points.image, cell)
