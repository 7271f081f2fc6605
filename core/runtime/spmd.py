"""`Session`: services on the ranks of a launch (torchrun, mpirun, srun), called from the user's script.

Like `local_ranks.LocalRanks`, but the processes are there already, this one is a rank too, and they may be on several
hosts. Two modes:

* ``"serve"``: the script goes on, on rank 0 alone. The others serve what rank 0 calls, until its script ends.
* ``"replicated"``: the script goes on, on all ranks, and all make the same calls.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import itertools
import logging
import math
import os
import pickle
import queue
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NoReturn

import numpy as np

from ..errors import CommunicationError, InputError, NvddError, RankError
from . import failures
from .agreement import check_alike
from .greeting import invite
from .hub import Hub
from .launcher import Launch
from .meeting import Meeting
from .serving import serve
from .spoke import Spoke
from .verdict import Limit, Verdict
from .watchdog import Watchdog

log = logging.getLogger("nvdd")
MODES = ("serve", "replicated")
# s that a rank may stay in a call after another's failure; rank 0 and its like run the user's script, so they get
# longer: what they compute ends with an exception there, once it comes to the next exchange.
_GRACE_SERVING, _GRACE_SCRIPT = 8.0, 30.0
_LEAVING = 4.0  # s for the others to hang up
_DIVERGED = "spmd='replicated': the script has not done the same on all ranks"

Number = tuple[int, int]  # of a call, and of the service that it starts: generation, count

_session: Session | None = None


class _Broken(Exception):
    """This rank's call is void: there is a verdict."""


def join(launch: Launch, mode: str, timeout: float | None) -> Session:
    """The session of this process; made at the first call, which all processes of the launch must make.

    In mode ``"serve"`` it returns on rank 0 alone: the other ranks serve, and exit with rank 0.

    Args:
        launch: from `launcher.detect`.
        mode: ``"serve"`` or ``"replicated"``; one for the whole run.
        timeout: seconds within which all processes must come; None for a week.
    """
    global _session
    if mode not in MODES:
        raise InputError(f"spmd must be one of {', '.join(map(repr, MODES))}, 'off', not {mode!r}")
    if _session is not None and _session.mode != mode:
        raise InputError(f"spmd={mode!r}, but this run has begun with spmd={_session.mode!r}: choose one")
    if _session is None:
        _session = Session(launch, mode, timeout)
    if mode == "serve" and launch.rank > 0:
        serve(_session)
    return _session


class Session:
    """The ranks of a launch. Use `join`.

    A failure on any rank ends the present process group and every service, and is raised once: on rank 0, or on all
    ranks that run the script. If all processes live on, the next `start` makes a new group; if one is gone, nothing
    can be started any more.
    """

    def __init__(self, launch: Launch, mode: str, timeout: float | None) -> None:
        limit = 7 * 86400.0 if timeout is None else timeout
        server, invitation = invite(launch.local_size == launch.size) if launch.rank == 0 else (None, None)
        self.meeting = Meeting(launch, timedelta(seconds=limit), (mode, invitation))
        modes = [mode for mode, _ in self.meeting.notices]
        if len(set(modes)) > 1:
            raise InputError(f"spmd must be the same on all ranks; it is {modes}")
        self.launch, self.mode = launch, mode
        self.arrays: dict[Number, dict[str, np.ndarray]] = {}
        self.serving = mode == "serve" and launch.rank > 0
        self._pid = os.getpid()
        self._comms: dict[str, tuple[Any, list[str]]] = {}
        self._services: dict[Number, Any] = {}
        self._count = itertools.count()
        self._dropped: list[Number] = []
        self._lock = threading.Lock()
        self._raised: Verdict | None = None
        self._deadline = math.inf
        self._watchdog = Watchdog(self._abort, self._end, _GRACE_SERVING if self.serving else _GRACE_SCRIPT)
        invitation, places = self.meeting.notices[0][1], self.meeting.places
        self.line: Hub | Spoke
        if launch.rank == 0:
            self.line = Hub(server, invitation.token, places, self._watchdog, limit)
        else:
            self.line = Spoke(invitation, places[0], self.meeting.here, self._watchdog, limit)
        self.line.doing = self._doing
        self.line.start()
        self.phase("idle")
        atexit.register(self.leave)

    # -- for the script

    def start(self, service: str, kwargs: Mapping[str, Any], device: str, timeout: float | None) -> Number:
        """Builds ``module:Class`` as ``Class(comm, arrays, phase, **kwargs)`` on every rank; returns its number.

        ``arrays`` is a dict of numpy arrays that each rank has for itself; rank 0's is ``self.arrays[number]``.
        In mode ``"serve"`` all ranks get rank 0's ``kwargs``, so that they agree also where these are random.
        """
        try:
            pickled = pickle.dumps(dict(kwargs), protocol=5) if self.mode == "serve" else None
        except Exception as error:
            raise InputError(
                f"the arguments of {service} can't be sent to the other ranks, since they can't be pickled "
                f"({type(error).__name__}: {error}): give names, paths, numbers, or importable classes"
            ) from error
        return self._call("start", (service, pickled, device), timeout, "the start", kwargs)[0]

    def call(self, number: Number, method: str, payload: Any, timeout: float | None) -> list[Any]:
        """Runs ``service.<method>(payload)`` on all ranks.

        Returns:
            What each rank returned, by rank; in mode ``"replicated"`` what this one did, alone in a list.
        """
        if number not in self._services:
            raise NvddError("this service has ended: start a new one")
        return self._call("run", (number, method, payload), timeout, f"{method!r}")

    def alive(self, number: Number) -> bool:
        """Whether a service can still be called; if a rank has failed meanwhile, the call will say so."""
        return number in self._services

    def drop(self, number: Number) -> None:
        """Lets go of a service; the other ranks do at the next call. May be called from a finaliser."""
        self._dropped.append(number)

    def devices(self, device: str) -> tuple[list[str], str]:
        """Device of each rank, and the backend, for a ``device`` of `start`."""
        comm, devices = self._comms[device]
        return devices, comm.backend

    def _call(self, word: str, args: tuple, timeout: float | None, what: str, kwargs: Any = None) -> list[Any]:
        with self._lock:
            self._ready()
            dropped, self._dropped = self._dropped, []
            number = (self.line.generation, next(self._count))
            order = (number, timeout, what, dropped, word, args)
            if self.mode == "serve":
                try:
                    body = pickle.dumps(("command", *order), protocol=5)
                except Exception as error:
                    raise InputError(f"the argument of {what} can't be pickled: {error}") from error
                self.line.command(body)
            try:
                return self.perform(*order, kwargs=kwargs)
            finally:
                self.phase("idle")

    def _ready(self) -> None:
        """Raises what happened since the last call; begins another generation if that has been raised."""
        verdict = self.line.verdict
        if verdict is not None and verdict is not self._raised:
            self._raised = verdict
            self.shut()
            raise failures.to_error(verdict.failures, self.launch.size)
        gone = sorted(self.line.lost) if isinstance(self.line, Hub) else (verdict.lost if verdict else [])
        if gone:
            why = self._raised.why if self._raised else f"rank {gone[0]} is gone"
            raise NvddError(f"the ranks of this run can't go on ({why}): start the job again")
        if verdict is not None:
            self.renew(self.line.generation + 1)

    # -- on every rank

    def perform(
        self,
        number: Number,
        timeout: float | None,
        what: str,
        dropped: list[Number],
        word: str,
        args: tuple,
        kwargs: Any = None,
    ) -> list[Any]:
        """Carries out an order, which all ranks have at once; gives the answers of all ranks, if this is the rank that leads.

        Args:
            number: of this call.
            timeout, what: its limit in seconds, and its name for messages.
            dropped: services that are no longer needed.
            word, args: ``"start"`` or ``"run"``, and what goes with it.
            kwargs: of the service, where the script has given them on this rank.
        """
        for old in dropped:
            self._services.pop(old, None)
            self.arrays.pop(old, None)
        deadline = self._deadline = math.inf if timeout is None else time.monotonic() + timeout
        self.line.calls += 1
        try:
            with self._watchdog.call(deadline):
                self._check()
                for comm, _ in self._comms.values():
                    comm.deadline = deadline
                value = self._start(number, *args, kwargs) if word == "start" else self._run(*args)
                answers = self._answers(number, value) if self._leads else [value]
            self._check()
            if self._watchdog.fired:
                raise CommunicationError(f"timed out waiting for a GPU, and broken off: {self._watchdog.fired}")
            return answers
        except BaseException as error:
            limit = Limit(timeout, what) if timeout is not None and time.monotonic() > deadline - 0.05 else None
            self._give_up(error, limit)

    @property
    def _leads(self) -> bool:
        return self.mode == "serve" and self.launch.rank == 0

    def _check(self) -> None:
        if self.mode == "replicated":
            for rank in self.line.left_behind():
                self.line.left_early(rank)
                raise _Broken
        if self.line.verdict is not None:
            raise _Broken

    def _start(self, number: Number, service: str, pickled: bytes | None, device: str, kwargs: Any) -> Number:
        self.phase("group")
        if device not in self._comms:
            self._gather(device)
            self._comms[device] = self.meeting.communicator(device, self._deadline)
        comm = self._comms[device][0]
        self.phase("setup")
        if self.mode == "replicated":
            check_alike(comm, {"the call": ("start", number, service), **kwargs}, _DIVERGED)
        module, _, name = service.partition(":")
        maker = getattr(importlib.import_module(module), name)
        arrays = self.arrays.setdefault(number, {})
        if kwargs is None:
            kwargs = pickle.loads(pickled)
        self._services[number] = maker(comm, arrays, self.phase, **kwargs)
        return number

    def _gather(self, device: str) -> None:
        """Returns when all ranks are here: a group that not all come to make can't be left before its time-out."""
        key = (self.line.generation, device)
        if isinstance(self.line, Hub):
            self._collect(key, None)
            self.line.command(pickle.dumps(("go", key)))
        else:
            self.line.answer((key, pickle.dumps(None)))
            while self._next_word() != ("go", key):
                pass

    def _run(self, number: Number, method: str, payload: Any) -> Any:
        self.phase(method)
        service = self._services[number]
        if self.mode == "replicated":
            inputs = service.fingerprint(payload) if method == "evaluate" else {}
            check_alike(service.comm, {"the call": (method, number), **inputs}, _DIVERGED)
        return getattr(service, method)(payload)

    def _answers(self, number: Number, mine: Any) -> list[Any]:
        """`_collect` at the end of a call, at which others may wait for a rank that is through."""
        self.line.collecting = True
        try:
            return self._collect(number, mine)
        finally:
            self.line.collecting = False

    def _collect(self, key: tuple, mine: Any) -> list[Any]:
        """The answers of all ranks, which also say that all have come so far."""
        answers = {0: mine}
        while len(answers) < self.launch.size:
            word, *rest = self._next_word()
            if word == "answer" and rest[1] == key:
                answers[rest[0]] = pickle.loads(rest[2])
        return [answers[rank] for rank in range(self.launch.size)]

    def _next_word(self) -> tuple:
        """What the line has next; raises if that is the verdict, or the time is over."""
        left = None if self._deadline == math.inf else max(0.0, self._deadline - time.monotonic())
        try:
            word = self.line.inbox.get(timeout=left)
        except queue.Empty:
            raise CommunicationError("timed out waiting for the other ranks") from None
        if word == ("verdict", self.line.generation):
            raise _Broken
        return word

    # -- failures

    def _give_up(self, error: BaseException, limit: Limit | None) -> NoReturn:
        """Reports, leaves the group so that the peers' operations fail at once, and raises what all agree upon."""
        failure = failures.from_exception(self.launch.rank, self.line.phase, error)
        if not isinstance(error, _Broken):
            self.line.report(failure, limit)
        link: BaseException | None = error
        while link is not None:  # the frames hold the process group, whose connections close with the last holder
            traceback.clear_frames(link.__traceback__)
            link = link.__cause__ or link.__context__
        self.shut()
        verdict = self._raised = self.line.settle()
        if self.serving or not isinstance(error, Exception):  # Ctrl-C, SystemExit: the script's own affair
            raise error
        first = failures.primary(verdict.failures)
        if first.rank == self.launch.rank and first.exception is not None and isinstance(error, failures.USER_ERRORS):
            raise error
        if first.rank == self.launch.rank and not isinstance(error, _Broken):
            raise RankError(first.rank, first.phase, first.cause, first.details) from error
        raise failures.to_error(verdict.failures, self.launch.size) from None

    def shut(self) -> None:
        """Ends services and process groups."""
        for service in self._services.values():
            if hasattr(service, "close"):
                with contextlib.suppress(Exception):
                    service.close()
        self._services, self.arrays = {}, {}
        for comm, _ in self._comms.values():
            comm.close()
        self._comms = {}

    def renew(self, generation: int) -> None:
        """Begins another generation: groups and services are made anew."""
        self.shut()
        self._count = itertools.count()
        self.line.renew(generation)

    def _abort(self) -> None:
        # In a thread: NCCL may take its time, and the line must be watched meanwhile.
        comms = [comm for comm, _ in self._comms.values()]
        threading.Thread(target=lambda: [comm.abort() for comm in comms], name="nvdd-abort", daemon=True).start()

    def _end(self, why: str) -> None:
        log.critical("rank %d is stuck in phase '%s' and ends: %s", self.launch.rank, self.line.phase, why)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(1)

    def _doing(self) -> tuple[int, str] | None:
        return next((comm.doing for comm, _ in list(self._comms.values()) if comm.doing), None)

    def phase(self, name: str) -> None:
        """Says what this rank does."""
        self.line.set_phase(name)

    # -- the end of the script

    def leave(self) -> None:
        """Ends the run on this rank; at the exit of the interpreter."""
        if os.getpid() != self._pid or self.line.closing:
            return
        for stream in (sys.stdout, sys.stderr):  # a launcher may end this process with the first of the others
            with contextlib.suppress(Exception):
                stream.flush()
        failed = self.line.verdict is not None
        if isinstance(self.line, Hub) and failed:
            self.line.kill(stopped_only=True)
        if self._leads:
            uncaught = getattr(sys, "last_value", None) is not None
            self.line.dismiss(int(failed and uncaught), _LEAVING)
            if failed:
                self.line.kill(stopped_only=False)
        elif self.mode == "replicated":
            self.line.leave()
        with contextlib.suppress(Exception):
            self.shut()
            self.meeting.leave()
        self.line.close()
