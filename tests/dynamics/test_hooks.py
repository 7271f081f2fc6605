"""Hooks: what they are given, where they run, and how a run ends when one of them fails."""

from __future__ import annotations

import csv
import io

import ase.io
import h5py
import numpy as np
import pytest
import torch
from ase import units
from rich.console import Console

import md
import parity
from nvdd import NVE, Batch, DomainConfig, InputError, NvddError
from nvdd.communicator import Communicator
from nvdd.dynamics.checkpoint import Checkpoint
from nvdd.dynamics.domain_parallel import DomainParallel
from nvdd.dynamics.hooks import Callback, Hook, HookScope
from nvdd.dynamics.logs import CSVLog, Guard, ProgressBar, StopWhen, TableLog
from nvdd.dynamics.trajectory import Trajectory

ONE = Communicator(None)


def run(hooks, steps: int = 6, atoms=None, comm=ONE, timestep: float = 2.0, path: str | None = None):
    made = DomainParallel(NVE(timestep), parity.wrapper("lj"), DomainConfig(mesh=comm), hooks)
    if path is None:
        made.partition(
            Batch.from_atoms(md.hot_argon((2, 2, 2)) if atoms is None else atoms) if comm.rank == 0 else None
        )
    else:
        made.restart(path)
    with made:
        made.run(steps)
    return made


class Sees(Hook):
    needs_stress = True

    def __init__(self, every: int, scope: HookScope) -> None:
        super().__init__(every)
        self.scope, self.seen = scope, []

    def __call__(self, run, seen) -> None:
        self.seen.append(seen)


def scopes_on_rank(comm: Communicator):
    hooks = [Sees(every, scope) for every, scope in zip((1, 2, 3), HookScope, strict=True)]
    run(hooks, comm=comm)
    return [
        [(s.step, s.energy.numpy(), s.pressure.numpy(), s.temperature.numpy(), s.owned.numpy()) for s in h.seen]
        for h in hooks
    ]


def test_scopes_and_totals(ranks):
    one, two = ranks.run(1, scopes_on_rank), ranks.run(2, scopes_on_rank)
    for rank, found in enumerate(two):
        local, everywhere, zero = found
        assert [s[0] for s in local] == list(range(7))
        assert [s[0] for s in everywhere] == [0, 2, 4, 6]
        assert [s[0] for s in zero] == ([0, 3, 6] if rank == 0 else [])
    for mine, alone in zip(two[1][1], one[0][1], strict=True):
        for a, b in zip(mine[1:4], alone[1:4], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-11)
        assert mine[4].sum() == alone[4].sum() == 32


def test_an_observation_is_what_ase_says():
    atoms = md.hot_argon((2, 2, 2))
    hook = Sees(1, HookScope.GLOBAL)
    run([hook], steps=0, atoms=atoms)
    seen, (expected, full) = hook.seen[0], (parity.exact("lj", atoms), np.eye(3))
    kinetic = (atoms.get_momenta().T @ atoms.get_velocities()) / atoms.get_volume()
    assert float(seen.energy) == pytest.approx(expected.energy, rel=1e-12)
    assert float(seen.kinetic) == pytest.approx(atoms.get_kinetic_energy(), rel=1e-12)
    assert float(seen.temperature) == pytest.approx(atoms.get_temperature(), rel=1e-12)
    assert float(seen.pressure) == pytest.approx(float(((kinetic - expected.stress) * full).sum() / 3), rel=1e-11)
    assert float(seen.density) == pytest.approx(atoms.get_masses().sum() / atoms.get_volume() / 0.602214076, rel=1e-8)
    assert float(seen.fmax) == pytest.approx(np.linalg.norm(expected.forces, axis=1).max(), rel=1e-11)


def test_fixed_atoms_count_in_the_density():
    atoms, hook = md.hot_argon((2, 2, 2)), Sees(1, HookScope.GLOBAL)
    made = DomainParallel(NVE(1.0), parity.wrapper("lj"), DomainConfig(mesh=ONE), [hook])
    made.partition(Batch.from_atoms(atoms), fixed=torch.arange(len(atoms)) < 20)
    made.run(0)
    expected = atoms.get_masses().sum() / atoms.get_volume() / 0.602214076
    assert float(hook.seen[0].density) == pytest.approx(expected, rel=1e-8)


def test_logs_and_trajectories_go_on_from_a_checkpoint(tmp_path):
    """The first run dies 3 steps after its checkpoint; what the second writes takes the place of these."""
    make = lambda: [
        CSVLog(tmp_path / "log.csv", 1),
        Trajectory(tmp_path / "frames.extxyz", 1),
        Trajectory(tmp_path / "frames.h5", 1, fields=("positions", "velocities", "forces")),
        Checkpoint(tmp_path / "run.ckpt", 4),
    ]
    run(make(), 7)
    with open(tmp_path / "frames.extxyz", "a") as file:
        file.write("32\nLattice=")  # in the middle of which it was killed
    again = run(make(), 4, path=str(tmp_path / "run.ckpt"))
    straight = run([], 8)
    with open(tmp_path / "log.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [int(line["step"]) for line in lines] == list(range(9))
    assert float(lines[-1]["epot_eV"]) == pytest.approx(float(straight.state.energy), rel=1e-10)
    assert all(line["pressure_GPa"] for line in lines)
    frames = ase.io.read(tmp_path / "frames.extxyz", ":")
    assert [frame.info["step"] for frame in frames] == list(range(9))
    assert np.abs(frames[-1].positions - straight.state.positions.numpy()).max() < 1e-7
    assert np.abs(frames[-1].get_velocities() - straight.state.velocities.numpy()).max() < 1e-7
    with h5py.File(tmp_path / "frames.h5") as file:
        group = file["particles/all"]
        assert group["position/step"][:].tolist() == list(range(9))
        np.testing.assert_allclose(group["position/value"][-1], straight.state.positions.numpy(), atol=1e-10)
        np.testing.assert_allclose(
            group["velocity/value"][-1] / units.fs, straight.state.velocities.numpy(), atol=1e-10
        )
        np.testing.assert_allclose(group["force/value"][-1], again.state.forces.numpy(), atol=1e-12)
        assert group["species"][:].tolist() == again.state.atomic_numbers.tolist()
        assert len(file["observables/potential_energy/value"]) == 9


def steps_in(folder) -> list[list[int]]:
    """Of the log and both trajectories."""
    with open(folder / "log.csv", newline="") as file:
        found = [[int(line["step"]) for line in csv.DictReader(file)]]
    found.append([frame.info["step"] for frame in ase.io.read(folder / "frames.extxyz", ":")])
    with h5py.File(folder / "frames.h5") as file:
        found.append(file["particles/all/position/step"][:].tolist())
        assert len(file["observables/potential_energy/value"]) == len(found[-1])
    return found


def files(folder, every: int) -> list[Hook]:
    hooks = [CSVLog(folder / "log.csv", 1), Trajectory(folder / "frames.extxyz", 1), Trajectory(folder / "frames.h5", 1)]
    return [*hooks, Checkpoint(folder / "run.ckpt", every)]


def test_files_are_cut_when_they_are_opened(tmp_path):
    run(files(tmp_path, 2), 3)
    run(files(tmp_path, 2), 0, path=str(tmp_path / "run.ckpt"))
    assert steps_in(tmp_path) == [[0, 1, 2]] * 3


def test_files_go_on_from_a_checkpoint_of_step_zero(tmp_path):
    run(files(tmp_path, 100), 2)
    run(files(tmp_path, 100), 3, path=str(tmp_path / "run.ckpt"))
    assert steps_in(tmp_path) == [[0, 1, 2, 3]] * 3


def test_a_log_is_there_at_any_moment_of_a_restart(tmp_path, monkeypatch):
    """It is written under another name and renamed when it is whole."""
    run(files(tmp_path, 2), 3)
    text = (tmp_path / "log.csv").read_text()

    def killed(*_) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as at:
        at.setattr("os.replace", killed)
        with pytest.raises(KeyboardInterrupt):
            run(files(tmp_path, 2), 1, path=str(tmp_path / "run.ckpt"))
    assert (tmp_path / "log.csv").read_text() == text


def test_time_goes_on_from_a_checkpoint_with_another_timestep(tmp_path):
    run(files(tmp_path, 1), 2, timestep=2.0)
    run(files(tmp_path, 1), 2, timestep=0.5, path=str(tmp_path / "run.ckpt"))
    expected = [0.0, 2.0, 4.0, 4.5, 5.0]
    with open(tmp_path / "log.csv", newline="") as file:
        assert [float(line["time_fs"]) for line in csv.DictReader(file)] == expected
    assert [frame.info["time_fs"] for frame in ase.io.read(tmp_path / "frames.extxyz", ":")] == expected
    with h5py.File(tmp_path / "frames.h5") as file:
        assert file["particles/all/position/time"][:].tolist() == expected


def test_table_and_progress():
    text = io.StringIO()
    run([TableLog(2, console=Console(file=text, width=200)), ProgressBar(6)])
    lines = text.getvalue().splitlines()
    assert lines[0].split()[:2] == ["step", "E_pot"] and [line.split()[0] for line in lines[1:]] == ["0", "2", "4", "6"]


def test_stop_when():
    made = run([StopWhen(lambda seen: seen.step >= 3)], 100)
    assert made.state.step == 3


class StopsAt(Hook):
    """On one rank, or on those that call it."""

    def __init__(self, scope: HookScope, step: int, rank: int | None = None) -> None:
        super().__init__()
        self.scope, self.step, self.rank = scope, step, rank

    def __call__(self, run, seen) -> None:
        self.stops = seen.step >= self.step and self.rank in (None, run.comm.rank)


def stops_on_rank(comm: Communicator):
    hooks = [StopsAt(HookScope.RANK_ZERO, 2), StopsAt(HookScope.LOCAL, 3, rank=1), StopsAt(HookScope.GLOBAL, 4, rank=0)]
    return [run([hook], 10, comm=comm).state.step for hook in hooks]


def test_a_hook_that_stops_on_one_rank_stops_all(ranks):
    assert ranks.run(2, stops_on_rank, timeout=60.0) == [[2, 3, 4]] * 2


def test_guards():
    with pytest.raises(NvddError, match=r"step 0: .* K, above max_temperature 50 K; use a timestep below 2 fs"):
        run([Guard(1, max_temperature=50.0)])
    with pytest.raises(NvddError, match=r"the conserved quantity has changed by .* eV an atom, more than max_drift"):
        run([Guard(1, max_drift=1e-9)], timestep=60.0)
    with pytest.raises(InputError, match="every must be a positive whole number of steps, got 0"):
        Guard(0)
    with pytest.raises(InputError, match=r"suffix '.dcd'; use one of .extxyz"):
        Trajectory("frames.dcd")


def test_positions_that_are_no_numbers():
    def breaks(run, seen) -> None:
        if seen.step == 2:
            run.state.velocities[3] = float("nan")

    with pytest.raises(InputError, match="step 2: the position of atom 3 or the cell is not a finite number"):
        run([Callback(breaks)])


def fails(run, seen) -> None:
    if seen.step == 3 and run.comm.rank == run.comm.size - 1:
        raise ZeroDivisionError("nobody counted on this")


def failing_on_rank(comm: Communicator, scope: str, steps: int):
    try:
        run([Callback(fails, scope=scope)], steps, comm=comm)
    except NvddError as error:
        return str(error)


@pytest.mark.parametrize("steps", [3, 6])
def test_what_fails_on_one_rank_ends_the_run_on_all(ranks, steps):
    found = ranks.run(3, failing_on_rank, "local", steps)
    assert found == ["rank 2: ZeroDivisionError: nobody counted on this"] * 3


def bad_input_on_rank(comm: Communicator):
    made = DomainParallel(NVE(1.0), parity.wrapper("lj"), DomainConfig(mesh=comm))
    try:
        made.partition(Batch.from_atoms(parity.structure("atom")[:0]) if comm.rank == 0 else None)
    except InputError as error:
        return str(error)


def test_input_that_rank_zero_refuses_is_refused_on_all(ranks):
    assert ranks.run(2, bad_input_on_rank) == ["partition was given no atoms"] * 2
