"""`Watchdog`: sees to it that this rank leaves an operation that can't end any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SLACK = 1.0  # s after a time limit: what can notice by itself that it has passed (gloo) does so first


class Watchdog:
    """Breaks off the call that this rank is in, once a failure is known or the time limit has passed.

    A failed peer does not wake a rank that waits for it everywhere: an NCCL kernel waits for ever, until its
    communicator is aborted from another thread, and gloo can't be aborted at all. So first ``abort`` is called; if
    the rank is still in the call after ``grace`` seconds, ``end`` is, which ends the process.

    Has no thread of its own: whoever watches calls `tick` often, from another thread than the call's.

    Args:
        abort: makes blocked operations return; what they return is not used.
        end: ends this process with the reason it is given.
        grace: s.
        clock: for tests.
    """

    def __init__(
        self,
        abort: Callable[[], None],
        end: Callable[[str], None],
        grace: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._abort, self._end, self._grace, self._clock = abort, end, grace, clock
        self._lock = threading.Lock()
        self._inside = False
        self._deadline: float | None = None
        self._broken_at: float | None = None
        self._why, self._patience = "", grace

    @contextmanager
    def call(self, deadline: float | None) -> Iterator[None]:
        """Around a call that may take until ``deadline`` (of the clock)."""
        with self._lock:
            self._inside, self._deadline, self._broken_at = True, deadline, None
        try:
            yield
        finally:
            with self._lock:
                self._inside = False

    @property
    def fired(self) -> str:
        """Why the last call was broken off, so that its result is void; empty if it was not."""
        return self._why if self._broken_at is not None else ""

    @property
    def inside(self) -> bool:
        """Whether this rank is in a call."""
        return self._inside

    def failed(self, why: str, grace: float | None = None) -> None:
        """There is a failure somewhere: the call will not end by itself. The first reason counts.

        Args:
            why: said when the process has to be ended.
            grace: s, instead of the usual.
        """
        with self._lock:
            if not self._inside or self._broken_at is not None:
                return
            self._broken_at, self._why = self._clock(), why
            self._patience = self._grace if grace is None else grace
        self._abort()

    def tick(self) -> None:
        """Acts on what has run out by now."""
        now = self._clock()
        with self._lock:
            overdue = self._inside and self._deadline is not None and now > self._deadline + _SLACK
            stuck = self._inside and self._broken_at is not None and now > self._broken_at + self._patience
        if stuck:
            self._end(self._why)
        elif overdue:
            self.failed("the time limit has passed")
