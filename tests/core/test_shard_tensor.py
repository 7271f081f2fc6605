"""A role is put on without a copy, comes off again, and stays through a copy."""

from __future__ import annotations

import copy

import pytest
import torch

from nvdd.communicator import Communicator
from nvdd.plan import ExchangePlan
from nvdd.roles import Role, ShardMeta
from nvdd.shard_tensor import ShardTensor, adopt, like, promote, to_local


@pytest.fixture
def meta() -> ShardMeta:
    empty = torch.zeros(0, dtype=torch.int64)
    return ShardMeta(ExchangePlan.build(Communicator(), 3, empty, empty))


def test_wrap_shares_memory_and_graph(meta):
    plain = torch.arange(6.0).reshape(3, 2).requires_grad_(True)
    rows = ShardTensor.wrap(plain, meta=meta)
    assert rows.role is Role.OWNED and rows.data_ptr() == plain.data_ptr()
    (gradient,) = torch.autograd.grad(to_local((rows * rows).sum()), plain)
    assert torch.equal(gradient, 2 * plain)
    assert type(to_local(rows)) is torch.Tensor and to_local(rows).data_ptr() == plain.data_ptr()
    assert to_local("anything else") == "anything else"


def test_of_another_number_of_systems(meta):
    value = ShardTensor.wrap(torch.zeros(4), role=Role.SYSTEM, meta=meta, n_systems=4)
    assert value.meta.n_systems == 4 and meta.n_systems == 1
    assert value.meta.plan is meta.plan


def test_role_stays_with_a_copy_and_follows_what_it_is_like(meta):
    index = promote(torch.tensor([0, 2]), Role.SENDER, meta, of="bonds")
    again = copy.deepcopy(index)
    assert again.role is Role.SENDER and again._of == "bonds" and again.data_ptr() != index.data_ptr()
    assert like(torch.zeros(2), index)._of == "bonds"
    assert like(torch.zeros(2), index, role=Role.EDGE).role is Role.EDGE
    assert "SENDER" in repr(index)


def test_adopt_is_seen_by_whoever_holds_the_tensor(meta):
    plain = torch.zeros(3)
    holder = [plain]
    adopt(plain, promote(torch.zeros(3), Role.OWNED, meta))
    assert isinstance(holder[0], ShardTensor) and holder[0].role is Role.OWNED
