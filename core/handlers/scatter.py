"""Writing rows by index: ``scatter_add``, ``index_add``, ``scatter_reduce``, ``index_put``.

* by RECEIVER: local and complete, because each edge lives where its receiver is owned.
* by SENDER: into owned and halo rows, then the halo rows are summed into their owners.
* by SYSTEM_INDEX: this rank's share, then a sum (maximum, ...) over ranks; the result is the same everywhere.

In-place forms keep in-place semantics: the tensor written to holds the final value also if the call's return is
dropped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nvdd.dispatch import Call, register
from nvdd.exchange import fold, sum_over_ranks
from nvdd.roles import Role, ShardMeta
from nvdd.shard_tensor import ShardTensor, promote, to_local

_OPS = ("scatter_add", "index_add", "scatter_reduce", "index_reduce", "index_put", "scatter")
_SUMS = {"sum", "add", "mean"}


def _index(call: Call) -> Any:
    if call.name == "index_put":
        indices = call.arg(1, "indices")
        return indices[0] if isinstance(indices, (tuple, list)) and len(indices) == 1 else None
    return call.arg(2, "index")


def _role(call: Call) -> Role | None:
    return getattr(_index(call), "_role", None)


def _pieces(call: Call) -> tuple[Tensor, Tensor, str]:
    """Tensor written to, rows written, and how they combine."""
    target = call.arg(0, "input")
    if call.name == "index_put":
        return target, call.arg(2, "values"), "sum" if call.arg(3, "accumulate", False) else "replace"
    if call.name in ("scatter_add", "index_add"):
        return target, call.arg(3, "src" if call.name == "scatter_add" else "source"), "sum"
    if call.name == "scatter":
        return (
            target,
            call.arg(3, "src"),
            {"add": "sum", None: "replace"}.get(call.arg(4, "reduce"), "multiply"),
        )
    how = call.arg(4, "reduce")
    return target, call.arg(3, "src" if call.name == "scatter_reduce" else "source"), how


def _check_target(call: Call, target: Tensor, rows: int, what: str) -> None:
    dim = 0 if call.name == "index_put" else call.arg(1, "dim")
    index = _index(call)
    if (dim + target.dim() if dim < 0 else dim) != index._row_dim or (index._row_dim != 0 and target.dim() == 1):
        raise call.refuse("a scatter by atoms or systems along another dimension than the one that counts them")
    if target.shape[dim] != rows:
        raise call.refuse(
            f"the tensor written to has {target.shape[dim]} rows, where this rank has {rows} {what}",
            "Allocate it with as many rows as the per-atom inputs have (data.atomic_numbers.shape[0]) or as there "
            "are systems (data.n_systems)",
        )


@register(
    *_OPS,
    when="by RECEIVER",
    does="local: receivers are owned",
    predicate=lambda call: _role(call) is Role.RECEIVER,
)
def scatter_to_receivers(call: Call):
    index = _index(call)
    target, source, _ = _pieces(call)
    if getattr(target, "_role", Role.OWNED) is not Role.OWNED:
        raise call.refuse("a scatter over receivers writes rows of atoms")
    _check_target(call, target, index._meta.n_owned, "owned atoms")
    return _owned(call.run(), target, source, index)


def _owned(out: Tensor, target: Tensor, source: Tensor, index: ShardTensor) -> Tensor:
    """The role that the operands had; what the model made local stays plain."""
    if isinstance(target, ShardTensor) or isinstance(source, ShardTensor):
        return promote(to_local(out), Role.OWNED, index._meta, index._row_dim)
    return out


@register(
    *_OPS,
    when="by SENDER, a sum",
    does="into owned and halo rows, then folded into owners",
    predicate=lambda call: _role(call) is Role.SENDER,
)
def scatter_to_senders(call: Call):
    index = _index(call)
    target, source, how = _pieces(call)
    if how != "sum" or index._row_dim != 0:
        raise call.refuse(
            f"a scatter over senders that combines by {how!r}", "Sum over senders, or combine over receivers"
        )
    _check_target(call, target, index._meta.n_owned, "owned atoms")
    meta = index._meta
    plain = to_local(target)
    share = plain.new_zeros((meta.n_padded, *plain.shape[1:]))
    alpha = call.kwargs.get("alpha", 1)
    rows, src = to_local(index), to_local(source)
    share = share.scatter_add(0, rows, src) if rows.dim() > 1 else share.index_add(0, rows, src)
    total = fold(share, meta.plan, f"{call.name} over senders")
    return _owned(_add(call, plain, total, alpha), target, source, index)


def _add(call: Call, target: Tensor, value: Tensor, alpha: float = 1) -> Tensor:
    return target.add_(value, alpha=alpha) if call.inplace else target.add(value, alpha=alpha)


@register(
    *_OPS,
    when="by SYSTEM_INDEX",
    does="this rank's share, then combined over ranks",
    predicate=lambda call: _role(call) is Role.SYSTEM_INDEX,
)
def scatter_to_systems(call: Call):
    index = _index(call)
    meta = index._meta
    target, source, how = _pieces(call)
    if not meta.policy.system_reductions:
        raise call.refuse(
            "the spec's policy has system_reductions off, so sums over systems are not known to be global"
        )
    if getattr(target, "_role", Role.SYSTEM) is not Role.SYSTEM:
        raise call.refuse("a scatter by system writes per-system rows")
    _check_target(call, target, meta.n_systems, "systems")
    plain, rows, src = to_local(target), to_local(index), to_local(source)
    dim = index._row_dim
    if meta.n_phantom and index._rows == "atom":
        rows, src = rows.narrow(dim, 0, meta.n_counted), src.narrow(dim, 0, meta.n_counted)
    if how in ("sum", "mean"):
        total = sum_over_ranks(_local_sum(plain, dim, rows, src), meta.comm, f"{call.name} by system")
        if how == "mean":
            total = _mean(call, plain, dim, rows, src, total, meta)
            out = plain.copy_(total) if call.inplace else total
        else:
            out = _add(call, plain, total, call.kwargs.get("alpha", 1))
    elif how in ("amax", "amin", "prod"):
        out = _extremum(call, plain, dim, rows, src, how, meta)
    else:
        raise call.refuse(f"a scatter by system that combines by {how!r}")
    return promote(out, Role.SYSTEM, meta)


def _local_sum(target: Tensor, dim: int, rows: Tensor, src: Tensor) -> Tensor:
    zeros = torch.zeros_like(target)
    if rows.dim() == 1 and src.dim() > 1:
        return zeros.index_add(dim, rows, src)
    return zeros.scatter_add(dim, rows, src)


def _mean(call: Call, target, dim, rows, src, total, meta: ShardMeta) -> Tensor:
    include = call.arg(5, "include_self", True)
    counts = sum_over_ranks(_local_sum(target, dim, rows, torch.ones_like(src)), meta.comm, "counts by system")
    if include:
        return (target + total) / (counts + 1)
    return torch.where(counts > 0, total / counts.clamp(min=1), target)


def _extremum(call: Call, target, dim, rows, src, how: str, meta: ShardMeta) -> Tensor:
    """Maximum, minimum or product over ranks; gradients flow to this rank's share as torch's own would."""
    if src.requires_grad:
        raise call.refuse(
            f"the gradient of a {how} over ranks", "Detach it (softmax is the same with a detached maximum)"
        )
    start = {"amax": -torch.inf, "amin": torch.inf, "prod": 1.0}[how]
    if not src.is_floating_point():
        info = torch.iinfo(src.dtype)
        start = {"amax": info.min, "amin": info.max, "prod": 1}[how]
    share = torch.full_like(target, start)
    share = (
        share.index_reduce(dim, rows, src, how)
        if rows.dim() == 1 and src.dim() > 1
        else share.scatter_reduce(dim, rows, src, how)
    )
    op = {"amax": "max", "amin": "min", "prod": "prod"}[how]
    total = meta.comm.all_reduce(share, op, f"{call.name} by system")
    if call.arg(5, "include_self", True):
        total = {"amax": torch.maximum, "amin": torch.minimum, "prod": torch.mul}[how](total, target)
    else:
        total = torch.where(total == start, target, total)
    return target.copy_(total) if call.inplace else total


@register(
    "setitem", when="x[receivers] = or x[system] = ...", does="refused: which edge wins is not defined",
    predicate=lambda call: isinstance(call.args[1], ShardTensor) and call.args[1]._role is not Role.OWNED,
)  # fmt: skip
def assign_by_index(call: Call):
    raise call.refuse(
        "assignment by an index that repeats rows (x[index] += y keeps one edge of each atom, in one process too)",
        "Use x.index_add_(0, index, y) or scatter_add",
    )
