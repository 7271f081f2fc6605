"""The points that a rank reads, and blocks of their edges, against the list of all edges."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nvdd.nearby import EDGES_AT_ONCE, Nearby, Points, block_size, cut, points_read
from nvdd.neighbors import edges_within
from structures import structure

STRUCTURES = ("triclinic", "left-handed", "unwrapped", "slab", "wire", "tiny cell", "gas", "pair", "atom")
CUTOFF = 6.0


def nearby_of(names: list[str], mine_of, skin: float = 0.0):
    """`Nearby` of some atoms of several systems, all atoms, and which these are."""
    systems = [structure(name) for name in names]
    positions = np.concatenate([s.positions for s in systems])
    cells, pbc = np.stack([s.cell.array for s in systems]), np.stack([s.pbc for s in systems])
    system = np.repeat(np.arange(len(systems)), [len(s) for s in systems])
    mine = np.flatnonzero(mine_of(len(positions)))
    atom, image = points_read(positions, cells, pbc, system, mine, CUTOFF + skin, torch.device("cpu"))
    put = torch.from_numpy
    points = Points(put(atom), put(image), len(mine))
    return Nearby(points, put(positions), put(cells), put(system)), systems, mine


@pytest.mark.parametrize("at_once", (1, 40, 10**6))
@pytest.mark.parametrize("name", STRUCTURES)
def test_blocks_are_the_list(name, at_once):
    nearby, (atoms,), mine = nearby_of([name], lambda n: np.arange(n) % 3 == 0)
    blocks = nearby.blocks(CUTOFF, at_once)
    assert nearby.blocks(CUTOFF, at_once) is blocks
    wanted = edges_within(atoms.positions, atoms.cell.array, atoms.pbc, CUTOFF, mine)
    found = []
    for k, (begin, end) in enumerate(blocks.bounds):
        edges = blocks.edges(k)
        assert ((edges.receivers >= begin) & (edges.receivers < end)).all()
        assert len(edges.receivers) <= at_once or end - begin == 1
        starts = blocks.starts(k)
        assert torch.equal(starts.diff(), torch.bincount(edges.receivers - begin, minlength=end - begin)[: end - begin])
        found.append(torch.cat([edges.receivers[:, None], edges.senders[:, None], blocks.shifts(k).long()], 1).numpy())
    found = {tuple(row) for row in np.concatenate(found).tolist()}
    receivers = {atom: k for k, atom in enumerate(mine)}  # the points' first rows
    assert found == {(receivers[i], j, *map(int, s)) for i, j, s in zip(*wanted, strict=True)}
    assert blocks.n_edges == nearby.n_edges == len(wanted.receiver)


def test_only_points_that_are_read():
    """Each point is within reach of an atom of this rank, and the list with the skin reads no other."""
    nearby, (atoms,), mine = nearby_of(["triclinic"], lambda n: np.arange(n) < 9, skin=1.0)
    wanted = edges_within(atoms.positions, atoms.cell.array, atoms.pbc, CUTOFF + 1.0, mine)
    assert set(nearby.placed.row.tolist()) == set(wanted.sender) | set(mine)


def test_several_systems_in_any_order_of_atoms():
    names = ["triclinic", "pair", "slab"]
    nearby, systems, mine = nearby_of(names, lambda n: np.arange(n) % 2 == 0)
    n_edges, begin = 0, 0
    for atoms in systems:
        own = mine[(mine >= begin) & (mine < begin + len(atoms))] - begin
        n_edges += len(edges_within(atoms.positions, atoms.cell.array, atoms.pbc, CUTOFF, own).receiver)
        begin += len(atoms)
    assert nearby.placed.row[: len(mine)].tolist() == mine.tolist()
    assert nearby.blocks(CUTOFF, 100).n_edges == n_edges


def test_a_rank_without_atoms_has_one_block_without_edges():
    nearby, _, _ = nearby_of(["triclinic"], lambda n: np.zeros(n, bool))
    blocks = nearby.blocks(CUTOFF, 100)
    assert blocks.bounds == [(0, 0)] and blocks.n_edges == 0 and not len(blocks.edges(0).senders)


def test_cut():
    assert cut(np.array([3, 5, 5, 30, 31]), 5) == [(0, 3), (3, 4), (4, 5)]
    assert cut(np.array([0, 0]), 5) == [(0, 2)]
    assert cut(np.array([], int), 5) == [(0, 0)]


def test_block_size():
    from nvdd import DomainConfig

    assert block_size(DomainConfig().edges_at_once) == block_size(DomainConfig(recompute=True).edges_at_once) == EDGES_AT_ONCE
    assert block_size(DomainConfig(max_edges_per_chunk=7).edges_at_once) == 7
