"""Out of memory on one rank: the error that all ranks get says what that rank had, and what would help."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields

import torch

from nvdd.communicator import Communicator
from nvdd.config import DomainConfig

_TOLD = ("can't allocate memory", "not enough memory", "out of memory", "alloc_failed")
_ASKED = re.compile(r"allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SAVERS = ("max_edges_per_chunk", "recompute")  # options that take time for memory
_MARGIN = 0.9  # of a rank's memory that can be filled


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out: Python's, torch's on GPUs and on CPUs, a library's on a GPU."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _TOLD)


@contextmanager
def advised(comm: Communicator, load: Callable[[], tuple[int, int, int] | None]) -> Iterator[None]:
    """Around a step: where memory runs out, the error's message goes on with advice; its type stays.

    Args:
        comm: the ranks.
        load: gives owned atoms, halo rows and edges of this rank; None before they are known.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error) and "`nvdd plan`" not in str(error):
            error.args = (f"{error}; {advice(comm, load(), str(error))}".removeprefix("; "),)
        raise


def advice(comm: Communicator, load: tuple[int, int, int] | None, message: str = "") -> str:
    """What the rank had, and how many ranks it takes at the least."""
    had = "" if load is None else f" with {load[0]} owned atoms, {load[1]} halo rows, {load[2]} edges"
    used, total = in_use(comm)
    asked = sum(float(n) * _UNITS[unit] for n, unit in _ASKED.findall(message)[:1])
    least = ranks_needed(used + asked, total, comm.size)
    return (
        f"rank {comm.rank} of {comm.size}{had} ran out of memory ({gib(used)} of {gib(total)} in use): take more ranks, {least} at "
        f"the least (`nvdd plan` says how many), fewer atoms or float32{savers()}"
    )


def in_use(comm: Communicator) -> tuple[float, float]:
    """Bytes in use, and bytes that there are, of this rank's GPU; on the CPU of this process, and its part of the machine."""
    if comm.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(comm.device)
        return total - free, total
    return _resident(), host_memory()


def host_memory() -> int:
    """Bytes of this machine for one of as many ranks as it has cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // cores


def _resident() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # no Linux
        return 0


def ranks_needed(memory: float, limit: float, n_ranks: int) -> int:
    """How many ranks it takes until one of ``n_ranks`` that needs ``memory`` bytes keeps below nine tenths of ``limit``."""
    return max(n_ranks + 1, math.ceil(n_ranks * memory / (_MARGIN * limit)))


def savers() -> str:
    """The options of `DomainConfig` that save memory, as the end of a sentence."""
    there = [f"{name}=" for name in _SAVERS if name in {f.name for f in fields(DomainConfig)}]
    return f", or {' or '.join(there)}" if there else ""


def gib(size: float) -> str:
    """``"1.25 GiB"``."""
    return f"{size / 2**30:.3g} GiB" if size >= 2**30 else f"{size / 2**20:.3g} MiB"
