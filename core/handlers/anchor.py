"""Stand-ins for positions and cell where the geometry is in the edge vectors.

Under ``ForceStrategy.EDGE_VECTORS`` a model that computes ``positions[sender] - positions[receiver] +
shifts @ cell`` gets zero positions, unit cells and the edge vectors as shifts, so that the expression *is* the
edge vectors. Anything else that it does with positions or cell would be wrong, and is refused by `dispatch`.
"""

from __future__ import annotations

from nvdd.dispatch import Call, register
from nvdd.roles import Role
from nvdd.shard_tensor import promote

_INDEX_ROLES = (Role.SENDER, Role.RECEIVER, Role.EDGE_INDEX, Role.SYSTEM_INDEX)


def _anchored(call: Call) -> bool:
    return bool(call.args) and getattr(call.args[0], "_role", None) is Role.ANCHOR


@register(
    "getitem",
    "index_select",
    "unsqueeze",
    "squeeze",
    "view",
    "reshape",
    when="ANCHOR",
    does="still a stand-in",
    predicate=_anchored,
)
def pick(call: Call):
    anchor = call.args[0]
    first = call.args[1] if call.name == "getitem" else call.arg(2, "index") if call.name == "index_select" else None
    if getattr(first, "_role", None) in (Role.SENDER, Role.RECEIVER, Role.EDGE_INDEX):
        # every row of the stand-in for positions is zero: no exchange is needed to read a remote one
        with_edges = first.shape
        zeros = anchor.new_zeros((*with_edges, *anchor.shape[1:]))
        return promote(zeros, Role.EDGE, anchor._meta, first._row_dim)
    return promote(call.run(), Role.ANCHOR, anchor._meta)


@register(
    "matmul", "einsum", "bmm", "mm", "mul", "linear", when="ANCHOR (cell) with EDGE (shifts)", does="shifts @ cell",
    predicate=lambda call: call.has(Role.ANCHOR) and call.has(Role.EDGE),
)  # fmt: skip
def shifts_times_cell(call: Call):
    edge = next(s for s in call.shards if s._role is Role.EDGE)
    return promote(call.run(), Role.EDGE, edge._meta, edge._row_dim)
