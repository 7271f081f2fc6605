"""Persistent ranks for tests: processes that import models once and then run one function after another."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import torch.distributed as dist

from nvdd.communicator import Communicator
from nvdd.runtime.local_ranks import LocalRanks


class RankPool:
    """``pool.run(4, function, *args)`` calls ``function(comm, *args)`` on four ranks; gives the list of returns.

    The function stands at module level of a test module. A hang is a failure: each call has a time limit. After a
    failure the next call starts new ranks.
    """

    def __init__(self, n_ranks: int) -> None:
        self.n_ranks = n_ranks
        self._ranks: LocalRanks | None = None

    def run(self, world_size: int, function: Any, *args: Any, timeout: float = 240.0) -> list[Any]:
        if self._ranks is None or self._ranks.closed:
            self._ranks = LocalRanks(self.n_ranks, "rank_pool:Service", start_timeout=120.0)
        payload = (world_size, function.__code__.co_filename, function.__qualname__, args)
        return self._ranks.call("run", payload, timeout=timeout)[:world_size]

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()


class Service:
    """One rank of the pool."""

    def __init__(self, comm: Communicator, arrays: Any, phase: Any) -> None:
        self.rank, self.size = comm.rank, comm.size
        # every rank takes part in making every group, as torch wants it
        self.groups = {n: dist.new_group(list(range(n)), backend="gloo") for n in range(2, comm.size + 1)}

    def run(self, payload: tuple) -> Any:
        world_size, file, name, args = payload
        if self.rank >= world_size:
            return None
        function = getattr(_module_from(file), name)
        group = self.groups[world_size] if world_size > 1 else None
        return function(Communicator(group), *args)


def _module_from(file: str) -> Any:
    """The test module in ``file``, by its path: test folders are no packages."""
    if file not in sys.modules:
        spec = importlib.util.spec_from_file_location(file, file)
        sys.modules[file] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[file])
    return sys.modules[file]
