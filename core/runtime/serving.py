"""What a rank does that serves rank 0's script, and how its process ends."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

from .meeting import Place

log = logging.getLogger("nvdd")
_LAST = 5.0  # s for what a process does at its end


def serve(session: Any) -> NoReturn:
    """Does what rank 0 asks for; ends this process when rank 0 ends.

    Args:
        session: the `spmd.Session` of this rank.
    """
    code = 1
    try:
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches rank 0 too, which then ends all
        code = _loop(session)
    except BaseException:
        traceback.print_exc()
    finally:
        _exit(session, code)


def _loop(session: Any) -> int:
    line = session.line
    while True:
        word, *rest = line.inbox.get()
        if word == "exit":
            return rest[0]
        if word == "gone":
            return 1
        if word == "verdict":
            session.shut()
        if word != "command":
            continue
        number, *order = rest
        if number[0] != line.generation:
            session.renew(number[0])
        try:
            (value,) = session.perform(number, *order)
            line.answer((number, pickle.dumps(value, protocol=5)))
        except BaseException:  # reported: rank 0 raises it
            log.debug("rank %d: this call failed", line.here.rank, exc_info=True)
            if line.verdict is not None and 0 in line.verdict.lost:
                log.error("rank %d ends, since %s", line.here.rank, line.verdict.why)
                return 1
        session.phase("idle")


def _exit(session: Any, code: int) -> NoReturn:
    """Ends the process. Nothing of the script after the constructor runs: no finally, no atexit."""
    stuck = _end_after(_LAST, 1)
    verdict = session.line.verdict
    alone = verdict is not None and bool(verdict.lost)
    with contextlib.suppress(Exception):
        session.shut()
        session.meeting.leave()
    session.line.close()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    stuck.cancel()
    if session.launch.rendezvous == "mpi" and not alone:
        from mpi4py import MPI

        # mpirun takes an exit without these two, MPI's end and that of its library, for a crash, and kills rank 0
        if not MPI.Is_finalized():
            MPI.Finalize()
        _end_after(_LAST, code)
        with contextlib.suppress(Exception):
            ctypes.CDLL(None).exit(code)
    elif code and not alone:
        _wait_for_end(session.meeting.places[0], session.meeting.here)
    os._exit(code)


def _end_after(seconds: float, code: int) -> threading.Timer:
    """Ends this process, unless it has ended by then or the timer is cancelled."""
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()
    return timer


def _wait_for_end(place: Place, here: Place) -> None:
    """Gives rank 0's process time to end with its own status: launchers report the first that fails, and end the rest."""
    give_up = time.monotonic() + _LAST
    while place.shares_host(here) and time.monotonic() < give_up:
        try:
            os.kill(place.pid, 0)
        except OSError:
            return
        time.sleep(0.05)
