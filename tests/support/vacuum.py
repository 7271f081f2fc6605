"""Room along open axes, for calculators that know periodicity along all axes or none."""

from __future__ import annotations

import numpy as np
from ase import Atoms


def with_room(atoms: Atoms) -> Atoms:
    """Atoms with partial periodicity in a cell that is periodic, with 30 A between images along open axes; others as they are."""
    if atoms.pbc.all() or not atoms.pbc.any():
        return atoms
    atoms = atoms.copy()
    cell = atoms.cell.complete().array
    for axis in np.flatnonzero(~atoms.pbc):
        cell[axis] = np.cross(cell[(axis + 1) % 3], cell[(axis + 2) % 3])
        cell[axis] *= (30 + np.ptp(atoms.positions @ cell[axis]) / np.linalg.norm(cell[axis])) / np.linalg.norm(cell[axis])
    atoms.set_cell(cell)
    atoms.pbc = True
    return atoms
