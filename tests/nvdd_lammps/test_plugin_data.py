"""ML-IAP's data object over the plugin's memory: views, and what is handed back."""

from __future__ import annotations

import numpy as np
import pytest

from lammps_step import Memory
from nvdd.errors import InputError


def test_arrays_are_views_of_what_lammps_has():
    memory = Memory()
    data = memory.data()
    for name in ["x", "types"]:
        assert np.shares_memory(getattr(data.host, name), getattr(memory, name.rstrip("s")))
    for name in ["f", "elems", "iatoms", "ielems", "pair_i", "pair_j", "rij"]:
        assert np.shares_memory(getattr(data, name), getattr(memory, name))
        assert np.array_equal(getattr(data, name), getattr(memory, name))
    assert np.array_equal(data.numneighs, [1, 2])
    assert np.array_equal(data.jelems, [-1, 0, 0])
    assert data.host.tags.dtype == np.int64 and data.host.tags.tolist() == [7, 3, 7]
    assert (data.nlocal, data.ntotal, data.nlistatoms, data.natomneigh, data.npairs) == (2, 3, 2, 2, 3)


def test_host():
    host = Memory().data().host
    assert (host.kind, host.units, host.me, host.nprocs, host.neigh_age, host.list_generation) == (
        "plugin",
        "metal",
        1,
        2,
        4,
        9,
    )
    lo, hi, xy, xz, yz, periodicity, triclinic = host.box()
    assert (lo.tolist(), hi.tolist()) == ([0, 1, 2], [10, 11, 12])
    assert (xy, xz, yz, periodicity, triclinic) == (0.5, -0.25, 0.125, (True, False, True), True)
    assert host.q is None and host.list_neighbors().tolist() == [0, 1, 2]
    assert Memory(tag=None).data().host.tags is None


def test_nothing_at_all():
    """A rank without atoms: arrays of no rows, and calls that do nothing."""
    data = Memory(nlocal=0, ntotal=0, nlistatoms=0, npairs=0, nlistneighbors=0, x=None, rij=None, pair_i=None).data()
    assert data.rij.shape == data.f.shape == (0, 3) and data.pair_i.shape == data.elems.shape == (0,)
    data.update_pair_forces(np.zeros((0, 3)))
    data.eatoms = np.zeros(0)
    data.energy = 0.0


def test_what_is_handed_back():
    memory = Memory()
    data = memory.data()
    data.energy = np.float32(1.5)
    data.eatoms = [1.0, 2.0]
    assert memory.step.energy == 1.5 and memory.step.eatoms_set and memory.eatoms.tolist() == [1, 2]
    forces = np.arange(9, dtype=np.float32).reshape(3, 3)
    data.update_pair_forces(np.asfortranarray(forces))
    assert np.array_equal(memory.calls["pair_forces"], forces)
    data.host.add_forces(np.ones((2, 3)))
    data.host.set_virial(np.arange(6))
    assert np.array_equal(memory.calls["add_virial"], np.arange(6)) and memory.calls["add_forces"].sum() == 6
    data.update_pair_energy([2.0, 4.0, 8.0])  # of atom 0 and atom 1, which the list has the other way round
    assert memory.eatoms.tolist() == [4, 3] and memory.step.energy == 7


def test_what_does_not_fit():
    data = Memory(want_vatom=1).data()
    for hand_back in (
        lambda: data.update_pair_forces(np.zeros((4, 3))),
        lambda: data.host.add_forces(np.zeros((3, 3))),
        lambda: data.update_pair_energy(np.zeros(2)),
        lambda: setattr(data, "eatoms", np.zeros(3)),
    ):
        with pytest.raises(InputError, match=r"of shape .* were handed to LAMMPS, where .* is expected"):
            hand_back()
    with pytest.raises(InputError, match="no virial per atom: take out the compute"):
        data.host.set_virial(np.zeros(6))
    for name in ("energy", "eatoms"):
        with pytest.raises(AttributeError):
            getattr(data, name)
