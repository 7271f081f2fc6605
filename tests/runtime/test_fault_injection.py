"""Planted faults in every phase, on workers and under torchrun: no hang, one error that names rank, phase and cause.

A handful in CI; a hundred with ``--run-slow``.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ase.build import bulk

from faulty import FAULTS, PHASES
from nvdd.errors import RankError
from nvdd_ase import NVDDCalculator

SUPPORT = Path(__file__).parent.parent / "support"
LIMIT = 10.0  # s to an error
TIMEOUT = 30.0  # s that an evaluation may take: what ends a stopped process; the first one loads kernels
CAUSES = {
    "kill": "SIGKILL",
    "raise": "a planted error",
    "memory": "out of memory",
    "stop": "answer|time",
    "skip": "out of step",
}


def cases(n: int, seed: int) -> list[tuple[str, str, int, int, int]]:
    """fault, phase, number of ranks, failing rank, which time the phase begins: all pairs of the first two, spread."""
    rng = random.Random(seed)
    pairs = [(f, p) for f, p in itertools.product(FAULTS, PHASES) if (f, p) != ("skip", "consolidate")]
    rng.shuffle(pairs)
    out = []
    for k in range(n):
        fault, phase = pairs[k % len(pairs)]
        size = rng.choice((2, 3, 4))
        out.append((fault, phase, size, rng.randrange(size), rng.choice((1, 2))))
    return out


@pytest.fixture(autouse=True)
def stamp(monkeypatch, tmp_path) -> Path:
    """Where the failing rank writes when it fails."""
    monkeypatch.setenv("PLANTED_STAMP", str(tmp_path / "stamp"))
    return tmp_path / "stamp"


def since_fault(message: str) -> float:
    """Seconds since the planted fault."""
    stamp = Path(os.environ["PLANTED_STAMP"])
    assert stamp.exists(), f"the fault has not come about: {message}"
    seconds = time.monotonic() - float(stamp.read_text())
    stamp.unlink()
    return seconds


def check_workers(fault: str, phase: str, size: int, rank: int, call: int) -> float:
    """Runs into the fault; returns the seconds from there to the error."""
    atoms = bulk("Ar", "fcc", a=5.3, cubic=True).repeat(2)
    atoms.rattle(0.1, seed=1)
    options = {"fault": fault, "phase": phase, "rank": rank, "call": call}
    with NVDDCalculator(
        "py:faulty:Faulty", model_options=options, ranks=size, device="cpu", skin=0.2, timeout=TIMEOUT
    ) as atoms.calc:
        pids = [r["pid"] for r in atoms.calc.report()]
        with pytest.raises(RankError) as error:
            for _ in range(4):
                atoms.get_forces()
                atoms.rattle(0.2, seed=2)  # farther than the skin: partition and plan come again
        message = str(error.value)
        seconds = since_fault(message)
        assert re.search(CAUSES[fault], message, re.IGNORECASE), message
        if fault == "memory":  # planted with a demand for 20 GiB
            assert re.search(rf"rank {rank} of {size}.* ran out of memory .*take more ranks, \d+ at the least", message), message
        if fault in ("kill", "raise", "memory", "stop"):
            assert error.value.rank == rank, message
            assert error.value.phase in (phase, "edges"), message
        assert seconds < (TIMEOUT + 4 if fault == "stop" else LIMIT), f"{seconds:.1f} s: {message}"
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    return seconds


def check_torchrun(fault: str, phase: str, size: int, rank: int, call: int) -> float:
    """The same under torchrun: every process ends, with an error that names the cause; seconds to the end of all."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    command += [str(SUPPORT / "faulty_script.py"), fault, phase, str(rank), str(call)]
    env = {**os.environ, "PYTHONPATH": str(SUPPORT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               start_new_session=True)  # fmt: skip
    try:
        out, _ = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, _ = process.communicate()
        raise AssertionError(f"hang: {out}") from None
    assert process.returncode != 0 and "reached the end" not in out, out
    assert re.search(CAUSES[fault] + "|Signal 9", out, re.IGNORECASE), out
    return since_fault(out)


QUICK = [
    ("kill", "forward", 3, 1, 2),
    ("raise", "backward", 2, 1, 1),
    ("memory", "forward", 2, 0, 2),
    ("stop", "backward", 2, 1, 1),
    ("skip", "backward", 2, 0, 1),
]


# the same faults in other phases
MORE = [pytest.param(case, marks=pytest.mark.slow) for case in (("kill", "plan", 2, 0, 2), ("raise", "consolidate", 3, 2, 1))]


@pytest.mark.parametrize("case", [*QUICK, *MORE], ids=lambda case: "-".join(map(str, case)))
def test_workers(case, record_property):
    record_property("seconds_to_error", check_workers(*case))


# a rank that raises under torchrun is in test_spmd.py, too
@pytest.mark.parametrize(
    "case", [pytest.param(("raise", "forward", 2, 1, 1), marks=pytest.mark.slow), ("kill", "backward", 3, 2, 1)], ids=str
)
def test_torchrun(case):
    check_torchrun(*case)


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_a_hundred(capsys):
    """80 on workers, 20 under torchrun; prints the time to error of each."""
    failed = []
    for n, check, label in ((80, check_workers, "workers"), (20, check_torchrun, "torchrun")):
        for case in cases(n, seed=n):
            try:
                outcome = f"{check(*case):.2f} s after the fault"
            except (AssertionError, pytest.fail.Exception) as error:
                outcome = f"FAILED: {error}"
                failed.append((label, *case, outcome))
            with capsys.disabled():
                print(label, *case, outcome, flush=True)
    assert not failed, failed
