"""SpatialPartitioner: owners by position, whatever the cell."""

from __future__ import annotations

import numpy as np
import pytest

from nvdd.errors import InputError
from nvdd.partition import SpatialPartitioner, best_grid

RNG = np.random.default_rng(0)
CELL = np.array([[9.0, 0.5, 0], [-1, 11.0, 0.3], [0.2, 2, 14.0]])


@pytest.mark.parametrize("balance", ("auto", "grid", "rcb"))
@pytest.mark.parametrize("n_ranks", (1, 2, 3, 4, 6, 8))
def test_every_atom_has_an_owner_and_images_do_not_matter(n_ranks, balance):
    positions = RNG.random((200, 3)) @ CELL
    partitioner = SpatialPartitioner(n_ranks, balance=balance)
    owner = partitioner.assign(positions, CELL, np.ones(3, bool))
    assert owner.min() >= 0 and owner.max() < n_ranks
    assert len(np.unique(owner)) == n_ranks
    moved = positions + RNG.integers(-3, 4, (200, 3)) @ CELL
    again = partitioner.assign(moved, CELL, np.ones(3, bool))
    assert (owner != again).sum() <= 2  # atoms within rounding of a face


def test_rcb_balances_what_a_grid_does_not():
    positions = np.concatenate([RNG.random((180, 3)) * [2, 10, 10], RNG.random((20, 3)) * [40, 10, 10]])
    cell, pbc = np.diag([40.0, 10, 10]), np.array([True, True, True])
    counts = {
        b: np.bincount(SpatialPartitioner(4, balance=b).assign(positions, cell, pbc), minlength=4)
        for b in ("grid", "rcb", "auto")
    }
    assert counts["grid"].max() > 100
    assert counts["rcb"].max() - counts["rcb"].min() <= 1
    assert (counts["auto"] == counts["rcb"]).all()


def test_grid_has_least_surface():
    assert best_grid(4, np.array([10.0, 10, 40])) == (1, 1, 4)
    assert best_grid(8, np.array([10.0, 10, 10])) == (2, 2, 2)
    assert best_grid(6, np.array([30.0, 20, 1])) in ((3, 2, 1),)


def test_open_axes_and_fewer_atoms_than_ranks():
    owner = SpatialPartitioner(4).assign(np.array([[0.0, 0, 0], [50, 0, 0]]), np.zeros((3, 3)), np.zeros(3, bool))
    assert len(set(owner)) == 2


@pytest.mark.parametrize(
    "arguments,says",
    [
        ({"n_ranks": 0}, "at least 1"),
        ({"n_ranks": 4, "grid": (2, 1, 1)}, "product 4"),
        ({"n_ranks": 4, "grid": (4, 1)}, "three"),
        ({"n_ranks": 2, "balance": "fair"}, "'fair'"),
        ({"n_ranks": 2, "grid": (2, 1, 1), "balance": "rcb"}, "not both"),
    ],
)
def test_bad_arguments(arguments, says):
    with pytest.raises(InputError, match=says):
        SpatialPartitioner(**arguments)
