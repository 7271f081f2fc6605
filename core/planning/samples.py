"""Small structures of the kind that is planned, on which a model is measured."""

from __future__ import annotations

from typing import Any

import numpy as np

from nvdd.cells import Frame

_THINNER = 1.15  # a strain that tells the cost of an edge from that of an atom
MOST_OF_CELL = 1500  # atoms of a cell that is measured whole


def tile(atoms: Any, least: int) -> Any:
    """The structure repeated to at least about ``least`` atoms, as near to a cube as its cell allows.

    One that can't be repeated stays as it is; of one with very many atoms a piece is cut out, with open axes.
    """
    atoms = atoms.copy()
    atoms.calc = None
    atoms.set_constraint()
    if len(atoms) > MOST_OF_CELL:
        return _piece(atoms, max(least, 100))
    times = np.ones(3, int)
    heights = Frame.of(atoms.cell.array, atoms.pbc).heights
    while atoms.pbc.any() and len(atoms) * times.prod() < least:
        length = np.where(atoms.pbc, heights * times, np.inf)
        times[int(length.argmin())] += 1
    return atoms.repeat(tuple(int(t) for t in times))


def _piece(atoms: Any, count: int) -> Any:
    """The atoms nearest to the middle, without periodicity."""
    centre = atoms.positions.mean(0)
    nearest = np.argsort(((atoms.positions - centre) ** 2).sum(1), kind="stable")[:count]
    piece = atoms[np.sort(nearest)]
    piece.pbc = False
    piece.cell[:] = 0
    return piece


def thinner(atoms: Any) -> Any:
    """The same atoms farther apart."""
    atoms = atoms.copy()
    if atoms.pbc.any():
        atoms.set_cell(atoms.cell.array * _THINNER, scale_atoms=False)
    atoms.positions *= _THINNER
    return atoms
