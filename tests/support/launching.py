"""Runs a script as a user does, never longer than a limit.

Launchers: ``"python"``, ``"torchrun"``, ``"mpirun"``, ``"srun"`` (processes with the variables that it sets),
``"env"`` (RANK, WORLD_SIZE, ...), ``"hosts"`` (the same, each on a host of another name).
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nvdd.runtime.launcher import detect

MPIRUN = Path(sys.executable).with_name("mpirun")
_MARK = "NVDD_TEST_RUN"  # in the environment of all processes of a run, to find those that outlive it
# of this process, which may be under a launcher itself
_NOT_PASSED_ON = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "TORCHELASTIC", "SLURM_", "PMI", "OMPI_", "MPI_LOCAL")
_steps = itertools.count(random.randrange(1 << 20))


@dataclass
class Run:
    """How a run ended: exit status of the launcher (srun, env, hosts: of every task), what was printed, and how long it took."""

    codes: list[int]
    out: str
    err: str
    seconds: float
    left: list[str]

    def lines(self, word: str) -> list[str]:
        """The lines of standard output that begin with a word."""
        return [line for line in self.out.splitlines() if line.startswith(word)]


def run(
    launcher: str,
    n: int,
    script: str | Path,
    *arguments: str,
    cwd: str | Path | None = None,
    limit: float = 60.0,
    env: Mapping[str, str] | None = None,
) -> Run:
    """Runs ``script`` on ``n`` processes; all that it has started is gone when this returns.

    Raises:
        AssertionError: it took longer than ``limit`` seconds; the message has what it had printed.
    """
    mark = uuid.uuid4().hex
    base = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_PASSED_ON)}
    base |= {_MARK: mark, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **(env or {})}
    command = [sys.executable, str(script), *arguments]
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        processes = [
            subprocess.Popen(
                line, env={**base, **more}, cwd=cwd, stdout=out, stderr=err, stdin=subprocess.DEVNULL, start_new_session=True
            )
            for line, more in _commands(launcher, n, command)
        ]  # fmt: skip
        late = False
        for process in processes:
            try:
                process.wait(max(0.0, start + limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                late = True
        seconds = time.monotonic() - start
        left = _kill(mark)
        codes = [process.wait() for process in processes]
        for file in (out, err):
            file.seek(0)
        result = Run(codes, out.read(), err.read(), seconds, left)
    assert not late, f"{launcher} {n} {' '.join(arguments)}: not over after {limit:g} s\n{result.out}\n{result.err}"
    return result


def _commands(launcher: str, n: int, command: Sequence[str]) -> list[tuple[Sequence[str], dict[str, str]]]:
    if launcher == "python":
        return [(command, {})]
    if launcher == "torchrun":
        options = ["--nproc-per-node", str(n), "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        return [([sys.executable, "-m", "torch.distributed.run", *options, *command[1:]], {})]
    if launcher == "mpirun":
        return [([str(MPIRUN), "-n", str(n), *command], {})]
    if launcher == "srun":
        step = next(step for step in _steps if _is_free(detect(slurm(0, max(n, 2), step)).address[1]))
        return [(command, slurm(rank, n, step)) for rank in range(n)]
    if launcher in ("env", "hosts"):  # what scripts for other launchers set
        port = next(port for port in range(20000 + next(_steps) % 10000, 60000) if _is_free(port))
        address = {"WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return [([*_host(rank, launcher), *command], {"RANK": str(rank), **address}) for rank in range(n)]
    raise ValueError(launcher)


def _host(rank: int, launcher: str) -> list[str]:
    """What puts a rank onto a "host" of another name."""
    return ["unshare", "--uts", "sh", "-c", f'hostname node{rank} && exec "$@"', "sh"] if launcher == "hosts" else []


def can_rename_hosts() -> bool:
    """Whether the launcher "hosts" works here, which takes root's rights."""
    return not subprocess.run("unshare --uts hostname node1", shell=True, capture_output=True).returncode


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True


def slurm(rank: int, n: int, step: int = 0) -> dict[str, str]:
    """What srun tells task ``rank`` of ``n`` on one node."""
    return {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": str(step),
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(n),
        "SLURM_LOCALID": str(rank),
        "SLURM_NNODES": "1",
        "SLURM_STEP_NODELIST": "node01",
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
    }


def _kill(mark: str) -> list[str]:
    """Ends what a run has left behind, which the launcher may have put into other sessions; returns their commands."""
    left = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (entry / "environ").read_bytes():
                left.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:
            continue
    return left
