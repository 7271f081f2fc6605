"""Finds a rank that has left an evaluation while others wait for it: it has gone back to LAMMPS, where it waits too."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from nvdd.communicator import Communicator
from nvdd.runtime.standstill import Standstill

_BEAT = 0.5  # s
_STILL = 1.5  # s without a change after which a rank tells the others where it is
_LAST_WORD = 2.0  # s for the first of the waiting ranks to speak for all


class Progress:
    """Over gloo: a thread that looks at what this rank and, if it waits for long, the others do.

    Nobody can break off an operation over gloo, so what is left is to end the process, which ends the others.

    Args:
        store: of the ranks.
        comm: this rank's.
        end: ends this process, given the reason to print, or None where another rank has printed it.
    """

    def __init__(self, store: Any, comm: Communicator, end: Callable[[str | None], None]) -> None:
        self._store, self._comm, self._end = store.clone(), comm, end
        self._evaluation, self._inside = 0, False
        self._told: Any = None
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="nvdd-progress", daemon=True).start()

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Around an evaluation."""
        self._evaluation, self._inside = self._evaluation + 1, True
        try:
            yield
        finally:
            self._inside = False

    def stop(self) -> None:
        """No more looking."""
        self._stopped.set()

    def _run(self) -> None:
        state, since, standstill = None, time.monotonic(), Standstill()
        while not self._stopped.wait(_BEAT):
            now, seen = time.monotonic(), (self._evaluation, self._inside, self._comm.doing)
            if seen != state:
                state, since = seen, now
                if self._told is not None:
                    self._tell(None)  # what was told is no longer so
                continue
            if now - since < _STILL:
                continue
            try:
                if self._told != state:
                    self._tell(state)
                if state[1] and state[2] is not None and (found := self._look(state, now, standstill)):
                    first, cause = found
                    if first != self._comm.rank:
                        time.sleep(_LAST_WORD)
                    self._end(cause if first == self._comm.rank else None)
            except Exception:  # the store is gone, and with it its rank, whose connections are gone too: gloo notices
                return

    def _tell(self, state: Any) -> None:
        self._store.set(f"progress/{self._comm.rank}", json.dumps(state))
        self._told = state

    def _look(self, mine: Any, now: float, standstill: Standstill) -> tuple[int, str] | None:
        """The rank that is to speak, and the cause, if the evaluation can't end any more."""
        doing: dict[int, Any] = {}
        finished = []
        for rank in range(self._comm.size):
            key = f"progress/{rank}"
            told = json.loads(self._store.get(key)) if self._store.check([key]) else None
            evaluation, inside, operation = told or (None, True, None)
            if evaluation == mine[0] and not inside:
                finished.append(rank)
            else:  # LAMMPS may take its time before this evaluation
                doing[rank] = tuple(operation) if evaluation == mine[0] and operation else None
        found = standstill.look(now, doing, finished)
        return None if found is None else (min(doing), found[1])
