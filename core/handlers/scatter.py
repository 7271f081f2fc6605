"""Writing rows by index: ``scatter_add``, ``index_add``, ``scatter_reduce``, ``index_put``.

* by RECEIVER: local and complete, because each edge lives where its receiver is owned. Under ``halo_correction``
  the halo rows are then summed into their owners and refreshed.
* by SENDER: into owned and halo rows; the halo rows are then combined into their owners (sum, mean, max, min).
* by SYSTEM_INDEX: this rank's share, then combined over ranks; the result is the same everywhere.

In-place forms keep in-place semantics: the tensor written to holds the final value also if the call's return is
dropped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nvdd.deferred import Deferred, sum_of
from nvdd.dispatch import Call, register
from nvdd.exchange import correct, fetch, fold, fold_extremum, gather_shares, shared, sum_over_ranks
from nvdd.handlers.rows import positive
from nvdd.roles import Role, ShardMeta
from nvdd.shard_tensor import ShardTensor, adopt, promote, to_local

_OPS = ("scatter_add", "index_add", "scatter_reduce", "index_reduce", "index_put", "scatter")
_EXTREMA = ("amax", "amin")


def _index(call: Call) -> Any:
    if call.name == "index_put":
        indices = call.arg(1, "indices")
        return indices[0] if isinstance(indices, (tuple, list)) and len(indices) == 1 else None
    return call.arg(2, "index")


def _by(*roles: Role):
    return lambda call: getattr(_index(call), "_role", None) in roles


def _pieces(call: Call) -> tuple[Tensor, Tensor, str]:
    """Tensor written to, rows written, and how they combine."""
    target = call.arg(0, "input")
    if call.name == "index_put":
        values, rows = call.arg(2, "values"), _index(call)
        if values.shape != (shape := rows.shape + target.shape[1:]):
            values = values.expand(shape)
        return target, values, "sum" if call.arg(3, "accumulate", False) else "replace"
    if call.name in ("scatter_add", "index_add"):
        return target, call.arg(3, "src" if call.name == "scatter_add" else "source"), "sum"
    if call.name == "scatter":
        source = call.arg(3, "src", call.kwargs.get("value"))
        return target, source, {"add": "sum", None: "replace"}.get(call.arg(4, "reduce"), "multiply")
    return target, call.arg(3, "src" if call.name == "scatter_reduce" else "source"), call.arg(4, "reduce")


def _check_target(call: Call, target: Tensor, rows: int, what: str) -> None:
    dim = 0 if call.name == "index_put" else call.arg(1, "dim")
    if positive(dim, target.dim()) != _index(call)._row_dim:
        raise call.refuse("a scatter along another dimension than the one that counts rows")
    if target.shape[dim] != rows:
        raise call.refuse(
            f"the tensor written to has {target.shape[dim]} rows, where this rank has {rows} {what}",
            "Allocate it with as many rows as the per-atom inputs have (data.n_atoms), or as there are systems "
            "(data.n_systems)",
        )


def _check_rows_written(call: Call, source: Any, index: ShardTensor) -> None:
    """What is written must have the rows that the entries of the index stand for."""
    if isinstance(source, ShardTensor):
        kind = source._entry if source._role is Role.SYSTEM_INDEX else source._role
        if kind is not index._entry and kind is not Role.SYSTEM:
            raise call.refuse(f"the index has entries for: {index._entry.value}; what is written has: {kind.value}")


def _result(
    value: Tensor | None, call: Call, target: Tensor, source: Any, role: Role, meta: ShardMeta, row_dim: int
) -> Tensor:
    """Puts ``value`` into the target if the call is in place (None: it is there), and gives it its role.

    Where the model made both operands local, the result stays plain.
    """
    if call.inplace:
        plain = to_local(target)
        value = plain if value is None else plain.copy_(value)
    has_role = source._tracked if isinstance(source, Deferred) else isinstance(source, ShardTensor)
    tracked = isinstance(target, ShardTensor) or has_role or role is Role.SYSTEM
    out = promote(value, role, meta, row_dim) if tracked else value
    return adopt(target, out) if call.inplace and tracked else out


def _local(
    call: Call, target: Tensor, dim: int, rows: Tensor, source: Any, how: str, include_self: bool = True
) -> Tensor:
    """Out of place, on this rank, whichever of torch's scatter functions fits the index."""
    if isinstance(source, Deferred) and how == "sum":
        return target + _in_chunks(call, source, rows, target)
    source = to_local(source)
    if not isinstance(source, Tensor):
        source = torch.full(rows.shape, source, dtype=target.dtype, device=target.device)
    by_row = rows.dim() == 1 and (target.dim() > 1 or source.dim() != 1)
    if how == "sum":
        alpha = call.kwargs.get("alpha", 1)
        source = source if alpha == 1 else source * alpha
        if by_row:
            return target.index_add(dim, rows, source)
        return target.scatter_add(dim, rows, source)
    if by_row:
        rows = rows.view(*[-1 if d == dim else 1 for d in range(source.dim())]).expand_as(source)
    return target.scatter_reduce(dim, rows, source, how, include_self=include_self)


@register(*_OPS, when="by RECEIVER", does="local: receivers are owned", predicate=_by(Role.RECEIVER))
def scatter_to_receivers(call: Call):
    index = _index(call)
    meta = index._meta
    target, source, how = _pieces(call)
    role = meta.role_of(index._of)
    if getattr(target, "_role", role) is not role:
        raise call.refuse(f"the index writes rows of {index._of}")
    _check_rows_written(call, source, index)
    _check_target(call, target, meta.rows_of(index._of), index._of)
    at = index._row_dim
    local = index._of != "atoms" or not meta.corrects or meta.comm.size == 1
    if isinstance(source, Deferred) and local:
        value = to_local(target) + _in_chunks(call, source, to_local(index), target)
    elif local:
        value = to_local(call.run())
        value = None if call.inplace else value
    elif how == "sum" and at == 0 and call.kwargs.get("include_self", True):
        zeros = torch.zeros_like(to_local(target))
        value = to_local(target) + correct(_local(call, zeros, 0, to_local(index), source, how), meta.plan, call.name)
    else:
        # receivers are owned: owned rows are complete, and halo rows only need their owners' values
        owned = _out_of_place(call, target).narrow(at, 0, meta.n_owned).movedim(at, 0)
        value = fetch(owned, meta.plan, f"{call.name} over receivers, forward").movedim(0, at)
    return _result(value, call, target, source, role, meta, at)


def _in_chunks(call: Call, source: Deferred, rows: Tensor, target: Tensor) -> Tensor:
    """The sum of edge rows that are computed as they are summed (`nvdd.deferred`)."""
    alpha = call.kwargs.get("alpha", 1)
    found = sum_of(source, rows, target.shape[0])
    return found if alpha == 1 else found * alpha


def _out_of_place(call: Call, target: Tensor) -> Tensor:
    """The operation on a copy of its target."""
    copy = to_local(target).clone()
    return to_local(call.run(copy, *call.args[1:], **call.kwargs))


@register(
    *_OPS, when="by SENDER", does="into owned and halo rows, then combined at their owners", predicate=_by(Role.SENDER)
)
def scatter_to_senders(call: Call):
    index = _index(call)
    meta, space = index._meta, index._of
    target, source, how = _pieces(call)
    if not meta.writes_remote:
        raise call.refuse(
            f"{meta.policy} sends no sums to other ranks, and this adds to rows of other ranks",
            "Scatter over receivers, or use a policy that reaches remote rows, for example SPEC_MPNN_HALO's",
        )
    if how not in ("sum", "mean", *_EXTREMA) or index._row_dim != 0:
        raise call.refuse(f"a scatter over senders that combines by {how!r}", "Combine over receivers instead")
    if getattr(target, "_role", meta.role_of(space)) is not meta.role_of(space):
        raise call.refuse(f"the index writes rows of {space}")
    _check_rows_written(call, source, index)
    _check_target(call, target, meta.rows_of(space), space)
    plan, plain, rows = meta.plan_of(space), to_local(target), to_local(index)
    include_self = call.kwargs.get("include_self", True)
    site = f"{call.name} over senders"
    start = plain[: plan.n_owned]
    empty = start.new_zeros(plan.n_padded, *plain.shape[1:])

    def total(values: Any) -> Tensor:
        return fold(_local(call, empty, 0, rows, values, "sum"), plan, site)

    if how == "sum" and include_self:
        owned = start + total(source)
    elif how in ("sum", "mean"):
        count = total(torch.ones_like(to_local(source)))
        owned = _sum_or_mean(start, total(source), count, how, include_self)
    else:
        best = _local(call, _worst(empty, how), 0, rows, to_local(source).detach(), how)
        best = fold_extremum(best, plan, how, site)
        reread = fetch(best, plan, site + ", ties")
        owned = _with_gradient(start, best, source, lambda: _read(reread, rows), total, how, include_self)
    if space == "atoms" and not meta.fetches:
        owned = fetch(owned, plan, site + ", forward")
    return _result(owned, call, target, source, meta.role_of(space), meta, 0)


def _sum_or_mean(start: Tensor, total: Tensor, count: Tensor, how: str, include_self: bool) -> Tensor:
    """What was there, with ``count`` values of sum ``total`` written to it."""
    if include_self:
        total, count = total + start, count + 1
    out = total / count.clamp(min=1) if how == "mean" else total
    return torch.where(count > 0, out, start)


def worst(like: Tensor, how: str) -> Any:
    """A number that any value beats under ``how``, ``"amax"`` or ``"amin"``."""
    if like.is_floating_point():
        return -torch.inf if how == "amax" else torch.inf
    if like.dtype is torch.bool:
        return how != "amax"
    info = torch.iinfo(like.dtype)
    return info.min if how == "amax" else info.max


def _worst(like: Tensor, how: str) -> Tensor:
    """A tensor that any value beats."""
    return torch.full_like(like, worst(like, how))


def _read(values: Tensor, rows: Tensor) -> Tensor:
    return values.index_select(0, rows) if rows.dim() == 1 else values.gather(0, rows)


def _with_gradient(start: Tensor, best: Tensor, source: Any, reread, total, how: str, include_self: bool) -> Tensor:
    """The extremum over all ranks, with torch's gradient: shared equally by all that attain it, also elsewhere.

    Args:
        start: what the target held.
        best: the extremum of what is written, over ranks, not differentiable; `_worst` where nothing is.
        source: what is written.
        reread: gives ``best`` at each entry of the index.
        total: sums values over the entries of the index and over ranks.
    """
    nothing = best == _worst(best, how)
    better = torch.maximum if how == "amax" else torch.minimum
    value = better(best, start.detach()) if include_self else torch.where(nothing, start.detach(), best)
    source = to_local(source)
    if not (source.requires_grad or start.requires_grad):
        return value
    attains = source.detach() == reread()
    at_start = start.detach() == value
    wins = (best == value) & ~nothing
    # torch counts a start that equals the extremum among those that share, also with include_self=False
    count = (total(attains.to(source.dtype)) * wins + at_start).clamp(min=1)
    if not include_self:
        at_start = at_start & nothing
    share = total(only_where(attains, source)) * wins + only_where(at_start, start)
    return value + only_derivative(share) / count


def only_where(condition: Tensor, value: Tensor) -> Tensor:
    """``value`` where the condition holds and it is finite, else zero; so is its derivative."""
    return torch.where(condition & value.detach().isfinite(), value, torch.zeros_like(value))


def only_derivative(value: Tensor) -> Tensor:
    """Zeros with the derivative of ``value``."""
    return value - value.detach()


@register(
    *_OPS, when="by SYSTEM_INDEX", does="this rank's share, then combined over ranks", predicate=_by(Role.SYSTEM_INDEX)
)
def scatter_to_systems(call: Call):
    index = _index(call)
    meta = index._meta
    target, source, how = _pieces(call)
    if not meta.policy.system_reductions:
        raise call.refuse("the policy has system_reductions off, so sums over systems are not known to be global")
    if getattr(target, "_role", Role.SYSTEM) is not Role.SYSTEM:
        raise call.refuse("a scatter by system writes per-system rows")
    if how not in ("sum", "mean", "prod", *_EXTREMA):
        raise call.refuse(f"a scatter by system that combines by {how!r}")
    _check_rows_written(call, source, index)
    _check_target(call, target, meta.n_systems, "systems")
    plain, rows, dim = to_local(target), to_local(index), index._row_dim
    if call.inplace:  # what is written is computed from a copy of what was there
        plain = plain.clone()
    elif plain.requires_grad and not isinstance(target, ShardTensor):
        plain = shared(plain, meta.comm)
    values = to_local(source)
    if not isinstance(values, Tensor):
        values = torch.full(rows.shape, values, dtype=plain.dtype, device=plain.device)
    edges = not index._entry.is_atoms
    ones = torch.ones_like(values)
    if meta.counts is not None:  # where capacities are filled up, what doesn't count is neutral
        rows = rows if edges else rows.narrow(dim, 0, meta.n_owned)
        neutral = worst(values, how) if how in _EXTREMA else {"prod": 1}.get(how, 0)
        values, ones = meta.only_counted(values, dim, neutral, edges), meta.only_counted(ones, dim, 0, edges)
    elif not edges:  # a phantom and halo rows count nowhere
        rows, values, ones = (t.narrow(dim, 0, meta.n_counted) for t in (rows, values, ones))
    include_self = call.kwargs.get("include_self", True)
    site = f"{call.name} by system"

    def total(v: Tensor) -> Tensor:
        return sum_over_ranks(_local(call, torch.zeros_like(plain), dim, rows, v, "sum"), meta.comm, site)

    if how == "sum" and include_self:
        out = plain + total(values)
    elif how in ("sum", "mean"):
        out = _sum_or_mean(plain, total(values), total(ones), how, include_self)
    elif how == "prod":
        shares = gather_shares(_local(call, torch.ones_like(plain), dim, rows, values, "prod"), meta.comm, site)
        touched = total(ones) > 0
        out = shares.prod(0) * plain if include_self else torch.where(touched, shares.prod(0), plain)
    else:
        best = _local(call, _worst(plain, how), dim, rows, values.detach(), how)
        best = meta.comm.all_reduce(best, {"amax": "max", "amin": "min"}[how], site)
        reread = lambda: best.index_select(dim, rows) if rows.dim() == 1 else best.gather(dim, rows)
        out = _with_gradient(plain, best, values, reread, total, how, include_self)
    return _result(out, call, target, source, Role.SYSTEM, meta, 0)


def _assigns_by_index(call: Call) -> bool:
    target, index = call.args[:2]
    if not isinstance(index, ShardTensor) or index._role.is_atoms:
        return False
    # a condition on per-system values picks among them the same on every rank
    both = index._role is Role.SYSTEM and getattr(target, "_role", None) is Role.SYSTEM
    return not (both and index.dtype is torch.bool)


@register(
    "setitem", when="x[receivers] = ..., x[systems] = ...", does="refused: which edge wins is not defined",
    predicate=_assigns_by_index,
)  # fmt: skip
def assign_by_index(call: Call):
    raise call.refuse(
        "assignment by an index that repeats rows (x[index] += y keeps one edge of each atom, in one process too)",
        "Use x.index_add_(0, index, y) or scatter_add",
    )
