"""Sharded storage (``gather_mode="distributed"``): atoms are named by global ids, wherever they are.

Edge indices stay rows inside, so that gathers and scatters by them use the plan that is there. To the model their
values are global ids: computing or comparing with them gives what one process gives. Reading or writing rows of
atoms by ids that were computed makes a plan for these ids, an all_to_all of counts, of ids and of rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nvdd.dispatch import Call, call_site, register
from nvdd.exchange import fetch, fold
from nvdd.handlers.carriers import of_parameters
from nvdd.handlers.reads import READS, parts, read
from nvdd.handlers.rows import positive
from nvdd.local_numbers import LocalInt
from nvdd.plan import ExchangePlan
from nvdd.roles import Role, ShardMeta
from nvdd.shard_tensor import ShardTensor, adopt, promote, to_local


def _are_ids(index: Any) -> bool:
    """Whether these can be global ids of atoms: integers, one or more for each atom or edge, under sharded storage."""
    if not isinstance(index, ShardTensor) or not index._meta.distributed:
        return False
    integer = not index.dtype.is_floating_point and index.dtype is not torch.bool
    return integer and index._role.has_rows and index._role is not Role.SYSTEM_INDEX


def global_ids(index: Tensor) -> Tensor:
    """The values of an index as one process has them: global ids of atoms. Anything else is given back as it is.

    For kernels that take plain tensors, under sharded storage.
    """
    if not isinstance(index, ShardTensor) or not index._role.is_index or index._of != "atoms":
        return index
    meta = index._meta
    ids = meta.atom_directory.ids.index_select(0, to_local(index).reshape(-1)).view(index.shape)
    return promote(ids.to(index.dtype), index._entry, meta, index._row_dim)


def check_not_local(call: Call) -> None:
    """Raises where global ids meet this rank's number of atoms: ``ids < data.n_atoms`` would drop other ranks' atoms."""
    n, n_global = call.meta.n_rows, len(call.meta.atom_directory.owner)
    given = (*call.args, *call.kwargs.values())
    if n != n_global and any(isinstance(v, LocalInt) or (type(v) is int and v == n) for v in given):
        raise call.refuse(
            f"global ids are compared or computed with {n}, the number of atoms of this rank, where one process has {n_global}",
            "There are no padding edges to filter out: leave the line away, or use a number that does not depend on ranks",
        )


def _plan(call: Call, index: ShardTensor) -> tuple[ExchangePlan, Tensor]:
    """The plan for the ids in ``index``, made once in a forward."""
    meta = index._meta
    for tensor, version, plan, rows in meta.plans_by_id:
        if tensor is index and version == index._version:
            return plan, rows
    directory, ids = meta.atom_directory, to_local(index).long()
    n_global = len(directory.owner)
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= n_global):
        raise call.refuse(
            f"ids from {int(ids.min())} to {int(ids.max())} are read, where there are the atoms 0 to {n_global - 1}",
            "There is no dummy atom: mask the entries that mean none, and let them read any atom",
        )
    plan, rows = directory.plan(meta.comm, meta.n_owned, ids)
    meta.plans_by_id.append((index, index._version, plan, rows))
    return plan, rows


def _reads_atoms(call: Call) -> bool:
    source, index, _ = parts(call)
    return _are_ids(index) and isinstance(source, ShardTensor) and source._role.is_atoms


@register(
    *READS, when="by global ids, from rows of atoms, sharded storage", does="an all_to_all for these ids",
    predicate=_reads_atoms,
)  # fmt: skip
def gather_by_id(call: Call):
    source, index, dim = parts(call)
    meta = index._meta
    if dim is None or positive(dim, source.dim()) != 0 or source._row_dim != 0:
        raise call.refuse("global ids read along another dimension than the first")
    if call.name == "getitem" and isinstance(call.args[1], tuple) and len(call.args[1]) > 1:
        raise call.refuse("global ids together with another index")
    plan, rows = _plan(call, index)
    padded = fetch(to_local(source), plan, f"{call.name} by id {call_site().rpartition('/')[2]}")
    return promote(read(call, padded, rows), index._role, meta, index._row_dim)


def _looks_up_activations(call: Call) -> bool:
    source, index, _ = parts(call)
    if not _are_ids(index) or isinstance(source, ShardTensor) or not isinstance(source, Tensor):
        return False
    return source.requires_grad and not of_parameters(source)


@register(
    *READS, when="by global ids, from a tensor that was made local", does="refused: whose rows these are is unknown",
    predicate=_looks_up_activations,
)  # fmt: skip
def gather_of_local(call: Call):
    raise call.refuse(
        "computed ids read a tensor that is not known to have rows of atoms (to_local was applied to it, or scripted "
        "code made it)",
        "Read before to_local, or read by data.edge_index itself",
    )


_WRITES = ("index_add", "scatter_add")


def _writes_atoms(call: Call) -> bool:
    target = call.arg(0, "input")
    return _are_ids(call.arg(2, "index")) and isinstance(target, ShardTensor) and target._role.is_atoms


@register(
    *_WRITES, when="by global ids, to rows of atoms, sharded storage", does="sums are sent to the owners",
    predicate=_writes_atoms,
)  # fmt: skip
def scatter_by_id(call: Call):
    target, index = call.arg(0, "input"), call.arg(2, "index")
    source: Any = call.arg(3, "src" if call.name == "scatter_add" else "source")
    meta: ShardMeta = index._meta
    if positive(call.arg(1, "dim"), target.dim()) != 0 or index._row_dim != 0 or target._row_dim != 0:
        raise call.refuse("global ids write along another dimension than the first")
    if isinstance(source, ShardTensor) and source._role is not index._role:
        raise call.refuse(f"the ids stand for: {index._role.value}; what is written has: {source._role.value}")
    if not meta.writes_remote:
        raise call.refuse(
            f"{meta.policy} sends no sums to other ranks, and this adds to rows of other ranks",
            "Scatter over receivers, or use ShardedStoragePolicy()",
        )
    plan, rows = _plan(call, index)
    plain, values = to_local(target), to_local(source)
    if index._role.is_atoms and meta.n_phantom:  # which counts nowhere
        rows, values = rows[: meta.n_counted], values[: meta.n_counted]
    empty = plain.new_zeros(plan.n_padded, *plain.shape[1:])
    if call.name == "index_add":
        written = empty.index_add(0, rows, values * call.kwargs.get("alpha", 1))
    else:
        written = empty.scatter_add(0, rows, values)
    out = plain + fold(written, plan, f"{call.name} by id")
    if call.inplace:
        plain.copy_(out)
        return target
    return adopt(out, target)
