"""`Hub`: rank 0's end of the line to the other ranks."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any

from . import failures
from .failures import Blame, Failure
from .greeting import accept
from .line import Line, Peer
from .meeting import Place, is_stopped
from .standstill import Standstill
from .verdict import Limit, Verdict, left_early
from .watchdog import Watchdog

log = logging.getLogger("nvdd")
_SETTLE_OWN, _SETTLE_OTHER = 0.1, 1.0  # s to wait for more reports, as in crew.py


class Hub(Line):
    """Rank 0's end: commands all, hears of all, decides what went wrong."""

    def __init__(
        self, server: socket.socket, token: bytes, places: Sequence[Place], watchdog: Watchdog, timeout: float
    ) -> None:
        found = accept(server, token, places, timeout)
        super().__init__(places[0], {rank: Peer(places[rank], found[rank]) for rank in found}, watchdog)
        self.lost: dict[int, Failure] = {}
        self._reports: list[tuple[Failure, Limit | None]] = []
        self._settled_at = 0.0
        self._answered: set[int] = set()
        self._standstill = Standstill()
        self._deadlock = False
        self.collecting = False  # rank 0 is through with a call, and waits for the others' answers

    def command(self, body: bytes) -> None:
        """Sends a pickled message to every other rank."""
        self._answered = set()
        for peer in self.peers.values():
            self._send(peer, body)

    def renew(self, generation: int) -> None:
        with self._lock:
            super().renew(generation)
            self._reports, self._deadlock = [], False

    def report(self, failure: Failure, limit: Limit | None) -> None:
        """Rank 0's own failure."""
        self._note(failure, limit)
        self._wake()

    def dismiss(self, code: int, patience: float) -> None:
        """Tells the others to exit with ``code``, and waits ``patience`` seconds at most until they have hung up."""
        for peer in self.peers.values():
            peer.left = math.inf
        self.command(pickle.dumps(("exit", code)))
        give_up = time.monotonic() + patience
        while time.monotonic() < give_up and not all(peer.gone for peer in self.peers.values()):
            time.sleep(0.01)

    def kill(self, stopped_only: bool) -> None:
        """Ends processes of this host that have not hung up: a stopped one would keep its launcher waiting."""
        for peer in self.peers.values():
            if not peer.gone and peer.place.shares_host(self.here) and (not stopped_only or is_stopped(peer.place)):
                with contextlib.suppress(OSError):
                    os.kill(peer.place.pid, signal.SIGKILL)

    def _note(self, failure: Failure, limit: Limit | None = None) -> None:
        with self._lock:
            if self._verdict is not None:
                return
            self._reports.append((failure, limit))
            own = failure.blame is Blame.OWN
            at = time.monotonic() + (_SETTLE_OWN if own else _SETTLE_OTHER)
            self._settled_at = min(self._settled_at, at) if len(self._reports) > 1 else at

    def _handle(self, peer: Peer, word: str, *rest: Any) -> None:
        if word == "answer":
            self._answered.add(peer.place.rank)
            self.inbox.put(("answer", peer.place.rank, *rest))
        elif word == "failed":
            generation, failure, limit = rest
            if generation == self.generation:
                self._note(failure, limit)

    def _beat(self, peer: Peer, phase: str, doing: tuple[int, str] | None) -> None:
        peer.doing = doing  # their phases they tell in better time, see read_phases

    def left_early(self, rank: int) -> None:
        self._note(left_early(rank))
        self._wake()

    def _hung_up(self, peer: Peer) -> None:
        if peer.left is not None:
            return
        place = peer.place
        cause = (
            f"its process ({place.pid} on {place.host}) is gone: killed, for example since memory ran out, or crashed"
        )
        failure = Failure(place.rank, peer.phase, cause)
        self.lost[place.rank] = failure
        if self._verdict is None:
            # at once: the launcher, who sees it too, may end this process before the script can raise anything
            log.error("rank %d failed in phase '%s': %s", place.rank, peer.phase, cause)
            self._note(failure)

    def _patience(self, until_beat: float) -> float:
        pending = self._settled_at - time.monotonic() if self._reports and self._verdict is None else until_beat
        return max(0.0, min(until_beat, pending))

    def _at_beat(self, now: float) -> None:
        for peer in self.peers.values():
            peer.read_phases()
        self._look_for_deadlock(now)

    def _tick(self, now: float) -> None:
        with self._lock:
            if not self._reports or self._verdict is not None:
                return
            reported = {failure.rank for failure, _ in self._reports}
            if now >= self._settled_at or len(reported) == len(self.peers) + 1:
                self._decide()

    def _look_for_deadlock(self, now: float) -> None:
        doing = {0: self.doing(), **{rank: peer.doing for rank, peer in self.peers.items()}}
        finished = self._answered | {0} if self.collecting else set()
        doing = {rank: what for rank, what in doing.items() if rank not in finished}
        found = self._standstill.look(now, doing, finished)
        if found and not self._reports and not any(is_stopped(peer.place) for peer in self._near()):
            rank, cause = found
            self._deadlock = True
            self._note(Failure(rank, self.peers[rank].phase if rank else self.phase, cause))

    def _near(self) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.place.shares_host(self.here)]

    def _decide(self) -> None:
        for peer in self.peers.values():
            peer.read_phases()
        found = [failure for failure, _ in self._reports]
        limit = next((limit for _, limit in self._reports if limit is not None), None)
        if limit is not None and failures.primary(found).blame is Blame.BACKEND:
            found = [self._timed_out(limit, {failure.rank for failure in found})]
        first = failures.primary(found)
        found = [failure for failure in found if failure is first or failure.cause != first.cause]
        verdict = Verdict(self.generation, found, sorted(self.lost), self._deadlock)
        body = pickle.dumps(("verdict", verdict))
        for peer in self.peers.values():
            self._send(peer, body)
        self._conclude(verdict)

    def _timed_out(self, limit: Limit, reported: set[int]) -> Failure:
        """The ranks to name are those that can't answer, else those that have neither answered nor failed."""
        ranks = [0, *self.peers]
        phases = {0: self.phase, **{rank: peer.phase for rank, peer in self.peers.items()}}
        silent = {rank: peer.silence(self.here) for rank, peer in self.peers.items() if not peer.gone}
        missing = [rank for rank in ranks if rank not in reported | self._answered]
        named = [rank for rank, why in silent.items() if why] or missing or sorted(reported)
        states = "; ".join(
            f"rank {rank} is in phase '{phases[rank]}'" + (f", and {silent[rank]}" if silent.get(rank) else "")
            for rank in named
        )
        return Failure(named[0], phases[named[0]], f"no answer to {limit.what} within {limit.seconds:g} s ({states})")

    def _undecided(self) -> Verdict:
        return Verdict(self.generation, [Failure(0, self.phase, "the ranks did not agree on what went wrong")])
