"""The geometries show what they are for, on structures of every kind."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk, fcc111

from nvdd import Batch, SpatialPartitioner
from nvdd.neighbors import edges_within
from nvdd.validate.edges import reference_edges
from nvdd.validate.geometries import dynamics, make_cases, with_geometry

CUTOFF = 4.5


def _crystal() -> Atoms:
    atoms = bulk("Ar", "fcc", a=5.0, cubic=True).repeat(2)
    atoms.rattle(0.1, seed=1)
    return atoms


def _slab() -> Atoms:
    atoms = fcc111("Ar", (3, 3, 3), a=5.0, vacuum=None)
    atoms.pbc = (True, True, False)
    atoms.cell[2] = 0
    return atoms


def _cluster() -> Atoms:
    return Atoms(_crystal().numbers, _crystal().positions)


STRUCTURES = {"crystal": _crystal, "slab": _slab, "cluster": _cluster}


def cases(name: str, n_ranks: int = 2):
    return make_cases(Batch.from_atoms(STRUCTURES[name]()), n_ranks, seed=0)


@pytest.mark.parametrize("name", STRUCTURES)
def test_translation_keeps_every_distance(name):
    made, _ = cases(name)
    before, after = (reference_edges(made[k], CUTOFF) for k in ("as given", "translated"))
    assert sorted(map(tuple, before[:, :2].tolist())) == sorted(map(tuple, after[:, :2].tolist()))
    # and is no small one: images of edges differ
    if made["as given"].pbc.any():
        assert not np.array_equal(before[:, 2:], after[:, 2:])


@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize("name", STRUCTURES)
def test_a_rank_without_atoms_and_one_without_edges(name, n_ranks):
    made, chosen = cases(name, n_ranks)
    grid = next(c for c in chosen if c.name == "vacuum").domain["grid_dims"]

    def owners(key):
        batch = made[key]
        place = SpatialPartitioner(n_ranks, grid)
        return place.assign(batch.positions.numpy(), batch.cell[0].numpy(), batch.pbc[0].numpy())

    assert np.bincount(owners("a rank without atoms"), minlength=n_ranks).tolist()[1:] == [0] * (n_ranks - 1)
    apart = made["a rank without edges"]
    owner = owners("a rank without edges")
    assert owner[-1] == n_ranks - 1 and (owner == n_ranks - 1).sum() == 1
    last = edges_within(
        apart.positions.numpy(), apart.cell[0].numpy(), apart.pbc[0].numpy(), CUTOFF, np.array([len(owner) - 1])
    )
    assert len(last.receiver) == 0 and len(reference_edges(apart, CUTOFF)) > 0


def test_two_systems_differ_in_size_and_cell():
    made, _ = cases("crystal")
    batch = made["two systems"]
    assert batch.n_systems == 2 and batch.n_atoms == 2 * 32 - 1
    assert not np.allclose(batch.cell[0], batch.cell[1])


def test_inputs_are_changed_only_where_there_are_any():
    atoms = _crystal()
    assert "changed inputs" not in cases("crystal")[0]
    atoms.info["charge"] = 0.5
    atoms.set_array("weight", np.ones(len(atoms)))
    made, _ = make_cases(Batch.from_atoms(atoms), 2, seed=0)
    assert float(made["changed inputs"].charge[0]) != 0.5
    assert (made["changed inputs"].weight != 1).all()
    assert float(made["strained"].charge[0]) == 0.5


def test_dynamics_keeps_and_remakes_partitions():
    sample = Batch.from_atoms(_crystal())
    frames = dynamics(sample, lambda batch: np.ones(batch.positions.shape), 5, seed=0)
    assert list(frames)[-1] == "mirrored" and len(frames) == 6
    place = SpatialPartitioner(2)
    owners = [
        place.assign(f.positions.numpy(), f.cell[0].numpy(), f.pbc[0].numpy()) for f in (sample, *frames.values())
    ]
    assert any((a != b).any() for a, b in pairwise(owners))
    x = [sample.positions.numpy(), *(f.positions.numpy() for f in frames.values())][:-1]
    steps = [np.linalg.norm(b - a, axis=1).max() for a, b in pairwise(x)]
    assert max(steps) < 0.25 < sum(steps[:2])  # of a skin of 0.5 A: kept one step, then remade
    moved = with_geometry(sample, sample.positions + 1)
    assert moved.neighbor_list is None and moved.n_atoms == sample.n_atoms
