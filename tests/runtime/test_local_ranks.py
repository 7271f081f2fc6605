"""`LocalRanks`: real processes that serve calls, fail, are killed, and never outlive their parent."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nvdd.errors import CommunicationError, DistributedOpError, InputError, NvddError, RankError
from nvdd.runtime import failures, rank_process, standstill
from nvdd.runtime.local_ranks import LocalRanks

HERE = str(Path(__file__).parent)
if HERE not in sys.path:  # the ranks import services.py from the path that they get from this process
    sys.path.insert(0, HERE)

SERVICE = "services:Service"
pytestmark = [pytest.mark.timeout(60), pytest.mark.skipif(os.name != "posix", reason="needs Unix sockets")]


@contextmanager
def ranks_of(n: int, **options: Any) -> Iterator[LocalRanks]:
    """Local ranks of which none may be left afterwards."""
    ranks = LocalRanks(n, SERVICE, **options)
    try:
        yield ranks
    finally:
        ranks.close()
        assert_gone(ranks.pids)


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie of this process counts too, one of a killed parent waits for init."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text() if Path("/proc").is_dir() else ""
        os.kill(pid, 0)
    except (ProcessLookupError, FileNotFoundError):
        return False
    state, parent = [*stat.rpartition(")")[2].split(), "?", "0"][:2]
    return state != "Z" or int(parent) == os.getpid()


def assert_gone(pids: Any, within: float = 0.0) -> float:
    start = time.monotonic()
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() - start < within, f"left behind: {left}"
        time.sleep(0.02)
    return time.monotonic() - start


def timed_failure(action: Callable[[], Any], kind: type = RankError) -> tuple[Any, float]:
    start = time.monotonic()
    with pytest.raises(kind) as caught:
        action()
    return caught.value, time.monotonic() - start


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


# -- calls


@pytest.fixture(scope="module")
def pair() -> Iterator[LocalRanks]:
    with ranks_of(2, kwargs={"scale": 2.0}) as ranks:
        yield ranks


@pytest.mark.parametrize("n", [1, 4])
def test_calls_reach_every_rank(n):
    with ranks_of(n) as ranks:
        assert (ranks.n_ranks, ranks.backend, ranks.devices) == (n, "gloo", ("cpu",) * n)
        assert ranks.call("reduce", 3.0) == [3.0 * n * (n + 1) / 2] * n
        ranks.share("x", (n, 3), np.float64)[:] = 1.0
        assert ranks.call("double", "x") == [3.0 * n] * n
        farewell = ranks.share("farewell", n, bool)
    assert ranks.closed and farewell.all()
    with pytest.raises(NvddError, match=r"ended \(closed\): make a new LocalRanks"):
        ranks.call("reduce")
    ranks.close()


def test_arguments_and_repeated_calls(pair):
    assert pair.call("reduce", 1.0) == [6.0, 6.0]
    start = time.monotonic()
    for value in range(200):
        assert pair.call("echo", value) == [value, value]
    print(f"{(time.monotonic() - start) / 200 * 1e6:.0f} us a call")
    assert pair.phases == ("idle", "idle")
    big = np.arange(3_000_000.0)  # more than a socket's buffer, both ways
    assert all(np.array_equal(back, big) for back in pair.call("echo", big))


def test_shared_arrays_are_live_and_can_be_replaced(pair):
    first = pair.share("x", (4, 3), np.float64)
    assert first.shape == (4, 3) and not first.any()
    first[:] = 1.0
    assert pair.call("double", "x") == [12.0, 12.0]
    assert (first == 2.0).all()
    assert pair.share("x", (4, 3), "float64") is first
    second = pair.share("x", 10, np.float32)
    second[:] = 3.0
    assert pair.call("double", "x") == [30.0, 30.0]
    assert (second == 6.0).all() and (first == 2.0).all()
    assert pair.share("empty", (0, 3), np.int64).shape == (0, 3)
    assert pair.call("double", "empty") == [0.0, 0.0]
    assert set(pair.arrays) == {"x", "empty"}
    with pytest.raises(InputError, match="Python objects"):
        pair.share("objects", 3, object)
    with pytest.raises(InputError, match="negative"):
        pair.share("x", (-1, 3), float)


def test_environment_of_the_ranks(monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "abc")
    monkeypatch.setenv("MASTER_ADDR", "no.such.host")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("PYTHONPATH", "/some/where")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "random.py").write_text("raise RuntimeError('the wrong random')")
    with ranks_of(2) as ranks:
        for rank, about in enumerate(ranks.call("about")):
            threads = max(1, rank_process.available_cores() // 2)
            assert about["env"] == {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "OMP_NUM_THREADS": str(threads),
                "PYTHONPATH": "/some/where",
                "TORCHELASTIC_RUN_ID": None,
            }
            assert (about["threads"], about["group"], about["device"]) == (threads, 2, "cpu")
            assert about["cwd"] == str(tmp_path)
            assert about["path"] == rank_process.absolute_path(sys.path)
    assert rank_process.environment(0, 2, {"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"


def test_two_sets_of_ranks_are_independent(pair):
    with ranks_of(1, kwargs={"scale": 10.0}) as other:
        other.share("x", 2, np.float64)[:] = 5.0
        pair.share("x", 2, np.float64)[:] = 1.0
        assert other.call("reduce") == [10.0] and pair.call("reduce") == [6.0, 6.0]
        assert other.call("double", "x") == [10.0]
        error, _ = timed_failure(lambda: other.call("misbehave", {"how": "exit"}))
        assert error.cause == "exited with code 7"
    assert pair.call("reduce") == [6.0, 6.0]
    assert pair.call("double", "x") == [2.0, 2.0]


def test_one_call_at_a_time():
    with ranks_of(1) as ranks:
        thread = threading.Thread(target=lambda: ranks.call("misbehave", {"how": "nothing", "after": 0.5}))
        thread.start()
        while ranks.phases != ("trouble",):
            time.sleep(0.01)
        with pytest.raises(NvddError, match="inside another call"):
            ranks.call("reduce")
        thread.join()
        assert ranks.call("reduce") == [1.0]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_lets_go_of_the_ranks(pair):
    child = os.fork()
    if child == 0:
        try:
            pair.call("reduce")
        except NvddError as error:
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pair.call("reduce") == [6.0, 6.0]


# -- what can't be sent


def test_arguments_that_cannot_be_sent():
    with pytest.raises(InputError, match=r"arguments of services:Service.*can't be pickled.*inside the service"):
        LocalRanks(1, SERVICE, {"scale": threading.Lock()})
    here = type("Mine", (), {"__module__": "__main__"})
    with pytest.raises(InputError, match=r"'Mine' is defined in the script.*move it to a module"):
        LocalRanks(1, SERVICE, {"scale": here})
    with pytest.raises(InputError, match="positive integer"):
        LocalRanks(0, SERVICE)
    with pytest.raises(InputError, match="module:Class"):
        LocalRanks(1, "services")
    with pytest.raises(InputError, match="move it to a module"):
        LocalRanks(1, "__main__:Service")
    with pytest.raises(InputError, match="cuda:<number>"):
        LocalRanks(1, SERVICE, device="gpu")


def test_an_argument_that_cannot_be_sent_leaves_the_ranks_as_they_were(pair):
    with pytest.raises(InputError, match="argument of 'echo' can't be sent"):
        pair.call("echo", lambda: 0)
    assert pair.call("reduce") == [6.0, 6.0]


def test_no_gpu():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(InputError, match="sees no GPU"):
        LocalRanks(1, SERVICE, device="cuda")


# -- failures


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("value_error", "ValueError: a number that is no good"),
        ("sys_exit", "SystemExit: 3"),
        ("kill", "killed by signal 9 (SIGKILL)"),
    ],
)
def test_failure_of_one_rank_while_the_others_wait(how, cause):
    with ranks_of(2) as ranks:
        pids = ranks.pids
        job = {"how": how, "on": [1], "after": 0.2, "phase": "forward"}
        error, seconds = timed_failure(lambda: ranks.call("misbehave", job))
        print(f"{how}: {seconds - 0.2:.2f} s to the error")
        assert (error.rank, error.phase, error.cause) == (1, "forward", cause)
        assert seconds < 10
        assert_gone(pids)
        if how == "value_error":
            assert "in _value_error" in error.details and "in _value_error" in notes(error)
        with pytest.raises(NvddError, match="rank 1 failed in phase 'forward'"):
            ranks.call("reduce")


def test_errors_of_the_user_are_raised_as_what_they_are():
    with ranks_of(2) as ranks:
        error, _ = timed_failure(lambda: ranks.call("misbehave", {"how": "op_error", "on": [1]}), DistributedOpError)
        assert (error.op, error.site) == ("sort", "model.py:12 in forward")
        assert "rank 1 of 2 in phase 'trouble'" in notes(error)
        assert ranks.closed


def test_killed_while_idle():
    with ranks_of(2) as ranks:
        os.kill(ranks.pids[1], signal.SIGKILL)
        time.sleep(0.1)
        error, seconds = timed_failure(lambda: ranks.call("reduce"))
        assert (error.rank, error.phase, error.cause) == (1, "idle", "killed by signal 9 (SIGKILL)")
        print(f"killed while idle: {seconds:.2f} s to the error")
        assert seconds < 2


@pytest.mark.parametrize(
    ("setup", "kind", "message"),
    [
        ("kill", RankError, r"rank 1 failed in phase 'build': killed by signal 9 \(SIGKILL\)"),
        ("input_error", InputError, "zero volume"),
    ],
)
def test_failure_during_setup(setup, kind, message):
    with pytest.raises(kind, match=message):
        LocalRanks(2, SERVICE, {"setup": setup, "on": 1})


def test_start_timeout():
    error, seconds = timed_failure(lambda: LocalRanks(1, SERVICE, {"setup": "sleep"}, start_timeout=3.0))
    assert "no answer to the start within 3 s" in error.cause and seconds < 8


def test_service_that_is_not_there():
    with pytest.raises(InputError, match=r"no module 'no_such_module'"):
        LocalRanks(1, "no_such_module.engine:Engine")
    with pytest.raises(InputError, match="the module has no 'Nothing'"):
        LocalRanks(1, "services:Nothing")


def test_stopped_rank_and_timeout():
    with ranks_of(2) as ranks:
        job = {"how": "stop", "on": [1], "phase": "backward"}
        error, seconds = timed_failure(lambda: ranks.call("misbehave", job, timeout=1.0))
        assert (error.rank, error.phase) == (1, "backward")
        assert "no answer to 'misbehave' within 1 s" in error.cause
        if Path("/proc/self/stat").exists():
            assert "rank 1 is in phase 'backward' and its process is stopped" in error.cause
        print(f"stopped: {seconds - 1:.2f} s after the time-out")
        assert seconds < 4


def test_a_rank_that_is_through_while_the_others_wait_for_it(monkeypatch):
    monkeypatch.setattr(standstill, "PATIENCE", 1.0)
    with ranks_of(3) as ranks:
        error, seconds = timed_failure(lambda: ranks.call("reduce_on", [0, 2]))
        assert error.rank == 1 and "ranks are out of step, and wait for each other: rank 1 is at the end" in error.cause
        assert "rank 0 in sum over ranks (layer 2) (operation " in error.cause and "rank 2 in sum" in error.cause
        assert seconds < 6


def test_result_that_cannot_be_sent_back():
    with ranks_of(1) as ranks:
        error, _ = timed_failure(lambda: ranks.call("misbehave", {"how": "lambda"}))
        assert "result can't be pickled" in error.cause


def test_the_first_cause_is_chosen():
    def failure(rank: int, error: BaseException) -> failures.Failure:
        return failures.from_exception(rank, "forward", error)

    gloo = failure(0, RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"))
    mismatch = failure(1, CommunicationError("3 rows sent, 4 expected"))
    try:
        raise CommunicationError("exchange 3") from RuntimeError("Connection closed by peer")
    except CommunicationError as error:
        wrapped = failure(2, error)
    own = failure(3, ValueError("no"))
    aborted = failures.from_exit(4, "forward", -signal.SIGABRT)
    killed = failures.from_exit(5, "forward", -signal.SIGKILL)
    order = [gloo, wrapped, mismatch, aborted]
    for later in range(1, 4):
        if later != 1:  # the first two are equally unlikely; the earlier is kept
            assert failures.primary(order[: later + 1]) is order[later]
    assert failures.primary(order[:2]) is gloo
    assert failures.primary([*order, own, killed]) is own
    assert failures.primary([*order, killed, own]) is killed
    error = failures.to_error([gloo, own, mismatch], 4)
    assert error.rank == 3 and "also failed: rank 1 in phase" in notes(error) and "rank 0" not in notes(error)
    assert "memory" in notes(failures.to_error([killed], 6))


class OddError(InputError):
    """Pickles, but does not load: its constructor wants two arguments."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} in {where}")


def test_user_errors_that_do_not_unpickle_keep_their_kind():
    error = failures.to_error([failures.from_exception(0, "setup", OddError("a", "b"))], 1)
    assert type(error) is InputError and str(error) == "a in b"
    rank_error = pickle.loads(pickle.dumps(RankError(1, "setup", "c", "d")))
    assert rank_error.details == "d"


# -- GPUs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("how", ["value_error", "kill", "stop"])
def test_ranks_on_gpus(n, how, capfd):
    count = torch.cuda.device_count()
    with ranks_of(n, device="cuda") as ranks:
        assert ranks.devices == tuple(f"cuda:{rank % count}" for rank in range(n))
        assert ranks.backend == ("nccl" if count >= n else "gloo")
        assert ranks.call("reduce") == [n * (n + 1) / 2] * n
        job = {"how": how, "on": [n - 1], "after": 0.2, "phase": "forward"}
        error, seconds = timed_failure(lambda: ranks.call("misbehave", job, timeout=1.0 if how == "stop" else None))
        assert (error.rank, error.phase) == (n - 1, "forward") and seconds < 10
    if how == "value_error":
        with ranks_of(n, device="cuda:0") as ranks:
            assert (ranks.backend, set(ranks.devices)) == ("gloo", {"cuda:0"})
            assert ranks.call("reduce") == [n * (n + 1) / 2] * n
        with pytest.raises(InputError, match="numbered from 0"):
            LocalRanks(1, SERVICE, device="cuda:99")
    assert capfd.readouterr().err == ""


# -- the end of the parent


def script(body: str, **options: Any) -> subprocess.Popen:
    """Runs a user's script, given on standard input and without a ``__main__`` guard."""
    body = "from nvdd.runtime.local_ranks import LocalRanks\n" + textwrap.dedent(body)
    path = os.pathsep.join([HERE, *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        **options,
    )
    process.stdin.write(body)
    process.stdin.close()
    process.stdin = None
    return process


def first_line(process: subprocess.Popen) -> list[int]:
    return [int(pid) for pid in process.stdout.readline().split()]


START = f"ranks = LocalRanks(2, {SERVICE!r})\nprint(*ranks.pids, flush=True)\n"


def test_script_from_stdin_that_never_closes():
    process = script(START + "print(ranks.call('reduce', 1.0))\nraise SystemExit(5)")
    pids = first_line(process)
    out, err = process.communicate(timeout=30)
    assert (out, err, process.returncode) == ("[3.0, 3.0]\n", "", 5)
    assert_gone(pids, within=0.5)


@pytest.mark.parametrize("what", ["idle", "collective"])
def test_parent_killed(what):
    calls = {
        "idle": "import time; time.sleep(600)",
        "collective": "ranks.call('misbehave', dict(how='sleep', on=[1]))",
    }
    process = script(START + calls[what])
    pids = first_line(process)
    time.sleep(0.5)
    assert all(is_alive(pid) for pid in pids)
    process.kill()
    seconds = assert_gone(pids, within=5.0)
    print(f"parent killed, ranks {what}: gone after {seconds:.2f} s")
    process.communicate(timeout=10)


def test_ctrl_c():
    body = START + "ranks.call('misbehave', dict(how='sleep', on=[0]))"
    process = script(body, start_new_session=True)
    pids = first_line(process)
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    start = time.monotonic()
    _, err = process.communicate(timeout=20)
    print(f"Ctrl-C: ended after {time.monotonic() - start:.2f} s")
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in err and "RankError" not in err
    assert_gone(pids)
