"""Small services that the tests of local ranks run in real processes."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from nvdd.errors import DistributedOpError, InputError


class Service:
    """Says what it got; sums over the ranks; fails in every way that a test asks for."""

    def __init__(self, comm: Any, arrays: Any, phase: Any, scale: float = 1.0, setup: str = "", on: int = 0) -> None:
        self.comm, self.arrays, self.phase, self.scale = comm, arrays, phase, scale
        self.rank = int(os.environ["RANK"])
        if setup and self.rank == on:
            self.misbehave({"how": setup, "phase": "build"})

    def reduce(self, value: float | None = None) -> float:
        value = 1.0 if value is None else value
        mine = self.scale * value * (self.rank + 1)
        total = torch.tensor([mine], dtype=torch.float64, device=self.comm.device)
        dist.all_reduce(total, group=self.comm.group)
        return float(total)

    def double(self, name: str) -> float:
        """Adds up the array on rank 0's side and doubles this rank's share of it in place."""
        array = self.arrays[name]
        total = float(array.sum())
        self.reduce()  # nobody writes before all have read
        array[self.rank :: dist.get_world_size()] *= 2
        return total

    def about(self, _: Any) -> dict[str, Any]:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "PYTHONPATH", "TORCHELASTIC_RUN_ID")
        return {
            "env": {name: os.environ.get(name) for name in names},
            "cwd": os.getcwd(),
            "path": list(sys.path),
            "threads": torch.get_num_threads(),
            "group": dist.get_world_size(self.comm.group),
            "device": str(self.comm.device),
        }

    def misbehave(self, what: dict[str, Any]) -> Any:
        """Does ``what["how"]`` on the ranks ``what["on"]`` (default: all), while the others wait for them."""
        if self.rank in what.get("on", [self.rank]):
            self.phase(what.get("phase", "trouble"))
            time.sleep(what.get("after", 0.0))
            getattr(self, f"_{what['how']}")()
        return self.reduce()

    def close(self) -> None:
        if "farewell" in self.arrays:
            self.arrays["farewell"][self.rank] = 1

    def echo(self, payload: Any) -> Any:
        return payload

    def _nothing(self) -> None:
        pass

    def _value_error(self) -> None:
        raise ValueError("a number that is no good")

    def _input_error(self) -> None:
        raise InputError("cell: zero volume; give a cell")

    def _op_error(self) -> None:
        raise DistributedOpError("sort over atoms", op="sort", site="model.py:12 in forward")

    def _exit(self) -> None:
        os._exit(7)

    def _sys_exit(self) -> None:
        sys.exit(3)

    def _kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def _sleep(self) -> None:
        time.sleep(600)

    def _lambda(self) -> Any:
        self.reduce = lambda value=1.0: self.phase  # a result that can't be pickled

    def reduce_on(self, ranks: list[int]) -> None:
        """A sum over ranks that only some of them make."""
        self.phase("forward")
        if self.comm.rank in ranks:
            self.comm.all_reduce(torch.ones(1), site="layer 2")
