"""Operations on the other dimensions of rows: reshapes, reductions and norms over features, picking features.

For each a rule (`nvdd.handlers.rows`) says where the row dimension goes; where it would be merged, cut or summed
over, the operation is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nvdd.dispatch import Call, register
from nvdd.handlers import rows
from nvdd.handlers.carriers import (
    carriers,
    first_has_rows,
    has_carrier,
    keep,
    kind,
    masks_edges,
    one_kind,
    only_first,
    to_rows,
    with_broadcast,
)
from nvdd.shard_tensor import ShardTensor, promote, to_local


@register(
    "view", "reshape", "flatten", "unflatten", "squeeze", "view_as", "reshape_as", "ravel",
    when="one operand with rows, the row dimension survives", does="keeps the role", predicate=only_first,
)  # fmt: skip
def view(call: Call):
    x, out = call.args[0], call.run()
    why = f"the reshape from {tuple(x.shape)} to {tuple(out.shape)} merges rows with other dimensions"
    return keep(call, out, rows.after_view(x.shape, x._row_dim, out.shape), why, x._role)


@register("unsqueeze", when="one operand with rows", does="keeps the role", predicate=only_first)
def unsqueeze(call: Call):
    x = call.args[0]
    at = rows.positive(call.arg(1, "dim"), x.dim() + 1)
    return keep(call, call.run(), x._row_dim + (at <= x._row_dim), role=x._role)


@register(
    "expand", "expand_as", "broadcast_to", when="rows along other dimensions, or something to the shape of rows",
    does="keeps the role", predicate=has_carrier,
)  # fmt: skip
def expand(call: Call):
    x, out = call.args[0], call.run()
    if not (isinstance(x, ShardTensor) and x._role.has_rows):  # value.expand_as(rows)
        target = call.args[1]
        if isinstance(x, ShardTensor):
            out = call.run(to_rows(to_local(x), target._meta, call.name), target)
        return promote(out, kind(target), target._meta, target._row_dim)
    place = rows.after_broadcast(x.dim(), x._row_dim, out.dim())
    if out.shape[place] != x.shape[x._row_dim]:
        raise call.refuse("the single row of one rank is repeated")
    return keep(call, out, place, role=x._role)


@register(
    "transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "t", "get:T", "get:mT", "adjoint",
    when="one operand with rows", does="keeps the role, the row dimension moves", predicate=only_first,
)  # fmt: skip
def permute(call: Call):
    x = call.args[0]
    permuted = lambda t: call.run(t, *call.args[1:], **call.kwargs)
    return keep(call, call.run(), rows.after_permutation(permuted, x.dim(), x._row_dim), role=x._role)


_NORMS = ("norm", "linalg_vector_norm", "vector_norm", "linalg_norm")


@register(
    "sum", "mean", "prod", "amax", "amin", "max", "min", "any", "all", "logsumexp", "var", "std", "argmax", "argmin",
    "nansum", "median", "count_nonzero", *_NORMS,
    when="one operand with rows, over other dimensions", does="row by row",
    predicate=lambda call: only_first(call) and not isinstance(call.arg(1, "other"), Tensor),
)  # fmt: skip
def reduce_features(call: Call):
    x = call.args[0]
    position = 2 if call.name in _NORMS else 1
    dim = call.arg(position, "dim")
    if isinstance(dim, bool):  # var(unbiased)
        dim = None
    # var(dim, unbiased, keepdim), all others (dim, keepdim)
    keepdim = call.arg(position + 1 + (call.name in ("var", "std")), "keepdim", False)
    place = rows.after_reduction(x._row_dim, rows.dims_of(dim, x.dim()), bool(keepdim))
    return keep(call, call.run(), place, "nvdd does not know how ranks combine this reduction over rows")


# operation -> (position of its dimension argument, default)
_ALONG = {
    "softmax": (1, None), "log_softmax": (1, None), "softmin": (1, None), "normalize": (2, 1), "cumsum": (1, None),
    "cumprod": (1, None), "sort": (1, -1), "argsort": (1, -1), "flip": (1, None), "roll": (2, None), "glu": (1, -1),
    "diff": (2, -1), "topk": (2, -1),
}  # fmt: skip


@register(*_ALONG, when="one operand with rows, along another dimension", does="row by row", predicate=only_first)
def along_features(call: Call):
    x = call.args[0]
    position, default = _ALONG[call.name]
    dim = call.arg(position, "dims" if call.name in ("flip", "roll") else "dim", default)
    if call.name == "flip" and len(call.args) > 2:  # x.flip(0, 1)
        dim = call.args[1:]
    if dim is None:
        raise call.refuse("without a dimension it runs over rows")
    if x._row_dim in rows.dims_of(dim, x.dim()):
        raise call.refuse("it runs along the rows, which are divided over ranks")
    return keep(call, call.run(), x._row_dim)


_PAIRS = {"cross": None, "linalg_cross": -1, "cosine_similarity": 1}  # operation -> default dimension


@register(*_PAIRS, when="operands with rows, along another dimension", does="row by row", predicate=has_carrier)
def pair_of_features(call: Call):
    role, having = one_kind(call), carriers(call)
    n_dims = max(a.dim() for a in call.args[:2])
    places = {rows.after_broadcast(c.dim(), c._row_dim, n_dims) for c in having}
    dim = call.arg(2, "dim", _PAIRS[call.name])
    if dim is None or len(places) > 1 or rows.positive(dim, n_dims) in places:
        raise call.refuse("it runs along the rows, which are divided over ranks, or its dimension is not given")
    args, kwargs = with_broadcast(call)
    out = call.run(*args, **kwargs)
    place = places.pop()
    if out.dim() < n_dims:
        place -= rows.positive(dim, n_dims) < place
    return promote(out, role, having[0]._meta, place)


@register("repeat", when="rows, along other dimensions", does="keeps the role", predicate=only_first)
def repeat(call: Call):
    x = call.args[0]
    factors = call.args[1] if isinstance(call.args[1], (tuple, list)) else call.args[1:]
    return keep(call, call.run(), rows.after_repeat(x.dim(), x._row_dim, factors), role=x._role)


@register("repeat_interleave", when="rows, along another dimension", does="keeps the role", predicate=only_first)
def repeat_interleave(call: Call):
    x, dim = call.args[0], call.arg(2, "dim")
    over_rows = dim is None or rows.positive(dim, x.dim()) == x._row_dim
    return keep(call, call.run(), None if over_rows else x._row_dim, role=x._role)


@register("pad", when="rows, in other dimensions", does="keeps the role", predicate=only_first)
def pad(call: Call):
    x = call.args[0]
    over_rows = x._row_dim >= x.dim() - len(call.arg(1, "pad")) // 2
    return keep(call, call.run(), None if over_rows else x._row_dim)


@register("gather", "take_along_dim", when="rows, along another dimension", does="row by row", predicate=first_has_rows)
def gather_features(call: Call):
    x, out = call.args[0], None
    dim = call.arg(2, "dim") if call.name == "take_along_dim" else call.arg(1, "dim")
    one_kind(call)
    aligned = all(c._row_dim == x._row_dim for c in carriers(call))
    if dim is not None and aligned and rows.positive(dim, x.dim()) != x._row_dim:
        out = call.run()
    same = out is not None and out.shape[x._row_dim] == x.shape[x._row_dim]
    return keep(call, out, x._row_dim if same else None)


def _is_plain_index(item: Any) -> bool:
    plain = isinstance(item, Tensor) and not isinstance(item, ShardTensor)
    return plain and item.dim() == 1 and item.dtype == torch.int64


@register("getitem", when="rows, other dimensions than theirs", does="keeps the role", predicate=first_has_rows)
def getitem(call: Call):
    x, item = call.args
    if isinstance(item, tuple) and x._row_dim == 0 and _is_plain_index(item[0]) and len(item[0]) == len(x):
        # x[arange(n), columns]: one entry of each row, if the first index really is 0, 1, ..., n - 1
        expected = torch.arange(len(x), device=item[0].device)
        refusal = call.refuse("it picks atoms or edges by a list of rows that is not 0, 1, ..., n - 1")
        x._meta.require((to_local(item[0]) == expected).all(), refusal)
        return keep(call, call.run(), 0)
    if x._row_dim == 0 and not x._role.is_atoms and masks_edges(kind(x), item):
        return keep(call, call.run(), 0)
    place = rows.after_basic_index(item, x.shape, x._row_dim)
    return keep(call, call.run(), place, "it picks single atoms or edges by their place on this rank", x._role)


@register(
    "select", "narrow", "split", "chunk", "unbind", "tensor_split", "index_select",
    when="rows, along another dimension", does="keeps the role", predicate=only_first,
)  # fmt: skip
def take(call: Call):
    x = call.args[0]
    position = 2 if call.name in ("split", "chunk", "tensor_split") else 1
    dim = rows.positive(call.arg(position, "dim", 0), x.dim())
    if dim == x._row_dim:
        raise call.refuse("it picks single atoms or edges by their place on this rank")
    drops = call.name in ("select", "unbind") and dim < x._row_dim
    return keep(call, call.run(), x._row_dim - drops)


@register("atleast_1d", "atleast_2d", when="one operand with rows", does="keeps the role", predicate=only_first)
def at_least(call: Call):
    if call.args[0].dim() < int(call.name[-2]):
        raise call.refuse("it moves rows to another dimension")
    return keep(call, call.run(), call.args[0]._row_dim)


@register("one_hot", when="per-atom or per-edge integers", does="row by row", predicate=only_first)
def one_hot(call: Call):
    if call.arg(1, "num_classes", -1) == -1:
        raise call.refuse("without num_classes the width depends on this rank's atoms", "Give num_classes")
    return keep(call, call.run(), call.args[0]._row_dim)


@register(
    "dropout", "alpha_dropout", "feature_dropout", when="in eval mode", does="keeps the role", predicate=only_first
)
def dropout(call: Call):
    # the function's default is training=True for dropout, False for the others
    if call.arg(2, "training", call.name == "dropout") and call.arg(1, "p", 0.5) > 0:
        raise call.refuse("random numbers would depend on how atoms are divided", "Call model.eval()")
    return keep(call, call.run(), call.args[0]._row_dim)


@register(
    "layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm",
    when="rows, over features", does="row by row", predicate=only_first,
)  # fmt: skip
def norm_layer(call: Call):
    x = call.args[0]
    if call.name in ("layer_norm", "rms_norm"):
        over_rows = x._row_dim >= x.dim() - len(call.arg(1, "normalized_shape"))
    else:
        over_rows = x._row_dim != 0
    if over_rows:
        raise call.refuse("the norm runs over rows")
    if call.name == "batch_norm" and call.arg(5, "training", False):
        raise call.refuse("BatchNorm in training takes means over the atoms of one rank", "Call model.eval()")
    return keep(call, call.run(), x._row_dim)
