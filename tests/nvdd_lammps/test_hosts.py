"""What the three hosts are asked for, and how results go back; by stand-ins with the hosts' traps."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ase import Atoms

from lammps_data import FakeLammps, HostData, KokkosData, Subdomain, plugin_data
from nvdd.errors import InputError
from nvdd_lammps import hosts
from nvdd_lammps.ranks import AgreedError, Handle

ELEMENTS = ["Ar", "Ne"]
COMM = SimpleNamespace(rank=0, size=1, allgather=lambda value: [value])


@pytest.fixture(autouse=True)
def nothing_attached(monkeypatch):
    monkeypatch.setattr(hosts, "_attached", [])


@pytest.fixture
def sub():
    cell = [[6.0, 0, 0], [1.0, 7.0, 0], [-0.5, 0.7, 8.0]]
    atoms = Atoms("ArNeArNe", np.random.default_rng(0).uniform(0, 5, (4, 3)), cell=cell, pbc=(True, True, False))
    return Subdomain(atoms, ELEMENTS, 0, 1, 4.0, null=(2,))


@pytest.fixture
def nothing():
    return Subdomain(Atoms(cell=[9, 9, 9], pbc=True), ELEMENTS, 0, 1, 4.0)


@pytest.fixture
def mpi():
    return pytest.importorskip("mpi4py.MPI", reason="the stand-in's world is MPI's").COMM_WORLD


def all_hosts(sub, mpi):
    yield hosts.step_of(plugin_data(sub, mpi))
    hosts.attach(FakeLammps(sub, COMM))
    yield hosts.step_of(HostData(sub))
    yield hosts.step_of(KokkosData(sub, COMM))


def test_all_tell_the_same(sub, mpi):
    steps = list(all_hosts(sub, mpi))
    assert [step.kind for step in steps] == ["plugin", "ML-IAP", "Kokkos"]
    for step in steps:
        assert (step.n_list, step.n_local, step.n_total) == (3, 4, len(sub.x))
        np.testing.assert_array_equal(step.list_atoms(), sub.listed)
        np.testing.assert_array_equal(step.elements(), sub.elements)
        for mine, given in zip(step.pairs(), (sub.pair_i, sub.pair_j, sub.rij), strict=True):
            np.testing.assert_array_equal(mine, given)
        cell, periodic = step.cell()
        np.testing.assert_array_equal(cell, sub.cell)
        assert periodic.tolist() == [True, True, False]
        np.testing.assert_array_equal(step.positions(), sub.x)
        assert step.units == "metal" and step.charges() is None and step.world()[1:] == (0, 1)
        assert step.wants_atom_energies and step.sets_virial == (step.kind == "plugin")
    for step in steps[:2]:
        np.testing.assert_array_equal(step.tags(), sub.tags)


def test_no_atoms(nothing, mpi):
    """Properties that raise or are None are not asked for."""
    for step in all_hosts(nothing, mpi):
        assert [len(a) for a in step.pairs()] == [0, 0, 0] and step.pairs()[2].shape == (0, 3)
        assert len(step.list_atoms()) == len(step.elements()) == 0
        step.give_pair_forces(torch.zeros(0, 3, dtype=torch.float64))
        step.give_energy(0.0, torch.zeros(0, dtype=torch.float64))
        assert step.data.given["energy"] == 0.0, "LAMMPS would count the last step's again"


def test_energies_and_pair_forces_arrive(sub, mpi):
    fij = torch.randn(len(sub.pair_i), 3, dtype=torch.float64).T.contiguous().T  # not in C order
    energies = torch.arange(3.0, dtype=torch.float64)
    for step in all_hosts(sub, mpi):
        step.give_energy(3.0, energies)
        step.give_pair_forces(fij)
        given = step.data.given
        assert given["energy"] == 3.0 and given["eatoms"].tolist() == [0.0, 1.0, 2.0]
        expected = np.zeros((len(sub.x), 3))
        np.add.at(expected, sub.pair_i, fij.numpy())
        np.add.at(expected, sub.pair_j, -fij.numpy())
        np.testing.assert_allclose(given["f"], expected, atol=1e-14)
        step.give_energy(1.0, None)  # where LAMMPS wants none per atom
        assert given["energy"] == 1.0


def test_other_forces(sub, mpi):
    data = plugin_data(sub, mpi)
    told = []
    data.host.set_virial = told.append
    forces = np.arange(9.0).reshape(3, 3)
    strain = np.array([[1, 4, 5], [4, 2, 6], [5, 6, 3.0]])
    hosts.step_of(data).give_forces(forces, strain)
    np.testing.assert_array_equal(data.given["f"][sub.listed], forces)
    assert not np.delete(data.given["f"], sub.listed, axis=0).any()
    assert told[0].tolist() == [-1, -2, -3, -4, -5, -6], "LAMMPS: xx yy zz xy xz yz of sum r f"


def test_kokkos_owners(sub):
    step = hosts.step_of(KokkosData(sub, COMM))
    rank, row = step.owners(0)
    place = {int(sub.index[atom]): k for k, atom in enumerate(sub.listed)}
    assert row.tolist() == [place.get(int(i), -1) for i in sub.index]
    assert rank.tolist() == [0 if int(i) in place else -1 for i in sub.index]
    assert step.units is None, "nobody has told"
    cell, periodic = step.cell()
    assert not cell.any() and not periodic.any()


def test_without_a_lammps_object(sub):
    with pytest.raises(AgreedError, match=r"does not tell models the ids of its atoms(.|\n)*python nvdd_attach"):
        hosts.step_of(HostData(sub))


def test_world_of_the_plugin(sub, mpi):
    step = hosts.step_of(plugin_data(sub, mpi))
    assert step.world() == step.world() == Handle(step.host.world, 0, 1)


def test_lammps_constants_of_units():
    assert hosts.ENERGY_UNITS == {"metal": 1.0, "real": 23.060549}


def test_another_lammps_than_the_one_that_was_attached(sub):
    other = FakeLammps(sub, COMM)
    other.extract_setting = lambda name: {"nlocal": 17, "nall": 40}[name]
    hosts.attach(other)
    for data in (HostData(sub), KokkosData(sub, COMM)):
        with pytest.raises(InputError, match=rf"has 17 atoms and 40 with ghosts on this rank, the one that computes {sub.n_local} "):
            hosts.step_of(data).check()
