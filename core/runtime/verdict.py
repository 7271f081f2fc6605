"""What the ranks of a launch agree upon when one of them has failed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from . import failures
from .failures import Failure


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


def left_early(rank: int) -> Failure:
    """A rank whose script is at its end while others still calculate."""
    cause = (
        "its script has ended while other ranks ask for a calculation; if by an exception, that is printed by itself"
    )
    return Failure(rank, "script", cause)
