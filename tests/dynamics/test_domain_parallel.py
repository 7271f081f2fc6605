"""Trajectories over ranks, against ASE's integrator with one process."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from ase import units
from ase.md.verlet import VelocityVerlet

import md
import parity
from nvdd import FIRE, NPT, NVE, Batch, DomainConfig, DomainParallel, DynamicsState, InputError, ShardedBatch
from nvdd.communicator import Communicator
from nvdd.dynamics.hooks import Hook
from nvdd_ase import NVDDCalculator

STEPS, TIMESTEP = 200, 4.0


@cache
def reference(model: str):
    atoms = start(model).copy()
    with NVDDCalculator(parity.wrapper(model)) as calculator:
        atoms.calc = calculator
        VelocityVerlet(atoms, TIMESTEP * units.fs).run(STEPS)
        atoms.get_forces()
        atoms.calc = None
    return atoms


@cache
def start(model: str):
    return md.hot_argon()


SIZES = [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow), 4]


@pytest.mark.parametrize("size", SIZES)
def test_velocity_verlet_is_ase_s(ranks, size):
    """On 1 to 4 ranks with migrations: 200 steps to 1e-8 A."""
    parts = ranks.run(
        size, md.run_on_rank, "lj", start("lj"), md.Verlet(TIMESTEP), STEPS, {"skin": 0.6, "migration_hysteresis": 0.1}
    )
    expected = reference("lj")
    assert np.abs(parts[0]["positions"] - expected.positions).max() < 1e-8
    assert np.abs(parts[0]["velocities"] - expected.get_velocities()).max() < 1e-8
    assert parts[0]["evaluations"] == STEPS + 1
    assert all(part["steps"] == STEPS and part["builds"] < STEPS / 4 for part in parts)
    migrated = sum(part["migrated"] for part in parts)
    assert migrated > 10 if size > 1 else migrated == 0
    assert max(part["owned"] for part in parts) < 1.3 * len(expected) / size


def mesh_on_rank(comm: Communicator):
    """Two groups of two ranks: one relaxes while the other runs dynamics. ``comm`` has the same four ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "domain"))
    refused = []
    for config in (DomainConfig(mesh=mesh), DomainConfig()):
        try:
            DomainParallel(md.Verlet(4.0), parity.wrapper("lj"), config)
        except (InputError, ValueError) as error:
            refused.append(str(error))
    relaxes = mesh.get_local_rank("pipeline") == 0
    dynamics = FIRE(fmax=0.01) if relaxes else md.Verlet(4.0)
    run = DomainParallel(dynamics, parity.wrapper("lj"), DomainConfig(mesh=mesh, mesh_dim="domain"))
    run.partition(Batch.from_atoms(md.hot_argon((2, 2, 2))) if run.comm.rank == 0 else None)
    run.run(12 if relaxes else 20)
    rows = run.batch.gather_rows(["positions"])
    return relaxes, None if rows is None else rows["positions"].numpy(), run.comm.size, refused


def test_a_mesh_of_pipeline_and_domain(ranks):
    atoms = md.hot_argon((2, 2, 2))
    found = ranks.run(4, mesh_on_rank)
    expected = {
        True: ranks.run(1, md.run_on_rank, "lj", atoms, FIRE(fmax=0.01), 12, {})[0]["positions"],
        False: ranks.run(1, md.run_on_rank, "lj", atoms, md.Verlet(4.0), 20, {})[0]["positions"],
    }
    for relaxes, positions, size, refused in found:
        assert size == 2
        assert "name the one over which atoms are divided: mesh_dim=" in refused[0]
        assert "this process is one of 4 ranks, but no mesh is given" in refused[1]
        if positions is not None:
            assert np.abs(positions - expected[relaxes]).max() < 1e-9
    assert sum(positions is not None for _, positions, _, _ in found) == 2


def memory_on_rank(comm: Communicator):
    """The largest tensor (rows) that a rank but 0 has made while atoms came to it and went."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        rows = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dim() == 2 and out.shape[1] >= 3:
                self.rows = max(self.rows, out.shape[0])
            return out

    atoms = md.hot_argon((4, 4, 4))
    state = None
    if comm.rank == 0:
        velocities = torch.from_numpy(atoms.get_velocities())
        state = DynamicsState.from_batch(Batch.from_atoms(atoms), torch.from_numpy(atoms.get_masses()), velocities)
    with Largest() as largest:
        batch = ShardedBatch.scatter(state, comm)
        gathered = batch.gather()
    assert batch.n_global == len(atoms)
    if gathered is not None:
        np.testing.assert_array_equal(gathered.positions.numpy(), atoms.positions)
        np.testing.assert_allclose(gathered.to_atoms()[0].get_velocities(), atoms.get_velocities(), rtol=1e-14)
    return largest.rows, batch.n_owned


def test_no_rank_but_the_first_has_all_atoms(ranks):
    """256 atoms on 4 ranks: no tensor of atoms on ranks 1 to 3 is nearly so long."""
    for rows, owned in ranks.run(4, memory_on_rank)[1:]:
        assert owned == 64 and rows == 64


class Opens(Hook):
    """Counts, and fails the first time on one rank."""

    def __init__(self, fails_on: int | None = None) -> None:
        super().__init__(100)
        self.opened, self.called, self.fails_on = 0, 0, fails_on

    def open(self, run) -> None:
        self.opened += 1
        if run.comm.rank == self.fails_on and self.opened == 1:
            raise InputError("not yet")

    def __call__(self, run, seen) -> None:
        self.called += 1


def begins_twice_on_rank(comm: Communicator):
    hooks = [Opens(), Opens(fails_on=comm.size - 1)]
    run = DomainParallel(NVE(2.0), parity.wrapper("lj"), DomainConfig(mesh=comm), hooks)
    run.partition(Batch.from_atoms(md.hot_argon((2, 2, 2))) if comm.rank == 0 else None)
    with pytest.raises(InputError, match="not yet"):
        run.run(3)
    forces = run.state.forces.abs().max()
    run.run(3)
    rows = run.batch.gather_rows(["positions"])
    return float(forces), [(hook.opened, hook.called) for hook in hooks], rows and rows["positions"].numpy()


def test_a_run_that_could_not_begin_can_begin_again(ranks):
    """Nothing is computed with the forces of zero that atoms have before; hooks that are open stay open."""
    expected = ranks.run(1, md.run_on_rank, "lj", md.hot_argon((2, 2, 2)), NVE(2.0), 3, {})[0]["positions"]
    for size in (1, 2):
        found = ranks.run(size, begins_twice_on_rank)
        for forces, counts, _ in found:
            assert forces == 0.0 and counts == [(1, 1), (2, 1)]
        assert np.abs(found[0][2] - expected).max() < 1e-10


def test_what_is_refused():
    one = DomainConfig(mesh=Communicator(None))
    with pytest.raises(InputError, match=r"dynamics must be a BaseDynamics, for example NVE\(1.0\)"):
        DomainParallel("nve", parity.wrapper("lj"), one)
    with pytest.raises(
        InputError, match=r"ghost_width 8.6 A is less than the model's cutoff and the skin together, 9 A"
    ):
        DomainParallel(md.Verlet(1.0), parity.wrapper("lj"), DomainConfig(mesh=Communicator(None), ghost_width=8.6))
    run = DomainParallel(NPT(1.0, temperature=10.0), parity.wrapper("lj"), one)
    with pytest.raises(InputError, match="NPT needs a cell with three independent vectors"):
        run.partition(Batch.from_atoms(parity.structure("pair")))
    with pytest.raises(InputError, match="partition takes a Batch on rank 0"):
        run.partition(parity.structure("argon"))
    for message, options in {
        "compile must be True, False or one of": {"compile": "quickly"},
        "migration_hysteresis must be zero or positive": {"migration_hysteresis": -1.0},
        "rebalance_every must be a positive whole number": {"rebalance_every": 0},
        "balance_by must be 'atoms' or 'time'": {"balance_by": "edges"},
        "ghost_width 0.1 A is less than cutoff": {"ghost_width": 0.1},
    }.items():
        with pytest.raises(InputError, match=message):
            DomainConfig(**options)
