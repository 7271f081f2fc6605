"""Points near others, from boxes, against all pairs; and that what comes out does not depend on how wide the space is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nvdd import cell_list
from nvdd.cell_list import CellList, Placed
from nvdd.errors import InputError

CELLS = np.array([[[5.0, 0, 0], [1.0, 6.0, 0], [-2.0, 0.5, 7.0]], [[9.0, 0, 0], [0, 9.0, 0], [0, 0, 9.0]]])


def placed(n: int = 400, spread: float = 20.0, seed: int = 0) -> Placed:
    """Points of two systems, in images of atoms that are in no cell in particular."""
    rng = np.random.default_rng(seed)
    image = rng.integers(-2, 3, (n, 3)).astype(float)
    system = rng.integers(0, 2, n)
    x = rng.uniform(0, spread, (n, 3)) * (1 + 2 * system[:, None]) - np.einsum("pi,pij->pj", image, CELLS[system])
    put = torch.from_numpy
    return Placed(put(x), put(image), put(rng.integers(0, 50, n)), put(system), put(CELLS))


def everything(points: Placed, n: int, cutoff: float) -> dict[int, set[tuple]]:
    """By each receiver what there is within the cutoff: row and whole cells."""
    x = (points.x + torch.einsum("pi,pij->pj", points.image, points.cell[points.system])).numpy()
    found = {}
    for i in range(n):
        near = (np.linalg.norm(x - x[i], axis=1) < cutoff) & (points.system == points.system[i]).numpy()
        near[i] = False
        shift = (points.image - points.image[i]).numpy()
        found[i] = {(int(points.row[k]), *map(int, shift[k]), k) for k in np.flatnonzero(near)}
    return found


@pytest.mark.parametrize("cutoff", (0.5, 4.0, 11.0, 300.0))
def test_edges_are_all_pairs(cutoff):
    points, n = placed(), 120
    boxes = CellList(points, cutoff)
    counts = boxes.count(n)
    edges = boxes.edges(0, counts, shifts=True)
    wanted = everything(points, n, cutoff)
    assert counts.sum(1).tolist() == [len(wanted[i]) for i in range(n)]
    assert (edges.receivers.diff() >= 0).all()
    named = lambda keys: sorted(key[:4] for key in keys)
    rows = torch.cat([edges.senders[:, None], edges.shifts.round().long()], 1).tolist()
    for i in range(n):
        assert sorted(tuple(rows[e]) for e in np.flatnonzero(edges.receivers.numpy() == i)) == named(wanted[i])
    lengths = edges.vectors.norm(dim=1)
    assert len(lengths) == sum(map(len, wanted.values())) and (lengths < cutoff).all()


def test_edges_of_some_receivers_are_a_part():
    points = placed()
    boxes = CellList(points, 6.0)
    counts = boxes.count(100)
    whole = boxes.edges(0, counts)
    parts = [boxes.edges(a, counts[a:b]) for a, b in ((0, 1), (1, 60), (60, 60), (60, 100))]
    for k in range(3):
        assert torch.equal(torch.cat([part[k] for part in parts]), whole[k])


def test_an_edge_and_its_reverse_are_negatives():
    """To the last bit, so that no pair is within the cutoff one way only."""
    x = torch.rand(40, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 9
    image = torch.cartesian_prod(*[torch.arange(-1.0, 2.0, dtype=torch.float64)] * 3)
    own = torch.cat([torch.zeros(40, 3), *(s.expand(40, 3) for s in image if s.any())]).double()
    points = Placed(x.repeat(27, 1), own, torch.arange(40).repeat(27), torch.zeros(1080, dtype=torch.int64), torch.from_numpy(CELLS[1:]))  # fmt: skip
    boxes = CellList(points, 4.0)
    edges = boxes.edges(0, boxes.count(40), shifts=True)
    key = lambda i, j, s: (int(i), int(j), *map(int, s))
    of = {key(i, j, s): v for i, j, s, v in zip(edges.receivers, edges.senders, edges.shifts, edges.vectors, strict=True)}
    assert len(of) > 500
    assert all(torch.equal(of[key(j, i, (-a, -b, -c))], -v) for (i, j, a, b, c), v in of.items())


def test_a_wide_empty_space_takes_few_boxes():
    points = placed(60, spread=1e6)
    boxes = CellList(points, 4.0)
    assert len(boxes._first) <= cell_list._FEW + 1
    assert boxes.count(60).sum() == sum(map(len, everything(points, 60, 4.0).values()))


def test_near():
    points, others = placed(100), placed(80, seed=2)
    where = lambda p: (p.x + torch.einsum("pi,pij->pj", p.image, p.cell[p.system]))
    distance = torch.cdist(where(others), where(points), compute_mode="donot_use_mm_for_euclid_dist")
    distance[others.system[:, None] != points.system] = np.inf
    assert torch.equal(CellList(points, 5.0).near(others), (distance < 5.0).any(1))


def test_no_points():
    points = placed().part(0, 0)
    boxes = CellList(points, 3.0)
    assert not len(boxes.edges(0, boxes.count(0)).receivers)
    assert not CellList(points, 3.0).near(placed()).any()


def test_a_position_that_is_no_number():
    points = placed()
    points.x[3] = np.nan
    with pytest.raises(InputError, match="is not a finite number: relax the structure first"):
        CellList(points, 3.0)
