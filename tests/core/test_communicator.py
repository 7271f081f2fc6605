"""Collectives over gloo; ranks that are out of step or late get an error that names both sides."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from nvdd.communicator import Communicator
from nvdd.errors import CommunicationError


def collectives_on_rank(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    value = torch.tensor([rank + 1.0, -rank])
    assert comm.all_reduce(value).tolist() == [size * (size + 1) / 2, -size * (size - 1) / 2]
    assert comm.all_reduce(value, "max").tolist() == [size, 0]
    assert comm.all_reduce(value, "min").tolist() == [1, 1 - size]
    assert comm.all_reduce(torch.tensor(2.0), "prod") == 2.0**size
    assert value.tolist() == [rank + 1, -rank], "the argument stays as it is"
    assert comm.all_gather_object({"rank": rank}) == [{"rank": r} for r in range(size)]
    assert comm.broadcast(torch.full((3,), float(rank)), root=size - 1).tolist() == [size - 1] * 3
    assert comm.transpose_counts([10 * rank + p for p in range(size)]) == [10 * p + rank for p in range(size)]
    # rank r sends s + 1 rows to each rank s below it, and nothing upwards
    send_counts = [p + 1 if p < rank else 0 for p in range(size)]
    recv_counts = [rank + 1 if p > rank else 0 for p in range(size)]
    for dtype in (torch.float64, torch.float32, torch.int64, torch.bool):
        send = torch.full((sum(send_counts), 2, 3), rank).to(dtype)
        expected = torch.cat([torch.full((n, 2, 3), p).to(dtype) for p, n in enumerate(recv_counts)])
        got = comm.exchange(send, send_counts, recv_counts, "test")
        assert got.dtype == dtype and torch.equal(got, expected)


@pytest.mark.parametrize("world_size", (1, 2, 3, 4))
def test_collectives(ranks, world_size):
    ranks.run(world_size, collectives_on_rank)


def a_group_to_break() -> Communicator:
    """A group of its own, so that the pool's stay in order; all four ranks make it."""
    return Communicator(dist.new_group(list(range(4)), backend="gloo"))


def out_of_step_on_rank(comm: Communicator, what: str) -> str:
    broken = a_group_to_break()
    ones = [1] * 4
    ones[broken.rank] = 0
    site, width = "gather of features", 2
    if broken.rank == 1:
        if what == "site":
            site = "fold of gradients"
        elif what == "width":
            width = 5
        else:  # has skipped one
            broken._sequence += 1
    try:
        broken.exchange(torch.zeros(3, width), ones, ones, site)
    except CommunicationError as error:
        return str(error)
    finally:
        comm.all_gather_object("all have read their headers")
        broken.close()
    return "in step"


@pytest.mark.parametrize(
    "what,theirs",
    (("site", "exchange 1 (fold of gradients"), ("width", "20 bytes a row"), ("sequence", "exchange 2 (gather")),
)  # fmt: skip
def test_out_of_step(ranks, what, theirs):
    messages = ranks.run(4, out_of_step_on_rank, what)
    for rank, message in enumerate(messages):
        assert message.startswith("ranks are out of step: rank"), message
        assert "gather of features" in message and theirs in message, message
        assert f"rank {rank} is in" in message and ("rank 1" in message), message


def late_on_rank(comm: Communicator) -> tuple[str, float]:
    group = a_group_to_break()
    start = time.monotonic()
    if group.rank == 2:
        message = "late"
    else:
        group.deadline = start + 1.0
        with pytest.raises(CommunicationError) as error:
            group.all_reduce(torch.ones(1), "sum", "charges")
        message = str(error.value)
    seconds = time.monotonic() - start
    comm.all_gather_object("done")
    group.close()
    with pytest.raises(CommunicationError, match="the process group has been closed"):
        group.all_reduce(torch.ones(1))
    return message, seconds


def test_deadline(ranks):
    for rank, (message, seconds) in enumerate(ranks.run(4, late_on_rank)):
        if rank != 2:
            assert message.startswith(f"rank {rank}, sum over ranks (charges): ") and seconds < 8, (message, seconds)


def mesh_on_rank(comm: Communicator) -> tuple[int, int]:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "domain"))
    with pytest.raises(ValueError, match=r"\('replica', 'domain'\); name the one"):
        Communicator.from_mesh(mesh)
    of_domain = Communicator.from_mesh(mesh, "domain")
    assert of_domain.device.type == "cpu" and of_domain.backend == "gloo"
    return of_domain.size, int(of_domain.all_reduce(torch.tensor(comm.rank)))


def test_one_dimension_of_a_mesh(ranks):
    assert ranks.run(4, mesh_on_rank) == [(2, 1), (2, 1), (2, 5), (2, 5)]
