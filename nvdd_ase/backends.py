"""Where the ranks of a calculator are: in this process, or in processes of their own.

Each backend has ``share(name, shape)`` (arrays that all ranks see), ``call(method, payload)`` (on every rank at
once; gives the list of returns), ``close()`` and ``closed``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nvdd_ase.engine import Engine


class InProcess:
    """One rank, in this process."""

    closed = False

    def __init__(self, ranks: int, device: str, arguments: Mapping[str, Any], timeouts: Any) -> None:
        from nvdd.communicator import Communicator

        self.arrays: dict[str, np.ndarray] = {}
        self.engine = Engine(Communicator(None, device), self.arrays, lambda phase: None, **arguments)

    def share(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name not in self.arrays or self.arrays[name].shape != shape:
            self.arrays[name] = np.zeros(shape)
        return self.arrays[name]

    def call(self, method: str, payload: Any = None) -> list[Any]:
        return [getattr(self.engine, method)(payload)]

    def close(self) -> None:
        self.closed = True


class Workers:
    """Ranks in processes of their own."""

    def __init__(self, ranks: int, device: str, arguments: Mapping[str, Any], timeouts: tuple) -> None:
        from nvdd.runtime.local_ranks import LocalRanks

        start, call = timeouts
        self.ranks = LocalRanks(
            ranks, "nvdd_ase.engine:Engine", arguments, device=device, start_timeout=start, call_timeout=call
        )

    @property
    def closed(self) -> bool:
        return self.ranks.closed

    def share(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        return self.ranks.share(name, shape, np.float64)

    def call(self, method: str, payload: Any = None) -> list[Any]:
        return self.ranks.call(method, payload)

    def close(self) -> None:
        self.ranks.close()
