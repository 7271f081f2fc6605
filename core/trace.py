"""`dispatch_trace`: counts what the framework did during a block of code.

In the spirit of ``torch.distributed.tensor.debug.CommDebugMode``.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

# Traces that are switched on, for the whole process: autograd runs backward on threads of its own.
_active: list[DispatchTrace] = []
_lock = threading.Lock()


@dataclass(frozen=True)
class ExchangeRecord:
    """One exchange of rows between ranks: where it came from, rows and bytes that this rank sent and received."""

    site: str
    rows_sent: int
    rows_received: int
    bytes_sent: int
    bytes_received: int
    seconds: float


@dataclass
class DispatchTrace:
    """What happened while the trace was on.

    Attributes:
        fired: (op, handler) -> how often the handler ran.
        exchanges: halo exchanges (fetches, folds, forces), in order.
        reductions: sums, maxima, ... over ranks by what they were for.
        bytes_reduced: size of the values that this rank gave to these; what travels is up to twice as much.
        setup: messages that build a plan, sent only when the neighbour list is rebuilt.
    """

    fired: Counter = field(default_factory=Counter)
    exchanges: list[ExchangeRecord] = field(default_factory=list)
    reductions: Counter = field(default_factory=Counter)
    bytes_reduced: int = 0
    setup: Counter = field(default_factory=Counter)

    @property
    def n_exchanges(self) -> int:
        """Number of exchanges; the same on every rank."""
        return len(self.exchanges)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sent in exchanges."""
        return sum(e.bytes_sent for e in self.exchanges)

    @property
    def bytes_received(self) -> int:
        """Bytes that this rank received in exchanges."""
        return sum(e.bytes_received for e in self.exchanges)

    @property
    def seconds(self) -> float:
        """Wall time in exchanges (on a GPU: time to enqueue them)."""
        return sum(e.seconds for e in self.exchanges)

    def summary(self) -> str:
        """A few lines to print."""
        lines = [
            f"{self.n_exchanges} exchanges, {self.bytes_sent} bytes sent, {self.bytes_received} received, "
            f"{sum(self.reductions.values())} reductions"
        ]
        lines += [f"  {e.site}: {e.rows_sent} rows out, {e.rows_received} rows in" for e in self.exchanges]
        lines += [f"  {op} -> {handler}: {n}" for (op, handler), n in sorted(self.fired.items())]
        return "\n".join(lines)


@contextmanager
def dispatch_trace() -> Iterator[DispatchTrace]:
    """Records the handlers, exchanges and reductions of a block of code.

    Example::

        with dispatch_trace() as trace:
            model(batch)
        print(trace.summary())
    """
    trace = DispatchTrace()
    with _lock:
        _active.append(trace)
    try:
        yield trace
    finally:
        with _lock:
            _active.remove(trace)


def active_traces() -> list[DispatchTrace]:
    """The traces that are on."""
    return _active
