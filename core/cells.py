"""Cells: completed where axes are open, volumes, wrapping. All in float64 numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nvdd.errors import InputError


@dataclass(frozen=True, eq=False)
class Frame:
    """A cell in which every system can be divided and searched.

    Attributes:
        cell: (3, 3) invertible; rows of periodic axes are the user's, those of open axes are unit vectors
            orthogonal to the periodic ones.
        inverse: its inverse.
        pbc: (3,) bool.
        heights: (3,) distance between opposite faces along each axis, A.
    """

    cell: np.ndarray
    inverse: np.ndarray
    pbc: np.ndarray
    heights: np.ndarray

    @classmethod
    def of(cls, cell: np.ndarray, pbc: np.ndarray) -> Frame:
        """From a user's cell and periodicity.

        Raises:
            InputError: a periodic axis without a vector, or periodic vectors that are not independent.
        """
        cell, pbc = np.asarray(cell, float).reshape(3, 3), np.asarray(pbc, bool)
        if not np.isfinite(cell).all():
            raise InputError(f"the cell has entries that are not finite numbers:\n{cell}")
        periodic = cell * pbc[:, None]
        lengths = np.linalg.norm(periodic, axis=1)
        for axis in np.flatnonzero(pbc & (lengths == 0)):
            raise InputError(
                f"axis {axis} is periodic but its cell vector is zero; set the cell or pbc[{axis}] = False"
            )
        full = _complete(periodic, pbc)
        unit = full / np.linalg.norm(full, axis=1)[:, None]
        if abs(np.linalg.det(unit)) < 1e-6:
            raise InputError(
                f"the periodic cell vectors are linearly dependent (relative volume {abs(np.linalg.det(unit)):.1e}):\n{cell}\n"
                "give three independent vectors, or switch off periodicity along one of them"
            )
        inverse = np.linalg.inv(full)
        return cls(full, inverse, pbc, 1.0 / np.linalg.norm(inverse, axis=0))

    def scaled(self, positions: np.ndarray) -> np.ndarray:
        """(N, 3) coordinates in cell vectors; on open axes distances in A."""
        return positions @ self.inverse

    def wrap(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Scaled coordinates brought into [0, 1] on periodic axes, and the whole cells taken off, (N, 3) each.

        1 itself comes of rounding, from just below a face.
        """
        scaled = self.scaled(positions)
        cells = np.where(self.pbc, np.floor(scaled), 0.0)
        return scaled - cells, cells


def _complete(cell: np.ndarray, pbc: np.ndarray) -> np.ndarray:
    """Unit vectors for open axes, orthogonal to the periodic ones; the periodic ones exactly as given."""
    out = cell.copy()
    given = [cell[a] / np.linalg.norm(cell[a]) for a in np.flatnonzero(pbc)]
    basis = list(np.linalg.qr(np.array(given).T)[0].T) if given else []
    for axis in np.flatnonzero(~pbc):
        # the Cartesian direction that is farthest from what is there, made orthogonal to it
        rest = np.eye(3) - sum((np.outer(b, b) for b in basis), np.zeros((3, 3)))
        order = [axis, (axis + 1) % 3, (axis + 2) % 3]
        best = max(order, key=lambda k: round(float(np.linalg.norm(rest[k])), 6))
        vector = rest[best] / np.linalg.norm(rest[best])
        out[axis] = vector
        basis.append(vector)
    return out


def volume(cell: np.ndarray) -> float:
    """Volume of a cell in A^3; 0 if a vector is missing."""
    return float(abs(np.linalg.det(np.asarray(cell, float).reshape(3, 3))))
