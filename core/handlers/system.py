"""Reductions over all atoms, edges or bonds: this rank's share, then over ranks; the result is SYSTEM.

Counts are global, and where several rows on several ranks attain a maximum they share its gradient equally, as
torch does in one process.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nvdd.dispatch import Call, register
from nvdd.exchange import broadcast, gather_shares, sum_over_ranks
from nvdd.handlers.rows import dims_of
from nvdd.handlers.scatter import only_derivative, only_where, worst
from nvdd.roles import Role, ShardMeta
from nvdd.shard_tensor import ShardTensor, promote, to_local

_SUMS = ("sum", "nansum", "count_nonzero")
_MOMENTS = ("mean", "var", "std")
_EXTREMA = ("amax", "amin", "max", "min")
_NORMS = ("norm", "linalg_vector_norm", "vector_norm", "linalg_norm")


def _dims(call: Call, x: Tensor) -> tuple[int, ...]:
    position = 2 if call.name in _NORMS else 1
    dim = call.arg(position, "dim")
    return tuple(range(x.dim())) if isinstance(dim, bool) else dims_of(dim, x.dim())


def _keepdim(call: Call) -> bool:
    if call.name == "count_nonzero":
        return False
    return bool(call.arg(3 if call.name in (*_NORMS, "var", "std") else 2, "keepdim", False))


def _over_rows(call: Call) -> bool:
    x = call.args[0] if call.args else None
    if not isinstance(x, ShardTensor) or not x._role.has_rows or x._role is Role.SYSTEM_INDEX:
        return False
    # max(x, dim) gives places as well, which mean nothing over ranks; amax(x, dim) does not
    if call.name in ("max", "min") and len(call.args) + len(call.kwargs) > 1:
        return False
    return x._row_dim in _dims(call, x)


def counted(x: ShardTensor, fill: float | bool = 0) -> Tensor:
    """The rows that count: neither a phantom atom nor halo rows; ``fill`` is neutral in what will be done with them."""
    return x._meta.only_counted(to_local(x), x._row_dim, fill, edges=not x._role.is_atoms)


def _sum(values: Tensor, dims: tuple[int, ...], keepdim: bool, meta: ShardMeta, site: str) -> Tensor:
    share = values.sum(dims, keepdim=keepdim) if dims else values
    return sum_over_ranks(share, meta.comm, site)


def _count(rows: Tensor, x: ShardTensor, dims: tuple[int, ...]) -> Tensor:
    """Number of values that go into each result, on all ranks."""
    meta, row_dim = x._meta, x._row_dim
    mine = meta.number_counted(rows, row_dim, edges=not x._role.is_atoms)
    count = meta.comm.all_reduce(mine, "sum", "count of rows")
    return count * math.prod(rows.shape[d] for d in dims if d != row_dim)


@register(
    *_SUMS, *_MOMENTS, *_EXTREMA, *_NORMS, "prod", "any", "all",
    when="rows, over the row dimension", does="this rank's share, then over ranks", predicate=_over_rows,
)  # fmt: skip
def reduce_rows(call: Call):
    x = call.args[0]
    meta, site = x._meta, f"{call.name} over rows"
    if not meta.policy.system_reductions:
        raise call.refuse("the policy has system_reductions off, so a sum over atoms is not known to be global")
    if call.kwargs.get("out") is not None:
        raise call.refuse("a reduction over rows into out=")
    if meta.counts is not None and x._role is Role.BOND:
        raise call.refuse("a sum over bonds in a compiled forward", "Leave compile out")
    rows, dims, keepdim = counted(x, _neutral(call, x)), _dims(call, x), _keepdim(call)
    if call.name in _SUMS:
        total = sum_over_ranks(call.run(rows, *call.args[1:], **call.kwargs), meta.comm, site)
    elif call.name in _MOMENTS:
        total = _moment(call, rows, x, dims, keepdim, meta)
    elif call.name in _NORMS:
        total = _norm(call, rows, dims, keepdim, meta)
    elif call.name in _EXTREMA:
        total = _extremum(rows, dims, keepdim, call.name.endswith("max"), meta, site)
    elif call.name == "prod":
        total = gather_shares(call.run(rows, *call.args[1:], **call.kwargs), meta.comm, site).prod(0)
    else:
        share = call.run(rows, *call.args[1:], **call.kwargs).to(torch.int32)
        total = meta.comm.all_reduce(share, "max" if call.name == "any" else "min", site).to(torch.bool)
    return promote(total, Role.SYSTEM, meta)


def _neutral(call: Call, x: ShardTensor) -> float | bool:
    """What adds nothing to the reduction."""
    if call.name in _EXTREMA:
        return worst(to_local(x), "amax" if call.name.endswith("max") else "amin")
    if call.name in _NORMS:
        order = call.arg(1, "p" if call.name == "norm" else "ord", 2)
        return torch.inf if isinstance(order, (int, float)) and order < 0 else 0
    return {"all": True, "prod": 1}.get(call.name, 0)


def _moment(call: Call, rows: Tensor, x: ShardTensor, dims, keepdim: bool, meta: ShardMeta) -> Tensor:
    row_dim, edges = x._row_dim, not x._role.is_atoms
    count = _count(rows, x, dims)
    dtype = call.kwargs.get("dtype")
    rows = rows if dtype is None else rows.to(dtype)
    mean = _sum(rows, dims, True, meta, "mean over rows") / count
    if call.name == "mean":
        return mean if keepdim else _drop(mean, dims)
    # var(unbiased), var(dim, unbiased, keepdim), var(dim, correction=, keepdim=)
    unbiased = next((a for a in call.args[1:] if isinstance(a, bool)), call.kwargs.get("unbiased"))
    correction = call.kwargs.get("correction", 1) if unbiased is None else int(unbiased)
    off = rows - broadcast(mean, meta.comm, "mean with rows")
    if meta.counts is not None:
        off = meta.only_counted(off, row_dim, edges=edges)
    variance = _sum(off * off, dims, keepdim, meta, f"{call.name} over rows") / (count - correction)
    return _root(variance, 2) if call.name == "std" else variance


def _drop(value: Tensor, dims: tuple[int, ...]) -> Tensor:
    for d in sorted(dims, reverse=True):
        value = value.squeeze(d)
    return value


def _norm(call: Call, rows: Tensor, dims, keepdim: bool, meta: ShardMeta) -> Tensor:
    order = call.arg(1, "p" if call.name == "norm" else "ord", 2)
    order = 2 if order in (None, "fro") else order
    if isinstance(order, str) or (call.name == "linalg_norm" and len(dims) == 2 and call.arg(1, "ord") is not None):
        raise call.refuse(f"a matrix norm ({order!r}) over rows")
    site = f"{call.name} over rows"
    if call.kwargs.get("dtype") is not None:
        rows = rows.to(call.kwargs["dtype"])
    size = rows.abs()
    if math.isinf(order):
        return _extremum(size, dims, keepdim, order > 0, meta, site)
    if order == 0:
        return _sum((rows != 0).to(rows.dtype), dims, keepdim, meta, site)
    return _root(_sum(rows * rows if order == 2 else size**order, dims, keepdim, meta, site), order)


def _root(powers: Tensor, order: float) -> Tensor:
    """``powers ** (1 / order)``; at zero its derivative is zero, as that of torch's norm and std."""
    safe = torch.where(powers == 0, torch.ones_like(powers), powers)
    return torch.where(powers == 0, torch.zeros_like(powers), safe ** (1.0 / order))


def _extremum(rows: Tensor, dims, keepdim: bool, largest: bool, meta: ShardMeta, site: str) -> Tensor:
    beaten = worst(rows, "amax" if largest else "amin")
    shape = [1 if d in dims else size for d, size in enumerate(rows.shape)]
    plain = rows.detach()
    if plain.numel():
        share = plain.amax(dims, keepdim=True) if largest else plain.amin(dims, keepdim=True)
    else:  # a rank without rows has nothing to say
        share = plain.new_full(shape, beaten)
    best = meta.comm.all_reduce(share, "max" if largest else "min", site)
    value = best if keepdim else _drop(best, dims)
    if not rows.requires_grad:
        return value
    attains = plain == best
    count = meta.comm.all_reduce(attains.to(rows.dtype).sum(dims, keepdim=keepdim), "sum", site + ", ties")
    # each that attains the extremum gets an equal share of the gradient
    share = _sum(only_where(attains, rows), dims, keepdim, meta, site + ", gradient")
    return value + only_derivative(share) / count


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
    edges, plain = not index._entry.is_atoms, to_local(index)
    length = max(meta.n_systems, call.arg(2, "minlength", 0))
    if meta.counts is None:
        share = torch.bincount(meta.only_counted(plain, edges=edges), minlength=length)
    else:
        ones = meta.only_counted(torch.ones_like(plain), edges=edges)
        share = ones.new_zeros(length).index_add(0, plain[: len(ones)], ones)
    return promote(meta.comm.all_reduce(share, "sum", "counts by system"), Role.SYSTEM, meta)
