"""Numbers of this rank's rows lay out memory; values computed with them are refused."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from ase import Atoms

from nvdd import Batch
from nvdd.communicator import Communicator
from nvdd.errors import DistributedOpError
from nvdd.local_numbers import LocalFloat, LocalInt, plain_numbers
from nvdd.plan import ExchangePlan
from nvdd.roles import Role, ShardMeta
from nvdd.shard_tensor import promote

X = torch.arange(4.0)
ROWS = torch.arange(4)


@pytest.fixture
def owned():
    """(4, 3) rows of atoms."""
    empty = torch.zeros(0, dtype=torch.int64)
    meta = ShardMeta(ExchangePlan.build(Communicator(), 4, empty, empty))
    return promote(torch.ones(4, 3), Role.OWNED, meta)


@pytest.mark.parametrize("ask", ("shape[0]", "size(0)", "size(-2)", "size(dim=0)", "size()[0]", "numel()", "nelement()"))
def test_rows_are_counted_locally(owned, ask):
    assert type(eval(f"x.{ask}", {"x": owned})) is LocalInt


@pytest.mark.parametrize("ask", ("shape[1]", "size(1)", "size(-1)", "dim()", "T.shape[0]"))
def test_features_are_counted_everywhere(owned, ask):
    assert type(eval(f"x.{ask}", {"x": owned})) is int


def test_values_per_system_are_counted_everywhere(owned):
    assert type(promote(torch.ones(2, 3), Role.SYSTEM, owned.meta).shape[0]) is int


LAYOUT = (
    "torch.zeros(n, 3)", "torch.zeros((n, 3))", "torch.zeros(s)", "torch.zeros(3, n, dtype=x.dtype)", "torch.arange(n)",
    "x.view(n, 1)", "x.expand(n)", "x.expand(2, n)", "x.reshape(n, -1)", "x.new_zeros(n, 2)", "x.repeat(n)", "x[:n]", "x[n - 1]",
    "torch.nn.functional.one_hot(i, n)", "x.split(math.ceil(n / 3))", "x.split(-(-n // 3))", "i * n + i", "i < n", "x < n",
    "torch.bincount(i, minlength=n)", "x.unflatten(0, (n, 1))", "range(n)", "max(n, 1)", "n % 2", "f'{n:4d} {n / 3:.2f}'", "x / int(n)",
    "h.reshape(n, 3)", "h.new_zeros(n, 3)", "torch.zeros(h.shape)", "torch.zeros(h.shape[:1] + (5,))", "h + h.new_zeros(h.shape)", "x.view(h.shape[:1])",
    "h.new_full((n,), 0.5)", "torch.full_like(i, n)", "h.new_full((3,), n, dtype=torch.int64)", "torch.full((n, 2), 0.5)",
)  # fmt: skip
COMPUTED = (
    "h / n", "h * n", "n * h", "h / max(n, 1)", "h * n**0.5", "h * (1 / n)", "h.sum(0) / n", "x * (1 / n)", "x / n**0.5", "x * (n * 0.5)",
    "x / math.sqrt(n)", "float(n)", "h / float(n)", "h + n", "h.clamp(max=n)", "torch.where(h > 2, h, n / 2)", "h.div_(n)", "-n * h",
    "h.pow(n)", "torch.div(h, n)", "h.mul(other=n)", "torch.full_like(h, n)", "h.new_full((3,), n)", "h.new_tensor(n)",
)  # fmt: skip


def _names(owned) -> dict:
    n = owned.shape[0]
    return {"n": n, "s": torch.Size([n, 3]), "x": X.clone(), "i": ROWS, "h": owned, "math": math, "torch": torch}


@pytest.mark.parametrize("line", LAYOUT)
def test_they_lay_out_memory(owned, line):
    names = _names(owned)
    plain = {**names, "n": 4, "s": torch.Size([4, 3]), "h": torch.ones(4, 3)}
    found, expected = eval(line, names), eval(line, plain)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found.as_subclass(torch.Tensor), expected)
    else:
        assert str(found) == str(expected)


@pytest.mark.parametrize("line", COMPUTED)
def test_they_are_not_computed_with(owned, line):
    with pytest.raises(DistributedOpError, match=r"comes from the number of rows on this rank.*n_atoms_per_system") as info:
        eval(line, _names(owned))
    assert info.value.site and "test_local_numbers" not in info.value.op


def test_they_are_the_number_that_they_are():
    n = LocalInt(4)
    assert n == 4 and hash(n) == hash(4) and n == n + 0 and n * 2 == 8 and n / 8 == 0.5 and [1, 2, 3, 4, 5][n] == 5
    assert type(n + 1) is LocalInt and type(1 + n) is LocalInt and type(n / 2) is LocalFloat and type(1 / n) is LocalFloat
    assert type(plain_numbers(n)) is int and type(plain_numbers(n / 3)) is float
    assert type(pickle.loads(pickle.dumps(n))) is int and type(copy.deepcopy(n / 3)) is float
    assert n.__add__("x") is NotImplemented


def test_one_process_has_plain_numbers():
    batch = Batch.from_atoms(Atoms("H2"))
    assert type(batch.n_atoms) is int
