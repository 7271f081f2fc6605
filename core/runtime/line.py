"""The line between rank 0 and every other rank, beside their process group: commands, answers, failures, deaths.

A process group can't say which of its ranks has died, and is of no use once one has. The line is a TCP connection a
rank to rank 0 (the hub), read by a thread on both ends: the system closes it with the process, however that ends, so
a death is known at once, by name, also between calls. (A key in torch's store would tell nothing of a death, and a
look at it would block while the store's host is stopped.)

What rank 0 knows of a failure it decides upon and sends to all: the verdict. So every rank raises the same error.
This module is what both ends have in common; rank 0's is in hub.py, the others' in spoke.py.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from .channel import Channel
from .failures import Failure
from .greeting import Connections
from .meeting import Place, is_stopped
from .verdict import Verdict
from .watchdog import Watchdog

log = logging.getLogger("nvdd")
BEAT = 0.5  # s between signs of life
_SILENT = 1.4  # s without one that tell a stopped process, or a host that is gone, from a live one
_HOPELESS = 1.0  # s of grace for ranks that wait for each other
_VERDICT = 4.0  # s within which the hub decides: more than it waits for reports, and a beat
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

_lines: weakref.WeakSet[Line] = weakref.WeakSet()


class Peer:
    """The other end of one connection, as this end sees it."""

    def __init__(self, place: Place, connections: Connections) -> None:
        self.place, self.channel, self.phases = place, Channel(connections[0]), connections[1]
        self.heard = time.monotonic()
        self.phase = "setup"
        self.doing: tuple[int, str] | None = None
        self.gone = False
        self.left: float | None = None  # calls that it had made when it left in good order
        self._tail = b""

    def read_phases(self) -> None:
        """Catches up with what the peer wrote: what a killed process has sent is still there."""
        with contextlib.suppress(OSError):
            while data := self.phases.recv(1 << 16):
                lines = (self._tail + data).split(b"\n")
                self._tail = lines[-1]
                if len(lines) > 1:
                    self.phase = lines[-2].decode("utf-8", "replace")

    def silence(self, here: Place) -> str:
        """Why this peer can't answer; empty if it lives."""
        if self.place.shares_host(here) and is_stopped(self.place):
            return "its process is stopped"
        quiet = time.monotonic() - self.heard
        return f"nothing has been heard of it for {quiet:.1f} s" if quiet > _SILENT else ""

    def close(self) -> None:
        self.channel.close()
        self.phases.close()


class Line:
    """What both ends have in common; see `hub.Hub` and `spoke.Spoke`.

    Attributes:
        inbox: what the thread has for the main one: tuples that begin with a word.
        phase: what this rank does.
        doing: tells the operation between ranks that it is in, as `Communicator.doing`.
    """

    def __init__(self, here: Place, peers: Mapping[int, Peer], watchdog: Watchdog) -> None:
        self.here, self.peers, self.watchdog = here, peers, watchdog
        self.inbox: queue.SimpleQueue[tuple] = queue.SimpleQueue()
        self.phase = "setup"
        self.doing: Callable[[], tuple[int, str] | None] = lambda: None
        self.generation = 0
        self.calls = 0  # begun on this rank
        self.closing = False
        self._verdict: Verdict | None = None
        self._waiting: queue.SimpleQueue[Peer] = queue.SimpleQueue()  # their sockets did not take all yet
        self._lock = threading.RLock()
        self._known = threading.Condition(self._lock)
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_out, _READ, None)
        for peer in peers.values():
            self._selector.register(peer.channel, _READ, peer)
        self._thread = threading.Thread(target=self._run, name="nvdd-line", daemon=True)
        _lines.add(self)

    def start(self) -> None:
        """Begins to listen."""
        self._thread.start()

    # -- sending, from any thread

    def _send(self, peer: Peer, body: bytes) -> None:
        if peer.gone:
            return
        with self._lock, contextlib.suppress(EOFError, OSError):  # a death shows on the reading side
            peer.channel.queue(body)
            if not peer.channel.flush():
                self._waiting.put(peer)
                self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake
            self._wake_in.send(b"\0")

    def set_phase(self, name: str) -> None:
        """Says what this rank does."""
        self.phase = name

    def leave(self) -> None:
        """Tells the others that this rank's script has come to its end, where all ranks run the script."""
        body = pickle.dumps(("left", self.calls))
        for peer in self.peers.values():
            self._send(peer, body)

    def left_behind(self) -> list[int]:
        """Ranks whose scripts have ended, although this rank has begun another call."""
        return [rank for rank, peer in self.peers.items() if peer.left is not None and peer.left < self.calls]

    # -- failures

    def renew(self, generation: int) -> None:
        """Begins another generation of process groups; what is said of an earlier one no longer counts."""
        with self._lock:
            self.generation, self._verdict = generation, None

    @property
    def verdict(self) -> Verdict | None:
        """Why this generation is over; None while it is not."""
        return self._verdict

    def settle(self) -> Verdict:
        """Waits for the verdict, which comes soon after a report."""
        with self._known:
            self._known.wait_for(lambda: self._verdict is not None, _VERDICT)
            if self._verdict is None:
                self._conclude(self._undecided())
            return self._verdict

    def _conclude(self, verdict: Verdict) -> None:
        with self._known:
            if self._verdict is not None:
                return
            self._verdict = verdict
            self._known.notify_all()
        self.inbox.put(("verdict", verdict.generation))
        self.watchdog.failed(verdict.why, _HOPELESS if verdict.deadlock and self.here.rank else None)

    def _undecided(self) -> Verdict:
        raise NotImplementedError

    # -- the thread

    def _run(self) -> None:
        try:
            self._listen()
        except Exception as error:
            if not self.closing:
                log.exception("rank %d: its line to the other ranks has broken", self.here.rank)
                cause = f"its line to the other ranks has broken: {type(error).__name__}: {error}"
                self._conclude(Verdict(self.generation, [Failure(self.here.rank, self.phase, cause)], [self.here.rank]))
                self.inbox.put(("gone",))

    def _listen(self) -> None:
        next_beat = 0.0
        while not self.closing:
            while not self._waiting.empty():
                peer = self._waiting.get()
                if not peer.gone:
                    self._selector.modify(peer.channel, _READ | _WRITE, peer)
            for key, events in self._selector.select(self._patience(next_beat - time.monotonic())):
                if key.data is None:
                    self._wake_out.recv(1 << 12)
                else:
                    self._serve(key.data, events)
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + BEAT
                beat = pickle.dumps(("beat", self.phase, self.doing()))
                for peer in self.peers.values():
                    self._send(peer, beat)
                self._at_beat(now)
            self._tick(now)
            self.watchdog.tick()

    def _patience(self, until_beat: float) -> float:
        return max(0.0, until_beat)

    def _serve(self, peer: Peer, events: int) -> None:
        try:
            if events & _WRITE:
                with self._lock:
                    if peer.channel.flush():
                        self._selector.modify(peer.channel, _READ, peer)
            messages = peer.channel.receive() if events & _READ else ()
        except (EOFError, OSError):
            if not peer.gone:
                peer.gone = True
                self._selector.unregister(peer.channel)
                peer.read_phases()
                if not self.closing:
                    self._hung_up(peer)
            return
        peer.heard = time.monotonic()
        for message in messages:
            word, *rest = pickle.loads(message.body)
            if word == "beat":
                self._beat(peer, *rest)
            elif word == "left":
                (peer.left,) = rest
                if self.watchdog.inside and peer.left < self.calls:
                    self.left_early(peer.place.rank)
            else:
                self._handle(peer, word, *rest)

    def _at_beat(self, now: float) -> None:
        pass

    def _tick(self, now: float) -> None:
        pass

    def _beat(self, peer: Peer, phase: str, doing: tuple[int, str] | None) -> None:
        peer.phase, peer.doing = phase, doing

    def left_early(self, rank: int) -> None:
        """A rank's script is at its end while this rank calculates: a failure."""
        raise NotImplementedError

    def _handle(self, peer: Peer, word: str, *rest: Any) -> None:
        raise NotImplementedError

    def _hung_up(self, peer: Peer) -> None:
        raise NotImplementedError

    # -- the end

    def close(self) -> None:
        """Stops the thread and hangs up."""
        if not self.closing:
            self.closing = True
            self._wake()
            if threading.current_thread() is not self._thread:
                self._thread.join(2.0)
            self.forget()

    def forget(self) -> None:
        """Closes the sockets alone. In a forked child, which would keep a dead rank's connection open."""
        self.closing = True
        for peer in self.peers.values():
            peer.close()
        for sock in (self._wake_in, self._wake_out):
            sock.close()
        self._selector.close()


def _forget_all() -> None:
    for line in list(_lines):
        line.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
