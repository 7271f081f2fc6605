"""`Spoke`: the end of the line to rank 0 on any other rank."""

from __future__ import annotations

import contextlib
import logging
import math
import pickle
from typing import Any

from .failures import Failure
from .greeting import Invitation, connect
from .line import Line, Peer
from .meeting import Place
from .verdict import Limit, Verdict, left_early
from .watchdog import Watchdog

log = logging.getLogger("nvdd")


class Spoke(Line):
    """Tells rank 0 what this rank does and how it fails, and hears from it what to do."""

    def __init__(self, invitation: Invitation, hub: Place, here: Place, watchdog: Watchdog, timeout: float) -> None:
        peer = Peer(hub, connect(invitation, hub, here, timeout))
        super().__init__(here, {hub.rank: peer}, watchdog)
        self._hub = self.peers[hub.rank]
        self._latest: Verdict | None = None

    def renew(self, generation: int) -> None:
        with self._lock:
            super().renew(generation)
            if self._latest is not None and self._latest.generation == generation:  # it came before the command did
                self._conclude(self._latest)

    def answer(self, value: Any) -> None:
        """Answers rank 0's last command."""
        self._send(self._hub, pickle.dumps(("answer", *value)))

    def report(self, failure: Failure, limit: Limit | None) -> None:
        """Tells rank 0 of this rank's failure."""
        self._send(self._hub, pickle.dumps(("failed", self.generation, failure, limit)))

    def set_phase(self, name: str) -> None:
        """Tells rank 0 what this rank does, in a way that costs neither of them any waiting."""
        self.phase = name
        with contextlib.suppress(OSError):
            self._hub.phases.send(name.encode() + b"\n")

    def _handle(self, peer: Peer, word: str, *rest: Any) -> None:
        if word == "verdict":
            with self._lock:
                self._latest = rest[0]
                if self._latest.generation == self.generation:
                    self._conclude(self._latest)
            return
        if word == "exit":
            peer.left = math.inf
        self.inbox.put((word, *rest))

    def left_early(self, rank: int) -> None:
        self._conclude(Verdict(self.generation, [left_early(rank)], [rank]))

    def _hung_up(self, peer: Peer) -> None:
        if peer.left is None:
            place = peer.place
            cause = f"its process ({place.pid} on {place.host}) is gone: killed, crashed, or ended by its launcher"
            log.error("rank %d: rank 0 failed in phase '%s': %s", self.here.rank, peer.phase, cause)
            self._conclude(Verdict(self.generation, [Failure(0, peer.phase, cause)], [0]))
        self.inbox.put(("gone",))

    def _undecided(self) -> Verdict:
        cause = self._hub.silence(self.here) or "it did not say what went wrong"
        return Verdict(self.generation, [Failure(0, self._hub.phase, cause)], [0])
