"""TiledStructure: the atoms of ASE's repeat, without building them."""

from __future__ import annotations

import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk

from nvdd.cells import Frame
from nvdd.errors import InputError
from nvdd.partition import unit_coordinates
from nvdd.planning.tiles import TiledStructure


def cell() -> Atoms:
    atoms = bulk("Si", "diamond", a=5.43)  # primitive, oblique
    atoms.rattle(0.1, seed=2)
    return atoms


def test_builds_what_ase_builds():
    tiled, whole = TiledStructure.of(cell(), (3, 1, 4)), cell().repeat((3, 1, 4))
    assert tiled.n_atoms == len(whole) == 24
    np.testing.assert_allclose(tiled.build(), whole.positions, rtol=0, atol=1e-12)
    np.testing.assert_allclose(tiled.whole_cell, whole.cell.array)


def test_coordinates_along_an_axis_are_those_of_the_whole():
    tiled = TiledStructure.of(cell(), (3, 2, 4))
    unit, lengths = unit_coordinates(tiled.build(), Frame.of(tiled.whole_cell, tiled.pbc))
    unit = unit.reshape(3, 2, 4, 2, 3)
    for axis in range(3):
        every = np.moveaxis(unit[..., axis], (axis, 3), (3, 2))  # (other, other, n, repeat)
        np.testing.assert_allclose(every, np.broadcast_to(tiled.along(axis), every.shape), rtol=0, atol=1e-12)
    np.testing.assert_allclose(tiled.lengths, lengths)


@pytest.mark.parametrize(
    ("atoms", "repeat", "says"),
    [
        (Atoms(), (1, 1, 1), "without atoms"),
        (cell(), (2, 2), "three positive whole numbers"),
        (cell(), (2, 0, 2), "three positive whole numbers"),
        (cell(), (2, 1.5, 2), "three positive whole numbers"),
        (Atoms("H2", [[0, 0, 0], [0, 0, 1]]), (1, 1, 2), "axis 2 is open"),
        (Atoms("H", pbc=True), (1, 1, 1), "periodic but its cell vector is zero"),
    ],
)
def test_refuses(atoms, repeat, says):
    with pytest.raises(InputError, match=says):
        TiledStructure.of(atoms, repeat)
