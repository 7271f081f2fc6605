"""Uneven systems: right on any number of ranks, balanced where boxes of a grid are not, also as atoms move."""

from __future__ import annotations

import time

import numpy as np
import pytest
from ase import Atoms, units
from ase.build import bulk

import md
import parity
from nvdd import Batch, DomainConfig, DomainParallel
from nvdd.communicator import Communicator
from nvdd.dynamics.hooks import Callback


def slab_in_vacuum() -> Atoms:
    atoms = bulk("Ar", "fcc", a=5.3, cubic=True).repeat((3, 3, 2))
    atoms.rattle(0.1, seed=1)
    atoms.cell[2, 2] = 60.0
    return _warm(atoms, 40.0)


def cluster_in_gas() -> Atoms:
    ball = bulk("Ar", "fcc", a=5.3, cubic=True).repeat(3)
    ball.positions += 1.0
    rng = np.random.default_rng(2)
    gas = np.array([[15.0 * i, 15.0 * j, 15.0 * k] for i in range(4) for j in range(4) for k in range(4)]) + 3.0
    gas = gas[(gas > 22.0).any(1)] + rng.uniform(-1, 1, 3)
    return _warm(Atoms("Ar" * (len(ball) + len(gas)), [*ball.positions, *gas], cell=[60] * 3, pbc=True), 60.0)


def leaving(repeat=(2, 2, 2)) -> Atoms:
    """A cluster that flies from the first rank's half into the second's."""
    atoms = bulk("Ar", "fcc", a=5.3, cubic=True).repeat(repeat)
    atoms.positions += [8.0, 1.0, 1.0]
    atoms.set_cell([60, 14, 14])
    atoms.pbc = True
    atoms.set_velocities(np.tile([0.05 / units.fs, 0, 0], (len(atoms), 1)))
    return atoms


def _warm(atoms: Atoms, temperature: float) -> Atoms:
    spread = np.sqrt(units.kB * temperature / atoms.get_masses())[:, None]
    atoms.set_velocities(spread * np.random.default_rng(4).normal(size=(len(atoms), 3)))
    return atoms


def load(parts) -> float:
    owned = np.array([part["now"] for part in parts])
    return owned.max() / owned.mean()


@pytest.mark.parametrize("make", [slab_in_vacuum, cluster_in_gas])
def test_uneven_systems(ranks, make):
    atoms = make()
    grids = {"balance": "grid", "grid_dims": (1, 1, 4) if make is slab_in_vacuum else (2, 2, 1)}
    single = ranks.run(1, md.run_on_rank, "lj", atoms, md.Verlet(4.0), 30, {})
    grid = ranks.run(4, md.run_on_rank, "lj", atoms, md.Verlet(4.0), 30, grids)
    rcb = ranks.run(4, md.run_on_rank, "lj", atoms, md.Verlet(4.0), 30, {"balance": "rcb"})
    assert load(grid) > 2.0 and load(rcb) <= 1.1
    for parts in (grid, rcb):
        assert np.abs(parts[0]["positions"] - single[0]["positions"]).max() < 1e-9


def test_planes_move_and_the_trajectory_stays(ranks):
    """A cluster leaves one domain for another; without a move of the planes one rank is emptied."""
    atoms, steps = leaving(), 120
    fixed = ranks.run(2, md.run_on_rank, "lj", atoms, md.Verlet(4.0), steps, {"grid_dims": (2, 1, 1)})
    assert sorted(part["now"] for part in fixed) == [0, len(atoms)]
    options = {"balance": "rcb", "rebalance_every": 10, "migration_hysteresis": 0.0}
    moved = ranks.run(2, md.run_on_rank, "lj", atoms, md.Verlet(4.0), steps, options)
    assert moved[0]["rebalanced"] > 0
    assert load(moved) <= 1.1
    single = ranks.run(1, md.run_on_rank, "lj", atoms, md.Verlet(4.0), steps, {})
    for parts in (fixed, moved):
        assert np.abs(parts[0]["positions"] - single[0]["positions"]).max() < 1e-9


def works_on_rank(comm: Communicator, steps: int, by: str | None):
    """Runs on each rank, whose work takes time in proportion to its atoms."""
    works = Callback(lambda run, seen: time.sleep(4e-4 * run.batch.n_owned), scope="local")
    options = {"balance": "rcb", "migration_hysteresis": 0.0}
    if by is not None:
        options |= {"rebalance_every": 5, "balance_by": by}
    return md.run_on_rank(comm, "lj", leaving((3, 2, 2)), md.Verlet(4.0), steps, options, [works])


def test_planes_move_by_time(ranks):
    """The cluster moves by more than its width; planes that stand still leave all atoms to one rank."""
    assert load(ranks.run(2, works_on_rank, 80, None)) > 1.9
    assert load(ranks.run(2, works_on_rank, 80, "time")) < 1.7


def test_the_first_load_is_the_time_since_the_atoms_came():
    loads = []
    config = DomainConfig(mesh=Communicator(None), balance_by="time", migration_hysteresis=0.0)
    run = DomainParallel(md.Verlet(4.0), parity.wrapper("lj"), config)
    began = time.perf_counter()
    run.partition(Batch.from_atoms(leaving()))
    run.migration.migrate = lambda state, load: loads.append(load)
    while not loads:
        run.step()
    assert 0.0 < loads[0] < time.perf_counter() - began


def test_a_rank_that_never_has_an_atom(ranks):
    atoms = parity.structure("pair").copy()
    parts = ranks.run(4, md.run_on_rank, "lj", atoms, md.Verlet(1.0), 5, {})
    single = ranks.run(1, md.run_on_rank, "lj", atoms, md.Verlet(1.0), 5, {})
    assert min(part["now"] for part in parts) == 0
    assert np.abs(parts[0]["positions"] - single[0]["positions"]).max() < 1e-12
