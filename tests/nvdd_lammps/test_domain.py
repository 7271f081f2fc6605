"""When the map of ghosts is made anew, and what must change without that; on one rank, by stand-ins."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ase import Atoms

import bond_models
from lammps_data import FakeLammps, HostData, KokkosData, Subdomain, plugin_data
from nvdd.communicator import Communicator
from nvdd.errors import CommunicationError, InputError
from nvdd_lammps import NVDDUnified, hosts
from nvdd_lammps.bond_rows import BondRows
from nvdd_lammps.domain import Domain
from nvdd_lammps.ranks import AgreedError

ELEMENTS = ["Ar", "Ne"]
COMM = SimpleNamespace(rank=0, size=1, allgather=lambda value: [value])


def subdomain(n: int = 5, **options) -> Subdomain:
    x = np.random.default_rng(1).uniform(0, 6, (6, 3))[:n]
    return Subdomain(Atoms("ArNeArNeArAr"[: 2 * n], x, cell=[6, 6, 7], pbc=True), ELEMENTS, 0, 1, 4.0, **options)


@pytest.fixture
def domain():
    return Domain(Communicator(None), [18, 10], positions=False, charges=())


@pytest.fixture(autouse=True)
def attached(monkeypatch):
    monkeypatch.setattr(hosts, "_attached", [])


def plugin(sub: Subdomain, generation: int = 1, **host):
    data = plugin_data(sub, pytest.importorskip("mpi4py.MPI", reason="the stand-in's world is MPI's").COMM_WORLD, generation=generation)
    vars(data.host).update(host)
    return hosts.step_of(data)


def python(sub: Subdomain):
    hosts.attach(FakeLammps(sub, COMM))
    return hosts.step_of(HostData(sub))


def kokkos(sub: Subdomain):
    return hosts.step_of(KokkosData(sub, COMM))


def test_the_plugins_generation(domain):
    sub = subdomain()
    for generation, builds in ((1, 1), (1, 1), (2, 2), (3, 3), (3, 3)):
        domain.update(plugin(sub, generation))
        assert domain.n_builds == builds


@pytest.mark.parametrize("step", (python, kokkos))
def test_evidence(domain, step):
    """Equal numbers of atoms, ghosts and pairs prove nothing: another order of the same atoms is another map."""
    sub = subdomain()
    for _ in range(2):
        domain.update(step(sub))
    assert domain.n_builds == 1
    ghosts = np.arange(sub.n_local, len(sub.x))
    order = np.concatenate([np.arange(sub.n_local), np.roll(ghosts, 1)])
    other = subdomain()
    place = np.argsort(order)
    other.index, other.x, other.tags, other.elements = (a[order] for a in (sub.index, sub.x, sub.tags, sub.elements))
    other.pair_i, other.pair_j = place[sub.pair_i].astype(np.int32), place[sub.pair_j].astype(np.int32)
    _, before = domain.update(step(sub))
    _, after = domain.update(step(other))
    assert domain.n_builds == 2
    np.testing.assert_array_equal(before.pair, after.pair)
    listed = subdomain()
    listed.listed = sub.listed[::-1].copy()
    domain.update(step(listed))
    assert domain.n_builds == 3


def test_types_change_without_a_new_list(domain):
    """As fix atom/swap does."""
    sub = subdomain()
    batch, _ = domain.update(plugin(sub))
    assert batch.atomic_numbers.tolist() == [18 - 8 * (sub.elements[a]) for a in sub.listed]
    sub.elements = 1 - sub.elements
    swapped, graph = domain.update(plugin(sub))
    assert swapped.atomic_numbers.tolist() == [28 - z for z in batch.atomic_numbers.tolist()]
    assert graph.topology.atomic_numbers.tolist() == swapped.atomic_numbers.tolist()
    assert domain.n_builds == 1


def test_atoms_come_and_go(domain):
    for generation, n in enumerate((5, 6, 3, 0, 4)):
        sub = subdomain(n)
        batch, graph = domain.update(plugin(sub, generation))
        assert graph.topology.ids.numel() == n and graph.topology.n_phantom == (n == 0)
        assert len(batch.atomic_numbers) == max(n, 1) and graph.vectors.shape == sub.rij.shape
        assert graph.topology.atoms_per_system.tolist() == [n]


def test_nothing_old_is_used_after_a_failure(domain):
    domain.update(plugin(subdomain()))
    broken = subdomain()
    broken.tags[:] = 1
    for _ in range(2):
        with pytest.raises(InputError, match="two atoms have the id 1"):
            domain.update(plugin(broken, 2))
    domain.update(plugin(subdomain(), 2))
    assert domain.n_builds == 2


def test_refused(domain):
    sub = subdomain()
    with pytest.raises(AgreedError, match="atoms have no ids"):
        domain.update(plugin(sub, tags=None))
    sub.elements[sub.listed[0]] = -1
    with pytest.raises(InputError, match="of a type that pair_coeff maps to NULL"):
        domain.update(plugin(sub, 2))
    hidden = subdomain(null=(1,))
    hidden.pair_j[0] = np.flatnonzero(hidden.index == 1)[0]
    with pytest.raises(CommunicationError, match="name an atom that no rank has"):
        domain.update(plugin(hidden, 3))
    with pytest.raises(AgreedError, match="use atom_style charge"):
        Domain(Communicator(None), [18, 10], False, ["charges"]).update(plugin(subdomain()))


def test_images_are_whole_cell_vectors():
    domain = Domain(Communicator(None), [18, 10], positions=True, charges=())
    sub = subdomain()
    batch, graph = domain.update(plugin(sub))
    x = batch.positions.numpy()
    receiver, sender = graph.pair.numpy()
    np.testing.assert_allclose(x[sender] + graph.shift.numpy() @ sub.cell - x[receiver], sub.rij, atol=1e-12)
    sub.x[-1] += 0.1
    with pytest.raises(CommunicationError, match="away from every periodic image"):
        domain.update(plugin(sub, 2))


def test_bonds_are_found_again_when_a_far_pair_comes_near():
    """Pairs that were no candidates when LAMMPS made its list; in between nothing is searched."""
    domain = Domain(Communicator(None), [18, 10], positions=False, charges=(), bonds=2.0)
    step = plugin(subdomain())
    _, graph = domain.update(step)
    rows = domain._bond_rows
    i, j, vectors = (torch.from_numpy(np.array(a)) for a in step.pairs())
    searched = []
    rows._find = lambda *args: (searched.append(1), BondRows._find(rows, *args))
    for scale, n_searches in ((1.0, 0), (0.9, 0), (0.45, 1), (0.5, 1), (1.0, 1)):
        found = rows.update(i, j, graph.pair, scale * vectors)
        afresh = BondRows(domain.ghosts.plan, rows.images, 2.0).update(i, j, graph.pair, scale * vectors)
        assert len(searched) == n_searches
        assert torch.equal(found.at, (scale * vectors.norm(dim=1) < 2.0).nonzero().squeeze(1)) and len(found.at) > 0
        for name in ("at", "reverse", "first", "bond_of_edge", "edge_of_bond"):
            assert torch.equal(getattr(found, name), getattr(afresh, name)), name
        torch.testing.assert_close(vectors[found.at][found.reverse], -vectors[found.at], rtol=0, atol=1e-12)


def test_an_edge_without_its_reverse_is_none():
    """At the very end of the cutoff ghosts are nearer at one end than at the other, by rounding."""
    step = plugin(subdomain())
    i, j, vectors = (torch.from_numpy(np.array(a)) for a in step.pairs())
    length = vectors.norm(dim=1)
    one = int((length - 2.0).abs().argmin())
    cutoff = float(length[one]) * (1 + 1e-14)  # both of the pair are inside, by little
    domain = Domain(Communicator(None), [18, 10], positions=False, charges=(), bonds=cutoff)
    _, graph = domain.update(step)
    for factor, lost in ((1.0, 0), (1 + 1e-13, 1)):
        vectors[one] *= factor
        rows = domain._bond_rows.update(i, j, graph.pair, vectors)
        edges = replace(graph, vectors=vectors, edge_rows=rows).within(cutoff, cutoff)
        assert len(edges.vectors) == int((vectors.norm(dim=1) < cutoff).sum()) - lost > 0
        torch.testing.assert_close(edges.vectors[edges.edge_rows.reverse], -edges.vectors, rtol=0, atol=1e-11)


def test_bonds_need_to_know_images(domain):
    """Kokkos' hosts don't tell of which image of an atom a ghost is."""
    unified = NVDDUnified(bond_models.ShortBonds(), {"elements": ELEMENTS})
    with pytest.raises(AgreedError, match=r"keeps features on bonds.*Kokkos does not tell"):
        unified.compute_forces(KokkosData(subdomain(), COMM))
