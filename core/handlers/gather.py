"""Reading rows by index: ``x[index]``, ``index_select``, ``gather``, ``embedding``.

* by SENDER: halo rows of ``x`` are fetched from their owners first; the adjoint sums them back into owners.
* by RECEIVER: local, receivers are owned.
* by SYSTEM_INDEX: a broadcast of per-system values, whose adjoint sums over ranks.
* by a per-atom integer (species): a look-up in a table, row by row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nvdd.dispatch import Call, call_site, register
from nvdd.exchange import broadcast, fetch
from nvdd.roles import Role, ShardMeta
from nvdd.shard_tensor import ShardTensor, promote, to_local

_ROW_ROLES = (Role.SENDER, Role.RECEIVER, Role.EDGE_INDEX)
_MAX_CACHED = 8  # tensors that one forward fetches again are few


def _parts(call: Call) -> tuple[Any, Any, int | None]:
    """Source, index and dimension of a gather."""
    if call.name == "getitem":
        item = call.args[1]
        return call.args[0], item[0] if isinstance(item, tuple) and item else item, 0
    if call.name in ("index_select", "gather", "take_along_dim"):
        if call.name == "take_along_dim":
            return call.arg(0, "input"), call.arg(1, "indices"), call.arg(2, "dim")
        return call.arg(0, "input"), call.arg(2, "index"), call.arg(1, "dim")
    # embedding(input=indices, weight=table)
    return call.arg(1, "weight"), call.arg(0, "input"), 0


def _index_role(call: Call) -> Role | None:
    return getattr(_parts(call)[1], "_role", None)


_OPS = ("getitem", "index_select", "gather", "take_along_dim", "embedding")


@register(
    *_OPS, when="by SENDER, RECEIVER or the pair, from per-atom rows",
    does="fetches halo rows for senders; local for receivers", predicate=lambda call: _index_role(call) in _ROW_ROLES,
)  # fmt: skip
def gather_by_edge(call: Call):
    source, index, dim = _parts(call)
    if not isinstance(source, Tensor) or dim is None:
        raise call.refuse("an edge index reads rows of something that is no tensor")
    role = getattr(source, "_role", Role.OWNED)  # a plain tensor has lost its role, its rows are checked below
    row_dim = getattr(source, "_row_dim", 0)
    if role not in (Role.OWNED, Role.SYSTEM_INDEX) or (role is Role.SYSTEM_INDEX and source._rows != "atom"):
        raise call.refuse(f"an edge index reads rows of atoms, not {role.value}")
    if dim < 0:
        dim += source.dim()
    if dim != 0 or row_dim != 0:
        raise call.refuse("atoms must be the first dimension of what is read by edge index")
    if (
        call.name == "getitem"
        and isinstance(call.args[1], tuple)
        and any(isinstance(i, Tensor) for i in call.args[1][1:])
    ):
        raise call.refuse("an edge index together with other index tensors")
    if source.shape[0] != index._meta.n_owned:
        raise call.refuse(
            f"a tensor of {source.shape[0]} rows is read by edge index, while this rank owns {index._meta.n_owned} atoms"
        )
    meta = index._meta
    rows = to_local(source) if index._role is Role.RECEIVER else padded(source, meta, call)
    out = _local(call, rows, to_local(index))
    if not isinstance(source, ShardTensor):
        return out  # of a tensor that the model made local nothing is tracked, here or further on
    out_role = Role.SYSTEM_INDEX if role is Role.SYSTEM_INDEX else Role.EDGE
    return promote(out, out_role, meta, index._row_dim, rows="edge")


def padded(source: Tensor, meta: ShardMeta, call: Call) -> Tensor:
    """Owned and halo rows of ``source``; a tensor that one forward reads twice travels once."""
    if meta.comm.size == 1:
        return to_local(source)
    for tensor, version, result in meta._fetched:
        if tensor is source and version == source._version:
            return result
    result = fetch(to_local(source), meta.plan, f"{call.name} {_short(call_site())}")
    meta._fetched.append((source, source._version, result))
    del meta._fetched[:-_MAX_CACHED]
    return result


def _short(site: str) -> str:
    path, _, rest = site.rpartition("/")
    return rest or path


def _local(call: Call, rows: Tensor, index: Tensor) -> Tensor:
    if call.name == "getitem":
        item = call.args[1]
        return call.run(rows, (index, *item[1:]) if isinstance(item, tuple) else index)
    if call.name == "embedding":
        return call.run(
            index,
            rows,
            *call.args[2:],
            **{k: v for k, v in call.kwargs.items() if k not in ("input", "weight")},
        )
    if call.name == "take_along_dim":
        return call.run(rows, index, 0)
    return call.run(rows, 0, index)


@register(
    *_OPS, when="by SYSTEM_INDEX, from per-system values", does="a broadcast; its adjoint sums over ranks",
    predicate=lambda call: _index_role(call) is Role.SYSTEM_INDEX,
)  # fmt: skip
def gather_by_system(call: Call):
    source, index, dim = _parts(call)
    role = getattr(source, "_role", None)
    if dim not in (0, None) or (role is not None and role not in (Role.SYSTEM, Role.ANCHOR)):
        raise call.refuse("a system index reads rows of per-system values")
    if role is None and source.requires_grad and source.grad_fn is not None:
        raise call.refuse(
            "the per-system value being read depends on atoms, but it is not known to be summed over ranks",
            "Sum over atoms with a scatter by data.batch (scatter_add, index_add) outside scripted code",
        )
    rows = to_local(source)
    if role is Role.SYSTEM and rows.requires_grad:
        rows = broadcast(rows, index._meta.comm, "gather by system")
    kind = Role.OWNED if index._rows == "atom" else Role.EDGE
    out = _local(call, rows, to_local(index))
    if role is Role.ANCHOR:
        return promote(out, Role.ANCHOR, index._meta)
    return promote(out, kind, index._meta, index._row_dim)


@register(
    *_OPS, when="by a per-atom or per-edge integer, from a table", does="row by row",
    predicate=lambda call: _index_role(call) in (Role.OWNED, Role.EDGE)
    and not to_local(_parts(call)[1]).is_floating_point()
    and _parts(call)[1].dtype is not torch.bool
    and getattr(_parts(call)[0], "_role", Role.SYSTEM) is Role.SYSTEM
    and call.name != "gather",
)  # fmt: skip
def look_up(call: Call):
    source, index, dim = _parts(call)
    rows = to_local(source)
    if isinstance(source, ShardTensor) and rows.requires_grad:
        rows = broadcast(rows, index._meta.comm, "look-up by atom")
    if dim not in (0, None):
        raise call.refuse("a look-up along another dimension than the first")
    return promote(_local(call, rows, to_local(index)), index._role, index._meta, index._row_dim)
