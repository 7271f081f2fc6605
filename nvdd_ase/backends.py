"""Where the ranks of a calculator are: in this process, in processes of their own, or in those of a launcher.

Each backend has ``share(name, shape)`` (arrays that the ranks read or fill), ``call(method, payload)`` (on every
rank at once; gives the list of returns), ``close()`` and ``closed``.
"""

from __future__ import annotations

import importlib
import socket
import sys
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

from nvdd.runtime.launcher import Launch

_ENGINE = "nvdd_ase.engine:Engine"


class InProcess:
    """One rank, in this process."""

    closed = False

    def __init__(
        self, ranks: int, device: str, arguments: Mapping[str, Any], timeouts: Any, service: str = _ENGINE
    ) -> None:
        from nvdd.communicator import Communicator

        self.arrays: dict[str, np.ndarray] = {}
        module, _, name = service.partition(":")
        self.engine = getattr(importlib.import_module(module), name)(
            Communicator(None, device), self.arrays, lambda phase: None, **arguments
        )

    def share(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        return _array(self.arrays, name, shape)

    def call(self, method: str, payload: Any = None) -> list[Any]:
        return [getattr(self.engine, method)(payload)]

    def close(self) -> None:
        if hasattr(self.engine, "close") and not self.closed:
            self.engine.close()
        self.closed = True


class Workers:
    """Ranks in processes of their own."""

    def __init__(
        self, ranks: int, device: str, arguments: Mapping[str, Any], timeouts: tuple, service: str = _ENGINE
    ) -> None:
        from nvdd.runtime.local_ranks import LocalRanks
        from nvdd.runtime.meeting import announce

        start, call = timeouts
        self.ranks = LocalRanks(ranks, service, arguments, device=device, start_timeout=start, call_timeout=call)
        announce("nvdd", [socket.gethostname()] * ranks, self.ranks.devices, self.ranks.backend)

    @property
    def closed(self) -> bool:
        return self.ranks.closed

    def share(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        return self.ranks.share(name, shape, np.float64)

    def call(self, method: str, payload: Any = None) -> list[Any]:
        return self.ranks.call(method, payload)

    def close(self) -> None:
        self.ranks.close()


class Launched:
    """The processes of a launcher, of which this one is a rank too.

    With ``spmd="serve"`` this returns on rank 0 alone: the other ranks serve until rank 0's script ends, and exit.
    """

    def __init__(
        self,
        launch: Launch,
        spmd: str,
        device: str,
        arguments: Mapping[str, Any],
        timeouts: tuple,
        service: str = "nvdd_ase.spmd_engine:SpmdEngine",
    ) -> None:
        start, self._timeout = timeouts
        from nvdd.runtime.spmd import join

        had_mpi = "mpi4py" in sys.modules
        self.session = join(launch, spmd, start)
        if spmd == "serve" or ("mpi4py" in sys.modules and not had_mpi):
            _keep_ase_serial()
        if service == "nvdd_ase.spmd_engine:SpmdEngine":
            arguments = {**arguments, "everywhere": spmd == "replicated"}
        self._number = self.session.start(service, arguments, device, start)
        self.close = weakref.finalize(self, self.session.drop, self._number)
        self.close.atexit = False

    @property
    def closed(self) -> bool:
        return not self.close.alive or not self.session.alive(self._number)

    def share(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        # after a failure there is no array to share; the call that follows says why
        return _array(self.session.arrays.get(self._number, {}), name, shape)

    def call(self, method: str, payload: Any = None) -> list[Any]:
        if method == "evaluate":
            payload = {**payload, "n_atoms": len(self.session.arrays[self._number]["positions"])}
        answers = self.session.call(self._number, method, payload, self._timeout if method == "evaluate" else None)
        return answers[0] if method == "report" and self.session.mode == "replicated" else answers


def _array(arrays: dict[str, np.ndarray], name: str, shape: tuple[int, ...]) -> np.ndarray:
    if name not in arrays or arrays[name].shape != shape:
        arrays[name] = np.zeros(shape)
    return arrays[name]


def _keep_ase_serial() -> None:
    """Keeps ASE from taking mpi4py's world for its own.

    ASE makes its file writing and random numbers collective once mpi4py is loaded. Where rank 0 runs the script
    alone, it would wait for the others for ever; where nvdd, not the script, has loaded mpi4py, the script does not
    count on it.
    """
    import ase.parallel

    ase.parallel.world.comm = ase.parallel.DummyMPI()
