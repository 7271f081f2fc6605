"""Numbers of atoms of each system (``data.n_atoms_per_system``).

Models use them in two ways: to divide by (everybody's atoms are meant), and to lay out memory (this rank's rows
are meant). The tensor holds this rank's numbers, and beside them the global ones and the system of each row here.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nvdd.dispatch import Call, register
from nvdd.handlers.carriers import to_rows
from nvdd.handlers.elementwise import is_pointwise
from nvdd.handlers.rows import positive
from nvdd.roles import Role, ShardMeta
from nvdd.shard_tensor import ShardTensor, promote, to_local


def make_count(local: Tensor, total: Tensor, system: Tensor, meta: ShardMeta) -> ShardTensor:
    """A COUNT: (n_systems,) rows of this rank, and of all ranks; (n_rows,) system of each row here."""
    out = promote(local, Role.COUNT, meta)
    out._total, out._system = total, system
    return out


def _globally(value: Any) -> Any:
    if isinstance(value, ShardTensor) and value._role is Role.COUNT:
        return promote(value._total, Role.SYSTEM, value._meta)
    return type(value)(map(_globally, value)) if type(value) in (tuple, list) else value


_COMPUTE = (
    "to", "type", "type_as", "double", "float", "half", "int", "long", "clone", "detach", "contiguous", "sum", "mean",
    "prod", "max", "min", "amax", "amin", "unsqueeze", "squeeze", "view", "reshape", "getitem", "select", "expand",
)  # fmt: skip


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
    value, counts, dim = call.arg(0, "input"), call.arg(1, "repeats"), call.arg(2, "dim")
    if not isinstance(counts, ShardTensor) or getattr(value, "_role", Role.SYSTEM) is not Role.SYSTEM:
        raise call.refuse("only per-system values are repeated by numbers of atoms")
    if value.dim() > 1 if dim is None else positive(dim, value.dim()) != 0:
        raise call.refuse("numbers of atoms repeat the first dimension only")
    rows = to_local(value)
    if isinstance(value, ShardTensor):
        rows = to_rows(rows, counts._meta, "repeat by system")
    # by the system of each row, for halo rows are not in the order of systems
    return promote(rows.index_select(0, counts._system), counts._meta.atom_role, counts._meta)


@register(
    "*", when="COUNT, computed with", does="everybody's atoms: SYSTEM",
    predicate=lambda call: _is_count(call) and (is_pointwise(call.name) or call.name in _COMPUTE),
)  # fmt: skip
def compute_with(call: Call):
    kwargs = {k: _globally(v) for k, v in call.kwargs.items()}
    return call.func(*_globally(call.args), **kwargs)
