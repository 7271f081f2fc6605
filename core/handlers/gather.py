"""Reading rows by index: ``x[index]``, ``index_select``, ``gather``, ``embedding``.

* by SENDER: halo rows of ``x`` are fetched from their owners first; the adjoint sums them back into owners. Under
  ``halo_read`` per-atom tensors have the halo rows already, and reading is local.
* by RECEIVER: local, receivers are owned.
* by SYSTEM_INDEX: a broadcast of per-system values, whose adjoint sums over ranks.
* by a per-atom integer (species): a look-up in a table, row by row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nvdd.deferred import defer_read
from nvdd.dispatch import Call, call_site, register
from nvdd.exchange import fetch
from nvdd.handlers.carriers import of_parameters, one_kind, to_rows
from nvdd.handlers.reads import READS, parts, read
from nvdd.handlers.rows import positive
from nvdd.roles import Role, ShardMeta
from nvdd.shard_tensor import ShardTensor, promote, to_local

_ROW_ROLES = (Role.SENDER, Role.RECEIVER, Role.EDGE_INDEX)
_MAX_CACHED = 8  # tensors that one forward reads twice are few


def _index_role(call: Call) -> Role | None:
    return getattr(parts(call)[1], "_role", None)


@register(
    *READS, when="by SENDER, RECEIVER or the pair, from rows that they point to",
    does="fetches halo rows for senders; local for receivers", predicate=lambda call: _index_role(call) in _ROW_ROLES,
)  # fmt: skip
def gather_by_edge(call: Call):
    source, index, dim = parts(call)
    _check_source(call, source, index, dim)
    meta, space = index._meta, index._of
    reads_local = index._role is Role.RECEIVER or (space == "atoms" and not meta.fetches)
    rows = to_local(source) if reads_local else padded(source, meta, space, call)
    if _may_wait(call, source, index):
        return defer_read(rows, to_local(index), meta, isinstance(source, ShardTensor))
    out = read(call, rows, to_local(index))
    if not isinstance(source, ShardTensor):
        return out  # of a tensor that the model made local nothing is tracked, here or further on
    if source._role is Role.SYSTEM_INDEX:
        return promote(out, Role.SYSTEM_INDEX, meta, index._row_dim, entry=index._entry)
    return promote(out, index._entry, meta, index._row_dim)


def _may_wait(call: Call, source: Any, index: ShardTensor) -> bool:
    """Whether what is read is one row of atoms for each edge, which a run in chunks of edges reads when it needs it."""
    meta = index._meta
    atoms_by_edge = index._of == "atoms" and index._entry is Role.EDGE and index.dim() == 1
    plain = call.name in ("index_select", "embedding") or (call.name == "getitem" and not isinstance(call.args[1], tuple))
    of_atoms = getattr(source, "_role", meta.atom_role) is meta.atom_role
    return meta.edges_at_once is not None and atoms_by_edge and plain and of_atoms and index.shape[0] == meta.n_edges


def _check_source(call: Call, source: Any, index: ShardTensor, dim: int | None) -> None:
    meta, space = index._meta, index._of
    if not isinstance(source, Tensor) or dim is None:
        raise call.refuse("an edge index reads rows of something that is no tensor")
    if isinstance(source, ShardTensor):
        kind = source._entry if source._role is Role.SYSTEM_INDEX else source._role
        if kind is not meta.role_of(space):
            raise call.refuse(f"the index reads rows of {space}, not: {kind.value}")
        if source._row_dim != 0:
            raise call.refuse("rows must be the first dimension of what is read by an edge index")
    if (dim + source.dim() if dim < 0 else dim) != 0:
        raise call.refuse("an edge index reads along another dimension than the first")
    item = call.args[1] if call.name == "getitem" else None
    if isinstance(item, tuple) and any(isinstance(i, Tensor) for i in item[1:]):
        raise call.refuse("an edge index together with other index tensors")
    if source.shape[0] != meta.rows_of(space):
        raise call.refuse(
            f"a tensor of {source.shape[0]} rows is read where this rank has {meta.rows_of(space)} {space}"
        )


def padded(source: Tensor, meta: ShardMeta, space: str, call: Call) -> Tensor:
    """Owned and halo rows of ``source``; a tensor that one forward reads twice travels once."""
    if meta.comm.size == 1:
        return to_local(source)
    for tensor, version, rows in meta.known:
        if tensor is source and version == source._version:
            return rows
    for tensor, version, result in meta._fetched:
        # what was fetched under no_grad carries no gradient
        has_graph = result.requires_grad or not (source.requires_grad and torch.is_grad_enabled())
        if tensor is source and version == source._version and has_graph:
            return result
    if not meta.reads_remote:
        raise call.refuse(
            "LocalStoragePolicy lets nothing cross ranks but what is given to the model, and this is read by senders",
            "Use a policy that reads remote rows, for example SPEC_MPNN_HALO's",
        )
    result = fetch(to_local(source), meta.plan_of(space), f"{call.name} {call_site().rpartition('/')[2]}")
    meta._fetched.append((source, source._version, result))
    del meta._fetched[:-_MAX_CACHED]
    return result


@register(
    *READS, when="by SYSTEM_INDEX, from per-system values", does="a broadcast; its adjoint sums over ranks",
    predicate=lambda call: _index_role(call) is Role.SYSTEM_INDEX,
)  # fmt: skip
def gather_by_system(call: Call):
    source, index, dim = parts(call)
    role = getattr(source, "_role", None)
    if role is Role.COUNT:  # what a number of atoms is read for by atom is a computation with it
        source, role = source._total, Role.SYSTEM
    if not _first(dim, source) or role not in (None, Role.SYSTEM):
        raise call.refuse("a system index reads rows of per-system values")
    if role is None and source.requires_grad and not of_parameters(source):
        raise call.refuse(
            "the per-system value being read depends on atoms, but it is not known to be summed over ranks",
            "Sum over atoms with a scatter by data.batch (scatter_add, index_add) outside scripted code",
        )
    rows = to_local(source)
    if role is Role.SYSTEM:
        rows = to_rows(rows, index._meta, "gather by system")
    out = read(call, rows, to_local(index))
    return promote(out, index._entry, index._meta, index._row_dim)


def _first(dim: int | None, source: Tensor) -> bool:
    """Whether ``dim`` is the first dimension."""
    return dim is None or positive(dim, source.dim()) == 0


def _is_look_up(call: Call) -> bool:
    source, index, _ = parts(call)
    if not isinstance(index, ShardTensor) or not index._role.has_rows or call.name == "gather":
        return False
    integer = not index.dtype.is_floating_point and index.dtype is not torch.bool
    return integer and getattr(source, "_role", Role.SYSTEM) is Role.SYSTEM


@register(*READS, when="by a per-atom or per-edge integer, from a table", does="row by row", predicate=_is_look_up)
def look_up(call: Call):
    source, index, dim = parts(call)
    if call.has(*_ROW_ROLES) or not _first(dim, source):
        raise call.refuse("a look-up along another dimension than the first, or by edge indices as well")
    rows = to_local(source)
    if isinstance(source, ShardTensor):
        rows = to_rows(rows, index._meta, "look-up by atom")
    return promote(read(call, rows, to_local(index)), one_kind(call), index._meta, index._row_dim)
