"""Operations that treat each row by itself: the result has the rows of the argument.

Elementwise operations are recognised by torch's own tag; for the others a rule says where the row dimension goes
(`nvdd.handlers.rows`). Where a per-system value meets rows of atoms or edges it is broadcast, and the adjoint
sums its gradient over ranks.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from nvdd.dispatch import Call, register
from nvdd.exchange import broadcast
from nvdd.handlers import rows
from nvdd.roles import Role
from nvdd.shard_tensor import ShardTensor, promote, to_local

_EXTRA_POINTWISE = {
    "where", "masked_fill", "broadcast_tensors", "copy", "fill", "zero", "relu6", "softplus", "silu", "gelu", "mish", "selu", "celu", "elu",
    "leaky_relu", "hardtanh", "logsigmoid", "softsign", "tanhshrink", "threshold", "positive", "clip", "nan_to_num",
    "float_power", "square", "rsqrt", "isnan", "isinf", "isfinite", "isclose", "real", "imag", "conj",
}  # fmt: skip


@cache
def _is_pointwise(name: str) -> bool:
    if name in _EXTRA_POINTWISE:
        return True
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return False
    return any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads())


def _carriers(call: Call) -> list[ShardTensor]:
    return [s for s in call.shards if s._role.has_rows]


def _kind(shard: ShardTensor) -> Role:
    if shard._role is Role.SYSTEM_INDEX:
        return Role.OWNED if shard._rows == "atom" else Role.EDGE
    return shard._role


def _one_kind(call: Call) -> Role:
    kinds = {_kind(c) for c in _carriers(call)}
    if len(kinds) > 1:
        raise call.refuse("rows of atoms are combined with rows of edges")
    return kinds.pop()


def _with_broadcast(call: Call) -> tuple[tuple, dict[str, Any]]:
    """The arguments, with per-system values broadcast where they meet rows."""

    def plain(value: Any) -> Any:
        if isinstance(value, ShardTensor):
            local = to_local(value)
            if value._role is Role.SYSTEM and local.requires_grad:
                return broadcast(local, value._meta.comm, f"{call.name} with rows")
            return local
        if isinstance(value, (tuple, list)):
            return type(value)(plain(v) for v in value)
        return value

    return tuple(plain(a) for a in call.args), {k: plain(v) for k, v in call.kwargs.items()}


def _allowed(call: Call) -> bool:
    return not call.has(Role.SENDER, Role.RECEIVER, Role.EDGE_INDEX, Role.ANCHOR)


# -- elementwise ------------------------------------------------------------------------------------------------


@register(
    "*", when="elementwise, at least one operand with rows", does="row by row; per-system operands are broadcast",
    predicate=lambda call: _allowed(call) and _is_pointwise(call.name) and bool(_carriers(call)),
)  # fmt: skip
def pointwise(call: Call):
    role = _one_kind(call)
    carriers = _carriers(call)
    args, kwargs = _with_broadcast(call)
    if call.inplace and isinstance(call.args[0], ShardTensor) and call.args[0]._role is Role.SYSTEM:
        raise call.refuse("a per-system value is changed in place by rows of atoms or edges")
    out = call.run(*args, **kwargs)
    n_dims = (out[0] if isinstance(out, tuple) else out).dim()
    places = {rows.after_broadcast(c.dim(), c._row_dim, n_dims) for c in carriers}
    shape = (out[0] if isinstance(out, tuple) else out).shape
    place = places.pop()
    if places or shape[place] != carriers[0].shape[carriers[0]._row_dim]:
        raise call.refuse("operands whose rows are in different dimensions give every pair of rows")
    if call.inplace and isinstance(call.args[0], ShardTensor):
        return call.args[0]
    wrap = lambda t: promote(t, role, carriers[0]._meta, place)
    return tuple(wrap(t) for t in out) if isinstance(out, tuple) else wrap(out)


@register(
    "*", when="SYSTEM with plain tensors only", does="the same on every rank",
    predicate=lambda call: bool(call.shards) and all(s._role is Role.SYSTEM for s in call.shards),
)  # fmt: skip
def replicated(call: Call):
    _refuse_lost_roles(call)
    out = call.run()
    meta = call.meta
    if call.inplace and out is call.args[0] and isinstance(out, ShardTensor):
        return out
    wrap = lambda t: promote(t, Role.SYSTEM, meta) if isinstance(t, Tensor) else t
    return type(out)(map(wrap, out)) if type(out) in (tuple, list) else wrap(out)


def _refuse_lost_roles(call: Call) -> None:
    """A plain tensor that depends on positions may be rows of this rank whose role got lost in scripted code."""
    system = call.shards[0]

    def check(value: Any) -> None:
        if isinstance(value, (list, tuple)):
            for v in value:
                check(v)
        elif isinstance(value, Tensor) and not isinstance(value, ShardTensor):
            aligned = value.dim() == 0 or value.dim() < system.dim() or value.shape[0] in (1, *system.shape[:1])
            if value.requires_grad and value.grad_fn is not None and system.requires_grad:
                raise call.refuse(
                    "a per-system value meets a tensor of which it is not known whether it is per atom, per edge or the "
                    "same on every rank",
                    "Read it by atom first: value[data.batch]",
                )
            if call.name in ("add", "sub", "mul", "div", "pow") and not aligned:
                raise call.refuse(
                    f"a per-system value {tuple(system.shape)} meets a plain tensor {tuple(value.shape)}: rows that lost "
                    "their role?",
                    "Read it by atom first: value[data.batch]",
                )

    check(call.args)
    check(tuple(call.kwargs.values()))


# -- shape-changing and feature-wise, one operand with rows -------------------------------------------------------

_VIEWS = ("view", "reshape", "flatten", "unflatten", "squeeze", "view_as", "reshape_as", "ravel")
_REDUCE = (
    "sum", "mean", "prod", "amax", "amin", "max", "min", "any", "all", "norm", "linalg_vector_norm", "vector_norm",
    "linalg_norm", "logsumexp", "var", "std", "argmax", "argmin", "nansum", "median", "count_nonzero",
)  # fmt: skip
_ALONG = (
    "softmax", "log_softmax", "softmin", "normalize", "cumsum", "cumprod", "sort", "argsort", "flip", "roll",
    "cosine_similarity", "glu", "diff", "topk", "linalg_cross", "cross",
)  # fmt: skip


def _first_has_rows(call: Call) -> bool:
    return _allowed(call) and getattr(call.args[0], "_role", None) is not None and call.args[0]._role.has_rows


def _only_first(call: Call) -> bool:
    return (
        _allowed(call)
        and len(call.shards) == 1
        and call.shards[0]._role.has_rows
        and bool(call.args)
        and call.args[0] is call.shards[0]
    )


def _keep(
    call: Call, out: Any, row_dim: int | None, why: str = "the operation mixes or cuts rows of atoms or edges"
) -> Any:
    x = _carriers(call)[0]
    if row_dim is None:
        raise call.refuse(why)
    role = x._role if call.name in _VIEWS_KEEP else _kind(x)
    wrap = lambda t: promote(t, role, x._meta, row_dim, x._rows)
    if isinstance(out, (tuple, list)):
        return type(out)(wrap(t) for t in out) if type(out) in (tuple, list) else tuple(wrap(t) for t in out)
    return wrap(out)


_VIEWS_KEEP = {
    *_VIEWS,
    "unsqueeze",
    "expand",
    "expand_as",
    "getitem",
    "broadcast_to",
    "cat",
    "transpose",
    "t",
}


@register(
    *_VIEWS,
    when="one operand with rows, the row dimension survives",
    does="keeps the role",
    predicate=_only_first,
)
def view(call: Call):
    x = call.args[0]
    out = call.run()
    return _keep(
        call,
        out,
        rows.after_view(x.shape, x._row_dim, out.shape),
        f"the reshape from {tuple(x.shape)} to {tuple(out.shape)} merges rows with other dimensions",
    )


@register(
    "unsqueeze",
    "expand",
    "expand_as",
    "broadcast_to",
    when="one operand with rows",
    does="keeps the role",
    predicate=_allowed,
)
def expand(call: Call):
    x = call.args[0]
    if not isinstance(x, ShardTensor):  # plain.expand_as(rows)
        target = call.args[1]
        return (
            promote(call.run(), _kind(target), target._meta, target._row_dim)
            if x.dim() and x.shape[0] == target.shape[0]
            else call.run()
        )
    if not x._role.has_rows:
        return promote(call.run(), x._role, x._meta)
    out = call.run()
    if call.name == "unsqueeze":
        at = rows.positive(call.arg(1, "dim"), x.dim() + 1)
        return _keep(call, out, x._row_dim + (at <= x._row_dim))
    return _keep(call, out, rows.after_broadcast(x.dim(), x._row_dim, out.dim()))


@register(
    "transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "t", "get:T", "get:mT", "adjoint",
    when="one operand with rows", does="keeps the role, the row dimension moves", predicate=_only_first,
)  # fmt: skip
def permute(call: Call):
    x = call.args[0]
    # where each dimension goes, seen on a tiny tensor whose sizes tell them apart
    probe = torch.empty([d + 2 for d in range(x.dim())], device="meta")
    moved = call.run(probe, *call.args[1:], **call.kwargs)
    return _keep(call, call.run(), list(moved.shape).index(x._row_dim + 2))


@register(*_REDUCE, when="one operand with rows, over other dimensions", does="row by row", predicate=_only_first)
def reduce_features(call: Call):
    x = call.args[0]
    position = {"norm": 2, "linalg_vector_norm": 2, "vector_norm": 2, "linalg_norm": 2}.get(call.name, 1)
    dim = call.arg(position, "dim", call.kwargs.get("axis"))
    keepdim = call.arg(position + 1, "keepdim", False)
    if call.name in ("var", "std"):
        keepdim = call.kwargs.get("keepdim", False)
    dims = rows.dims_of(dim, x.dim())
    return _keep(
        call,
        call.run(),
        rows.after_reduction(x._row_dim, dims, bool(keepdim)),
        "a reduction over rows that nvdd doesn't know how to combine over ranks",
    )


@register(*_ALONG, when="one operand with rows, along another dimension", does="row by row", predicate=_only_first)
def along_features(call: Call):
    x = call.args[0]
    position, default = {"normalize": (2, 1), "cosine_similarity": (2, 1), "glu": (1, -1), "sort": (1, -1), "argsort": (1, -1),
                         "topk": (2, -1), "diff": (2, -1), "flip": (1, None), "roll": (2, None), "cross": (2, -1),
                         "linalg_cross": (2, -1)}.get(call.name, (1, None))  # fmt: skip
    dim = call.arg(position, "dims" if call.name in ("flip", "roll") else "dim", default)
    if dim is None:
        raise call.refuse("without a dimension it runs over rows")
    if x._row_dim in rows.dims_of(dim, x.dim()):
        raise call.refuse("it runs along the rows, which are divided over ranks")
    return _keep(call, call.run(), x._row_dim)


def _is_plain_index(item: Any) -> bool:
    return (
        isinstance(item, Tensor) and not isinstance(item, ShardTensor) and item.dim() == 1 and item.dtype == torch.int64
    )


@register("getitem", when="OWNED or EDGE, other dimensions than rows", does="keeps the role", predicate=_first_has_rows)
def getitem(call: Call):
    x, item = call.args
    if isinstance(item, tuple) and x._row_dim == 0 and _is_plain_index(item[0]) and len(item[0]) == len(x):
        # x[arange(n), columns]: one entry of each row, if the first index really is 0, 1, ..., n - 1
        expected = torch.arange(len(x), device=item[0].device)
        refusal = call.refuse("it picks atoms or edges by a list of rows that is not 0, 1, ..., n - 1")
        x._meta.require((to_local(item[0]) == expected).all(), refusal)
        return _keep(call, call.run(), 0)
    place = rows.after_basic_index(item, x.shape, x._row_dim)
    return _keep(call, call.run(), place, "it picks single atoms or edges by their place on this rank")


@register(
    "select",
    "narrow",
    "split",
    "chunk",
    "unbind",
    "tensor_split",
    "index_select",
    when="OWNED or EDGE, along another dimension",
    does="keeps the role",
    predicate=_only_first,
)
def take(call: Call):
    x = call.args[0]
    position = {"split": 2, "chunk": 2, "tensor_split": 2}.get(call.name, 1)
    dim = rows.positive(call.arg(position, "dim", 0), x.dim())
    if dim == x._row_dim:
        raise call.refuse("it picks single atoms or edges by their place on this rank")
    drops = call.name in ("select", "unbind") and dim < x._row_dim
    return _keep(call, call.run(), x._row_dim - drops)


@register("one_hot", when="per-atom or per-edge integers", does="row by row", predicate=_only_first)
def one_hot(call: Call):
    if call.arg(1, "num_classes", -1) == -1:
        raise call.refuse("without num_classes the width depends on this rank's atoms", "Give num_classes")
    return _keep(call, call.run(), call.args[0]._row_dim)


@register(
    "dropout",
    "alpha_dropout",
    "feature_dropout",
    when="in eval mode",
    does="keeps the role",
    predicate=_only_first,
)
def dropout(call: Call):
    if call.arg(2, "training", call.name != "dropout") and call.arg(1, "p", 0.5) > 0:
        raise call.refuse("random numbers would depend on how atoms are divided", "Call model.eval()")
    return _keep(call, call.run(), call.args[0]._row_dim)


@register(
    "layer_norm",
    "rms_norm",
    "group_norm",
    "batch_norm",
    "instance_norm",
    when="OWNED or EDGE, over features",
    does="row by row",
    predicate=_only_first,
)
def norm_layer(call: Call):
    x = call.args[0]
    if call.name in ("layer_norm", "rms_norm") and x._row_dim >= x.dim() - len(call.arg(1, "normalized_shape")):
        raise call.refuse("the norm runs over rows")
    if call.name == "batch_norm" and (call.arg(5, "training", False) or x._row_dim == 1):
        raise call.refuse("BatchNorm in training takes means over the atoms of one rank", "Call model.eval()")
    if call.name in ("group_norm", "instance_norm") and x._row_dim != 0:
        raise call.refuse("the norm runs over rows")
    return _keep(call, call.run(), x._row_dim)


# -- products, joins: several operands with rows ----------------------------------------------------------------


@register("linear", when="OWNED or EDGE with plain weights", does="row by row", predicate=_only_first)
def linear(call: Call):
    x = call.args[0]
    if x._row_dim == x.dim() - 1:
        raise call.refuse("the product sums over rows")
    return _keep(call, call.run(), x._row_dim)


def _has_carrier(call: Call) -> bool:
    return _allowed(call) and bool(_carriers(call))


@register(
    "matmul",
    "mm",
    "bmm",
    "mv",
    when="at least one operand with rows",
    does="row by row",
    predicate=_has_carrier,
)
def matmul(call: Call):
    role = _one_kind(call)
    args, kwargs = _with_broadcast(call)
    out = call.run(*args, **kwargs)
    a, b = call.arg(0, "input"), call.arg(1, "other", call.kwargs.get("mat2"))
    places = set()
    for operand, other, first in ((a, b, True), (b, a, False)):
        if isinstance(operand, ShardTensor) and operand._role.has_rows:
            places.add(rows.after_matmul(operand.dim(), operand._row_dim, other.dim(), first, out.dim()))
    if len(places) != 1 or None in places:
        raise call.refuse("the product sums over rows or gives every pair of rows")
    return promote(out, role, _carriers(call)[0]._meta, places.pop())


@register("addmm", "baddbmm", when="rows @ plain weights", does="row by row", predicate=_has_carrier)
def addmm(call: Call):
    x = call.arg(1, "mat1" if call.name == "addmm" else "batch1")
    if _carriers(call) != [x] or x._row_dim != 0:
        raise call.refuse("the product sums over rows or gives every pair of rows")
    return promote(call.run(), _kind(x), x._meta, 0)


@register("tensordot", when="one operand with rows, over other dimensions", does="row by row", predicate=_has_carrier)
def tensordot(call: Call):
    if len(call.shards) != 1:
        raise call.refuse("the product may give every pair of rows")
    x = call.shards[0]
    a, b, dims = call.arg(0, "a"), call.arg(1, "b"), call.arg(2, "dims", 2)
    if isinstance(dims, int):
        dims = (list(range(a.dim() - dims, a.dim())), list(range(dims)))
    over_a, over_b = (rows.dims_of(list(d), t.dim()) if len(d) else () for d, t in zip(dims, (a, b), strict=True))
    place = rows.after_reduction(x._row_dim, over_a if x is a else over_b, keepdim=False)
    if place is None:
        raise call.refuse("the product sums over rows")
    return promote(call.run(), _kind(x), x._meta, place if x is a else place + a.dim() - len(over_a))


@register("einsum", when="at least one operand with rows", does="row by row", predicate=_has_carrier)
def einsum(call: Call):
    role = _one_kind(call)
    equation = call.args[0]
    operands = call.args[1] if len(call.args) == 2 and isinstance(call.args[1], (list, tuple)) else call.args[1:]
    args, kwargs = _with_broadcast(call)
    out = call.run(*args, **kwargs)
    info = [(o.dim(), o._row_dim if isinstance(o, ShardTensor) and o._role.has_rows else None) for o in operands]
    place = rows.after_einsum(equation, info, out.dim())
    if place is None:
        raise call.refuse(f"einsum {equation!r} sums over rows or gives every pair of rows")
    return promote(out, role, _carriers(call)[0]._meta, place)


@register(
    "cat",
    "concat",
    "concatenate",
    "hstack",
    when="along other dimensions than rows",
    does="row by row",
    predicate=_has_carrier,
)
def cat(call: Call):
    role = _one_kind(call)
    first = _carriers(call)[0]
    dim = 1 if call.name == "hstack" and first.dim() > 1 else call.arg(1, "dim", call.kwargs.get("axis", 0))
    if len({c._row_dim for c in _carriers(call)}) > 1 or rows.positive(dim, first.dim()) == first._row_dim:
        raise call.refuse("it puts rows of atoms or edges one after another")
    args, kwargs = _with_broadcast(call)
    return promote(call.run(*args, **kwargs), role, first._meta, first._row_dim)


@register("stack", when="operands with the same rows", does="row by row", predicate=_has_carrier)
def stack(call: Call):
    role = _one_kind(call)
    first = _carriers(call)[0]
    if len({c._row_dim for c in _carriers(call)}) > 1:
        raise call.refuse("rows are in different dimensions of what is stacked")
    dim = rows.positive(call.arg(1, "dim", 0), first.dim() + 1)
    args, kwargs = _with_broadcast(call)
    return promote(call.run(*args, **kwargs), role, first._meta, first._row_dim + (dim <= first._row_dim))


@register("atleast_1d", "atleast_2d", when="one operand with rows", does="keeps the role", predicate=_only_first)
def at_least(call: Call):
    if call.args[0].dim() < int(call.name[-2]):
        raise call.refuse("it moves rows to another dimension")
    return _keep(call, call.run(), call.args[0]._row_dim)
