"""IndexPartitioner: equal runs of a list, along a curve that keeps what is near together."""

from __future__ import annotations

import numpy as np
import pytest

from nvdd import InputError, SpatialPartitioner
from nvdd.index_partition import GRAPH_PLANS, IndexPartitioner, hilbert_order


def test_curve_goes_from_cell_to_cell():
    """Through all cells of a grid, each next to the one before: a Hilbert curve, and no other one of the usual."""
    n = 8
    cells = np.stack(np.meshgrid(*[np.arange(n)] * 3, indexing="ij"), -1).reshape(-1, 3)
    cells = np.random.default_rng(0).permutation(cells)
    order = hilbert_order((cells + 0.5) / n, np.ones(3))
    assert sorted(order) == list(range(n**3))
    np.testing.assert_array_equal(np.abs(np.diff(cells[order], axis=0)).sum(1), 1)


def test_curve_goes_through_cubes():
    """Along a long body it goes from end to end, not to and fro; neither in two dimensions nor one do its steps grow."""
    x = np.random.default_rng(0).random((4000, 3))
    lengths = np.array([1.0, 2.0, 64.0])
    path = (x * lengths)[hilbert_order(x, lengths)]
    assert np.linalg.norm(np.diff(path, axis=0), axis=1).max() < 2
    assert (path[-1, 2] - path[0, 2]) > 62
    flat = hilbert_order(x, np.array([10.0, 9.0, 0.0]))
    assert np.linalg.norm(np.diff(x[flat][:, :2], axis=0), axis=1).max() < 0.6
    point = hilbert_order(np.zeros((3, 3)), np.full(3, 1e-9))
    np.testing.assert_array_equal(point, [0, 1, 2])


def test_a_few_parts_are_cut_across_the_longer_axes():
    """Four parts of a plate are its quarters, which have the least surface."""
    n = 16
    x = (np.stack(np.meshgrid(*[np.arange(n)] * 3, indexing="ij"), -1).reshape(-1, 3) + 0.5) / n
    for part in np.array_split(hilbert_order(x, np.array([2.0, 10.0, 10.5])), 4):
        np.testing.assert_allclose(np.ptp(x[part], axis=0) + 1 / n, [1.0, 0.5, 0.5])


@pytest.mark.parametrize("plan", GRAPH_PLANS)
@pytest.mark.parametrize("n_ranks,n", ((1, 5), (3, 20), (4, 2), (7, 100)))
def test_equal_parts(n_ranks, n, plan):
    rng = np.random.default_rng(n)
    cells, pbc = np.stack([np.diag([9.0, 5, 7]), np.zeros((3, 3))]), np.array([[True] * 3, [False] * 3])
    members = np.split(rng.permutation(n), [n // 3])
    positions = rng.normal(size=(n, 3)) * 8
    partitioner = IndexPartitioner(n_ranks, plan)
    owner = partitioner.divide(positions, cells, pbc, members)
    sizes = np.bincount(owner, minlength=n_ranks)
    assert sizes.sum() == n and sizes.max() - sizes.min() <= 1
    assert (np.diff(owner) >= 0).all() == (plan == "blocks" or n_ranks == 1 or n < 3)
    np.testing.assert_array_equal(owner, partitioner.divide(positions + 1.0, cells, pbc, members))


def test_small_systems_stay_whole():
    """Of a batch of equal systems none is cut, where domains cut each."""
    rng = np.random.default_rng(0)
    members = [np.arange(5) + 5 * k for k in range(8)]
    cells, pbc = np.repeat(np.eye(3)[None] * 9, 8, 0), np.ones((8, 3), bool)
    positions = rng.random((40, 3)) * 9
    owner = IndexPartitioner(4).divide(positions, cells, pbc, members)
    assert all(len(set(owner[atoms])) == 1 for atoms in members)
    assert all(len(set(SpatialPartitioner(4).divide(positions, cells, pbc, members)[atoms])) > 1 for atoms in members)


@pytest.mark.parametrize("plan", ("curve", "blocks"))
def test_no_atoms(plan):
    nothing = np.zeros((0, 3)), np.eye(3)[None], np.zeros((1, 3), bool), [np.zeros(0, np.int64)]
    assert IndexPartitioner(3, plan).divide(*nothing).shape == (0,)


def test_order_is_kept_until_it_pays():
    rng = np.random.default_rng(0)
    cell, pbc, members = np.eye(3)[None] * 10, np.ones((1, 3), bool), [np.arange(60)]
    partitioner = IndexPartitioner(3)
    first = partitioner.divide(rng.random((60, 3)) * 10, cell, pbc, members)
    partitioner.observe(100)
    partitioner.observe(110)
    mixed = rng.random((60, 3)) * 10
    np.testing.assert_array_equal(first, partitioner.divide(mixed, cell, pbc, members))
    partitioner.observe(111)
    assert (first != partitioner.divide(mixed, cell, pbc, members)).any() and partitioner.n_orders == 2
    partitioner.observe(150)  # the new order's first: nothing better is known
    partitioner.divide(mixed, cell, pbc, members)
    assert partitioner.n_orders == 2
    partitioner.divide(mixed, cell, ~pbc, members)
    assert partitioner.n_orders == 3, "another system"


def test_refused():
    with pytest.raises(InputError, match="graph_plan must be one of 'curve', 'blocks', got 'ring'"):
        IndexPartitioner(2, "ring")
    with pytest.raises(InputError, match="at least 1, got 0"):
        IndexPartitioner(0)
