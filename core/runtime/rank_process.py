"""Starting and ending the process of one rank."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import NvddError
from .channel import Channel

# What a rank tells of itself without a message: its phase; number and name of the operation between ranks that it is
# in, 0 while it computes.
STATE = np.dtype([("phase", "S32"), ("operation", "i8"), ("what", "S96")])

# What a launcher (torchrun, mpirun, srun) told the parent is wrong for a rank that the parent starts.
_LAUNCHER_NAMES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("SLURM_PROCID", "SLURM_LOCALID", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
_LAUNCHER_PREFIXES = ("TORCHELASTIC_", "OMPI_COMM_WORLD_", "PMI_", "PMIX_", "HYDI_", "HYDRA_")

_POLITE = 0.3  # seconds between SIGTERM and SIGKILL: a rank inside a collective has no use for more
_PATIENCE = 5.0  # seconds after SIGKILL: only a process stuck in a driver takes longer; nothing ends that one


@dataclass(eq=False)
class RankProcess:
    """A started rank: its number, its process, and the parent's end of the channel to it."""

    rank: int
    process: subprocess.Popen
    channel: Channel


def start(rank: int, n_ranks: int) -> RankProcess:
    """Starts ``python -m nvdd.worker`` as rank ``rank``, which waits for a message that says what to serve."""
    if os.name != "posix" or not sys.executable:
        raise NvddError("local ranks need Linux or macOS, and a Python that knows its path (sys.executable)")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "nvdd.worker", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            # A session of its own: Ctrl-C in a terminal reaches the parent alone, which then ends the ranks.
            start_new_session=True,
            env=environment(rank, n_ranks, os.environ),
            # `-m` puts the working directory first on the path, where a user's random.py would hide the real
            # one; the rank goes to the parent's directory once it has the parent's path.
            cwd="/",
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    ours.setblocking(False)
    return RankProcess(rank, process, Channel(ours))


def environment(rank: int, n_ranks: int, base: Mapping[str, str]) -> dict[str, str]:
    """The environment variables of a rank, made from the parent's."""
    env = {
        name: value
        for name, value in base.items()
        if name not in _LAUNCHER_NAMES and not name.startswith(_LAUNCHER_PREFIXES)
    }
    env["RANK"] = env["LOCAL_RANK"] = str(rank)
    env["WORLD_SIZE"] = env["LOCAL_WORLD_SIZE"] = str(n_ranks)
    env.setdefault("PYTHONHASHSEED", "0")  # sets of names in one order on all ranks, whatever a model does in it
    # Without this every rank would start a thread on every core.
    env.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // n_ranks)))
    loopback = next((name for name in ("lo", "lo0") if name in _network_interfaces()), None)
    if loopback:
        env.setdefault("GLOO_SOCKET_IFNAME", loopback)
    # So that the rank finds nvdd itself where the parent found it; later it gets the parent's path by message.
    env["PYTHONPATH"] = os.pathsep.join(absolute_path(sys.path))
    return env


def absolute_path(path: Sequence[str]) -> list[str]:
    """``sys.path`` in a form that means the same in any working directory."""
    return [os.path.abspath(entry) for entry in path if isinstance(entry, str)]


def available_cores() -> int:
    """The cores that this process may use, which a batch system may have restricted."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _network_interfaces() -> set[str]:
    try:
        return {name for _, name in socket.if_nameindex()}
    except OSError:
        return set()


def wait(members: Sequence[RankProcess], seconds: float) -> bool:
    """Waits until all processes have ended; False if one is still there after ``seconds``."""
    deadline = time.monotonic() + seconds
    for member in members:
        try:
            member.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
    return True


def terminate(members: Sequence[RankProcess]) -> None:
    """Ends the processes, and what they started, at once."""
    for number, seconds in ((signal.SIGTERM, _POLITE), (signal.SIGKILL, _PATIENCE)):
        for member in members:
            if member.process.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(member.process.pid, number)  # it leads a group, see start()
        if wait(members, seconds):
            return


def is_stopped(member: RankProcess) -> bool:
    """Whether the process is stopped (SIGSTOP, a debugger); False where the system does not tell."""
    try:
        with open(f"/proc/{member.process.pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False
