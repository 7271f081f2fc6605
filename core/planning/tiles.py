"""`TiledStructure`: a structure repeated along its cell vectors, without being built."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nvdd.cells import Frame
from nvdd.errors import InputError
from nvdd.partition import unit_coordinates


@dataclass(frozen=True, eq=False)
class TiledStructure:
    """Atom ``i`` of cell ``k`` is at ``positions[i] + k @ cell``; ``(k, i)`` counts as in ``ase.Atoms.repeat``.

    Attributes:
        positions: (n, 3) A, of one cell.
        cell: (3, 3) A.
        pbc: (3,) bool.
        repeat: cells along each vector; 1 along open ones.
    """

    positions: np.ndarray
    cell: np.ndarray
    pbc: np.ndarray
    repeat: tuple[int, int, int] = (1, 1, 1)

    @classmethod
    def of(cls, atoms: Any, repeat: Sequence[int] = (1, 1, 1)) -> TiledStructure:
        """Of an ``ase.Atoms``.

        Raises:
            InputError: no atoms, a repeat that is not three positive whole numbers, or one along an open axis.
        """
        if len(atoms) == 0:
            raise InputError("a structure without atoms can't be divided")
        try:
            times = tuple(operator.index(r) for r in repeat)
        except TypeError:
            times = ()
        if len(times) != 3 or min(times) < 1:
            raise InputError(f"repeat {repeat!r} must be three positive whole numbers, such as (40, 40, 40)")
        pbc = np.array(atoms.pbc, bool)
        for axis in np.flatnonzero(~pbc):
            if times[axis] > 1:
                raise InputError(
                    f"repeat {times}: axis {axis} is open, so that there is nothing to repeat along it; give 1 there, "
                    f"or set pbc[{axis}] = True"
                )
        Frame.of(np.array(atoms.cell), pbc)  # refuses a cell that can't be divided
        return cls(np.array(atoms.positions, float), np.array(atoms.cell, float), pbc, times)

    @property
    def n_cells(self) -> int:
        """Number of cells."""
        return int(np.prod(self.repeat, dtype=np.int64))

    @property
    def n_atoms(self) -> int:
        """Atoms in all cells."""
        return len(self.positions) * self.n_cells

    @property
    def whole_cell(self) -> np.ndarray:
        """(3, 3) A, of all cells together."""
        return self.cell * np.array(self.repeat)[:, None]

    @property
    def lengths(self) -> np.ndarray:
        """(3,) A, what a `SpatialPartitioner` divides along each axis."""
        return unit_coordinates(self.positions, Frame.of(self.whole_cell, self.pbc))[1]

    def along(self, axis: int) -> np.ndarray:
        """(n, repeat[axis]) coordinates in [0, 1] along an axis: they don't depend on the cell along the others.

        By the arithmetic of a run; but for the rounding of sums over three oblique cell vectors, to the last bit.
        """
        cells = np.zeros((self.repeat[axis], 3))
        cells[:, axis] = np.arange(self.repeat[axis])
        positions = (self.positions[:, None] + (cells @ self.cell)[None]).reshape(-1, 3)
        unit, _ = unit_coordinates(positions, Frame.of(self.whole_cell, self.pbc))
        return unit[:, axis].reshape(len(self.positions), -1)

    def build(self) -> np.ndarray:
        """(n_atoms, 3) positions of all atoms, in the order of ``ase.Atoms.repeat``."""
        cells = np.stack(np.meshgrid(*map(np.arange, self.repeat), indexing="ij"), -1).reshape(-1, 3)
        return (self.positions[None] + (cells @ self.cell)[:, None]).reshape(-1, 3)
