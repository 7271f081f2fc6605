"""Edges against all pairs and images; those of some receivers are those of all with such a receiver."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from ase import Atoms

from nvdd import Batch, neighbors
from nvdd.neighbors import attach_neighbors, edges_within, is_first_of_pair
from structures import structure

STRUCTURES = ("triclinic", "left-handed", "unwrapped", "slab", "wire", "tiny cell", "gas", "pair", "atom")
CUTOFF = 6.0


def keys(edges) -> set[tuple[int, ...]]:
    found = [(int(i), int(j), *map(int, s)) for i, j, s in zip(*edges, strict=True)]
    assert len(set(found)) == len(found), "an edge comes twice"
    return set(found)


def all_pairs(atoms) -> set[tuple[int, ...]]:
    """Every pair and image whose distance is below the cutoff, by trying far more than needed."""
    x, cell = atoms.positions, atoms.cell.array
    spread = np.ptp(x, axis=0).max()
    reach = [
        int((CUTOFF + spread) / np.linalg.norm(v) * 1.5) + 2 if p else 0 for v, p in zip(cell, atoms.pbc, strict=True)
    ]
    out = set()
    for image in product(*(range(-n, n + 1) for n in reach)):
        r = np.linalg.norm(x[None] + np.array(image) @ cell - x[:, None], axis=2)
        out |= {(int(i), int(j), *image) for i, j in np.argwhere(r < CUTOFF) if i != j or any(image)}
    return out


@pytest.mark.parametrize("name", STRUCTURES)
def test_all_pairs_and_images(name):
    atoms = structure(name)[:20]  # of an unwrapped structure they are many cells apart
    found = keys(edges_within(atoms.positions, atoms.cell.array, atoms.pbc, CUTOFF))
    assert found == all_pairs(atoms)
    assert found or name == "atom"


@pytest.mark.parametrize("name", STRUCTURES)
def test_of_some_receivers(name):
    atoms = structure(name)
    geometry = atoms.positions, atoms.cell.array, atoms.pbc, CUTOFF
    whole = keys(edges_within(*geometry))
    owner = np.random.default_rng(2).integers(0, 3, len(atoms))
    for rank in range(3):
        mine = np.flatnonzero(owner == rank)
        assert keys(edges_within(*geometry, mine)) == {key for key in whole if owner[key[0]] == rank}


@pytest.mark.parametrize("name", ("triclinic", "left-handed", "unwrapped", "slab", "wire"))
def test_of_some_receivers_within_a_long_cutoff(name, monkeypatch):
    """Where most points are surroundings, pairs are looked for in blocks of receivers; they are the same pairs."""
    searched = []
    blocks = neighbors._search_in_blocks
    monkeypatch.setattr(neighbors, "_MANY", 0)
    monkeypatch.setattr(neighbors, "_search_in_blocks", lambda *args: searched.append(1) or blocks(*args))
    atoms = structure(name)
    geometry = atoms.positions, atoms.cell.array, atoms.pbc, 15.0
    whole = keys(edges_within(*geometry))
    mine = np.arange(1, len(atoms), 7)
    found = edges_within(*geometry, mine)
    assert searched and keys(found) == {key for key in whole if key[0] in mine}
    assert (np.diff(found.receiver) != 0).sum() == len(mine) - 1, "edges are grouped by receiver"


@pytest.mark.parametrize("name", STRUCTURES)
def test_one_edge_of_each_pair_is_the_first(name):
    atoms = structure(name)
    edges = edges_within(atoms.positions, atoms.cell.array, atoms.pbc, CUTOFF)
    first = is_first_of_pair(*edges)
    chosen = keys([a[first] for a in edges])
    reverse = {(j, i, -a, -b, -c) for i, j, a, b, c in chosen}
    assert not chosen & reverse
    assert chosen | reverse == keys(edges)


def test_of_a_cell_that_requires_a_gradient():
    batch = Batch.from_atoms(Atoms("Ar", cell=[3.0, 3.0, 3.0], pbc=True))
    batch.cell = batch.cell.clone().requires_grad_(True)
    assert len(attach_neighbors(batch, 3.5).neighbor_list) == 6
