"""One rank of `nvdd.runtime.local_ranks.LocalRanks`, inside its process."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import numpy as np

from ..errors import InputError
from . import failures, shared_arrays
from .channel import Channel, Message
from .rank_process import STATE

# Not a limit that anybody should meet: the parent watches, and how long a call may take is for it to say.
_COLLECTIVE_TIMEOUT = timedelta(days=7)
_BEAT = 500  # ms


def main() -> None:
    """Entry of ``python -m nvdd.worker <descriptor of the control socket>``."""
    if len(sys.argv) != 2 or not sys.argv[1].isdigit():
        sys.exit("nvdd.worker is started by nvdd, which gives it a socket; it can't be started by hand")
    fd = int(sys.argv[1])
    os.set_inheritable(fd, False)  # a child that held it would hide this rank's death from the parent
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets the Ctrl-C and ends its ranks
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError):
            stream.reconfigure(line_buffering=True)  # a killed rank's prints must not be lost
    worker = Worker(socket.socket(fileno=fd))
    os.register_at_fork(after_in_child=worker.hang_up)
    worker.run()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(0)  # the interpreter's own way out, past all of torch, takes a second and can crash


class Worker:
    """Reads messages from the parent and acts on them until told to exit, a failure, or the parent's end."""

    def __init__(self, sock: socket.socket) -> None:
        self.rank = int(os.environ["RANK"])
        self.n_ranks = int(os.environ["WORLD_SIZE"])
        self._channel = Channel(sock)
        self._arrays: dict[str, np.ndarray] = {}
        self._states: np.ndarray | None = None
        self._comm: Any = None
        self._service: Any = None
        self._store: Any = None
        self._leaving = False
        threading.Thread(target=self._watch, name="nvdd-watch", daemon=True).start()

    def run(self) -> None:
        actions = {"start": self._start, "share": self._share, "call": self._call, "exit": self._exit}
        while (message := self._next_message()) is not None:
            name, *arguments = pickle.loads(message.body)
            try:
                answer = _packed(actions[name](message, *arguments))
                self._set_phase("idle")
            except BaseException as error:  # SystemExit too: a rank must not end behind the parent's back
                failure = failures.from_exception(self.rank, self._phase(), error)
                answer = pickle.dumps(failure, protocol=5)
            self._channel.queue(answer)
            with contextlib.suppress(EOFError):
                self._channel.flush()
            # After a failure the loop just waits for the parent to end this process. To exit now would make the
            # peers' collectives fail too, and bury the cause under their errors.

    def hang_up(self) -> None:
        """In a forked child: lets go of the socket, which is the rank's alone."""
        self._channel.close()

    def _next_message(self) -> Message | None:
        while True:
            try:
                messages = self._channel.receive()
            except EOFError:
                return None
            if messages:
                return messages[0]  # the parent sends one at a time and waits for its answer

    # -- what the parent asks for

    def _start(self, message: Message, start: dict[str, Any]) -> dict[str, str]:
        states_fd, meeting_fd = message.fds
        self._states = shared_arrays.attach(states_fd, (self.n_ranks,), STATE)
        os.close(states_fd)
        sys.path[:] = start["path"]
        os.chdir(start["cwd"])
        if start["pythonpath"] is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = start["pythonpath"]
        service = _load_service(start["service"])
        kwargs = pickle.loads(start["kwargs"])
        comm, backend = self._join(start, meeting_fd)
        self._comm = comm
        self._service = service(comm, MappingProxyType(self._arrays), self._set_phase, **kwargs)
        return {"device": str(comm.device), "backend": backend}

    def _share(self, message: Message, name: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
        (fd,) = message.fds
        self._arrays[name] = shared_arrays.attach(fd, shape, dtype)
        os.close(fd)

    def _call(self, message: Message, method: str, payload: bytes) -> Any:
        self._set_phase(method)
        return getattr(self._service, method)(pickle.loads(payload))

    def _exit(self, message: Message) -> None:
        import torch.distributed as dist

        self._leaving = True
        if hasattr(self._service, "close"):
            self._service.close()
        self._service = None
        if dist.is_initialized():
            dist.destroy_process_group()

    # -- the group

    def _join(self, start: dict[str, Any], meeting_fd: int) -> tuple[Any, str]:
        """Makes the process group of the ranks; returns the communicator and the backend's name."""
        import torch
        import torch.distributed as dist

        from ..communicator import Communicator

        threads = os.environ["OMP_NUM_THREADS"].split(",")[0]
        if threads.isdigit():
            torch.set_num_threads(max(1, int(threads)))
        device, own = _device(start["device"], self.rank, self.n_ranks)
        backend = "nccl" if own else "gloo"
        timeout = _COLLECTIVE_TIMEOUT if start["timeout"] is None else timedelta(seconds=start["timeout"])
        hosts = self.rank == 0
        if not hosts:
            os.close(meeting_fd)
        store = dist.TCPStore(
            "127.0.0.1",
            start["port"],
            self.n_ranks,
            is_master=hosts,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=meeting_fd if hosts else None,
        )
        self._store = store  # rank 0's must outlive the others' groups: until the parent closes the socket
        dist.init_process_group(
            backend,
            store=store,
            rank=self.rank,
            world_size=self.n_ranks,
            timeout=_COLLECTIVE_TIMEOUT,
            device_id=device if own else None,
        )
        return Communicator(dist.group.WORLD, device), backend

    # -- phases, and the end of the parent

    def _set_phase(self, phase: str) -> None:
        self._states["phase"][self.rank] = phase.encode()

    def _phase(self) -> str:
        return "setup" if self._states is None else self._states["phase"][self.rank].decode("utf-8", "replace")

    def _tell(self) -> None:
        """Lets the parent see which operation between ranks this one is in."""
        comm = self._comm
        if comm is not None:
            number, what = comm.doing or (0, "")
            self._states["operation"][self.rank] = number
            self._states["what"][self.rank] = what.encode("utf-8", "replace")

    def _watch(self) -> None:
        """Ends this process when the parent is gone, also in the middle of a call; tells it what goes on."""
        poll = select.poll()
        poll.register(self._channel, 0)  # nothing but the hang-up, which is always reported
        parent = os.getppid()
        while not poll.poll(_BEAT) and os.getppid() == parent:
            self._tell()
        if not self._leaving:
            os._exit(1)


def _packed(answer: Any) -> bytes:
    try:
        return pickle.dumps((answer,), protocol=5)
    except Exception as error:
        raise TypeError(f"the result can't be pickled for the parent: {error}") from error


def _load_service(path: str) -> Callable[..., Any]:
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise InputError(
                f"service {path!r}: no module {error.name!r} on the parent's sys.path, which the ranks use too"
            ) from error
        raise
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        raise InputError(f"service {path!r}: the module has no {attribute!r}") from error


def _device(asked: str, rank: int, n_ranks: int) -> tuple[Any, bool]:
    """The device of a rank, and whether every rank has a GPU of its own (NCCL needs that)."""
    import torch

    if asked == "cpu":
        return torch.device("cpu"), False
    count = torch.cuda.device_count()
    if count == 0:
        raise InputError(f"device {asked!r}: torch {torch.__version__} sees no GPU on this machine; use device='cpu'")
    kind, _, index = asked.partition(":")
    number = int(index) if index else rank % count
    if number >= count:
        raise InputError(f"device {asked!r}: this machine has {count} GPU(s), numbered from 0")
    device = torch.device(kind, number)
    torch.cuda.set_device(device)
    return device, n_ranks == 1 or (not index and n_ranks <= count)
