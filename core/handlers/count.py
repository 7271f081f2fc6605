"""Numbers of atoms of each system (``data.n_atoms_per_system``).

Models use them in two ways: to divide by (everybody's atoms are meant), and to lay out memory (this rank's rows
are meant). The tensor holds this rank's numbers, and the global ones beside them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nvdd.dispatch import Call, register
from nvdd.exchange import broadcast
from nvdd.handlers.elementwise import is_pointwise
from nvdd.roles import Role, ShardMeta
from nvdd.shard_tensor import ShardTensor, promote, to_local


def make_count(local: Tensor, total: Tensor, meta: ShardMeta) -> ShardTensor:
    """A COUNT: (n_systems,) rows of this rank, and of all ranks."""
    out = promote(local, Role.COUNT, meta)
    out._total = total
    return out


def _globally(value: Any) -> Any:
    if isinstance(value, ShardTensor) and value._role is Role.COUNT:
        return promote(value._total, Role.SYSTEM, value._meta)
    return type(value)(map(_globally, value)) if type(value) in (tuple, list) else value


_CASTS = ("to", "type", "type_as", "double", "float", "half", "int", "long", "clone", "detach", "contiguous")


def _is_count(call: Call) -> bool:
    return call.has(Role.COUNT)


@register(
    "tolist", "item", "__int__", "__index__", "numpy", "__array__", when="COUNT", does="this rank's rows: memory layout",
    predicate=_is_count,
)  # fmt: skip
def lay_out(call: Call):
    return call.run()


@register("repeat_interleave", when="SYSTEM by COUNT", does="a broadcast to this rank's atoms", predicate=_is_count)
def repeat(call: Call):
    value, counts = call.arg(0, "input"), call.arg(1, "repeats")
    if not isinstance(counts, ShardTensor) or getattr(value, "_role", Role.SYSTEM) is not Role.SYSTEM:
        raise call.refuse("only per-system values are repeated by numbers of atoms")
    rows = to_local(value)
    if isinstance(value, ShardTensor) and rows.requires_grad:
        rows = broadcast(rows, counts._meta.comm, "repeat by system")
    return promote(rows.repeat_interleave(to_local(counts), 0), counts._meta.atom_role, counts._meta)


@register(
    "*", when="COUNT, computed with", does="everybody's atoms: SYSTEM",
    predicate=lambda call: _is_count(call) and (is_pointwise(call.name) or call.name in (*_CASTS, "sum", "unsqueeze", "view", "reshape", "getitem")),
)  # fmt: skip
def compute_with(call: Call):
    kwargs = {k: _globally(v) for k, v in call.kwargs.items()}
    return call.func(*_globally(call.args), **kwargs)
