"""Stand-ins for positions, cell and shifts where the geometry is in the edge vectors.

Under ``ForceStrategy.EDGE_VECTORS`` a model that computes ``positions[sender] - positions[receiver] +
shifts @ cell`` gets zero positions, unit cells and the edge vectors as shifts, so that the expression *is* the
edge vectors. Anything else that it does with these three would be wrong, and is refused by `dispatch`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nvdd.dispatch import Call, register
from nvdd.handlers.carriers import masks_edges
from nvdd.handlers.reads import READS, parts, read
from nvdd.handlers.rows import after_basic_index, after_einsum, after_view, positive
from nvdd.roles import Role
from nvdd.shard_tensor import promote, to_local

_EDGE_INDEX = (Role.SENDER, Role.RECEIVER, Role.EDGE_INDEX)


def _is(value: Any, of: str) -> bool:
    return getattr(value, "_role", None) is Role.ANCHOR and value._of == of


def _reads_positions(call: Call) -> bool:
    source, index, _ = parts(call)
    return _is(source, "positions") and getattr(index, "_role", None) in _EDGE_INDEX


@register(
    *READS, when="ANCHOR (positions) by edge index", does="zeros: no exchange is needed to read a remote row",
    predicate=_reads_positions,
)  # fmt: skip
def read_positions(call: Call):
    source, index, _ = parts(call)
    if call.name == "getitem" and not isinstance(call.args[1], tuple):
        zeros = source.new_zeros((*index.shape, *source.shape[1:]))
    else:
        rows = source.new_zeros((index._meta.n_padded, *source.shape[1:]))
        zeros = read(call, rows, to_local(index))
    return promote(zeros, Role.EDGE, index._meta, index._row_dim)


@register(
    *READS, "unsqueeze", "squeeze", "view", "reshape", "select", "neg", when="ANCHOR", does="still a stand-in",
    predicate=lambda call: bool(call.args) and getattr(parts(call)[0], "_role", None) is Role.ANCHOR,
)  # fmt: skip
def pick(call: Call):
    anchor, out = parts(call)[0], call.run()
    if anchor._of == "shifts" and not _keeps_edges_first(call, out):
        raise call.refuse("it picks edges by their place on this rank, or moves them to another dimension")
    return promote(out, Role.ANCHOR, anchor._meta, of=anchor._of)


def _keeps_edges_first(call: Call, out: Tensor) -> bool:
    shifts = call.args[0]
    if call.name == "getitem":
        item = call.args[1]
        return masks_edges(Role.EDGE, item) or after_basic_index(item, shifts.shape, 0) == 0
    if call.name == "unsqueeze":
        return positive(call.arg(1, "dim"), shifts.dim() + 1) > 0
    return call.name == "neg" or after_view(shifts.shape, 0, out.shape) == 0


@register(
    "transpose", "swapaxes", "swapdims", "permute", "get:T", "get:mT", "t", when="ANCHOR (cell)",
    does="still a stand-in", predicate=lambda call: bool(call.args) and _is(call.args[0], "cell"),
)  # fmt: skip
def transpose(call: Call):
    return promote(call.run(), Role.ANCHOR, call.args[0]._meta, of="cell")


def _shifts_with_cell(call: Call) -> bool:
    return len(call.shards) == 2 and {getattr(s, "_of", "") for s in call.shards} == {"shifts", "cell"}


@register(
    "matmul", "einsum", "bmm", "mm", "mul", "linear", when="ANCHOR (cell) with ANCHOR (shifts)", does="shifts @ cell",
    predicate=lambda call: call.has(Role.ANCHOR) and _shifts_with_cell(call),
)  # fmt: skip
def shifts_times_cell(call: Call):
    out, row_dim = call.run(), 0
    if call.name == "einsum":
        operands = [(s.dim(), 0 if s._of == "shifts" else None) for s in call.shards]
        row_dim = after_einsum(call.args[0], operands, out.dim())
    if row_dim is None:
        raise call.refuse("it sums over edges")
    return promote(out, Role.EDGE, call.meta, row_dim)
