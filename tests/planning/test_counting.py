"""Counts by periodicity against the partition and the edges of a run on the structure that is built."""

from __future__ import annotations

import time

import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk

from nvdd.errors import InputError
from nvdd.index_partition import IndexPartitioner
from nvdd.neighbors import edges_within
from nvdd.partition import SpatialPartitioner
from nvdd.planning import counting
from nvdd.planning.counting import LoadCounter
from nvdd.planning.tiles import TiledStructure

SKIN = 0.5


def argon(stdev: float = 0.3) -> Atoms:
    atoms = bulk("Ar", "fcc", a=5.26, cubic=True)
    atoms.rattle(stdev, seed=1)
    return atoms


def triclinic() -> Atoms:
    """Unwrapped too."""
    atoms = argon()
    atoms.set_cell(atoms.cell.array @ np.array([[1, 0.1, 0.05], [-0.08, 1, 0.2], [0.3, 0, 1.0]]), scale_atoms=True)
    atoms.positions += np.array([[2, -1, 3], [0, 0, 0], [1, 1, 1], [-4, 0, 0]]) @ atoms.cell.array
    return atoms


def slab() -> Atoms:
    atoms = argon().repeat((1, 1, 2))
    atoms.pbc = (True, True, False)
    return atoms


def cluster() -> Atoms:
    atoms = argon().repeat((3, 3, 4))
    return Atoms(atoms.numbers, atoms.positions)


CASES = {
    "ortho": (argon(), (7, 5, 6)),
    "perfect": (argon(0.0), (6, 6, 6)),  # atoms on the faces of domains
    "triclinic": (triclinic(), (5, 6, 4)),
    "slab": (slab(), (6, 7, 1)),
    "cluster": (cluster(), (1, 1, 1)),
    "thinner than the cutoff": (argon(), (2, 1, 3)),
    "one cell": (argon(), (1, 1, 1)),
}


def of_run(atoms: Atoms, owner: np.ndarray, n_ranks: int, cutoff: float) -> tuple[np.ndarray, ...]:
    """Owned atoms, halo rows and edges of each rank, from the searches that ranks make."""
    x, cell = atoms.positions, atoms.cell.array
    halo, n_edges = [], []
    for rank in range(n_ranks):
        edges = edges_within(x, cell, atoms.pbc, cutoff + SKIN, np.flatnonzero(owner == rank))
        vectors = x[edges.sender] - x[edges.receiver] + edges.shift @ cell
        halo.append(len(np.unique(edges.sender[owner[edges.sender] != rank])))
        n_edges.append(int(((vectors**2).sum(1) < cutoff**2).sum()))
    return np.bincount(owner, minlength=n_ranks), np.array(halo), np.array(n_edges)


@pytest.mark.parametrize("n_ranks", (1, 2, 3, 4, 8, 12, 30))
@pytest.mark.parametrize("case", CASES)
def test_domains_are_those_of_a_run(case, n_ranks):
    cell, repeat = CASES[case]
    whole = cell.repeat(repeat)
    for cutoff in (4.5, 9.0):
        counter = LoadCounter(TiledStructure.of(cell, repeat), cutoff, SKIN)
        for balance in ("grid", "auto", "rcb"):
            loads = counter.domains(n_ranks, balance=balance)
            owner = SpatialPartitioner(n_ranks, balance=balance).assign(whole.positions, whole.cell.array, whole.pbc)
            for counted, of_a_run in zip((loads.owned, loads.halo, loads.edges), of_run(whole, owner, n_ranks, cutoff), strict=True):
                np.testing.assert_array_equal(counted, of_a_run)


@pytest.mark.parametrize("plan", ("curve", "blocks"))
@pytest.mark.parametrize("case", ("triclinic", "slab", "one cell"))
def test_parts_of_the_list_are_those_of_a_run(case, plan):
    cell, repeat = CASES[case]
    whole = cell.repeat(repeat)
    loads = LoadCounter(TiledStructure.of(cell, repeat), 4.5, SKIN).parts_of_list(5, plan)
    everything = [np.arange(len(whole))]
    owner = IndexPartitioner(5, plan).divide(whole.positions, whole.cell.array[None], whole.pbc[None], everything)
    owned, halo, edges = of_run(whole, owner, 5, 4.5)
    np.testing.assert_array_equal(loads.owned, owned)
    np.testing.assert_array_equal(loads.edges, edges)
    reads_all = np.where(owned > 0, len(whole) - owned, 0)
    np.testing.assert_array_equal(loads.halo, halo if plan == "curve" else reads_all)


def test_a_given_grid():
    cell, repeat = CASES["triclinic"]
    whole = cell.repeat(repeat)
    loads = LoadCounter(TiledStructure.of(cell, repeat), 6.0, SKIN).domains(6, grid=(1, 2, 3))
    owner = SpatialPartitioner(6, (1, 2, 3)).assign(whole.positions, whole.cell.array, whole.pbc)
    np.testing.assert_array_equal(loads.halo, of_run(whole, owner, 6, 6.0)[1])
    assert loads.grid == (1, 2, 3)


def test_a_hundred_million_atoms_on_4096_ranks():
    silicon = bulk("Si", "diamond", a=5.43, cubic=True)
    start = time.process_time()
    loads = LoadCounter(TiledStructure.of(silicon, (233, 233, 233)), 6.0, SKIN).domains(4096)
    assert time.process_time() - start < 30
    assert loads.owned.sum() == 8 * 233**3 and len(loads.halo) == 4096
    # volumes within reach of boxes of 14 and 15 cells; of layers a quarter of a cell apart, four are nearer than 6.5 A
    around = lambda a, reach: 6 * a**2 * reach + 3 * np.pi * a * reach**2 + 4 / 3 * np.pi * reach**3
    density = 8 / 5.43**3
    assert density * around(14 * 5.43, 5.43) < loads.halo.min()
    assert loads.halo.max() < density * around(15 * 5.43, 6.5)


def test_what_is_not_counted_is_refused(monkeypatch):
    monkeypatch.setattr(counting, "MOST_BUILT", 100)
    counter = LoadCounter(TiledStructure.of(argon(), (4, 4, 4)), 4.5, SKIN)
    with pytest.raises(InputError, match="by bisection, which is counted up to 100 atoms; these are 256"):
        counter.domains(4, balance="rcb")
    with pytest.raises(InputError, match="strategy 'graph'"):
        counter.parts_of_list(4)
    assert counter.domains(4).how == "grid"
