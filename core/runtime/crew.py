"""The parent's hold on its ranks: sends them a message, waits for all answers, notices any death, ends them."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import selectors
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import NvddError, RankError
from . import failures, rank_process
from .failures import Failure
from .rank_process import RankProcess
from .standstill import Standstill

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
_TICK = 0.2  # s; a death shows as end-of-file at once, and at the next tick if a stray child holds the socket open
_SETTLE_OWN = 0.1  # s to wait for other ranks' reports after a rank's own failure: only to say who else failed
_SETTLE_OTHER = 0.5  # s after a failed collective: its cause, on another rank, is on its way
_REAP = 1.0  # s between a rank's end-of-file and its exit code
_EXIT = 2.0  # s for a clean exit

_crews: weakref.WeakSet[Crew] = weakref.WeakSet()


class Crew:
    """N started ranks. Ends with its first failure; :meth:`end` does it by request.

    Args:
        n_ranks: how many processes to start.
        states: shared array of `rank_process.STATE`, one a rank, where the ranks write what they do.
    """

    def __init__(self, n_ranks: int, states: np.ndarray) -> None:
        self.ended: str | None = None  # why there are no ranks any more
        self.states = states
        self.members: list[RankProcess] = []
        self._selector = selectors.DefaultSelector()
        _crews.add(self)
        try:
            for rank in range(n_ranks):
                member = rank_process.start(rank, n_ranks)
                self.members.append(member)
                self._selector.register(member.channel, _READ, member)
        except BaseException as error:
            self.kill(f"they did not start: {error}")
            raise

    def phase(self, rank: int) -> str:
        return self.states["phase"][rank].decode("utf-8", "replace")

    def _doing(self, rank: int) -> tuple[int, str] | None:
        number = int(self.states["operation"][rank])
        return (number, self.states["what"][rank].decode("utf-8", "replace")) if number else None

    def exchange(self, body: bytes, fds: Sequence[int] = (), *, timeout: float | None, what: str) -> list[Any]:
        """Sends a message to every rank and returns their answers by rank; ends the ranks if that goes wrong."""
        if self.ended:
            raise NvddError(f"these ranks have ended ({self.ended}): make a new LocalRanks")
        try:
            return self._exchange(body, fds, timeout, what)
        except BaseException as error:  # Ctrl-C included: the ranks are inside a call that nobody will answer
            self.kill(str(error) or type(error).__name__)
            raise

    def _exchange(self, body: bytes, fds: Sequence[int], timeout: float | None, what: str) -> list[Any]:
        give_up = math.inf if timeout is None else time.monotonic() + timeout
        settle = math.inf
        answers: dict[int, Any] = {}
        failed: dict[int, Failure] = {}
        standstill = Standstill()
        self._look_for_deaths(failed)
        if not failed:
            for member in self.members:
                member.channel.queue(body, fds)
                self._send(member, failed)
        next_look = time.monotonic() + _TICK
        while len(answers.keys() | failed.keys()) < len(self.members):
            now = time.monotonic()
            if failed:
                own = failures.primary([*failed.values()]).blame is failures.Blame.OWN
                settle = min(settle, now + (_SETTLE_OWN if own else _SETTLE_OTHER))
                if now >= settle:
                    break
            elif now >= give_up:
                raise self._timed_out(timeout, what, answers)
            if now >= next_look:
                self._look_for_deaths(failed)
                self._look_for_standstill(standstill, now, answers, failed)
                next_look = now + _TICK
            for key, events in self._selector.select(max(0.0, min(next_look, settle, give_up) - now)):
                if events & _WRITE:
                    self._send(key.data, failed)
                if events & _READ:
                    self._read(key.data, answers, failed)
        if failed:
            raise failures.to_error([*failed.values()], len(self.members))
        return [answers[member.rank] for member in self.members]

    def _send(self, member: RankProcess, failed: dict[int, Failure]) -> None:
        if member.rank in failed:  # so noted while this event waited
            return
        try:
            done = member.channel.flush()
        except EOFError:
            self._note_death(member, failed)
        else:
            self._selector.modify(member.channel, _READ if done else _READ | _WRITE, member)

    def _read(self, member: RankProcess, answers: dict[int, Any], failed: dict[int, Failure]) -> None:
        if member.rank in failed:
            return
        try:
            messages = member.channel.receive()
        except EOFError:
            self._note_death(member, failed)
            return
        for message in messages:
            try:
                answer = pickle.loads(message.body)
            except Exception as error:
                cause = f"its answer can't be unpickled here ({type(error).__name__}: {error})"
                answer = Failure(member.rank, self.phase(member.rank), cause)
            if isinstance(answer, Failure):
                self._note(member, answer, failed)
            else:
                answers[member.rank] = answer[0]

    def _look_for_deaths(self, failed: dict[int, Failure]) -> None:
        for member in self.members:
            if member.rank not in failed and member.process.poll() is not None:
                # Its last words may still be unread: a rank that reported is not a rank that died.
                self._read(member, {}, failed)
                if member.rank not in failed:
                    self._note_death(member, failed)

    def _look_for_standstill(
        self, standstill: Standstill, now: float, answers: dict[int, Any], failed: dict[int, Failure]
    ) -> None:
        inside = [member for member in self.members if member.rank not in answers]
        found = standstill.look(now, {m.rank: self._doing(m.rank) for m in inside}, answers.keys())
        if found and not failed and not any(map(rank_process.is_stopped, inside)):
            raise RankError(found[0], self.phase(found[0]), found[1])

    def _note_death(self, member: RankProcess, failed: dict[int, Failure]) -> None:
        rank_process.wait([member], _REAP)
        phase = self.phase(member.rank)
        self._note(member, failures.from_exit(member.rank, phase, member.process.poll()), failed)

    def _note(self, member: RankProcess, failure: Failure, failed: dict[int, Failure]) -> None:
        failed[member.rank] = failure
        self._selector.unregister(member.channel)  # there is nothing more to learn from it

    def _timed_out(self, timeout: float, what: str, answers: dict[int, Any]) -> RankError:
        missing = [member for member in self.members if member.rank not in answers]
        stopped = [member for member in missing if rank_process.is_stopped(member)]
        first = (stopped or missing)[0]  # where one is stopped, the others merely wait for it
        states = "; ".join(
            f"rank {m.rank} is in phase '{self.phase(m.rank)}'" + (" and its process is stopped" * (m in stopped))
            for m in missing
        )
        cause = f"no answer to {what} within {timeout:g} s ({states})"
        return RankError(first.rank, self.phase(first.rank), cause)

    def end(self, body: bytes) -> None:
        """Asks the ranks to exit with the message ``body``, waits a little, then insists."""
        if self.ended:
            return
        try:
            with contextlib.suppress(Exception):  # whatever is wrong with them, they end now
                self._exchange(body, (), _EXIT, "the request to exit")
                for member in self.members:
                    member.channel.close()  # the sign that all ranks have left the process group
                rank_process.wait(self.members, _EXIT)
        finally:
            self.kill("closed")

    def kill(self, why: str) -> None:
        """Ends the ranks at once; none is left when this returns."""
        if self.ended:
            return
        try:
            rank_process.terminate(self.members)
        finally:
            self._release(why)

    def _release(self, why: str) -> None:
        # Closing the sockets is also the last resort: a rank whose socket hangs up ends itself.
        self.ended = why
        for member in self.members:
            member.channel.close()
        self._selector.close()

    def forget(self) -> None:
        """In a forked child: the ranks are the parent's. An inherited socket would keep them alive after its death."""
        if not self.ended:
            self._release("they belong to the process from which this one was forked")
            for member in self.members:
                member.process.returncode = 0  # not our child: Popen must neither wait for it nor warn


def _forget_all() -> None:
    for crew in list(_crews):
        crew.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
