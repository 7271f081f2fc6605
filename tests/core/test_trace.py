"""`dispatch_trace` counts what happens while it is on, on any thread, and nothing else."""

from __future__ import annotations

import threading

import pytest
import torch

from nvdd import dispatch_trace
from nvdd.communicator import Communicator
from nvdd.plan import ExchangePlan
from nvdd.roles import Role, ShardMeta
from nvdd.shard_tensor import promote
from nvdd.trace import active_traces


def rows() -> torch.Tensor:
    empty = torch.zeros(0, dtype=torch.int64)
    return promote(torch.ones(3), Role.OWNED, ShardMeta(ExchangePlan.build(Communicator(), 3, empty, empty)))


def test_counts_what_fires_inside_the_block():
    x = rows()
    x + 1
    with dispatch_trace() as outer:
        x + 1
        with dispatch_trace() as inner:
            thread = threading.Thread(target=lambda: x * 2)  # as autograd's backward
            thread.start()
            thread.join()
    x + 1
    ops = lambda trace: {op: n for (op, _), n in trace.fired.items() if op in ("add", "mul")}  # not x.dim() and such
    assert ops(outer) == {"add": 1, "mul": 1}
    assert ops(inner) == {"mul": 1}
    assert "mul -> elementwise: " in inner.summary()
    assert not active_traces()


def test_is_off_after_an_error():
    with pytest.raises(ZeroDivisionError), dispatch_trace():
        1 / 0  # noqa: B018
    assert not active_traces()


def on_rank(comm: Communicator) -> dict:
    with dispatch_trace() as trace:
        peer = torch.tensor([1 - comm.rank])
        comm.exchange(torch.zeros(2 + comm.rank, 3, dtype=torch.float64), *_counts(comm), "features")
        comm.all_reduce(peer, "sum", "charges")
        comm.all_gather(torch.zeros(4), "energies")
        comm.exchange(torch.zeros(2 + comm.rank, 1), *_counts(comm), "a plan", setup=True)
        comm.transpose_counts([0, 0], "counts of a plan")
    (record,) = trace.exchanges
    return {"rows": (record.rows_sent, record.rows_received), "bytes": (trace.bytes_sent, trace.bytes_received),
            "site": record.site, "reductions": dict(trace.reductions), "setup": dict(trace.setup),
            "n": trace.n_exchanges, "bytes_reduced": trace.bytes_reduced, "seconds": trace.seconds}  # fmt: skip


def _counts(comm: Communicator) -> tuple[list[int], list[int]]:
    """Rank 0 sends 2 rows, rank 1 sends 3."""
    return ([0, 2], [0, 3]) if comm.rank == 0 else ([3, 0], [2, 0])


def test_exchanges_reductions_and_plans(ranks):
    for rank, found in enumerate(ranks.run(2, on_rank)):
        sent, received = (2, 3) if rank == 0 else (3, 2)
        assert found["rows"] == (sent, received) and found["bytes"] == (24 * sent, 24 * received)
        assert found["n"] == 1 and found["site"] == "features" and found["seconds"] > 0
        assert found["reductions"] == {"charges": 1, "energies": 1} and found["bytes_reduced"] == 8 + 16
        assert found["setup"] == {"a plan": 1, "counts of a plan": 1}
