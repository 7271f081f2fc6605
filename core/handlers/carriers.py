"""What the families of row-wise operations share: which operands carry rows, and how results get their role."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nvdd.dispatch import Call
from nvdd.exchange import broadcast
from nvdd.roles import Role, ShardMeta
from nvdd.shard_tensor import ShardTensor, promote, to_local

_MANY = 50  # operations that make a weight of parameters are fewer


def carriers(call: Call) -> list[ShardTensor]:
    """The operands whose rows are this rank's atoms, edges or bonds."""
    return [s for s in call.shards if s._role.has_rows]


def kind(shard: ShardTensor) -> Role:
    """Role of a value computed from ``shard`` row by row."""
    return shard._entry if shard._role is Role.SYSTEM_INDEX else shard._role


def one_kind(call: Call) -> Role:
    """The kind of rows that all operands have."""
    kinds = {kind(c) for c in carriers(call)}
    if len(kinds) > 1:
        raise call.refuse("rows of different things (" + " / ".join(sorted(k.name for k in kinds)) + ") are combined")
    return kinds.pop()


def to_rows(value: Tensor, meta: ShardMeta, site: str) -> Tensor:
    """A per-system value for use with this rank's rows; its adjoint sums their gradients over ranks."""
    if not value.requires_grad:
        return value
    value = broadcast(value, meta.comm, site)
    if meta.n_phantom:
        # a phantom has no gradient, also where the model divides by its zero neighbours and 0 * inf would be NaN
        value = torch.where(torch.ones_like(value, dtype=torch.bool), value.detach(), value)
    return value


def with_broadcast(call: Call) -> tuple[tuple, dict[str, Any]]:
    """The arguments, with per-system values broadcast where they meet rows."""

    def plain(value: Any) -> Any:
        if isinstance(value, ShardTensor):
            local = to_local(value)
            return to_rows(local, value._meta, f"{call.name} with rows") if value._role is Role.SYSTEM else local
        if isinstance(value, (tuple, list)):
            return type(value)(plain(v) for v in value)
        return value

    return tuple(plain(a) for a in call.args), {k: plain(v) for k, v in call.kwargs.items()}


def _is_strain(leaf: Tensor) -> bool:
    """Whether a leaf can be a strain, of one system or of each, by which a model differentiates inside its forward."""
    return leaf.dim() in (2, 3) and leaf.shape[-2:] == (3, 3)


def of_parameters(value: Tensor) -> bool:
    """Whether a tensor that needs a gradient is a leaf or computed from parameters (or a strain) only, in a few steps."""
    if value.grad_fn is None:
        return True
    seen, todo = set(), [value.grad_fn]
    while todo:
        node = todo.pop()
        leaf = getattr(node, "variable", None)
        if len(seen) > _MANY or (leaf is not None and not (isinstance(leaf, torch.nn.Parameter) or _is_strain(leaf))):
            return False
        seen.add(node)
        todo += [n for n, _ in node.next_functions if n is not None and n not in seen]
    return True


def masks_edges(rows: Role, item: Any) -> bool:
    """Whether ``item`` is ``mask`` or ``mask, ...`` with a condition on such rows: what is left depends on no order."""
    mask, rest = (item[0], item[1:]) if isinstance(item, tuple) and item else (item, ())
    masked = isinstance(mask, ShardTensor) and mask.dtype == torch.bool and mask.dim() == 1
    plain = all(i is Ellipsis or isinstance(i, (int, slice)) for i in rest)
    return masked and plain and kind(mask) is rows


def allowed(call: Call) -> bool:
    """No operand is an edge index, a count or a stand-in, which have handlers of their own."""
    return not call.has(Role.SENDER, Role.RECEIVER, Role.EDGE_INDEX, Role.ANCHOR, Role.COUNT)


def has_carrier(call: Call) -> bool:
    """Predicate: at least one operand with rows."""
    return allowed(call) and bool(carriers(call))


def only_first(call: Call) -> bool:
    """Predicate: the first argument has rows, and no other argument is a ShardTensor."""
    return len(call.shards) == 1 and first_has_rows(call)


def first_has_rows(call: Call) -> bool:
    """Predicate: the first argument has rows."""
    first = call.args[0] if call.args else None
    return isinstance(first, ShardTensor) and first._role.has_rows and allowed(call)


def keep(call: Call, out: Any, row_dim: int | None, why: str = "", role: Role | None = None) -> Any:
    """The result(s) with the role of the first operand with rows; refused if the row dimension is lost."""
    x = carriers(call)[0]
    if row_dim is None:
        raise call.refuse(why or "it mixes or cuts rows of atoms or edges")
    role = role or kind(x)

    def wrap(value: Any) -> Any:
        return promote(value, role, x._meta, row_dim, x._entry, x._of) if isinstance(value, Tensor) else value

    return type(out)(tuple(map(wrap, out))) if isinstance(out, (tuple, list)) else wrap(out)
