"""Pieces of a structure to measure on."""

from __future__ import annotations

import numpy as np
from ase import Atoms
from ase.build import bulk

from nvdd.planning.samples import MOST_OF_CELL, thinner, tile


def test_a_cell_is_repeated_towards_a_cube():
    atoms = bulk("Ar", "fcc", a=5.26, cubic=True).repeat((1, 1, 3))
    atoms.set_initial_charges(np.arange(len(atoms)))
    piece = tile(atoms, 90)
    assert len(piece) >= 90 and len(set(np.rint(piece.cell.lengths() / 5.26))) == 1
    assert set(piece.get_initial_charges()) == set(range(12))


def test_open_axes_are_not_repeated():
    slab = bulk("Ar", "fcc", a=5.26, cubic=True)
    slab.pbc = (True, True, False)
    assert tile(slab, 100).cell.lengths()[2] == 5.26
    assert len(tile(Atoms("Ar2", [[0, 0, 0], [0, 0, 4]]), 100)) == 2


def test_of_very_many_atoms_a_piece_is_cut_out():
    atoms = bulk("Ar", "fcc", a=5.26, cubic=True).repeat(8)
    assert len(atoms) > MOST_OF_CELL
    piece = tile(atoms, 150)
    assert len(piece) == 150 and not piece.pbc.any()
    assert np.ptp(piece.positions, axis=0).max() < 5 * 5.26
    assert len(atoms) == 2048 and atoms.pbc.all()


def test_thinner_moves_atoms_apart():
    for atoms in (bulk("Ar", "fcc", a=5.26, cubic=True), Atoms("Ar2", [[0, 0, 0], [0, 0, 4]])):
        found = thinner(atoms)
        np.testing.assert_allclose(found.get_distance(0, 1), 1.15 * atoms.get_distance(0, 1))
