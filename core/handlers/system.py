"""Reductions over all atoms or edges, and counts: this rank's share, then over ranks; the result is SYSTEM."""

from __future__ import annotations

import torch
from torch import Tensor

from nvdd.dispatch import Call, register
from nvdd.exchange import sum_over_ranks
from nvdd.handlers.rows import dims_of
from nvdd.roles import Role, ShardMeta
from nvdd.shard_tensor import ShardTensor, promote, to_local

_REDUCTIONS = ("sum", "mean", "amax", "amin", "max", "min", "any", "all", "nansum", "count_nonzero")


def _over_rows(call: Call) -> bool:
    x = call.args[0] if call.args else None
    if getattr(x, "_role", None) not in (Role.OWNED, Role.EDGE):
        return False
    if call.name in ("max", "min") and len(call.args) + len(call.kwargs) > 1:
        return False
    return x._row_dim in dims_of(call.arg(1, "dim"), x.dim())


def counted(x: ShardTensor) -> Tensor:
    """The rows that count: those of a phantom atom don't."""
    plain = to_local(x)
    if x._meta.n_phantom and x._role is Role.OWNED:
        return plain.narrow(x._row_dim, 0, x._meta.n_counted)
    return plain


@register(
    *_REDUCTIONS,
    when="OWNED or EDGE, over the rows",
    does="this rank's share, then over ranks",
    predicate=_over_rows,
)
def reduce_rows(call: Call):
    x = call.args[0]
    meta = x._meta
    if not meta.policy.system_reductions:
        raise call.refuse("the spec's policy has system_reductions off, so a sum over atoms is not known to be global")
    rows = counted(x)
    rest, options = call.args[1:], call.kwargs
    if call.name in ("sum", "nansum", "count_nonzero"):
        total = sum_over_ranks(call.run(rows, *rest, **options), meta.comm, f"{call.name} over rows")
    elif call.name == "mean":
        total = _mean(rows, x._row_dim, rest, options, meta)
    else:
        total = _extremum(call, rows, rest, options, meta)
    return promote(total, Role.SYSTEM, meta)


def _mean(rows: Tensor, row_dim: int, rest: tuple, options: dict, meta: ShardMeta) -> Tensor:
    options = {**options}
    dims = dims_of(rest[0] if rest else options.get("dim"), rows.dim())
    share = torch.sum(rows, *(rest or ()), **options) if rest or options else rows.sum()
    n = 1
    for d in dims:
        n *= rows.shape[d] if d != row_dim else 1
    count = meta.comm.all_reduce(torch.tensor(rows.shape[row_dim], device=rows.device), "sum", "count of rows")
    return sum_over_ranks(share, meta.comm, "mean over rows") / (n * count)


def _extremum(call: Call, rows: Tensor, rest: tuple, options: dict, meta: ShardMeta) -> Tensor:
    if rows.requires_grad:
        raise call.refuse(
            f"the gradient of {call.name} over the rows of all ranks",
            "Detach it first if no gradient is meant",
        )
    if call.name in ("any", "all"):
        share = call.run(rows, *rest, **options)
        op = "max" if call.name == "any" else "min"
        return meta.comm.all_reduce(share.to(torch.int32), op, f"{call.name} over rows").to(torch.bool)
    largest = call.name in ("amax", "max")
    if rows.is_floating_point():
        start = -torch.inf if largest else torch.inf
    else:
        info = torch.iinfo(rows.dtype)
        start = info.min if largest else info.max
    dims = dims_of(rest[0] if rest else options.get("dim"), rows.dim())
    keepdim = options.get("keepdim", rest[1] if len(rest) > 1 else False)
    # a rank without rows has nothing to say
    shape = [size if d not in dims else 1 for d, size in enumerate(rows.shape)]
    filler = rows.new_full(shape, start)
    function = torch.amax if largest else torch.amin
    row_dim = call.args[0]._row_dim
    share = function(
        torch.cat([rows, filler.expand([s if d != row_dim else 1 for d, s in enumerate(rows.shape)])], row_dim),
        dims,
        keepdim,
    )
    return meta.comm.all_reduce(share, "max" if largest else "min", f"{call.name} over rows")


def _is_system_index(call: Call) -> bool:
    return bool(call.args) and getattr(call.args[0], "_role", None) is Role.SYSTEM_INDEX


@register(
    "max", "amax", when="SYSTEM_INDEX", does="n_systems - 1, also where a rank lacks the last system",
    predicate=lambda call: _is_system_index(call) and len(call.args) == 1 and not call.kwargs,
)  # fmt: skip
def last_system(call: Call):
    index = call.args[0]
    return promote(torch.tensor(index._meta.n_systems - 1, device=index.device), Role.SYSTEM, index._meta)


@register("bincount", when="SYSTEM_INDEX", does="counts of all ranks", predicate=_is_system_index)
def count_by_system(call: Call):
    index = call.args[0]
    meta = index._meta
    if call.arg(1, "weights") is not None:
        raise call.refuse("weighted counts by system", "Use scatter_add")
    rows = to_local(index)[: meta.n_counted] if index._rows == "atom" else to_local(index)
    share = torch.bincount(rows, minlength=max(meta.n_systems, call.arg(2, "minlength", 0)))
    return promote(meta.comm.all_reduce(share, "sum", "counts by system"), Role.SYSTEM, meta)
