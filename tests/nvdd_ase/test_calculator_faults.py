"""`NVDDCalculator` when ranks fail: one clear error within seconds, no process left, and the next call is right."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk

import user_models
from nvdd.errors import NvddError, RankError
from nvdd_ase import NVDDCalculator

TROUBLED = "py:user_models:Troubled"
LIMIT = 10.0  # s within which every error must have come
NOTHING, RAISE, RAISE_IN_BACKWARD, SLEEP = range(4)


def argon() -> Atoms:
    atoms = bulk("Ar", cubic=True, a=5.3).repeat((2, 2, 1))
    atoms.rattle(0.1, seed=1)
    atoms.info["trouble"] = np.zeros(3)
    return atoms


@pytest.fixture
def atoms(shared) -> Atoms:
    """Argon with a calculator on 2 ranks that has just been used."""
    atoms = argon()
    atoms.calc = shared(TROUBLED, ranks=2)
    atoms.get_forces()
    return atoms


@pytest.fixture(scope="module")
def expected(shared) -> np.ndarray:
    """Forces of `argon` on one rank."""
    atoms = argon()
    atoms.calc = shared(TROUBLED, ranks=1)
    return atoms.get_forces()


def pids(atoms: Atoms) -> list[int]:
    return [rank["pid"] for rank in atoms.calc.report()]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def assert_gone(processes: list[int], within: float = 0.0) -> None:
    deadline = time.monotonic() + within
    while left := [pid for pid in processes if is_alive(pid)]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.02)


def fails(action: Callable[[], object], kind: type = RankError) -> tuple[RankError, float]:
    """The error, and how long it took to come; prints both."""
    start = time.monotonic()
    with pytest.raises(kind) as caught:
        action()
    seconds = time.monotonic() - start
    print(f"{seconds:.2f} s: {caught.value}")
    return caught.value, seconds


def assert_works_again(atoms: Atoms, expected: np.ndarray, old: list[int]) -> None:
    """New ranks, the right numbers, nothing of the old ranks."""
    assert_gone(old)
    atoms.info["trouble"] = np.zeros(3)
    atoms.calc.reset()
    np.testing.assert_allclose(atoms.get_forces(), expected, rtol=0, atol=1e-14)
    assert not set(pids(atoms)) & set(old)
    atoms.positions[0] += 0.01
    assert np.abs(atoms.get_forces() - expected).max() > 1e-5, "a new evaluation"


@contextmanager
def after(seconds: float, action: Callable[[], object]) -> Iterator[None]:
    timer = threading.Timer(seconds, action)
    timer.start()
    try:
        yield
    finally:
        timer.join()


# -- ranks that die ----------------------------------------------------------------------------------------------


def test_killed_while_idle(atoms, expected):
    old = pids(atoms)
    os.kill(old[1], signal.SIGKILL)
    assert np.abs(atoms.get_forces() - expected).max() < 1e-14, "results that are there need no rank"
    atoms.positions[0] += 0.01
    error, seconds = fails(atoms.get_forces)
    assert (error.rank, error.phase) == (1, "idle") and "killed by signal 9 (SIGKILL)" in error.cause
    assert str(error) == "rank 1 failed in phase 'idle': killed by signal 9 (SIGKILL)"
    assert seconds < LIMIT
    atoms.positions[0] -= 0.01
    assert_works_again(atoms, expected, old)


def test_killed_during_a_step(atoms, expected):
    old = pids(atoms)
    atoms.info["trouble"] = (SLEEP, 0, 60.0)  # rank 1 waits for rank 0 in an exchange
    with after(0.5, lambda: os.kill(old[0], signal.SIGKILL)):
        error, seconds = fails(atoms.get_forces)
    assert (error.rank, error.phase) == (0, "forward") and "SIGKILL" in error.cause
    assert 0.3 < seconds < LIMIT
    assert_works_again(atoms, expected, old)


# -- models that raise -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "phase", "cause"),
    [
        (RAISE, "forward", "MemoryError: out of memory, as a test wants it"),
        (RAISE_IN_BACKWARD, "backward", "ArithmeticError: no derivative, as a test wants it"),
    ],
)
def test_raised_on_one_rank(atoms, expected, what, phase, cause):
    old = pids(atoms)
    atoms.info["trouble"] = (what, 1, 0.2)
    error, seconds = fails(atoms.get_forces)
    assert (error.rank, error.phase) == (1, phase) and error.cause.startswith(cause)
    assert str(error) == f"rank 1 failed in phase '{phase}': {error.cause}"
    assert (error.cause == cause) == ("MemoryError" not in cause), "for memory, advice follows"
    assert "user_models.py" in error.details, "the traceback on the rank"
    assert seconds < LIMIT
    assert atoms.calc.results == {}
    assert_works_again(atoms, expected, old)


@pytest.mark.slow  # a fault on three ranks is in tests/runtime/test_fault_injection.py
def test_raised_on_one_rank_of_three(expected):
    atoms = argon()
    with NVDDCalculator(TROUBLED, ranks=3) as atoms.calc:
        old = pids(atoms)
        atoms.info["trouble"] = (RAISE, 2, 0.0)
        error, seconds = fails(atoms.get_forces)
        assert (error.rank, error.phase) == (2, "forward") and "MemoryError" in error.cause and seconds < LIMIT
        assert_works_again(atoms, expected, old)


def test_raised_on_all_ranks(atoms, expected):
    old = pids(atoms)
    atoms.info["trouble"] = (RAISE, -1, 0.0)
    error, seconds = fails(atoms.get_forces)
    assert error.rank in (0, 1) and error.phase == "forward" and "MemoryError" in error.cause and seconds < LIMIT
    other = f"also failed: rank {1 - error.rank} in phase 'forward': MemoryError"
    assert any(other in note for note in error.__notes__)
    assert_works_again(atoms, expected, old)


def test_raised_in_this_process(shared, expected):
    """One rank needs no envelope: the model's own exception comes, and the model stays."""
    atoms = argon()
    atoms.calc = shared(TROUBLED, ranks=1)
    for what, kind in ((RAISE, MemoryError), (RAISE_IN_BACKWARD, ArithmeticError)):
        atoms.info["trouble"] = (what, 0, 0.0)
        with pytest.raises(kind, match="as a test wants it"):
            atoms.get_forces()
        atoms.info["trouble"] = np.zeros(3)
        assert (atoms.get_forces() == expected).all()


# -- limits, and the end -----------------------------------------------------------------------------------------


def test_timeout(expected):
    atoms = argon()
    with NVDDCalculator(TROUBLED, ranks=2, timeout=1.5) as atoms.calc:
        atoms.get_forces()
        old = pids(atoms)
        atoms.info["trouble"] = (SLEEP, 1, 60.0)
        error, seconds = fails(atoms.get_forces)
        assert "no answer to 'evaluate' within 1.5 s" in error.cause
        assert "rank 1 is in phase 'forward'" in error.cause and 1.4 < seconds < LIMIT
        assert_works_again(atoms, expected, old)
        left = pids(atoms)
        calculator = atoms.calc
    assert_gone(left)
    calculator.close()  # for the second time
    with pytest.raises(NvddError, match="nothing to report"):
        calculator.report()


@pytest.mark.parametrize("ranks", (1, 2))
def test_close_and_use_again(expected, ranks):
    atoms = argon()
    with NVDDCalculator(TROUBLED, ranks=ranks) as calculator:
        atoms.calc = calculator
        atoms.get_forces()
        old = pids(atoms)
        calculator.close()
        calculator.close()
        assert (atoms.get_forces() == calculator.results["forces"]).all(), "results outlive the ranks"
        if ranks > 1:
            assert_works_again(atoms, expected, old)
            old = pids(atoms)
        else:
            atoms.positions[0] += 0.1
            assert np.abs(atoms.get_forces() - expected).max() > 1e-3
    if ranks > 1:
        assert_gone(old)


def test_ranks_end_with_the_last_reference():
    """At once, not when Python next collects garbage: a notebook's cell that is run again leaves none behind."""
    atoms = argon()
    atoms.calc = NVDDCalculator(TROUBLED, ranks=2)
    atoms.get_forces()
    old = pids(atoms)
    gc.disable()
    try:
        atoms.calc = None
        assert_gone(old)
    finally:
        gc.enable()


# -- Ctrl-C ------------------------------------------------------------------------------------------------------


def test_ctrl_c_in_a_notebook(atoms, expected):
    """The process goes on, and so does the calculator."""
    old = pids(atoms)
    atoms.info["trouble"] = (SLEEP, 1, 60.0)
    start = time.monotonic()
    with after(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)), pytest.raises(KeyboardInterrupt):
        atoms.get_forces()
    assert time.monotonic() - start < LIMIT
    assert_works_again(atoms, expected, old)


def test_ctrl_c_in_a_terminal(tmp_path):
    """SIGINT to the whole process group, as a terminal sends it, in the middle of a step."""
    script = tmp_path / "script.py"
    script.write_text(
        "from ase.build import bulk\n"
        "from nvdd_ase import NVDDCalculator\n"
        "atoms = bulk('Ar', cubic=True, a=5.3).repeat((2, 1, 1))\n"
        f"atoms.calc = NVDDCalculator({TROUBLED!r}, ranks=2)\n"
        "print(*[rank['pid'] for rank in atoms.calc.report()], flush=True)\n"
        f"atoms.info['trouble'] = ({SLEEP}, 0, 60.0)\n"
        "atoms.get_forces()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(user_models.__file__).parent)}
    process = subprocess.Popen(
        [sys.executable, str(script)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    ranks = [int(pid) for pid in process.stdout.readline().split()]
    assert len(ranks) == 2
    time.sleep(1.0)
    start = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    print(f"Ctrl-C: ended after {time.monotonic() - start:.2f} s")
    assert time.monotonic() - start < LIMIT
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in errors and "RankError" not in errors
    assert_gone(ranks)
