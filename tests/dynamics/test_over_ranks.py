"""Integrators and optimisers over ranks, against one process."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

import md
import one_process
import parity
from nvdd import CSVR, FIRE, FIRE2, LBFGS, NPH, NPT, NVE, Batch, DomainConfig, DomainParallel, Langevin, NoseHoover
from nvdd.communicator import Communicator

SKIN = {"skin": 0.6, "migration_hysteresis": 0.1}
DYNAMICS = {
    "NVE": NVE(4.0),
    "Langevin": Langevin(4.0, 120.0, 0.02, seed=3),
    "CSVR": CSVR(4.0, 100.0, tau=80.0, seed=3),
    "NoseHoover": NoseHoover(4.0, 100.0, tau=80.0),
    "NPH": NPH(4.0, 0.1, tau=300.0, mode="full"),
    "NPT": NPT(4.0, 100.0, 0.1, tau=80.0, tau_cell=300.0, mode="full"),
    "FIRE": FIRE(1e-9, "frechet"),
    "FIRE2": FIRE2(1e-9),
    "LBFGS": LBFGS(1e-9, "frechet", memory=10),
}


@cache
def start():
    return md.hot_argon((2, 3, 3))


@cache
def expected(name: str, steps: int):
    run = one_process.Simulation(start(), parity.wrapper("lj"), DYNAMICS[name])
    run.run(steps)
    return run.to_atoms()[0], run.conserved[0]


def compare(ranks, size: int, name: str, steps: int) -> None:
    parts = ranks.run(size, md.run_on_rank, "lj", start(), DYNAMICS[name], steps, SKIN, timeout=1200.0)
    atoms, conserved = expected(name, steps)
    assert np.abs(parts[0]["positions"] - atoms.positions).max() < 1e-8
    assert np.abs(atoms.positions - start().positions).max() > 0.01
    for part in parts:  # the cell is the same on every rank to the last bit
        assert (part["cell"] == parts[0]["cell"]).all()
    assert np.abs(parts[0]["cell"][0] - atoms.cell.array).max() < 1e-9
    assert parts[0]["conserved"][0] == pytest.approx(conserved, abs=1e-9)


@pytest.mark.parametrize("name", DYNAMICS)
def test_trajectory_is_that_of_one_process(ranks, name):
    compare(ranks, 3, name, 25)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", DYNAMICS)
def test_trajectory_of_200_steps_is_that_of_one_process(ranks, name, size):
    compare(ranks, size, name, 200)


OF_MACE = {"NVE": NVE(0.5), "FIRE": FIRE(1e-9), "FIRE2": FIRE2(1e-9), "LBFGS": LBFGS(1e-9)}


@cache
def displaced_quartz():
    """Near a minimum: far from one, L-BFGS makes large differences of rounding, ASE's as well."""
    run = one_process.Simulation(parity.structure("quartz"), parity.wrapper("mace-zbl"), LBFGS(1e-6))
    assert run.run(3000)
    atoms = run.to_atoms()[0]
    atoms.rattle(0.02, seed=1)
    atoms.set_velocities(np.random.default_rng(0).normal(scale=0.01, size=(len(atoms), 3)))
    return atoms


@cache
def quartz_alone(name: str):
    run = one_process.Simulation(displaced_quartz(), parity.wrapper("mace-zbl"), OF_MACE[name])
    run.run(200)
    return run.to_atoms()[0]


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", OF_MACE)
def test_mace_of_200_steps_is_that_of_one_process(ranks, name, size):
    before, after = displaced_quartz(), quartz_alone(name)
    parts = ranks.run(size, md.run_on_rank, "mace-zbl", before, OF_MACE[name], 200, {}, timeout=1200.0)
    assert np.abs(parts[0]["positions"] - after.positions).max() < 1e-8
    assert np.abs(after.positions - before.positions).max() > 0.01


@pytest.mark.parametrize("name", ["NVE", "Langevin"])
def test_several_systems_over_ranks(ranks, name):
    """Each is divided among the ranks by itself, and its atoms move between them."""
    systems = [md.hot_argon((2, 2, 2)), md.hot_argon((3, 2, 2), 200.0, seed=7), md.hot_argon((2, 2, 3), seed=8)]
    steps, options = 20, {"skin": 0.4, "migration_hysteresis": 0.0}
    alone = one_process.Simulation(systems, parity.wrapper("lj"), DYNAMICS[name])
    alone.run(steps)
    parts = ranks.run(2, md.run_on_rank, "lj", systems, DYNAMICS[name], steps, options)
    assert all(part["migrated"] > 0 and part["builds"] > 1 for part in parts)
    expected = alone.to_atoms()
    positions = np.concatenate([atoms.positions for atoms in expected])
    velocities = np.concatenate([atoms.get_velocities() for atoms in expected])
    assert np.abs(parts[0]["positions"] - positions).max() < 1e-8
    assert np.abs(parts[0]["velocities"] - velocities).max() < 1e-8
    for part in parts:
        np.testing.assert_allclose(part["conserved"], alone.conserved, rtol=0, atol=1e-9)


def volumes_on_rank(comm: Communicator, dynamics: NPT, steps: int) -> list[float]:
    """Runs on each rank: the volume after each step."""
    run = DomainParallel(dynamics, parity.wrapper("lj"), DomainConfig(mesh=comm, **SKIN))
    run.partition(Batch.from_atoms(start()) if comm.rank == 0 else None)
    volumes = []
    for _ in range(steps):
        run.step()
        volumes.append(float(run.state.volume))
    return volumes


@pytest.mark.parametrize("steps", [60, pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])])
@pytest.mark.parametrize("mode", ["iso", "full"])
def test_volumes_of_four_ranks_are_those_of_one(ranks, mode, steps):
    """To 1e-9 at each of the steps."""
    dynamics = NPT(2.0, 60.0, 0.1, tau=100.0, tau_cell=300.0, mode=mode)
    four = np.array(ranks.run(4, volumes_on_rank, dynamics, steps, timeout=1200.0))
    one = np.array(ranks.run(1, volumes_on_rank, dynamics, steps, timeout=1200.0)[0])
    assert (four == four[0]).all()
    assert np.abs(four[0] / one - 1).max() < 1e-9
    assert np.ptp(one) > 1e-3 * one[0]
