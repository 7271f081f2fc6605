"""Edge indices: taking senders and receivers apart, reshaping and casting them, masking edges.

Their values are rows, so anything that would look at them has no handler.
"""

from __future__ import annotations

from typing import Any

import torch

from nvdd.dispatch import Call, register
from nvdd.handlers.carriers import kind
from nvdd.handlers.rows import after_broadcast, after_permutation, after_repeat, after_view, is_whole, positive
from nvdd.roles import Role
from nvdd.shard_tensor import ShardTensor, like


def _first_is_index(call: Call) -> bool:
    return bool(call.args) and getattr(call.args[0], "_role", None) is not None and call.args[0]._role.is_index


def _one_kind(index: ShardTensor, at: int) -> Role:
    return Role.SENDER if at == index._sender_at else Role.RECEIVER


def _pair_dim(index: ShardTensor) -> int:
    return 1 - index._row_dim


def _pick(call: Call, index: ShardTensor, at: int, out: torch.Tensor) -> ShardTensor:
    return like(out, index, row_dim=0, role=_one_kind(index, positive(at, 2)))


@register(
    "getitem",
    when="an edge index",
    does="senders or receivers; a mask keeps whole edges",
    predicate=_first_is_index,
)
def getitem(call: Call):
    index, item = call.args
    if index._role is not Role.EDGE_INDEX:
        return _getitem_of_one(call, index, item)
    items = list(item) if isinstance(item, tuple) else [item]
    if Ellipsis in [i for i in items if i is Ellipsis]:
        at = next(k for k, i in enumerate(items) if i is Ellipsis)
        items[at : at + 1] = [slice(None)] * (3 - len(items))
    items += [slice(None)] * (2 - len(items))
    if len(items) == 2:
        pair, edges = items[_pair_dim(index)], items[index._row_dim]
        if isinstance(pair, int) and _keeps_edges(index, edges):
            return _pick(call, index, pair, call.run())
        if isinstance(pair, slice) and is_whole(pair, 2) and _keeps_edges(index, edges):
            return like(call.run(), index)
    raise call.refuse(f"indexing an edge index with {item!r} cuts single entries out of it", _HOW)


_HOW = "Take edge_index[0], edge_index[1], neighbor_list[:, 0], or mask whole edges"


def _keeps_edges(index: ShardTensor, item: Any) -> bool:
    """All edges are kept, or those for which a condition holds that was computed for each of them."""
    if isinstance(item, ShardTensor):
        return item.dtype == torch.bool and item.dim() == 1 and kind(item) is index._entry
    return is_whole(item, index.shape[index._row_dim])


def _getitem_of_one(call: Call, index: ShardTensor, item: Any):
    items = item if isinstance(item, tuple) else (item,)
    if all(i is None or i is Ellipsis or _keeps_edges(index, i) for i in items):
        out = call.run()
        lead = 0
        for i in items:
            if i is not None:
                break
            lead += 1
        return like(out, index, row_dim=index._row_dim + lead)
    raise call.refuse("taking edges by their place on this rank", _HOW)


@register("select", "unbind", when="an edge index", does="senders or receivers", predicate=_first_is_index)
def select(call: Call):
    index = call.args[0]
    dim = positive(call.arg(1, "dim", 0), index.dim())
    if index._role is not Role.EDGE_INDEX or dim != _pair_dim(index):
        raise call.refuse("taking the row of a single edge", _HOW)
    if call.name == "select":
        return _pick(call, index, call.arg(2, "index"), call.run())
    return tuple(_pick(call, index, at, out) for at, out in enumerate(call.run()))


@register(
    "get:T", "get:mT", "t", "transpose", "swapaxes", "swapdims", "permute", when="an edge index",
    does="the pair, the other way round", predicate=_first_is_index,
)  # fmt: skip
def transpose(call: Call):
    index = call.args[0]
    permute = lambda t: call.run(t, *call.args[1:], **call.kwargs)
    return like(call.run(), index, row_dim=after_permutation(permute, index.dim(), index._row_dim))


@register(
    "flip",
    "flipud",
    when="EDGE_INDEX, along the pair",
    does="senders and receivers change places",
    predicate=_first_is_index,
)
def flip(call: Call):
    index = call.args[0]
    dims = call.arg(1, "dims", (0,))
    dims = {positive(d, index.dim()) for d in (dims if isinstance(dims, (tuple, list)) else call.args[1:])}
    if index._role is not Role.EDGE_INDEX or dims != {_pair_dim(index)}:
        raise call.refuse("reversing the order of edges apart from the tensors that belong to them")
    out = like(call.run(), index)
    out._sender_at = 1 - index._sender_at
    return out


@register(
    "view", "reshape", "flatten", "unsqueeze", "squeeze", "expand", "expand_as", "broadcast_to", "repeat",
    when="an edge index", does="keeps the role", predicate=_first_is_index,
)  # fmt: skip
def reshape(call: Call):
    index = call.args[0]
    out = call.run()
    n_dims = index.dim()
    if call.name in ("expand", "expand_as", "broadcast_to"):
        row_dim = after_broadcast(n_dims, index._row_dim, out.dim())
    elif call.name == "repeat":
        factors = call.args[1] if isinstance(call.args[1], (tuple, list)) else call.args[1:]
        row_dim = after_repeat(n_dims, index._row_dim, factors)
    elif call.name == "unsqueeze":
        dim = positive(call.arg(1, "dim"), n_dims + 1)
        row_dim = index._row_dim + (dim <= index._row_dim)
    else:
        row_dim = after_view(index.shape, index._row_dim, out.shape)
    if row_dim is None or (index._role is Role.EDGE_INDEX and out.dim() != 2):
        raise call.refuse(f"reshaping an edge index from {tuple(index.shape)} to {tuple(out.shape)}", _HOW)
    return like(out, index, row_dim=row_dim)


@register(
    "stack", when="[senders, receivers] or [receivers, senders]", does="the pair",
    predicate=lambda call: {s._role for s in call.shards} == {Role.SENDER, Role.RECEIVER},
)  # fmt: skip
def stack(call: Call):
    parts = call.args[0]
    if len(parts) != 2 or len(call.shards) != 2:
        raise call.refuse("stacking edge indices with something else")
    dim = positive(call.arg(1, "dim", 0), 2)
    out = like(call.run(), parts[0], row_dim=1 - dim, role=Role.EDGE_INDEX)
    out._sender_at = 0 if parts[0]._role is Role.SENDER else 1
    return out


@register(
    "cat", "concat", "concatenate", when="edge indices of one role, along edges", does="keeps the role",
    predicate=lambda call: bool(call.shards) and call.shards[0]._role.is_index,
)  # fmt: skip
def cat(call: Call):
    parts = call.args[0]
    first = call.shards[0]
    dim = positive(call.arg(1, "dim", 0), first.dim())
    same = all(getattr(p, "_role", None) is first._role and p._sender_at == first._sender_at for p in parts)
    if not same or dim != first._row_dim:
        raise call.refuse("joining edge indices of different roles, or with plain tensors")
    return like(call.run(), first)
