"""Products and joins of operands with rows: matrix products, einsum, cat, stack.

The row dimension may be a batch dimension or the outer one, never the one summed over.
"""

from __future__ import annotations

from nvdd.dispatch import Call, register
from nvdd.handlers import rows
from nvdd.handlers.carriers import carriers, has_carrier, keep, kind, one_kind, only_first, with_broadcast
from nvdd.roles import Role
from nvdd.shard_tensor import ShardTensor, promote

_SUMS = "the product sums over rows or gives every pair of rows"


@register("linear", when="rows with plain weights", does="row by row", predicate=only_first)
def linear(call: Call):
    x = call.args[0]
    return keep(call, call.run(), x._row_dim if x._row_dim < x.dim() - 1 else None, _SUMS)


@register("matmul", "mm", "bmm", "mv", when="at least one operand with rows", does="row by row", predicate=has_carrier)
def matmul(call: Call):
    role = one_kind(call)
    args, kwargs = with_broadcast(call)
    out = call.run(*args, **kwargs)
    a, b = call.arg(0, "input"), call.arg(1, "other", call.kwargs.get("mat2"))
    places = set()
    for operand, other, first in ((a, b, True), (b, a, False)):
        if isinstance(operand, ShardTensor) and operand._role.has_rows:
            places.add(rows.after_matmul(operand.dim(), operand._row_dim, other.dim(), first, out.dim()))
    if len(places) != 1 or None in places:
        raise call.refuse(_SUMS)
    return promote(out, role, carriers(call)[0]._meta, places.pop())


@register("addmm", "baddbmm", when="rows @ plain weights", does="row by row", predicate=has_carrier)
def addmm(call: Call):
    x = call.arg(1, "mat1" if call.name == "addmm" else "batch1")
    if len(call.shards) != 1 or call.shards[0] is not x or x._row_dim != 0:
        raise call.refuse(_SUMS)
    return promote(call.run(), kind(x), x._meta, 0)


@register("tensordot", when="one operand with rows, over other dimensions", does="row by row", predicate=has_carrier)
def tensordot(call: Call):
    if len(call.shards) != 1:
        raise call.refuse(_SUMS)
    x = call.shards[0]
    a, b, dims = call.arg(0, "a"), call.arg(1, "b"), call.arg(2, "dims", 2)
    if isinstance(dims, int):
        dims = (list(range(a.dim() - dims, a.dim())), list(range(dims)))
    over_a, over_b = (rows.dims_of(list(d), t.dim()) if len(d) else () for d, t in zip(dims, (a, b), strict=True))
    place = rows.after_reduction(x._row_dim, over_a if x is a else over_b, keepdim=False)
    if place is None:
        raise call.refuse(_SUMS)
    return promote(call.run(), kind(x), x._meta, place if x is a else place + a.dim() - len(over_a))


@register("einsum", when="at least one operand with rows", does="row by row", predicate=has_carrier)
def einsum(call: Call):
    role = one_kind(call)
    equation = call.args[0]
    operands = call.args[1] if len(call.args) == 2 and isinstance(call.args[1], (list, tuple)) else call.args[1:]
    args, kwargs = with_broadcast(call)
    out = call.run(*args, **kwargs)
    info = [(o.dim(), o._row_dim if isinstance(o, ShardTensor) and o._role.has_rows else None) for o in operands]
    place = rows.after_einsum(equation, info, out.dim()) if isinstance(equation, str) else None
    if place is None:
        raise call.refuse(f"einsum {equation!r} sums over rows or gives every pair of rows")
    return promote(out, role, carriers(call)[0]._meta, place)


@register(
    "cat", "concat", "concatenate", "hstack", when="along other dimensions than rows, or edges after edges",
    does="row by row", predicate=has_carrier,
)  # fmt: skip
def cat(call: Call):
    role, first = one_kind(call), carriers(call)[0]
    dim = 1 if call.name == "hstack" and first.dim() > 1 else call.arg(1, "dim", 0)
    one_after_another = rows.positive(dim, first.dim()) == first._row_dim
    edges = role is Role.EDGE and len(carriers(call)) == len(call.arg(0, "tensors"))
    if len({c._row_dim for c in carriers(call)}) > 1 or (one_after_another and not edges):
        raise call.refuse("it puts rows of atoms or edges one after another")
    args, kwargs = with_broadcast(call)
    return promote(call.run(*args, **kwargs), role, first._meta, first._row_dim)


@register("stack", when="operands with the same rows", does="row by row", predicate=has_carrier)
def stack(call: Call):
    role, first = one_kind(call), carriers(call)[0]
    if len({c._row_dim for c in carriers(call)}) > 1:
        raise call.refuse("rows are in different dimensions of what is stacked")
    dim = rows.positive(call.arg(1, "dim", 0), first.dim() + 1)
    args, kwargs = with_broadcast(call)
    return promote(call.run(*args, **kwargs), role, first._meta, first._row_dim + (dim <= first._row_dim))
