"""Messages as operators: the numbers of the communicator, their derivatives, and what torch must know of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nvdd import DistributedOpError, InputError
from nvdd.collective_ops import TracedRanks, all_reduce, exchange
from nvdd.communicator import Communicator


def on_rank(comm) -> dict[str, Any]:
    ranks = TracedRanks(comm)
    other = 1 - comm.rank
    rows = torch.arange(6.0, dtype=torch.float64).reshape(3, 2) + 10 * comm.rank
    sent = [0, 3] if comm.rank == 0 else [3, 0]
    rows.requires_grad_()
    got = exchange(rows, rows.detach(), sent, sent, ranks._number, "test")
    got.pow(2).sum().backward()
    value = torch.tensor([1.0 + comm.rank, 2.0], dtype=torch.float64, requires_grad=True)
    total = all_reduce(value, value.detach(), "sum", ranks._number, "test")
    (total * (comm.rank + 1)).sum().backward()
    out = {"got": got.detach(), "grad": rows.grad, "total": total.detach(), "value_grad": value.grad, "other": other}
    ranks.begin()
    with torch.no_grad():
        out["by_traced"] = ranks.exchange(rows, sent, sent, "test"), ranks.all_reduce(value, "max", "test")
        out["chained"] = ranks._last is out["by_traced"][1]
    return out


def test_numbers_and_derivatives(ranks):
    parts = ranks.run(2, on_rank)
    for k, part in enumerate(parts):
        theirs = torch.arange(6.0, dtype=torch.float64).reshape(3, 2) + 10 * (1 - k)
        mine = torch.arange(6.0, dtype=torch.float64).reshape(3, 2) + 10 * k
        assert torch.equal(part["got"], theirs) and torch.equal(part["by_traced"][0], theirs)
        assert torch.equal(part["grad"], 2 * mine), "the derivative of what I sent comes back to me"
        assert part["total"].tolist() == [3.0, 4.0]
        assert part["value_grad"].tolist() == [3.0, 3.0]
        assert part["by_traced"][1].tolist() == [2.0, 2.0] and part["chained"]


def test_fake_shapes():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        rows = torch.empty(5, 4, 3)
        assert exchange(rows, rows, [0, 5], [0, 7], 0, "test").shape == (7, 4, 3)
        assert all_reduce(rows, rows, "sum", 0, "test").shape == (5, 4, 3)


def test_one_rank_has_no_messages():
    ranks = TracedRanks(Communicator(None))
    rows = torch.ones(3, 2)
    assert ranks.exchange(rows, [], [], "test").shape == (0, 2)
    assert torch.equal(ranks.all_reduce(rows), rows) and ranks._last is None


def test_what_is_no_operator_is_refused():
    ranks = TracedRanks(Communicator(None))
    with pytest.raises(DistributedOpError, match=r"Communicator\.all_gather_object; leave compile out"):
        ranks.all_gather_object(1)


def test_a_communicator_keeps_its_number():
    comm = Communicator(None)
    assert TracedRanks(comm)._number == TracedRanks(comm)._number != TracedRanks(Communicator(None))._number


def test_a_maximum_has_no_derivative(ranks):
    assert all("has no derivative" in text for text in ranks.run(2, maximum_on_rank))


def maximum_on_rank(comm) -> str:
    value = torch.ones(2, requires_grad=True)
    total = all_reduce(value, value.detach(), "max", TracedRanks(comm)._number, "test")
    try:
        total.sum().backward()
    except (DistributedOpError, InputError) as error:
        return str(error)
    return ""
