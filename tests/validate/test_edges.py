"""Halo completeness says which pairs are missing, too many or misplaced."""

from __future__ import annotations

import numpy as np
from ase import Atoms
from ase.build import bulk

from nvdd import Batch
from nvdd.validate.edges import check_edges, reference_edges

CUTOFF = 4.0


def _halves():
    atoms = bulk("Ar", "fcc", a=5.0, cubic=True).repeat(2)
    atoms.rattle(0.1, seed=1)
    batch = Batch.from_atoms(atoms)
    edges = reference_edges(batch, CUTOFF)
    mine = edges[:, 0] < 16
    return batch, edges, [edges[mine], edges[~mine]], [np.arange(16), np.arange(16, 32)]


def test_complete_in_any_order():
    batch, edges, parts, ids = _halves()
    found = check_edges("g", batch, CUTOFF, edges, [parts[0][::-1], parts[1]], ids)
    assert found.matches and found.by_rank == (len(parts[0]), len(parts[1])) and "complete" in str(found)


def test_missing_surplus_and_misplaced():
    batch, edges, parts, ids = _halves()
    missing = check_edges("g", batch, CUTOFF, edges, [parts[0][1:], parts[1]], ids)
    assert not missing.matches and missing.missing == [tuple(parts[0][0].tolist())] and "missing" in str(missing)
    twice = check_edges("g", batch, CUTOFF, edges, [np.concatenate([parts[0], parts[0][:1]]), parts[1]], ids)
    assert not twice.matches and len(twice.surplus) == 1 and not twice.missing
    swapped = check_edges("g", batch, CUTOFF, edges, parts[::-1], ids)
    assert not swapped.matches and len(swapped.misplaced) == len(edges)
    image = parts[0].copy()
    image[0, 2] += 1
    wrong = check_edges("g", batch, CUTOFF, edges, [image, parts[1]], ids)
    assert len(wrong.missing) == len(wrong.surplus) == 1


def test_an_edge_of_just_the_cutoff_may_be_rounded_out():
    batch = Batch.from_atoms(Atoms("Ar3", [[0, 0, 0], [CUTOFF * (1 - 1e-12), 0, 0], [0, 2.0, 0]]))
    edges = reference_edges(batch, CUTOFF)
    short = edges[(edges[:, :2] != 1).all(1)]
    assert len(short) < len(edges)
    assert check_edges("g", batch, CUTOFF, edges, [short], [np.arange(3)]).matches
