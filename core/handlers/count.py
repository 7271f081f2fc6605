"""Numbers of atoms (or edges) of each system: ``data.n_atoms_per_system``, `rows_per_system`.

Models use them in two ways: to divide by (everybody's atoms are meant), and to lay out memory (this rank's rows
are meant). The tensor holds this rank's numbers, and beside them the global ones and the system of each row here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nvdd.dispatch import Call, register
from nvdd.handlers.carriers import to_rows
from nvdd.handlers.elementwise import is_pointwise
from nvdd.handlers.rows import positive
from nvdd.roles import Role, ShardMeta
from nvdd.shard_tensor import ShardTensor, promote, to_local


def make_count(
    local: Tensor, total: Tensor, system: Tensor, meta: ShardMeta, entry: Role | None = None
) -> ShardTensor:
    """A COUNT: (n_systems,) rows of this rank, and of all ranks; (n_rows,) system of each row here; None: of atoms."""
    out = promote(local, Role.COUNT, meta, entry=entry or meta.atom_role)
    out._total, out._system = total, system
    return out


def rows_per_system(system: Tensor, n_systems: int) -> Tensor:
    """(n_systems,) numbers of rows, such as edges, from the system of each (n_rows,): ``data.batch[data.receivers]``.

    Under domain decomposition this rank's where they lay out memory, everybody's where they are computed with, as
    ``data.n_atoms_per_system``. Every rank calls at once.
    """
    counts = torch.bincount(system, minlength=n_systems)
    if not isinstance(system, ShardTensor):
        return counts
    rows = to_local(system)
    local = torch.bincount(rows, minlength=n_systems)
    return make_count(local, to_local(counts), rows, system._meta, system._entry)


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


@register(
    "repeat_interleave", when="SYSTEM by COUNT",
    does="a broadcast to this rank's atoms; arange(n_systems) becomes the SYSTEM_INDEX", predicate=_is_count,
)  # fmt: skip
def repeat(call: Call):
    value, counts, dim = call.arg(0, "input"), call.arg(1, "repeats"), call.arg(2, "dim")
    if not isinstance(counts, ShardTensor) or getattr(value, "_role", Role.SYSTEM) is not Role.SYSTEM:
        raise call.refuse("only per-system values are repeated by numbers of atoms")
    if value.dim() > 1 if dim is None else positive(dim, value.dim()) != 0:
        raise call.refuse("numbers of atoms repeat the first dimension only")
    meta, rows = counts._meta, to_local(value)
    # by the system of each row, for halo rows are not in the order of systems
    if _numbers_systems(value, meta.n_systems):
        return promote(rows.index_select(0, counts._system), Role.SYSTEM_INDEX, meta, entry=counts._entry)
    if isinstance(value, ShardTensor):
        rows = to_rows(rows, meta, "repeat by system")
    return promote(rows.index_select(0, counts._system), counts._entry, meta)


def _numbers_systems(value: Tensor, n_systems: int) -> bool:
    """Whether a value is 0, 1, ... n_systems - 1: repeated by numbers of atoms it is the system of each atom."""
    if isinstance(value, ShardTensor) or value.dtype != torch.int64 or value.shape != (n_systems,):
        return False
    return bool((value == torch.arange(n_systems, device=value.device)).all())


@register(
    "*", when="COUNT, computed with", does="everybody's atoms: SYSTEM",
    predicate=lambda call: _is_count(call) and (is_pointwise(call.name) or call.name in _COMPUTE),
)  # fmt: skip
def compute_with(call: Call):
    kwargs = {k: _globally(v) for k, v in call.kwargs.items()}
    return call.func(*_globally(call.args), **kwargs)
