"""`ProbeRanks`: what ranks measure of a model: seconds and bytes of a step, its exchanges, and what messages cost."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from nvdd.communicator import Communicator
from nvdd.config import DomainConfig
from nvdd.data import Batch
from nvdd.exchange import fetch
from nvdd.plan import ExchangePlan
from nvdd.runtime.model import DistributedModel
from nvdd.runtime.out_of_memory import host_memory
from nvdd.trace import dispatch_trace

SERVICE = "nvdd.planning.probe:ProbeRanks"
WANTED = ("energy", "forces")
_WIDTH = 64  # numbers in a row of a test message


class ProbeRanks:
    """The service of a calibration's `nvdd.runtime.local_ranks.LocalRanks`.

    Args:
        comm, arrays, phase: as of every service.
        factory: a `nvdd.validate.factory.FactoryRef`.
        dtype: of the weights; None for the model's own.
        clock: ``"wall"``; ``"cpu"`` for the seconds that this process computes, which a busy machine does not change.
    """

    def __init__(
        self, comm: Communicator, arrays: Any, phase: Callable[[str], None], *, factory: Any, dtype: str | None, clock: str = "wall"
    ) -> None:
        self.comm, self.phase = comm, phase
        self._now = {"wall": time.perf_counter, "cpu": time.process_time}[clock]
        phase("model")
        wrapper = factory.make("cpu")
        self.wrapper = (wrapper if dtype is None else wrapper.to(getattr(torch, dtype))).to(comm.device).eval()

    def describe(self, _: Any = None) -> dict[str, Any]:
        """The model's cutoff and type, and what device and memory this rank has."""
        blocks = getattr(self.wrapper, "composed_of", (self.wrapper,))
        neighbors = [block.model_config.neighbor_config for block in blocks]
        widest = max(n.cutoff for n in neighbors)
        cuda = self.comm.device.type == "cuda"
        return {
            "cutoff": widest,
            "far_edges": all(n.drops_far_edges for n in neighbors if n.cutoff == widest),
            "dtype": str(blocks[0].dtype).removeprefix("torch."),
            "device": torch.cuda.get_device_name(self.comm.device) if cuda else "cpu",
            "memory": torch.cuda.get_device_properties(self.comm.device).total_memory if cuda else host_memory(),
        }

    def measure(self, task: dict[str, Any]) -> dict[str, Any] | None:
        """Steps of this rank by itself.

        Args:
            task: ``batch``; ``domain``, arguments of `DomainConfig`; ``together``, whether all ranks do it at once or the
                first alone; ``seconds`` to spend.

        Returns:
            ``owned``, ``edges``, median ``seconds``, peak ``bytes`` of a step; None from a rank that only waits.
        """
        found = None
        self.comm.all_reduce(torch.zeros(1, device=self.comm.message_device), site="start of a measurement")
        if task["together"] or self.comm.rank == 0:
            model = DistributedModel(self.wrapper, DomainConfig(mesh=Communicator(None, self.comm.device), **task["domain"]))
            found = self._step(model, task["batch"], task["seconds"])
        self.comm.all_reduce(torch.zeros(1, device=self.comm.message_device), site="end of a measurement")
        return found

    def trace(self, task: dict[str, Any]) -> dict[str, Any]:
        """Steps of all ranks together, as `measure`, ``count`` of them (the same on all); with ``halo`` rows, exchanges as
        (site, bytes a row, rows), and sums."""
        model = DistributedModel(self.wrapper, DomainConfig(mesh=self.comm, **task["domain"]))
        found = self._step(model, task["batch"], count=task.get("count", 15))
        with dispatch_trace() as trace:
            out = model(task["batch"], WANTED)
        rows = lambda e: e.rows_sent + e.rows_received
        width = lambda e: (e.bytes_sent + e.bytes_received) / max(rows(e), 1)
        return {
            **found,
            "halo": out.n_halo,
            "exchanges": [(e.site, width(e), rows(e) / 2) for e in trace.exchanges],
            "reductions": sum(trace.reductions.values()),
        }

    def ping(self, rows: Sequence[int]) -> dict[str, Any]:
        """Median seconds of an exchange of so many rows with the next rank, and of a sum over ranks."""
        times = {}
        for n in rows:
            peer = (self.comm.rank + 1) % self.comm.size
            owner = torch.full((n if self.comm.size > 1 else 0,), peer)
            plan = ExchangePlan.build(self.comm, n, owner, torch.arange(len(owner)), "rows of a test message")
            message = torch.ones(n, _WIDTH, device=self.comm.device)
            kept = torch.no_grad()(fetch)
            times[n * _WIDTH * message.element_size()] = self._median(lambda: kept(message, plan, "test"), 30)  # noqa: B023
        one = torch.ones(1, dtype=torch.float64, device=self.comm.device)
        return {"exchange": times, "reduction": self._median(lambda: self.comm.all_reduce(one, site="test"), 30)}

    def _step(self, model: DistributedModel, batch: Batch, seconds: float = 0.0, count: int | None = None) -> dict[str, Any]:
        out = model(batch, WANTED)
        model(batch, WANTED)
        self._wait()
        begin = time.perf_counter()
        model(batch, WANTED)
        self._wait()
        enough = int(min(30, max(3, seconds / (time.perf_counter() - begin))))
        median = self._median(lambda: model(batch, WANTED), count or enough)
        with self._peak() as peak:
            model(batch, WANTED)
        return {"owned": len(out.ids), "edges": out.n_edges, "seconds": median, "bytes": peak()}

    def _median(self, call: Callable[[], Any], count: int) -> float:
        times = []
        for _ in range(count):
            start = self._now()
            call()
            self._wait()
            times.append(self._now() - start)
        return statistics.median(times)

    def _wait(self) -> None:
        if self.comm.device.type == "cuda":
            torch.cuda.synchronize(self.comm.device)

    @contextmanager
    def _peak(self) -> Iterator[Callable[[], int]]:
        """Most bytes that tensors took during the block: on a GPU by its allocator, else by torch's profiler."""
        if self.comm.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.comm.device)
            yield lambda: torch.cuda.max_memory_allocated(self.comm.device)
            return
        from torch.profiler import ProfilerActivity, profile

        weights = sum(t.untyped_storage().nbytes() for t in (*self.wrapper.parameters(), *self.wrapper.buffers()))
        with _quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            yield lambda: weights + _most_alive(record)


def _most_alive(record: Any) -> int:
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    return most


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the profiler's native code prints to standard error."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
