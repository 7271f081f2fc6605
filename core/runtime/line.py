"""The line between rank 0 and every other rank, beside their process group: commands, answers, failures, deaths.

A process group can't say which of its ranks has died, and is of no use once one has. The line is a TCP connection a
rank to rank 0 (the hub), read by a thread on both ends: the system closes it with the process, however that ends, so
a death is known at once, by name, also between calls. (A key in torch's store would tell nothing of a death, and a
look at it would block while the store's host is stopped.)

What rank 0 knows of a failure it decides upon and sends to all: the verdict. So every rank raises the same error.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import math
import os
import pickle
import queue
import secrets
import selectors
import signal
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..errors import NvddError
from . import failures
from .channel import Channel
from .failures import Blame, Failure
from .meeting import Place, is_stopped
from .watchdog import Watchdog

log = logging.getLogger("nvdd")
BEAT = 0.5  # s between signs of life
_SILENT = 1.4  # s without one that tell a stopped process, or a host that is gone, from a live one
_SETTLE_OWN, _SETTLE_OTHER = 0.1, 1.0  # s to wait for more reports, as in crew.py
_STUCK = 6.0  # s in which all ranks are in operations, not all in the same one, and none comes out
_HOPELESS = 1.0  # s of grace for ranks that wait for each other
_VERDICT = 4.0  # s within which the hub decides; more than _SETTLE_OTHER and a beat
_HELLO = struct.Struct("<16sI?")  # token, rank, whether this connection carries phases
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

_lines: weakref.WeakSet[Line] = weakref.WeakSet()


class Limit(NamedTuple):
    """The time limit of the call in which a failure happened, if it had passed by then."""

    seconds: float
    what: str


@dataclass
class Verdict:
    """Why the ranks of one generation can't go on.

    Attributes:
        lost: ranks whose processes are gone for good.
        deadlock: the ranks wait for each other; nothing but the end of a process gets one out of that.
    """

    generation: int
    failures: list[Failure]
    lost: list[int] = field(default_factory=list)
    deadlock: bool = False

    @property
    def why(self) -> str:
        first = failures.primary(self.failures)
        return f"rank {first.rank} failed in phase '{first.phase}': {first.cause}"


class Invitation(NamedTuple):
    """Where rank 0 waits for the others, and the word by which it knows them."""

    hosts: tuple[str, ...]
    port: int
    token: bytes


def invite(one_host: bool) -> tuple[socket.socket, Invitation]:
    """Opens rank 0's end; on one host only to processes of that host."""
    if one_host:
        server = socket.create_server(("127.0.0.1", 0), backlog=512)
    elif socket.has_dualstack_ipv6():
        server = socket.create_server(("", 0), family=socket.AF_INET6, backlog=512, dualstack_ipv6=True)
    else:
        server = socket.create_server(("", 0), backlog=512)
    hosts = [os.environ.get("MASTER_ADDR", ""), socket.getfqdn(), socket.gethostname()]
    with contextlib.suppress(OSError):
        hosts.append(socket.gethostbyname(socket.gethostname()))
    hosts = ["127.0.0.1"] if one_host else [host for host in dict.fromkeys(hosts) if host]
    return server, Invitation(tuple(hosts), server.getsockname()[1], secrets.token_bytes(16))


class _Peer:
    """The other end of one connection, as this end sees it."""

    def __init__(self, place: Place, channel: Channel, phases: socket.socket) -> None:
        self.place, self.channel, self.phases = place, channel, phases
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
    """What both ends have in common; see `Hub` and `Spoke`.

    Attributes:
        inbox: what the thread has for the main one: tuples that begin with a word.
        phase: what this rank does.
        doing: tells the operation between ranks that it is in, as `Communicator.doing`.
    """

    def __init__(self, here: Place, peers: Sequence[_Peer], watchdog: Watchdog) -> None:
        self.here, self.peers, self.watchdog = here, {p.place.rank: p for p in peers}, watchdog
        self.inbox: queue.SimpleQueue[tuple] = queue.SimpleQueue()
        self.phase = "setup"
        self.doing: Callable[[], tuple[int, str] | None] = lambda: None
        self.generation = 0
        self.calls = 0  # begun on this rank
        self.closing = False
        self._verdict: Verdict | None = None
        self._waiting: queue.SimpleQueue[_Peer] = queue.SimpleQueue()  # their sockets did not take all yet
        self._lock = threading.RLock()
        self._known = threading.Condition(self._lock)
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_out, _READ, None)
        for peer in peers:
            self._selector.register(peer.channel, _READ, peer)
        self._thread = threading.Thread(target=self._run, name="nvdd-line", daemon=True)
        _lines.add(self)

    def start(self) -> None:
        """Begins to listen."""
        self._thread.start()

    # -- sending, from any thread

    def _send(self, peer: _Peer, body: bytes) -> None:
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

    def _serve(self, peer: _Peer, events: int) -> None:
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

    def _beat(self, peer: _Peer, phase: str, doing: tuple[int, str] | None) -> None:
        peer.phase, peer.doing = phase, doing

    def left_early(self, rank: int) -> None:
        """A rank's script is at its end while this rank calculates: a failure."""
        raise NotImplementedError

    def _handle(self, peer: _Peer, word: str, *rest: Any) -> None:
        raise NotImplementedError

    def _hung_up(self, peer: _Peer) -> None:
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


class Hub(Line):
    """Rank 0's end: commands all, hears of all, decides what went wrong."""

    def __init__(
        self, server: socket.socket, token: bytes, places: Sequence[Place], watchdog: Watchdog, timeout: float
    ) -> None:
        super().__init__(places[0], _accept(server, token, places, timeout), watchdog)
        self.lost: dict[int, Failure] = {}
        self._reports: list[tuple[Failure, Limit | None]] = []
        self._settled_at = 0.0
        self._answered: set[int] = set()
        self._doing: dict[int, tuple[int, str] | None] = {}
        self._doing_since = 0.0
        self._deadlock = False

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

    def _handle(self, peer: _Peer, word: str, *rest: Any) -> None:
        if word == "answer":
            self._answered.add(peer.place.rank)
            self.inbox.put(("answer", peer.place.rank, *rest))
        elif word == "failed":
            generation, failure, limit = rest
            if generation == self.generation:
                self._note(failure, limit)

    def _beat(self, peer: _Peer, phase: str, doing: tuple[int, str] | None) -> None:
        peer.doing = doing  # their phases they tell in better time, see read_phases

    def left_early(self, rank: int) -> None:
        self._note(_left_early(rank))
        self._wake()

    def _hung_up(self, peer: _Peer) -> None:
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
        """Finds ranks that took another path through the model and now wait for each other, which no message tells."""
        doing = {0: self.doing(), **{rank: peer.doing for rank, peer in self.peers.items()}}
        if doing != self._doing or None in doing.values() or self._reports:
            self._doing, self._doing_since = doing, now
        elif len(set(doing.values())) > 1 and now - self._doing_since > _STUCK:
            rank = next(rank for rank in doing if doing[rank] != doing[0])
            states = "; ".join(f"rank {rank} in {what} (operation {number})" for rank, (number, what) in doing.items())
            cause = (
                f"ranks are out of step, and wait for each other: {states}. The model takes another path on some ranks: "
                "look for a branch on the number of atoms or edges around a gather of neighbours"
            )
            self._deadlock = True
            self._note(Failure(rank, self.peers[rank].phase, cause))

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


class Spoke(Line):
    """The end of any other rank."""

    def __init__(self, invitation: Invitation, hub: Place, here: Place, watchdog: Watchdog, timeout: float) -> None:
        super().__init__(here, [_connect(invitation, hub, here, timeout)], watchdog)
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

    def _handle(self, peer: _Peer, word: str, *rest: Any) -> None:
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
        self._conclude(Verdict(self.generation, [_left_early(rank)], [rank]))

    def _hung_up(self, peer: _Peer) -> None:
        if peer.left is None:
            place = peer.place
            cause = f"its process ({place.pid} on {place.host}) is gone: killed, crashed, or ended by its launcher"
            log.error("rank %d: rank 0 failed in phase '%s': %s", self.here.rank, peer.phase, cause)
            self._conclude(Verdict(self.generation, [Failure(0, peer.phase, cause)], [0]))
        self.inbox.put(("gone",))

    def _undecided(self) -> Verdict:
        cause = self._hub.silence(self.here) or "it did not say what went wrong"
        return Verdict(self.generation, [Failure(0, self._hub.phase, cause)], [0])


def _left_early(rank: int) -> Failure:
    cause = (
        "its script has ended while other ranks ask for a calculation; if by an exception, that is printed by itself"
    )
    return Failure(rank, "script", cause)


def _accept(server: socket.socket, token: bytes, places: Sequence[Place], timeout: float) -> list[_Peer]:
    """Waits until every other rank has both of its connections."""
    found: dict[tuple[int, bool], socket.socket] = {}
    give_up = time.monotonic() + timeout
    try:
        while len(found) < 2 * (len(places) - 1):
            left = give_up - time.monotonic()
            missing = [p.rank for p in places[1:] if (p.rank, False) not in found or (p.rank, True) not in found]
            if left <= 0:
                raise NvddError(
                    f"ranks {missing} did not reach rank 0 on port {server.getsockname()[1]} in {timeout:g} s"
                )
            server.settimeout(left)
            try:
                sock, _ = server.accept()
            except TimeoutError:
                continue
            sock.settimeout(min(5.0, left))
            hello = _receive(sock)
            if hello is None or len(hello) != _HELLO.size:
                sock.close()
                continue
            word, rank, phases = _HELLO.unpack(hello)
            if not hmac.compare_digest(word, token) or not 0 < rank < len(places):
                sock.close()
                continue
            _say(sock, token)
            found[rank, phases] = sock
    finally:
        server.close()
    return [_peer(p, found[p.rank, False], found[p.rank, True]) for p in places[1:]]


def _connect(invitation: Invitation, hub: Place, here: Place, timeout: float) -> _Peer:
    """Opens both connections to rank 0, at the first of its addresses that answers with the right word."""
    give_up = time.monotonic() + timeout
    problems = []
    hosts = ("127.0.0.1", *invitation.hosts) if hub.shares_host(here) else invitation.hosts
    while time.monotonic() < give_up:
        problems = []
        for host in hosts:
            socks = []
            try:
                for phases in (False, True):
                    socks.append(socket.create_connection((host, invitation.port), timeout=min(10.0, timeout)))
                    _say(socks[-1], _HELLO.pack(invitation.token, here.rank, phases))
                    if _receive(socks[-1]) != invitation.token:
                        raise OSError("another program listens there")
                return _peer(hub, *socks)
            except OSError as error:
                problems.append(f"{host}: {error}")
                for sock in socks:
                    sock.close()
        time.sleep(0.2)
    raise NvddError(
        f"rank {here.rank} on {here.host} can't reach rank 0 on {hub.host}, port {invitation.port} "
        f"({'; '.join(problems)}): the hosts of a run must reach each other by TCP; export MASTER_ADDR=<an address of "
        f"{hub.host} that the others reach> if its name does not resolve"
    )


def _peer(place: Place, line: socket.socket, phases: socket.socket) -> _Peer:
    for sock in (line, phases):
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a host that vanishes says no goodbye
        for name, seconds in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
    return _Peer(place, Channel(line), phases)


def _say(sock: socket.socket, body: bytes) -> None:
    channel = Channel(sock)
    channel.queue(body)
    channel.flush()


def _receive(sock: socket.socket) -> bytes | None:
    """The first message on a new connection; None if there is none in time."""
    channel = Channel(sock)
    with contextlib.suppress(EOFError, OSError):
        while True:
            if messages := channel.receive():
                return messages[0].body
    return None


def _forget_all() -> None:
    for line in list(_lines):
        line.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
