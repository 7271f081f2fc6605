"""Energies and forces of atoms that ranks own, against one process, for everything that the envelope promises."""

from __future__ import annotations

import numpy as np
import pytest

import md
import parity

NAMES = ["argon", "triclinic", "left-handed", "unwrapped", "slab", "wire", "tiny cell", "pair", "gas", "atom", "bar"]


GRID, RCB = {"skin": 0.0}, {"balance": "rcb", "skin": 1.0}


@pytest.mark.parametrize(
    ("size", "options"), [(1, GRID), (2, GRID), (3, GRID), (4, GRID), (3, RCB)], ids=["1", "2", "3", "4", "3 rcb"]
)
def test_every_structure(ranks, size, options):
    compare(ranks, size, "lj", NAMES, options)


IN_BLOCKS = ["triclinic", "unwrapped", "slab", "tiny cell", "pair", "atom", "bar"]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_edges_in_blocks(ranks, size):
    """D3, whose edges nobody lists: the atoms and images near a rank's own are found instead."""
    compare(ranks, size, "dftd3", IN_BLOCKS, {"skin": 1.0, "max_edges_per_chunk": 300} if size == 2 else {})


def compare(ranks, size, model, names, options):
    parts = ranks.run(size, md.evaluate_on_rank, model, names, options)
    for k, name in enumerate(names):
        expected = parity.reference(model, name)
        found = parity.assemble([part[k] for part in parts], len(expected.forces))
        assert abs(found.energy - expected.energy) <= 1e-12 * abs(expected.energy) + 1e-14, name
        limit = 1e-11 * np.abs(expected.forces).max() + 1e-14
        assert np.abs(found.forces - expected.forces).max() <= limit, name
        if found.stress is not None and expected.stress is not None:
            assert np.abs(found.stress - expected.stress).max() <= 1e-11 * np.abs(expected.stress).max() + 1e-14, name


OTHERS = ["Bonds", "ReverseEdges", "ShortBonds", "Equilibrated", "ComputedIds"]


@pytest.mark.parametrize("size", [2, 4])
def test_bonds_sharded_storage_and_several_systems(ranks, size):
    """Models with rows of edges, and with global ids: as with all atoms on every rank."""
    for parts in zip(*ranks.run(size, md.models_on_rank, OTHERS, ["triclinic", "tiny cell", "slab"]), strict=True):
        assert all(part["energy"] < 1e-12 and part["forces"] < 1e-11 for part in parts), parts


def test_a_list_beside_blocks(ranks):
    """MACE has a list of its own edges, and D3 none."""
    for part in ranks.run(3, md.models_on_rank, ["mace + d3"], ["quartz", "silica pair"]):
        assert all(found["energy"] < 1e-12 and found["forces"] < 1e-11 for found in part), part


def test_mace(ranks):
    for parts in zip(
        *ranks.run(3, md.models_on_rank, ["mace", "mace halo"], ["silica left-handed", "silica pair"]), strict=True
    ):
        assert all(part["energy"] < 1e-12 and part["forces"] < 1e-11 for part in parts), parts
