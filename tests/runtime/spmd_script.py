"""A user's script, and a service for it; test_spmd.py runs it under launchers: ``spmd_script.py <scenario> <mode>``."""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import torch

from nvdd.errors import DistributedOpError, InputError, NvddError, RankError
from nvdd.runtime import standstill


class Service:
    """Sums over the ranks, and fails in every way that a test asks for."""

    def __init__(self, comm: Any, arrays: Any, phase: Any, setup: str = "") -> None:
        self.comm, self.arrays, self.phase = comm, arrays, phase
        if setup:
            self.act({"how": setup, "on": [1], "phase": "build"})

    def fingerprint(self, payload: Any) -> dict[str, Any]:
        return {"value": payload}

    def evaluate(self, value: float) -> float:
        """value * (1 + 2 + ... + size)."""
        mine = torch.tensor([value * (self.comm.rank + 1)], dtype=torch.float64)
        return float(self.comm.all_reduce(mine, site="test"))

    def kernel(self, job: dict[str, Any]) -> float:
        """As `act`, but the ranks that wait do so in what stands for an NCCL kernel: only `abort` ends it."""
        if self.comm.rank in job["on"]:
            self.phase("backward")
            getattr(self, f"_{job['how']}")()
        aborted = threading.Event()
        self.comm.abort = aborted.set
        assert aborted.wait(30.0), "nobody has called abort"
        return math.nan  # void: must not reach the script

    def place(self, _: Any) -> tuple[int, int, int]:
        return self.comm.rank, os.getpid(), torch.get_num_threads()

    def act(self, job: dict[str, Any]) -> float:
        """Does ``job["how"]`` on the ranks ``job["on"]``, while the others wait for them."""
        self.phase("forward")
        self.evaluate(1.0)
        if self.comm.rank in job["on"]:
            self.phase(job.get("phase", "backward"))
            getattr(self, f"_{job['how']}")()
        return self.evaluate(1.0)

    def _value_error(self) -> None:
        raise ValueError("a number that is no good")

    def _memory(self) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def _input_error(self) -> None:
        raise InputError("cell: zero volume; give a cell")

    def _op_error(self) -> None:
        raise DistributedOpError("sort over atoms", op="sort", site="model.py:12 in forward")

    def _sys_exit(self) -> None:
        sys.exit(3)

    def _kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def _skip(self) -> None:
        self.comm.exchange(torch.zeros(1, 1), *self._one_row(), site="gather of the model")

    def _sleep(self) -> None:
        time.sleep(600)

    def _one_row(self) -> tuple[list[int], list[int]]:
        peer = 1 - self.comm.rank
        counts = [int(rank == peer) for rank in range(self.comm.size)]
        return counts, counts


SERVICE = "spmd_script:Service"


def main(scenario: str, mode: str) -> None:
    from nvdd.runtime.launcher import detect
    from nvdd.runtime.spmd import join

    launch = detect()
    session = join(launch, mode, 60.0)
    number = session.start(SERVICE, {}, "cpu", 60.0)
    say("ready", launch.rank, launch.launcher)
    globals()[scenario.split(":")[0]](session, number, launch, *scenario.split(":")[1:])
    say("end", launch.rank)


def say(*words: Any) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")  # at once: other ranks write too
    sys.stdout.flush()


def attempt(action: Any, *arguments: Any, **options: Any) -> Any:
    """What an action returns, or the error it raises, which is printed with its time."""
    start = time.monotonic()
    try:
        return action(*arguments, **options)
    except (NvddError, InputError) as error:
        notes = " | ".join(getattr(error, "__notes__", [])).replace("\n", " ")
        say(f"caught {type(error).__name__} after {time.monotonic() - start:.1f} s: {error} [{notes}]")
        return error


def sums(session: Any, number: int, launch: Any) -> None:
    size = launch.size
    assert session.call(number, "evaluate", 2.0, 20.0)[0] == size * (size + 1)
    second = session.start(SERVICE, {}, "cpu", 60.0)
    assert session.call(second, "evaluate", 1.0, 20.0)[0] == session.call(number, "evaluate", 0.5, None)[0] * 2
    session.drop(second)
    places = session.call(number, "place", None, 20.0)
    say("places", launch.rank, [rank for rank, _, _ in places], "threads", {threads for _, _, threads in places})
    start = time.monotonic()
    for _ in range(200):
        session.call(number, "evaluate", 1.0, None)
    say(f"{(time.monotonic() - start) / 200 * 1e6:.0f} us a call")


def fails(session: Any, number: int, launch: Any, how: str, on: str = "1") -> None:
    """One failure, uncaught."""
    standstill.PATIENCE = 1.5  # s; not 6
    session.call(number, "act", {"how": how, "on": [int(on)]}, None if how == "skip" else 2.0)


def stopped(session: Any, number: int, launch: Any) -> None:
    """Rank 0 stops in a call; a launcher would kill it once rank 1 has ended."""
    if launch.rank == 0:
        subprocess.Popen(["sh", "-c", f"sleep 7; kill -9 {os.getpid()}"])
    session.call(number, "act", {"how": "stop", "on": [0]}, 1.0)


def recovers(session: Any, number: int, launch: Any) -> None:
    """Failures of all kinds but deaths, each caught; the ranks go on with new groups."""
    kinds = ("value_error", "memory", "input_error", "op_error", "sys_exit", "skip")
    for how in kinds if session.mode == "serve" else kinds[:4]:
        for on in (0, 1) if how in ("value_error", "input_error") else (1,):
            error = attempt(session.call, number, "act", {"how": how, "on": [on]}, 2.0)
            say(how, on, type(error).__name__, getattr(error, "rank", None), getattr(error, "phase", None))
            assert not session.alive(number)
            number = session.start(SERVICE, {}, "cpu", 60.0)
            assert session.call(number, "evaluate", 2.0, 20.0)[0] == launch.size * (launch.size + 1)
    attempt(session.start, SERVICE, {"setup": "input_error"}, "cpu", 30.0)
    attempt(session.start, "spmd_script:Nothing", {}, "cpu", 30.0)
    number = session.start(SERVICE, {}, "cpu", 60.0)
    assert session.call(number, "evaluate", 2.0, 20.0)[0] == launch.size * (launch.size + 1)


def aborts(session: Any, number: int, launch: Any) -> None:
    """Ranks blocked in what only an abort ends: after another rank's failure, and after the time limit."""
    error = attempt(session.call, number, "kernel", {"how": "value_error", "on": [1]}, None)
    say("aborts", type(error).__name__, getattr(error, "rank", None))
    number = session.start(SERVICE, {}, "cpu", 60.0)
    error = attempt(session.call, number, "kernel", {"how": "nothing", "on": []}, 1.0)
    say("aborts", type(error).__name__, "no answer to 'kernel' within 1 s" in str(error))
    number = session.start(SERVICE, {}, "cpu", 60.0)
    assert session.call(number, "evaluate", 2.0, 20.0)[0] == launch.size * (launch.size + 1)


def lost(session: Any, number: int, launch: Any, how: str) -> None:
    """A rank is gone; the script catches that, and tries again."""
    error = attempt(session.call, number, "act", {"how": how, "on": [launch.size - 1]}, 2.0)
    assert isinstance(error, RankError), error
    assert isinstance(attempt(session.start, SERVICE, {}, "cpu", 2.0), NvddError)


def idle(session: Any, number: int, launch: Any) -> None:
    """A rank is killed between two calls."""
    _, pid, _ = session.call(number, "place", None, 20.0)[1]
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.3)
    attempt(session.call, number, "evaluate", 1.0, None)


def raises(session: Any, number: int, launch: Any) -> None:
    raise LookupError("the script's own error")


def dies(session: Any, number: int, launch: Any) -> None:
    """Rank 0 is killed, in its own script or in a call."""
    os.kill(os.getpid(), signal.SIGKILL)


def diverges(session: Any, number: int, launch: Any) -> None:
    attempt(session.call, number, "evaluate", 1.0 + (launch.rank == 1), 20.0)
    number = session.start(SERVICE, {}, "cpu", 60.0)
    method = "evaluate" if launch.rank else "place"
    attempt(session.call, number, method, 1.0, 20.0)


def leaves(session: Any, number: int, launch: Any, who: str) -> None:
    """One rank ends its script earlier than the others."""
    session.call(number, "evaluate", 1.0, 20.0)
    if launch.rank != int(who):
        attempt(session.call, number, "evaluate", 1.0, 20.0)


if __name__ == "__main__":
    logging.basicConfig(level="INFO", format="%(levelname)s %(message)s")
    main(*sys.argv[1:])
