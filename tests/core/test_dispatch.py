"""Names of operations, the table of handlers, and the error for what no handler takes."""

from __future__ import annotations

import operator

import pytest
import torch

from nvdd.communicator import Communicator
from nvdd.dispatch import call_site, handler_table, op_name
from nvdd.errors import DistributedOpError
from nvdd.handlers import FAMILIES
from nvdd.plan import ExchangePlan
from nvdd.roles import Role, ShardMeta
from nvdd.shard_tensor import promote


@pytest.mark.parametrize(
    "func,name",
    (
        (torch.index_select, ("index_select", False)),
        (torch.Tensor.index_add_, ("index_add", True)),
        (torch.Tensor.__getitem__, ("getitem", False)),
        (torch.Tensor.__setitem__, ("setitem", True)),
        (torch.Tensor.__iadd__, ("add", True)),
        (torch.Tensor.__radd__, ("add", False)),
        (torch.Tensor.__rsub__, ("sub", False)),
        (torch.Tensor.__truediv__, ("div", False)),
        (torch.true_divide, ("div", False)),
        (torch.Tensor.__len__, ("__len__", False)),
        (torch.Tensor.T.__get__, ("get:T", False)),
        (torch.ops.aten.index_add.default, ("index_add", False)),
        (torch.ops.aten.index_add, ("index_add", False)),
    ),
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_one_name_for_each_operation(func, name):
    assert op_name(func) == name


def test_table():
    table = handler_table()
    assert {h.family for h in table} == set(FAMILIES)
    assert all(h.when and h.does for h in table), "nvdd handlers prints both"


@pytest.fixture
def meta() -> ShardMeta:
    empty = torch.zeros(0, dtype=torch.int64)
    return ShardMeta(ExchangePlan.build(Communicator(), 3, empty, empty))


CASES = {
    "atoms are mixed": (Role.OWNED, lambda x: torch.msort(x), "msort", "may mix rows of atoms or edges"),
    "index compared": (Role.SENDER, lambda x: x < 2, "lt", "There are no padding edges to filter out"),
    "stand-in read": (Role.ANCHOR, lambda x: x + 1, "add", "Build on data.edge_vectors"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_no_handler_takes(meta, case):
    """The error names operation, roles and shapes, the line of the model, and a way out."""
    role, function, op, message = CASES[case]
    x = promote(torch.arange(3), role, meta, of="positions" if role is Role.ANCHOR else "atoms")
    with pytest.raises(DistributedOpError, match=message) as error:
        function(x)
    assert error.value.op == op
    assert str(error.value).startswith(f"{op}({role.name}(3,)) at {__file__}:")
    line = function.__code__.co_firstlineno
    assert f"{__file__}:{line}" in error.value.site


def test_call_site_is_the_callers_line():
    here = operator.attrgetter("f_lineno")(__import__("sys")._getframe())
    assert call_site() == f"{__file__}:{here + 1} in test_call_site_is_the_callers_line"
