"""Ranks of a launcher: real processes under torchrun, mpirun and a stand-in for srun, that serve, fail, are killed.

The scenarios are in spmd_script.py. Every run has a hard limit, and nothing of it may be left.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from launching import MPIRUN, Run, can_rename_hosts, run
from nvdd.runtime.agreement import digest
from nvdd.runtime.meeting import Place, announce, set_threads
from nvdd.runtime.watchdog import Watchdog

SCRIPT = Path(__file__).with_name("spmd_script.py")
needs_mpi = pytest.mark.skipif(
    not MPIRUN.exists() or not shutil.which("hydra_pmi_proxy", path=MPIRUN.parent), reason="needs mpich"
)
pytestmark = pytest.mark.timeout(100)


def scenario(launcher: str, n: int, name: str, mode: str = "serve", limit: float = 60.0, **options: object) -> Run:
    result = run(launcher, n, SCRIPT, name, mode, limit=limit, **options)
    print(f"{launcher} {n} {name} {mode}: {result.seconds:.1f} s, exit status {result.codes}\n{result.out}{result.err}")
    return result


def seconds(line: str) -> float:
    return float(re.search(r"after ([\d.]+) s", line).group(1))


def caught_soon(result: Run, text: str) -> list[str]:
    """The RankErrors that begin with ``text``, raised long before any time limit."""
    return [line for line in result.lines("caught RankError") if f" s: {text}" in line and seconds(line) < 1.5]


# -- runs that go well


@pytest.mark.parametrize(
    ("launcher", "n", "mode"),
    [
        ("torchrun", 2, "serve"),
        pytest.param("mpirun", 3, "serve", marks=needs_mpi),
        ("srun", 2, "replicated"),
        pytest.param("srun", 3, "serve", marks=pytest.mark.slow),
        pytest.param("mpirun", 2, "replicated", marks=[needs_mpi, pytest.mark.slow]),
    ],
)
def test_calls(launcher, n, mode):
    result = scenario(launcher, n, "sums", mode)
    ranks = range(n) if mode == "replicated" else [0]
    assert result.codes == [0] * (n if launcher == "srun" else 1)
    assert sorted(result.lines("ready")) == [f"ready {rank} {launcher}" for rank in ranks]
    assert sorted(result.lines("end")) == [f"end {rank}" for rank in ranks]  # nothing runs on ranks that serve
    expected = [f"places {rank} {[rank] if mode == 'replicated' else list(range(n))} threads {{1}}" for rank in ranks]
    assert sorted(result.lines("places")) == expected
    assert result.err.count(f"{n} ranks by {launcher}, backend gloo") == 1  # by rank 0, once, also for two services
    assert all(f"rank {rank}: " in result.err for rank in range(n))
    assert not result.left


@pytest.mark.skipif(not can_rename_hosts(), reason="needs root, and Linux")
def test_several_hosts():
    """Three hosts by name: threads, devices and signs of life are then no longer those of one."""
    result = scenario("hosts", 3, "lost:kill")
    assert result.codes == [0, 0, -9]
    assert all(f"rank {rank}: node{rank}, cpu" in result.err for rank in range(3))
    assert re.search(r"rank 2 failed in phase 'backward': its process \(\d+ on node2\) is gone", result.out)


def test_failures_that_leave_all_processes_alive_are_raised_and_the_ranks_go_on():
    result = scenario("srun", 3, "recovers")
    assert result.codes == [0, 0, 0] and result.lines("end") == ["end 0"] and not result.left
    kinds = [line.split()[:5] for line in result.out.splitlines() if not line.startswith(("caught", "ready", "end"))]
    assert kinds == [
        ["value_error", "0", "RankError", "0", "backward"],
        ["value_error", "1", "RankError", "1", "backward"],
        ["memory", "1", "RankError", "1", "backward"],
        ["input_error", "0", "InputError", "None", "None"],
        ["input_error", "1", "InputError", "None", "None"],
        ["op_error", "1", "DistributedOpError", "None", "None"],
        ["sys_exit", "1", "RankError", "1", "backward"],
        ["skip", "1", "RankError", "0", "forward"],
    ]
    caught = result.lines("caught")
    assert all(seconds(line) < 2.0 for line in caught if "no answer" not in line)
    assert "a number that is no good" in caught[1] and "in _value_error" in caught[1]  # the traceback of rank 1
    assert "no answer to 'act' within 2 s" in caught[7] and seconds(caught[7]) < 5.0
    assert "zero volume" in caught[8] and "'build'" in caught[8]  # while it was being built
    assert "no attribute 'Nothing'" in caught[9]


@needs_mpi
def test_failures_where_all_ranks_run_the_script():
    result = scenario("mpirun", 2, "recovers", "replicated")
    assert result.codes == [0] and sorted(result.lines("end")) == ["end 0", "end 1"]
    for kind in ("value_error 1 RankError 1 backward", "input_error 1 InputError None None"):
        assert result.lines(kind) == [kind] * 2  # the same on both


@pytest.mark.parametrize("mode", ["serve", pytest.param("replicated", marks=pytest.mark.slow)])
def test_what_only_an_abort_ends(mode):
    """As an NCCL kernel: the failure, or the time limit, must reach ranks that are blocked in it."""
    result = scenario("srun", 2, "aborts", mode)
    n = 2 if mode == "replicated" else 1
    assert result.lines("aborts") == ["aborts RankError 1"] * n + ["aborts RankError True"] * n or n == 2
    assert result.lines("end") and result.codes == [0, 0]
    assert all(seconds(line) < 5.0 for line in result.lines("caught"))


# -- runs that end with an error


@pytest.mark.parametrize(
    ("launcher", "mode"),
    [
        ("torchrun", "serve"),
        pytest.param("mpirun", "serve", marks=[needs_mpi, pytest.mark.slow]),
        pytest.param("srun", "replicated", marks=pytest.mark.slow),
    ],
)
def test_an_error_that_the_script_does_not_catch(launcher, mode):
    result = scenario(launcher, 2, "fails:value_error", mode)
    assert all(result.codes) and not result.lines("end") and not result.left
    text = "nvdd.errors.RankError: rank 1 failed in phase 'backward': ValueError: a number that is no good"
    assert result.err.count(text) == (2 if mode == "replicated" else 1)
    if launcher == "torchrun":  # its summary names the rank whose traceback stands above
        assert re.search(r"Root Cause.*\n\[0\]:\n(.*\n){2,5} *exitcode +: 1 ", result.err)


@pytest.mark.parametrize(
    ("launcher", "n", "mode"),
    [
        pytest.param("srun", 2, "serve", marks=pytest.mark.slow),
        ("torchrun", 2, "serve"),
        pytest.param("mpirun", 2, "serve", marks=needs_mpi),
        ("srun", 3, "replicated"),
    ],
)
def test_a_rank_is_killed(launcher, n, mode):
    result = scenario(launcher, n, "lost:kill", mode)
    who = f"rank {n - 1} failed in phase 'backward': its process"
    ours = f"ERROR {who}" in result.err and "is gone: killed" in result.err
    # mpirun and torchrun end the other ranks too as soon as they see it, at times before these have said a word
    theirs = {"mpirun": r"EXIT STRING: Killed \(signal 9\)", "torchrun": rf"rank *: {n - 1} .*\n.*exitcode *: -9"}
    assert ours or (launcher in theirs and re.search(theirs[launcher], result.out + result.err))
    if launcher == "srun":  # the others ends the whole job as soon as they see it
        assert result.codes == [0] * (n - 1) + [-9]
        assert len(caught_soon(result, who)) == (1 if mode == "serve" else n - 1)
        assert "the ranks of this run can't go on" in result.lines("caught NvddError")[0]
    else:
        assert all(result.codes)
    assert not result.left


def test_a_rank_is_killed_between_two_calls():
    result = scenario("srun", 2, "idle")
    # 'place' still, where a busy machine has it killed before it is told what to do
    assert any(caught_soon(result, f"rank 1 failed in phase '{phase}': its process") for phase in ("idle", "place"))
    assert result.codes == [0, -9]


@pytest.mark.parametrize("mode", ["serve", pytest.param("replicated", marks=pytest.mark.slow)])
def test_rank_0_is_killed(mode):
    result = scenario("srun", 3, "dies" if mode == "serve" else "fails:kill:0", mode)
    assert result.codes == [-9, 1, 1]
    for rank in (1, 2):
        assert f"ERROR rank {rank}: rank 0 failed in phase" in result.err


def test_a_rank_is_stopped():
    result = scenario("srun", 3, "lost:stop")
    text = "no answer to 'act' within 2 s (rank 2 is in phase 'backward', and its process is stopped)"
    (first, second) = result.lines("caught RankError")
    assert text in first and seconds(first) < 5.0
    assert "no answer to the start within 2 s" in second and "its process is stopped" in second
    assert result.codes == [0, 0, -9]  # rank 0 ends what does not end by itself


def test_rank_0_is_stopped():
    result = scenario("srun", 2, "stopped")
    assert re.search(r"ERROR rank 1 ends, since rank 0 failed in phase .*its process is stopped", result.err)
    assert result.codes == [-9, 1]


def test_ranks_that_wait_for_each_other():
    """One rank makes an exchange that the others don't: found without a time limit."""
    result = scenario("srun", 2, "fails:skip")
    assert (
        "rank 1 failed in phase 'backward': ranks are out of step, and wait for each other: rank 0 in sum over ranks"
        in result.err
    )
    assert "rank 1 in exchange 1 (gather of the model)" in result.err
    assert all(result.codes)


@needs_mpi
def test_the_scripts_own_error():
    result = scenario("mpirun", 2, "raises")
    assert all(result.codes) and result.err.count("LookupError: the script's own error") == 1
    assert "RankError" not in result.err and "BAD TERMINATION" not in result.err + result.out


# -- replicated


def test_ranks_that_do_not_do_the_same():
    result = scenario("srun", 2, "diverges", "replicated")
    text = "the script has not done the same on all ranks: compared with rank 0, rank 1 in"
    caught = result.out.count("caught InputError")
    assert (
        caught == 4
        and result.out.count(f"{text} value differs") >= 2
        and result.out.count(f"{text} the call differs") >= 2
    )


@pytest.mark.parametrize("who", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_script_that_ends_early_on_one_rank(who):
    result = scenario("srun", 2, f"leaves:{who}", "replicated")
    assert caught_soon(result, f"rank {who} failed in phase 'script': its script has ended")
    assert result.codes == [0, 0]


# -- what needs no processes


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_watchdog():
    clock, done = Clock(), []
    dog = Watchdog(lambda: done.append("abort"), done.append, grace=8.0, clock=clock)
    dog.failed("nobody is in a call")
    dog.tick()
    assert not done and not dog.inside
    with dog.call(clock.now + 5.0):
        clock.now += 5.5  # over, but what has a limit of its own may say so first
        dog.tick()
        assert not done and dog.inside
        clock.now += 1.0
        dog.tick()
        dog.failed("too late")
        assert done == ["abort"]
        clock.now += 7.9
        dog.tick()
        assert done == ["abort"]
        clock.now += 0.2
        dog.tick()
        assert done == ["abort", "the time limit has passed"]
    assert dog.fired == "the time limit has passed"
    done.clear()
    with dog.call(None):
        assert not dog.fired
        clock.now += 1e6
        dog.tick()
        assert not done
        dog.failed("rank 1 failed", grace=1.0)
        assert done == ["abort"] and dog.fired == "rank 1 failed"
        clock.now += 1.1
        dog.tick()
        assert done == ["abort", "rank 1 failed"]
    done.clear()
    clock.now += 1e6
    dog.tick()
    assert not done


def test_threads(monkeypatch):
    import torch

    monkeypatch.delenv("OMP_NUM_THREADS")
    given = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: given[-1] if given else 64)
    monkeypatch.setattr(torch, "set_num_threads", given.append)

    def place(rank: int, host: str, cores: range) -> Place:
        return Place(rank, host, "", 1, tuple(cores))

    shared = [place(r, "a", range(16)) for r in range(3)] + [place(3, "b", range(16))]
    assert [set_threads(shared, rank) for rank in range(4)][:3] == [5, 5, 5]
    given.clear()
    assert set_threads(shared, 3) == 16
    bound = [place(r, "a", range(4 * r, 4 * r + 4)) for r in range(4)]  # each has cores of its own
    given.clear()
    assert set_threads(bound, 2) == 4
    given[:] = [2]
    assert set_threads(bound, 2) == 2  # the script's own choice
    given.clear()
    assert set_threads([place(r, "a", range(2)) for r in range(4)], 0) == 1
    given.clear()
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert set_threads(bound, 0) == 64 and not given


def test_announcement(caplog):
    caplog.set_level("INFO", "nvdd")
    announce("torchrun", ["a", "a", "b"], ["cuda:0", "cuda:1", "cuda:0"], "nccl", 4)
    assert len(caplog.records) == 1 and "3 ranks by torchrun, backend nccl, 4 thread(s) each" in caplog.text
    assert "rank 2: b, cuda:0" in caplog.text
    caplog.clear()
    announce("nvdd", ["a"] * 4, ["cuda:0", "cuda:1", "cuda:0", "cuda:1"], "gloo")
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 2 and warnings[0].startswith("ranks 0, 2 share cuda:0 of a") and "gloo" in warnings[0]
    caplog.clear()
    announce("srun", ["a"] * 2, ["cuda:0", "cuda:0"], "nccl", units=["GPU-1", "GPU-2"])  # each sees its own GPU only
    announce("srun", ["a"] * 100, ["cpu"] * 100, "gloo")
    assert all(record.levelname == "INFO" for record in caplog.records) and "... 36 more" in caplog.text


def test_digest():
    import numpy as np
    import torch

    x = np.arange(6.0)
    assert digest({"a": x, "b": None}) == digest({"b": None, "a": x.copy()})
    assert digest({"forces", "energy"}) == digest({"energy", "forces"})
    values = [x, x.reshape(2, 3), x.astype(np.float32), x + 1e-15, [1, 2], [2, 1], "1", 1, 1.0, True, None, {}]
    values += [torch.arange(6.0), torch.arange(6.0, dtype=torch.bfloat16), torch.zeros(0), torch.tensor(1.0), object()]
    assert len({digest(value) for value in values}) == len(values)
    assert all(0 <= digest(value) < 2**63 for value in values)
