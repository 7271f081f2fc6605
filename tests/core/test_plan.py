"""Plans on ranks that read each other's rows at random: what comes is what was asked for."""

from __future__ import annotations

import pytest
import torch

from nvdd.communicator import Communicator
from nvdd.errors import CommunicationError
from nvdd.exchange import fetch
from nvdd.plan import ExchangePlan

ROWS = (5, 0, 7, 3)  # that each rank owns; one owns nothing


def random_plan(comm: Communicator, seed: int = 0) -> tuple[ExchangePlan, torch.Tensor, torch.Tensor]:
    """A plan, and owner and row of each halo row; rows of rank 0 are read by all others."""
    generator = torch.Generator().manual_seed(10 * seed + comm.rank)
    rank, row = [], []
    for peer in range(comm.size):
        if peer != comm.rank:
            wanted = torch.randperm(ROWS[peer], generator=generator)[: 1 + comm.rank if peer else None]
            rank += [peer] * len(wanted)
            row += wanted.tolist()
    rank, row = torch.tensor(rank, dtype=torch.int64), torch.tensor(row, dtype=torch.int64)
    return ExchangePlan.build(comm, ROWS[comm.rank], rank, row, "things"), rank, row


def label(rank, row):
    """A number that says whose row it is."""
    return (100.0 * torch.as_tensor(rank) + torch.as_tensor(row)).to(torch.float64)


def on_rank(comm: Communicator) -> None:
    plan, rank, row = random_plan(comm)
    owned = label(comm.rank, torch.arange(plan.n_owned))
    padded = fetch(owned, plan)
    assert torch.equal(padded, torch.cat([owned, label(rank, row)]))
    assert plan.n_padded == plan.n_owned + plan.n_halo == len(padded)
    assert torch.equal(plan.boundary[plan.boundary_slot], plan.send_index)
    assert len(plan.boundary.unique()) == len(plan.boundary)
    assert sum(plan.send_counts) == len(plan.send_index) and plan.send_counts[comm.rank] == 0
    # a subset, chosen by the owners' labels, so that all choose alike
    keeps = lambda values: values % 2 == 0
    subset = plan.select(keeps(owned), keeps(padded[plan.n_owned :]), "even things")
    expected = padded[keeps(padded)]
    assert torch.equal(fetch(owned[keeps(owned)], subset), expected)
    assert subset.kind == "even things"


@pytest.mark.parametrize("world_size", (1, 2, 3, 4))
def test_rows_come_from_where_they_are(ranks, world_size):
    ranks.run(world_size, on_rank)


def asks_too_far(comm: Communicator) -> str:
    peer, row = 1 - comm.rank, 4 if comm.rank == 0 else 9
    try:
        ExchangePlan.build(comm, 5, torch.tensor([peer]), torch.tensor([row]), "things")
    except CommunicationError as error:
        return str(error)
    return "accepted"


def test_a_row_that_is_not_there(ranks):
    first, second = ranks.run(2, asks_too_far)
    assert first == "rank 0: a peer asks for things row 9 of 5"
    assert second == "accepted", "rank 0 asked for the last row"


def test_halo_rows_are_remote_and_in_the_order_of_owners():
    index = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="none of them owned here"):
        ExchangePlan.build(Communicator(), 3, index, index)
