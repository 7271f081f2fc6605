"""N supervised processes on this machine that serve calls together, as the ranks of one torch.distributed group."""

from __future__ import annotations

import os
import pickle
import re
import socket
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from ..errors import InputError, NvddError
from . import shared_arrays
from .channel import dumps_for_ranks
from .crew import Crew
from .rank_process import STATE, absolute_path


class LocalRanks:
    """Starts ``n_ranks`` processes, each of which builds a service, and calls that service on all of them at once.

    The caller is no rank. The processes end with `close`, with the ``with`` block, when the object is collected,
    when this process ends in whatever way, and with the first failure: a rank that raises or dies ends them all
    and is reported once, as a `RankError` (or as the rank's own exception if that is an `InputError`,
    `MissingDependencyError` or `DistributedOpError`). After that, a new ``LocalRanks`` must be made.

    The user's script is not run by the ranks and needs no ``__main__`` guard; what it sends them must therefore
    be defined in a module.

    Args:
        n_ranks: number of processes.
        service: ``"module:Class"``, built by each rank as ``Class(comm, arrays, phase, **kwargs)``: ``comm`` is
            the rank's `Communicator`; ``arrays`` a read-only mapping of the shared arrays by name, always up to
            date; ``phase`` a function by which the service says what it does (``phase("forward")``), so that a
            failure can name it. If it has a method ``close``, that is called before a clean exit.
        kwargs: keyword arguments of the service; pickled once.
        device: ``"cpu"``, ``"cuda"`` (rank i takes GPU i modulo their number), ``"cuda:k"`` (all take GPU k).
        start_timeout: seconds within which every rank's service must be built; ``None``: no limit.
        call_timeout: default limit of a call in seconds; ``None``: no limit. Deaths are noticed at once anyway.
    """

    def __init__(
        self,
        n_ranks: int,
        service: str,
        kwargs: Mapping[str, Any] | None = None,
        device: str = "cpu",
        start_timeout: float | None = 300.0,
        call_timeout: float | None = None,
    ) -> None:
        if not isinstance(n_ranks, int) or isinstance(n_ranks, bool) or n_ranks < 1:
            raise InputError(f"the number of ranks must be a positive integer, not {n_ranks!r}")
        _check_service(service)
        if not re.fullmatch(r"cpu|cuda(:\d+)?", str(device)):
            raise InputError(f"local ranks can't use device {device!r}: 'cpu', 'cuda', or 'cuda:<number>'")
        pickled_kwargs = dumps_for_ranks(dict(kwargs or {}), f"the arguments of {service}")

        self.call_timeout = call_timeout
        self._arrays: dict[str, np.ndarray] = {}
        self._busy = threading.Lock()
        states_fd, states = shared_arrays.create((n_ranks,), STATE)
        states["phase"] = b"setup"
        # The ranks meet at a store that rank 0 hosts on this socket. It is bound here, to the loopback interface
        # alone, so that no port must be guessed or passed back, and no other machine can connect.
        meeting_point = socket.create_server(("127.0.0.1", 0), backlog=max(128, n_ranks))
        try:
            self._crew = Crew(n_ranks, states)
            self._finalizer = weakref.finalize(self, self._crew.end, _message("exit"))
            start = {
                "path": absolute_path(sys.path),
                "pythonpath": os.environ.get("PYTHONPATH"),
                "cwd": os.getcwd(),
                "port": meeting_point.getsockname()[1],
                "device": str(device),
                "service": service,
                "kwargs": pickled_kwargs,
                "timeout": start_timeout,
            }
            fds = [states_fd, meeting_point.fileno()]
            body = _message("start", start)
            ready = self._crew.exchange(body, fds, timeout=start_timeout, what="the start")
        finally:
            os.close(states_fd)
            meeting_point.close()
        self.devices: tuple[str, ...] = tuple(answer["device"] for answer in ready)
        self.backend: str = ready[0]["backend"]

    @property
    def n_ranks(self) -> int:
        return len(self._crew.members)

    @property
    def closed(self) -> bool:
        """Whether the ranks have ended, by request or by a failure."""
        return self._crew.ended is not None

    @property
    def pids(self) -> tuple[int, ...]:
        """The process id of each rank."""
        return tuple(member.process.pid for member in self._crew.members)

    @property
    def phases(self) -> tuple[str, ...]:
        """What each rank does just now."""
        return tuple(self._crew.phase(rank) for rank in range(self.n_ranks))

    @property
    def arrays(self) -> Mapping[str, np.ndarray]:
        """This process's views of the shared arrays, by name."""
        return MappingProxyType(self._arrays)

    def share(self, name: str, shape: int | Sequence[int], dtype: Any) -> np.ndarray:
        """Makes ``arrays[name]``, in memory that this process and all ranks see; returns this process's view.

        A new array is zero. Sharing a name again with another shape or dtype replaces the array (an old view
        stays valid but is no longer the ranks'); with the same shape and dtype it returns the array as it is.
        """
        shape, dtype = shared_arrays.normalise(shape, dtype)
        present = self._arrays.get(name)
        if present is not None and present.shape == shape and present.dtype == dtype and not self.closed:
            return present
        fd, view = shared_arrays.create(shape, dtype)
        try:
            body = _message("share", name, shape, dtype)
            self._exchange(body, [fd], self.call_timeout, f"sharing {name!r}")
        finally:
            os.close(fd)
        self._arrays[name] = view
        return view

    def call(self, method: str, payload: Any = None, timeout: float | None = None) -> list[Any]:
        """Runs ``service.<method>(payload)`` on all ranks at once.

        Args:
            method: name of the service's method.
            payload: its argument, pickled; large arrays belong into :meth:`share`.
            timeout: limit in seconds; ``None``: ``call_timeout``.

        Returns:
            What each rank returned, by rank.
        """
        body = _message("call", method, dumps_for_ranks(payload, f"the argument of {method!r}"))
        return self._exchange(body, (), self.call_timeout if timeout is None else timeout, f"{method!r}")

    def _exchange(self, body: bytes, fds: Sequence[int], timeout: float | None, what: str) -> list[Any]:
        if not self._busy.acquire(blocking=False):
            raise NvddError("these ranks are inside another call; each thread needs LocalRanks of its own")
        try:
            return self._crew.exchange(body, fds, timeout=timeout, what=what)
        finally:
            self._busy.release()

    def close(self) -> None:
        """Ends the ranks; a second time it does nothing."""
        self._finalizer()

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<LocalRanks: {self.n_ranks} x {self._crew.ended or 'ready'}>"


def _message(*parts: Any) -> bytes:
    return pickle.dumps(parts, protocol=5)


def _check_service(service: str) -> None:
    module, _, attribute = str(service).partition(":")
    if not module or not attribute:
        raise InputError(f"service {service!r} does not name a class: write 'package.module:Class'")
    if module == "__main__":
        raise InputError(
            f"service {service!r} is in the script itself, which the ranks do not run: move it to a module"
        )
