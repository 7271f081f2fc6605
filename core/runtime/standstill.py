"""Finds ranks that have taken another path than the others, and are now waited for: no message tells of that."""

from __future__ import annotations

from collections.abc import Collection, Mapping

Doing = tuple[int, str]  # the operation that a rank is in, as `Communicator.doing`: its number, what it is
PATIENCE = 5.0  # s without any change: with the ends of processes and launchers an error within 10 s


class Standstill:
    """Looks again and again at what the ranks do.

    Over gloo. An operation over NCCL is only begun by the host, so that nobody is seen in it.
    """

    def __init__(self) -> None:
        self._state: tuple = ()
        self._since = 0.0

    def look(
        self, now: float, doing: Mapping[int, Doing | None], finished: Collection[int] = ()
    ) -> tuple[int, str] | None:
        """The rank to name and the cause, if nobody can go on any more; None otherwise.

        Args:
            now: seconds on any clock.
            doing: what each rank is in that is still inside the call; None for one that computes.
            finished: ranks that have come to the end of the call.
        """
        state = (dict(doing), frozenset(finished))
        if state != self._state or not doing or None in doing.values():
            self._state, self._since = state, now
            return None
        if now - self._since <= PATIENCE or (not finished and len(set(doing.values())) == 1):
            return None
        first = doing[min(doing)]
        rank = min(finished, default=None)
        if rank is None:
            rank = next(r for r in doing if doing[r] != first)
        states = [f"rank {r} is at the end of the call" for r in sorted(finished)]
        states += [f"rank {r} in {what} (operation {number})" for r, (number, what) in sorted(doing.items())]
        return rank, (
            f"ranks are out of step, and wait for each other: {'; '.join(states)}. The model takes another path on some "
            "ranks: look for a branch on the number of atoms or edges around a gather of neighbours"
        )
