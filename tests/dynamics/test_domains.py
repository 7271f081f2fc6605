"""Boxes of ranks: they fill space, follow the grid of SpatialPartitioner, and balance what no rank sees as a whole."""

from __future__ import annotations

import numpy as np
import pytest

import parity
from nvdd import SpatialPartitioner
from nvdd.cells import Frame
from nvdd.communicator import Communicator
from nvdd.dynamics.domains import Domains, balanced_domains, grid_domains


def cluster_in_gas(n: int = 3000, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.concatenate([rng.normal(0.2, 0.03, (4 * n // 5, 3)), rng.uniform(0, 1, (n // 5, 3))]) % 1.0


FRAME = Frame.of(np.diag([40.0, 50.0, 60.0]), [True] * 3)


def divided(comm: Communicator, weighted: bool):
    """Runs on each rank, with its share of the points: how much each rank owns."""
    points = cluster_in_gas()
    mine = points[comm.rank :: comm.size]
    weights = 1.0 + 3.0 * (mine[:, 0] > 0.5) if weighted else np.ones(len(mine))
    balanced = balanced_domains(comm, mine, weights, FRAME)
    grid = grid_domains(comm, mine, FRAME, None)
    whole = 1.0 + 3.0 * (points[:, 0] > 0.5) if weighted else np.ones(len(points))
    count = lambda domains: np.bincount(domains.owner(points), whole, minlength=comm.size)
    owner = balanced.owner(points)
    inside = (points >= balanced.low[owner]) & (points < balanced.high[owner])
    return count(balanced), count(grid), bool(inside.all()), balanced.plane, owner


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_balance(ranks, size, weighted):
    parts = ranks.run(size, divided, weighted)
    balanced, grid, inside, plane, owner = parts[0]
    assert inside
    assert balanced.max() / balanced.mean() < 1.01
    assert grid.max() / grid.mean() > 1.5
    for part in parts[1:]:
        np.testing.assert_array_equal(part[3], plane)
        np.testing.assert_array_equal(part[4], owner)


@pytest.mark.parametrize("name", ["argon", "triclinic", "slab", "wire", "unwrapped"])
@pytest.mark.parametrize("grid", [(2, 3, 1), (1, 1, 5), (4, 1, 2)])
def test_grid_is_that_of_the_partitioner(name, grid):
    atoms = parity.structure(name)
    frame = Frame.of(atoms.cell.array, atoms.pbc)
    expected = SpatialPartitioner(int(np.prod(grid)), grid).assign(atoms.positions, atoms.cell.array, atoms.pbc)

    class Several(Communicator):  # only their number matters
        size = property(lambda self: int(np.prod(grid)), lambda self, value: None)

        def all_reduce(self, value, op="sum", site=""):
            return value

    found = grid_domains(Several(), frame.wrap(atoms.positions)[0], frame, grid).owner(frame.wrap(atoms.positions)[0])
    np.testing.assert_array_equal(found, expected)


def test_hysteresis_is_measured_in_angstrom_across_periodic_faces():
    domains = Domains.of_cuts([(0, 0.25, ~0, ~1)], np.array([True] * 3), 2)
    points = np.array([[0.1, 0.9, 0.5], [0.3, 0, 0], [0.95, 0, 0], [0.6, 0, 0], [7.1, 0, 0]])
    np.testing.assert_allclose(domains.outside(points, 0, FRAME.pbc, FRAME.heights), [0, 2, 2, 14, 0], atol=1e-9)
    np.testing.assert_array_equal(domains.owner(points % 1.0), [0, 1, 1, 1, 0])
