"""`Wire`: an output of one model of a sum that another one reads as an input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nvdd.errors import InputError


@dataclass(frozen=True)
class Wire:
    """What goes from one block of a pipeline to another.

    Attributes:
        source, output: the block that gives it (its place in the list, from 0), and the name there.
        target, input: the block that reads it, and the name of its input.
        fixed: whether forces leave out that the value depends on the geometry (fixed charges). By default they
            include it, by the chain rule.
    """

    source: int
    output: str
    target: int
    input: str
    fixed: bool = False


def in_order(n_blocks: int, wires: Sequence[Wire]) -> list[int]:
    """The blocks, each after those that it reads from; otherwise as they are given.

    Raises:
        InputError: blocks read from each other in a circle.
    """
    waiting, done = list(range(n_blocks)), []
    while waiting:
        ready = [k for k in waiting if all(w.source in done for w in wires if w.target == k)]
        if not ready:
            circle = ", ".join(
                f"block {w.target} reads {w.output!r} of block {w.source}" for w in wires if w.target in waiting
            )
            raise InputError(f"the wires go in a circle: {circle}; take one of them out")
        done.append(ready[0])
        waiting.remove(ready[0])
    return done
