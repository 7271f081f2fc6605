"""Fetch and fold, sum and broadcast are each other's adjoints, to second order; sums are made in float64."""

from __future__ import annotations

import pytest
import torch

from nvdd import exchange
from nvdd.communicator import Communicator
from nvdd.plan import ExchangePlan

ROWS = (4, 1, 3)  # that each rank owns; everyone reads everything


def everyone_reads_all(comm: Communicator) -> ExchangePlan:
    others = [(p, r) for p in range(comm.size) if p != comm.rank for r in range(ROWS[p])]
    rank, row = torch.tensor(others, dtype=torch.int64).reshape(-1, 2).T
    return ExchangePlan.build(comm, ROWS[comm.rank], rank, row)


def numbers(*shape: int, phase: float = 0.0) -> torch.Tensor:
    return torch.sin(torch.arange(torch.Size(shape).numel(), dtype=torch.float64) * 1.3 + phase).reshape(shape)


def whole(comm: Communicator) -> torch.Tensor:
    """(all rows, 2) of all ranks."""
    return numbers(sum(ROWS[: comm.size]), 2)


def mine(comm: Communicator) -> slice:
    return slice(sum(ROWS[: comm.rank]), sum(ROWS[: comm.rank + 1]))


def order_of_halo(comm: Communicator) -> torch.Tensor:
    """Global row behind each padded row."""
    rows = torch.arange(sum(ROWS[: comm.size]))
    here = mine(comm)
    return torch.cat([rows[here], rows[: here.start], rows[here.stop :]])


def energy(comm: Communicator, plan: ExchangePlan, x: torch.Tensor) -> torch.Tensor:
    """This rank's share of a function that fetches, folds, sums and broadcasts, all of it nonlinear."""
    padded = exchange.fetch(x, plan) ** 2
    folded = exchange.fold(padded * (1 + torch.arange(len(padded)))[:, None], plan)
    total = exchange.sum_over_ranks(folded.sum(0), comm).tanh()
    corrected = exchange.correct(padded.sin(), plan)[: plan.n_owned]
    return (folded.sin() * exchange.broadcast(total, comm) + corrected * x).sum()


def energy_of_all(size: int, x: torch.Tensor) -> torch.Tensor:
    """The same in one process."""

    class Rank:
        def __init__(self, rank):
            self.rank, self.size = rank, size

    folded = torch.zeros_like(x)
    for rank in range(size):
        order = order_of_halo(Rank(rank))
        folded = folded.index_add(0, order, x[order] ** 2 * (1 + torch.arange(len(order)))[:, None])
    return (folded.sin() * folded.sum(0).tanh() + size * (x**2).sin() * x).sum()


def derivatives_on_rank(comm: Communicator) -> None:
    plan = everyone_reads_all(comm)
    x = whole(comm)[mine(comm)].requires_grad_(True)
    v = numbers(len(whole(comm)), 2, phase=0.7)
    (gradient,) = torch.autograd.grad(energy(comm, plan, x), x, create_graph=True)
    (product,) = torch.autograd.grad((gradient * v[mine(comm)]).sum(), x)

    y = whole(comm).requires_grad_(True)
    (expected,) = torch.autograd.grad(energy_of_all(comm.size, y), y, create_graph=True)
    (second,) = torch.autograd.grad((expected * v).sum(), y)
    torch.testing.assert_close(gradient, expected[mine(comm)], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(product, second[mine(comm)], rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("world_size", (1, 2, 3))
def test_first_and_second_derivatives(ranks, world_size):
    ranks.run(world_size, derivatives_on_rank)


def adjoints_on_rank(comm: Communicator) -> None:
    plan = everyone_reads_all(comm)
    x, y = numbers(plan.n_owned, 3, phase=comm.rank), numbers(plan.n_padded, 3, phase=9.0 + comm.rank)
    inner = lambda a, b: comm.all_reduce((a * b).sum())
    torch.testing.assert_close(
        inner(exchange.fetch(x, plan), y), inner(x, exchange.fold(y, plan)), rtol=1e-13, atol=1e-13
    )
    one, two = exchange.fold_packed([y, y[:, :1] * 2], plan)
    assert torch.equal(one, exchange.fold(y, plan))
    assert torch.equal(two, exchange.fold(y[:, :1] * 2, plan))
    order = order_of_halo(comm)
    place = torch.argsort(order)  # rows in the order of all
    values = [
        numbers(plan.n_padded, 3, phase=9.0 + r)[torch.argsort(order_of_halo(_as(comm, r)))] for r in range(comm.size)
    ]
    for op in ("amax", "amin"):
        expected = getattr(torch.stack(values), op)(0)[mine(comm)]
        assert torch.equal(exchange.fold_extremum(y, plan, op, "test"), expected)
    assert torch.equal(values[comm.rank], y[place])


class _as:
    """Another rank's view of the ranks."""

    def __init__(self, comm: Communicator, rank: int) -> None:
        self.size, self.rank = comm.size, rank


@pytest.mark.parametrize("world_size", (1, 2, 3))
def test_fold_is_the_transpose_of_fetch(ranks, world_size):
    ranks.run(world_size, adjoints_on_rank)


def sums_on_rank(comm: Communicator) -> torch.Tensor:
    plan = everyone_reads_all(comm)
    share = torch.full((plan.n_padded, 1), (1e8, 1.0, -1e8)[comm.rank], dtype=torch.float32)
    return exchange.fold(share, plan)


def test_fold_sums_in_float64(ranks):
    """In float32 the 1 is lost between 1e8 and -1e8."""
    for part in ranks.run(3, sums_on_rank):
        assert part.dtype == torch.float32 and (part == 1).all()


def parameters_on_rank(comm: Communicator) -> None:
    w = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    value = exchange.shared(w, comm) ** 2  # the same on every rank, and so its gradient
    share = exchange.counted_once(value, comm)
    assert comm.all_reduce(share.detach()) == value.detach()
    exchange.sum_over_ranks(share, comm).sin().backward()
    total = comm.all_reduce(torch.zeros_like(w) if w.grad is None else w.grad)
    torch.testing.assert_close(total, torch.cos(value.detach()) * 2 * w.detach())
    shares = exchange.gather_shares(torch.tensor([1.0 + comm.rank]), comm, "test")
    assert shares.tolist() == [[1.0 + r] for r in range(comm.size)]


@pytest.mark.parametrize("world_size", (1, 2, 3))
def test_what_all_have_alike_counts_once(ranks, world_size):
    ranks.run(world_size, parameters_on_rank)


def test_wrong_number_of_rows():
    empty = torch.zeros(0, dtype=torch.int64)
    plan = ExchangePlan.build(Communicator(), 3, empty, empty)
    with pytest.raises(ValueError, match=r"shape \(2, 1\) was given where 3 owned rows of atoms are expected"):
        exchange.fetch(torch.zeros(2, 1), plan)
    with pytest.raises(ValueError, match="3 owned and halo rows"):
        exchange.fold(torch.zeros(4, 1), plan)
