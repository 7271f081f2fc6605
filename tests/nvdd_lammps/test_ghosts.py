"""The map of ghosts, for random owners, images and lists, on 1 to 4 ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvdd.communicator import Communicator
from nvdd.errors import CommunicationError, InputError
from nvdd_lammps.ghosts import GhostMap, _find

RANKS = (1, 2, 3, 4)


def subdomain(seed: int, size: int, rank: int) -> dict[str, Any]:
    """Atoms of one rank: random owners (some ranks may have none), lists in random order, ghosts with several images."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 30))
    tags = rng.choice(10**9, n, replace=False) + 1
    owner = rng.integers(0, size if seed % 3 else max(1, size - 1), n)
    listed = rng.random(n) < 0.8  # the others are of a type that this model doesn't compute
    mine = np.random.default_rng((seed, rank))
    own = mine.permutation(np.flatnonzero(owner == rank))
    ghosts = mine.choice(n, int(mine.integers(0, 60)))  # the same atom several times: images; own atoms too
    index = np.concatenate([own, ghosts])
    list_atoms = mine.permutation(np.flatnonzero(listed[own]))
    neighbors = np.flatnonzero(listed[index] & (mine.random(len(index)) < 0.9))
    return {"index": index, "tags": tags[index], "listed": listed, "owner": owner, "n_local": len(own), "list": list_atoms, "neighbors": neighbors}


def check_on_rank(comm: Communicator, seeds: range) -> int:
    """Makes the map in three ways, and lets owners and ghosts compare ids."""
    most = 0
    for seed in seeds:
        sub = subdomain(seed, comm.size, comm.rank)
        rows = comm.all_gather_object(sub["index"][sub["list"]].tolist())
        place = {atom: (rank, row) for rank, atoms in enumerate(rows) for row, atom in enumerate(atoms)}
        there = np.array([place.get(int(atom), (-1, -1)) for atom in sub["index"]]).reshape(-1, 2)
        all_ghosts = GhostMap.by_tags(comm, sub["tags"], sub["list"], sub["n_local"], None)
        some = GhostMap.by_tags(comm, sub["tags"], sub["list"], sub["n_local"], sub["neighbors"])
        told = GhostMap.by_owners(comm, there[:, 0], there[:, 1], sub["list"], sub["n_local"])
        np.testing.assert_array_equal(all_ghosts.row_of_atom, told.row_of_atom)
        np.testing.assert_array_equal(all_ghosts.atom_of_row, told.atom_of_row)
        for ghosts in (all_ghosts, some, told):
            ghosts.verify(sub["tags"])
            assert ghosts.n_owned == max(1, len(sub["list"])) and ghosts.n_phantom == (not len(sub["list"]))
            if comm.size == 1:
                assert ghosts.plan.n_halo == 0
        if len(sub["list"]):
            wanted = np.union1d(sub["neighbors"], sub["list"])
            assert (some.row_of_atom[wanted] >= 0).all()
            np.testing.assert_array_equal(sub["tags"][some.atom_of_row[some.row_of_atom[wanted]]], sub["tags"][wanted])
            assert len(np.unique(sub["tags"][some.atom_of_row])) == len(some.atom_of_row), "one row an atom"
        else:
            assert (some.row_of_atom < 0).all() and some.plan.n_halo == 0
        most = max(most, all_ghosts.plan.n_halo)
    return most


@pytest.mark.parametrize("world_size", RANKS)
def test_random(ranks, world_size):
    halo = ranks.run(world_size, check_on_rank, range(40))
    assert (max(halo) > 3) == (world_size > 1)


def wrong_on_rank(comm: Communicator) -> str:
    sub = subdomain(1, comm.size, comm.rank)
    ghosts = GhostMap.by_tags(comm, sub["tags"], sub["list"], sub["n_local"], None)
    assert ghosts.plan.n_halo
    try:
        ghosts.verify(sub["tags"] + comm.rank)  # not what the owners say
    except CommunicationError as error:
        return str(error)
    return ""


def test_a_wrong_map_is_found(ranks):
    assert all("the map of ghosts is wrong" in text for text in ranks.run(2, wrong_on_rank))


def twins_on_rank(comm: Communicator) -> None:
    """Atom 7 is on the first and on the last rank."""
    tags = np.array([7 if comm.rank in (0, comm.size - 1) else 70 + comm.rank, 100 + comm.rank])
    if comm.size == 1:
        tags[1] = 7
    GhostMap.by_tags(comm, tags, np.array([1, 0]), 2, None)


@pytest.mark.parametrize("world_size", (1, 3))
def test_ids_must_be_distinct(ranks, world_size):
    with pytest.raises(InputError, match="two atoms have the id 7: ids must be distinct"):
        ranks.run(world_size, twins_on_rank)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 20), unique=True), st.lists(st.integers(0, 20)))
def test_find(values, wanted):
    array = np.array(values, np.int64)
    found = _find(array, np.argsort(array, kind="stable"), np.array(wanted, np.int64))
    assert found.tolist() == [values.index(w) if w in values else -1 for w in wanted]
