"""Where the ranks of a launch are: their hosts, cores and devices; the process groups between them; their threads."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ..errors import InputError
from .launcher import Launch

log = logging.getLogger("nvdd")
_SHOWN = 64  # rows of the table of ranks
# Once they have met, deadlines of calls and the watch over the ranks limit them, not the group.
NO_LIMIT = 7 * 86400.0  # s


@dataclass(frozen=True)
class Place:
    """Where one rank runs. ``machine`` tells hosts of one name apart; ``cores`` are those it may use."""

    rank: int
    host: str
    machine: str
    pid: int
    cores: tuple[int, ...]

    @classmethod
    def here(cls, rank: int) -> Place:
        """This process's."""
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        return cls(rank, socket.gethostname(), _machine(), os.getpid(), tuple(cores))

    def shares_host(self, other: Place) -> bool:
        return (self.host, self.machine) == (other.host, other.machine)


def _machine() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


class Meeting:
    """The processes of a launch, met. All of them make it at once.

    Attributes:
        places: of every rank.
        notices: what each rank had to say, see the argument ``notice``.

    Args:
        launch: from `launcher.detect`.
        timeout: within which all must come.
        notice: something picklable for all ranks to know.
    """

    def __init__(self, launch: Launch, timeout: timedelta, notice: Any = None) -> None:
        import torch.distributed as dist

        self.launch = launch
        self._announced: set[str] = set()
        self._one_host = launch.local_size == launch.size
        with self._loopback():
            self.owns_default_group = launch.join(timeout)
            # A group of our own, also where the default one is ours: what a script does with that is its business.
            group = dist.new_group(list(range(launch.size)), timeout=timeout, backend="gloo")
            gathered: list[Any] = [None] * launch.size
            dist.all_gather_object(gathered, (Place.here(launch.rank), notice), group=group)
        dist.destroy_process_group(group)
        self.places: list[Place] = [place for place, _ in gathered]
        self.notices = [notice for _, notice in gathered]
        self._one_host = all(self.places[0].shares_host(place) for place in self.places)
        self.threads = set_threads(self.places, launch.rank)

    @property
    def here(self) -> Place:
        """This rank's place."""
        return self.places[self.launch.rank]

    def local_rank(self, rank: int) -> int:
        """Its number among the ranks of its host."""
        return sum(self.places[rank].shares_host(place) for place in self.places[:rank])

    def communicator(self, asked: str, deadline: float) -> tuple[Any, list[str]]:
        """A group of its own over all ranks, each on its device; all ranks call it at once.

        Args:
            asked: ``"cpu"``, ``"cuda"`` (the GPU of the rank's number on its host), ``"cuda:1"`` (the same everywhere).
            deadline: ``time.monotonic()`` by which it must have been made, and its first deadline.

        Returns:
            This rank's `Communicator`, over NCCL if every rank has a GPU of its own and over gloo otherwise; and the
            device of each rank.
        """
        import torch.distributed as dist

        from ..communicator import Communicator

        ranks = list(range(self.launch.size))
        device, unit, problem = device_of(asked, self.local_rank(self.launch.rank))
        limit = min(NO_LIMIT, max(0.01, deadline - time.monotonic()))
        with self._loopback():
            comm = Communicator(dist.new_group(ranks, timeout=timedelta(seconds=limit), backend="gloo"), device)
            comm.deadline = deadline
            answers = comm.all_gather_object((str(device), unit, problem), site="devices")
        devices, units, problems = (list(column) for column in zip(*answers, strict=True))
        if any(problems):  # the same error on all ranks: nobody is left waiting for one without a GPU
            rank = next(r for r, text in enumerate(problems) if text)
            comm.close()
            raise InputError(f"device {asked!r}: rank {rank} on {self.places[rank].host}: {problems[rank]}")
        gpus = {(place.machine, unit) for place, unit in zip(self.places, units, strict=True) if unit is not None}
        if len(gpus) == len(ranks) and dist.is_nccl_available():
            comm.close()
            with _environment(TORCH_NCCL_ASYNC_ERROR_HANDLING="0"):  # nvdd's watchdog aborts; torch's would kill
                comm = Communicator(dist.new_group(ranks, timeout=timedelta(seconds=NO_LIMIT), backend="nccl"), device)
                comm.deadline = deadline
        if self.launch.rank == 0 and asked not in self._announced:
            self._announced.add(asked)
            hosts = [place.host for place in self.places]
            announce(self.launch.launcher, hosts, devices, comm.backend, self.threads, units)
        return comm, devices

    def leave(self) -> None:
        """Destroys the default group, if it was made here."""
        import torch.distributed as dist

        if self.owns_default_group and dist.is_initialized():
            with contextlib.suppress(Exception):
                dist.destroy_process_group()

    @contextlib.contextmanager
    def _loopback(self) -> Iterator[None]:
        """On one host gloo needs no network, and no host name that resolves."""
        name = next((n for n in ("lo", "lo0") if n in {name for _, name in socket.if_nameindex()}), None)
        wanted = (
            {"GLOO_SOCKET_IFNAME": name} if name and self._one_host and not os.environ.get("GLOO_SOCKET_IFNAME") else {}
        )
        with _environment(**wanted):
            yield


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def set_threads(places: Sequence[Place], rank: int) -> int:
    """Gives this rank its share of the cores that it may use, unless OMP_NUM_THREADS says how many threads it has.

    A core that k ranks may use counts 1/k: right for ranks that are bound to cores, and for ranks that are not.
    """
    import torch

    if not os.environ.get("OMP_NUM_THREADS"):
        here = places[rank]
        users = Counter(core for place in places if place.shares_host(here) for core in place.cores)
        share = max(1, int(sum(1.0 / users[core] for core in here.cores) + 1e-9))
        if share < torch.get_num_threads():  # fewer than that were the script's own choice
            torch.set_num_threads(share)
    return torch.get_num_threads()


def announce(
    launcher: str,
    hosts: Sequence[str],
    devices: Sequence[str],
    backend: str,
    threads: int | None = None,
    units: Sequence[Any] | None = None,
) -> None:
    """Logs which rank is where, once, and warns if ranks share a GPU.

    Args:
        launcher, hosts, devices, backend: of the run; the lists have one entry a rank.
        threads: of rank 0.
        units: what identifies the GPU of each rank on its host, if not ``devices``; None for no GPU.
    """
    rows = [f"  rank {r}: {host}, {device}" for r, (host, device) in enumerate(zip(hosts, devices, strict=True))]
    rows[_SHOWN:] = [f"  ... {len(rows) - _SHOWN} more"] if len(rows) > _SHOWN else []
    each = f", {threads} thread(s) each" if threads else ""
    log.info("%d ranks by %s, backend %s%s\n%s", len(hosts), launcher, backend, each, "\n".join(rows))
    users: dict[Any, list[int]] = {}
    for rank, device in enumerate(devices):
        if device.startswith("cuda"):
            users.setdefault((hosts[rank], units[rank] if units else device), []).append(rank)
    for (host, _), ranks in users.items():
        if len(ranks) > 1:
            log.warning(
                "ranks %s share %s of %s: they take turns on it, and exchange through host memory (gloo), since NCCL "
                "wants a GPU for each rank. One rank a GPU is faster",
                ", ".join(map(str, ranks)), devices[ranks[0]], host,
            )  # fmt: skip


def device_of(asked: str, local_rank: int) -> tuple[Any, Any, str]:
    """This rank's device, what identifies it among the GPUs of its machine (None: no GPU), and what is wrong."""
    import torch

    cpu = torch.device("cpu")
    kind, _, index = asked.partition(":")
    if asked == "cpu":
        return cpu, None, ""
    if kind != "cuda" or (index and not index.isdigit()):
        return cpu, None, "ranks take 'cpu', 'cuda', or 'cuda:<number>'"
    count = torch.cuda.device_count()
    if count == 0:
        return cpu, None, f"torch {torch.__version__} sees no GPU there; use device='cpu'"
    # a launcher may show each rank one GPU only, its own: then number 0 is the right one
    number = int(index) if index else local_rank % count
    if number >= count:
        return cpu, None, f"it has {count} GPU(s), numbered from 0"
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device, str(getattr(torch.cuda.get_device_properties(device), "uuid", number)), ""


def is_stopped(place: Place) -> bool:
    """Whether the process at ``place``, on this host, is stopped (SIGSTOP, a debugger)."""
    try:
        with open(f"/proc/{place.pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False
