"""What a wrapper or the body of an adapter says when it means something about ranks.

Each verb is the identity, or the plain operation, in a single process, so that code with them stays single-process
code. A ShardTensor says itself which rows it has; a plain tensor is taken to have the rows that the policy gives to
per-atom tensors (``current_dd_context().n_rows``), owned rows first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from nvdd.adapters.callables import MethodAdapter
from nvdd.context import DDContext, context_of, current_dd_context
from nvdd.errors import DistributedOpError
from nvdd.exchange import correct, fetch, fold, sum_over_ranks
from nvdd.roles import Role, ShardMeta
from nvdd.shard_tensor import ShardTensor, like, promote, to_local

__all__ = [
    "DDContext",
    "RecombineOutput",
    "Scope",
    "autograd_target",
    "current_dd_context",
    "distributed_method",
    "entries_at",
    "gather_atoms",
    "localize",
    "neighbor_refresh_adapters",
    "refresh_neighbors",
    "scatter_to_owners",
    "system_sum",
    "to_local",
]


class Scope(str, Enum):
    """Which rows `system_sum` sums, and whether the sum crosses ranks."""

    OWNED = "owned"  # each atom once, summed over ranks: the same total on every rank
    LOCAL = "local"  # each owned atom once, this rank's share: for an output declared Reduce.ALL_REDUCE
    PADDED = "padded"  # owned and halo rows of this rank, nothing crosses


def distributed_method(body: Callable) -> Callable:
    """Marks the body of a `MethodAdapter` that says something new under domain decomposition only.

    ``body(original, self, *args, **kwargs)`` runs inside a distributed forward, ``original(self, *args, **kwargs)``
    elsewhere::

        @distributed_method
        def gather_first(original, self, features, index):
            return original(self, refresh_neighbors(features, pad=True), index)
    """

    @functools.wraps(body)
    def switch(original: Callable, *args: Any, **kwargs: Any) -> Any:
        if context_of((*args, *kwargs.values())) is None:
            return original(*args, **kwargs)
        return body(original, *args, **kwargs)

    return switch


def refresh_neighbors(x: Tensor, pad: bool = False) -> Tensor:
    """Per-atom rows with up-to-date halo rows.

    Args:
        x: (n_rows, ...) per-atom values. Where per-atom tensors have owned rows only (``halo_fetch``, sharded
            storage) it is given back as it is, because reading senders fetches.
        pad: True to get (n_padded, ...) rows under any policy, for code that reads neighbours out of sight.

    Returns:
        The rows; gradients of halo rows go back to their owners.
    """
    context = context_of((x,))
    if context is None:
        return x
    meta = context.meta
    padded = isinstance(x, ShardTensor) and x._role is Role.PADDED
    if not padded:
        _check_atoms(x, meta, "refresh_neighbors")
        if meta.fetches and not pad:
            return x
        for known, version, rows in meta.known:  # an input, whose halo rows each rank has
            if known is x and version == x._version:
                return promote(rows, Role.PADDED, meta)
    _check_crosses(meta, "refresh_neighbors")
    return promote(fetch(to_local(x)[: meta.n_owned], meta.plan, "refresh of neighbours"), Role.PADDED, meta)


def gather_atoms(x: Tensor) -> Tensor:
    """Rows of all atoms on every rank, in the order of the input: keys and values of an attention over all pairs.

    Queries stay with their owners, so that each rank computes (n_owned, n_atoms) pairs::

        weights = torch.softmax(query @ gather_atoms(key).T + bias, 1)
        h = h + weights @ gather_atoms(value)

    Args:
        x: (n_rows, ...) per-atom values.

    Returns:
        (n_atoms, ...) a plain tensor, the same on every rank; in one process ``x``. Its gradients go back to the owners,
        which sum them.

    Raises:
        DistributedOpError: ``x`` has no rows of atoms, or the host of this run (LAMMPS, native dynamics) does not tell
            where all atoms are.
    """
    context = context_of((x,))
    if context is None:
        return x
    meta = context.meta
    if not (isinstance(x, ShardTensor) and x._row_dim == 0 and (x._role.is_atoms or _is_system_of_atoms(x))):
        what = x._role.value if isinstance(x, ShardTensor) else f"a plain tensor of shape {tuple(x.shape)}"
        raise DistributedOpError(f"gather_atoms takes rows of atoms in the first dimension, and this is: {what}")
    _check_crosses(meta, "gather_atoms")
    if meta.directory is None:
        raise DistributedOpError(
            "gather_atoms needs to know where every atom is, which the host of this run (LAMMPS, native dynamics) does not "
            "tell: models of all pairs run from ASE, with NVDDCalculator"
        )
    plan, rows = meta.directory.plan_of_all(meta.comm, meta.n_owned)
    return fetch(to_local(x)[: meta.n_owned], plan, "gather of all atoms").index_select(0, rows)


def _is_system_of_atoms(x: ShardTensor) -> bool:
    return x._role is Role.SYSTEM_INDEX and x._entry in (Role.OWNED, Role.PADDED)


def scatter_to_owners(out: Tensor) -> Tensor:
    """Per-atom sums, halo rows of which are partial, made complete.

    Args:
        out: (n_padded, ...) values that were written over owned and halo rows. A ShardTensor of owned rows is
            complete already, because each edge is where its receiver is owned, and is given back as it is.

    Returns:
        Rows as the policy has them: (n_owned, ...) of complete sums, or (n_padded, ...) with the halo refreshed.

    Raises:
        DistributedOpError: ``out`` is not (n_padded, ...) rows of atoms, or the policy lets nothing cross
            ranks.
    """
    context = context_of((out,))
    if context is None or (isinstance(out, ShardTensor) and out._role is Role.OWNED):
        return out
    meta, site = context.meta, "sums to their owners"
    if isinstance(out, ShardTensor) and out._role is not Role.PADDED:
        raise DistributedOpError(f"scatter_to_owners takes rows of atoms, and this is: {out._role.value}")
    if out.shape[:1] != (meta.n_padded,):
        raise DistributedOpError(
            f"scatter_to_owners takes {meta.n_padded} owned and halo rows, and this has shape {tuple(out.shape)}; write over "
            "owned and halo rows (current_dd_context().n_padded)"
        )
    _check_crosses(meta, "scatter_to_owners")
    plain = to_local(out)
    total = fold(plain, meta.plan, site) if meta.fetches else correct(plain, meta.plan, site)
    return promote(total, meta.atom_role, meta)


def system_sum(values: Tensor, index: Tensor, n_systems: int, scope: Scope = Scope.OWNED) -> Tensor:
    """Sums per-atom (or per-edge) values into systems, each atom once.

    Args:
        values: (n_rows, ...) per-atom values, owned rows first, or a ShardTensor of per-edge values.
        index: (n_rows,) system of each row.
        n_systems: number of systems in the batch.
        scope: see `Scope`.

    Returns:
        (n_systems, ...) totals; under ``Scope.OWNED`` the same on every rank, else this rank's share.

    Raises:
        DistributedOpError: ``values`` and ``index`` have different lengths, or not the rows of this rank.
    """
    context = context_of((values, index))
    rows, systems = to_local(values), to_local(index)
    if context is None:
        return _sum(rows, systems, n_systems)
    meta = context.meta
    kinds = {getattr(values, "_role", None), getattr(index, "_entry", None)}
    per_edge = bool(kinds & {Role.EDGE, Role.BOND})
    if len(rows) != len(systems) and (per_edge or not {len(rows), len(systems)} <= _lengths(meta)):
        raise DistributedOpError(
            f"system_sum takes as many systems as values, and got values of shape {tuple(rows.shape)} and an index of shape "
            f"{tuple(systems.shape)}"
        )
    if not per_edge and Scope(scope) is not Scope.PADDED:
        least = meta.n_counted if meta.counts is None else meta.n_owned
        if min(len(rows), len(systems)) < least or len(rows) not in _lengths(meta):
            raise DistributedOpError(
                f"system_sum takes the {least} owned rows of this rank (halo rows may follow), and got values of "
                f"shape {tuple(rows.shape)} and an index of shape {tuple(systems.shape)}"
            )
        rows, systems = meta.only_counted(rows), systems[:least]
    elif per_edge:
        rows = meta.only_counted(rows, edges=True)
    elif meta.counts is not None:
        raise DistributedOpError(
            "system_sum(scope=Scope.PADDED) in a compiled forward, whose rows are filled up; leave compile out for this model"
        )
    share = _sum(rows, systems, n_systems)
    if Scope(scope) is not Scope.OWNED:
        return share
    return promote(sum_over_ranks(share, meta.comm, "system_sum"), Role.SYSTEM, meta)


def entries_at(index: Tensor, places: Tensor) -> Tensor:
    """Entries of an index at places that this rank has computed, for example the bond of the first edge of each angle.

    Args:
        index: (E,) ``data.senders``, ``data.bond_of_edge``, ...
        places: (A,) int64, rows of the index, plain.

    Returns:
        (A,) rows of what the index points to. What is read by it has a row for each place: take `to_local` of it where it
        meets rows of edges.

    Raises:
        DistributedOpError: ``index`` is not one index (E,).
    """
    if not isinstance(index, ShardTensor):
        return index[places]
    if index._role not in (Role.SENDER, Role.RECEIVER) or index.dim() != 1:
        raise DistributedOpError(f"entries_at takes one index (E,), and this is: {index._role.value}")
    return like(to_local(index)[to_local(places)], index)


def _lengths(meta: ShardMeta) -> set[int]:
    """Numbers of rows that per-atom tensors have: without phantom, without halo, with both."""
    return {meta.n_owned if meta.counts is not None else meta.n_counted, meta.n_owned, meta.n_padded}


def _sum(rows: Tensor, systems: Tensor, n_systems: int) -> Tensor:
    return rows.new_zeros(n_systems, *rows.shape[1:]).index_add(0, systems, rows)


def _check_atoms(x: Tensor, meta: ShardMeta, who: str) -> None:
    if isinstance(x, ShardTensor) and x._role is not Role.OWNED:
        raise DistributedOpError(f"{who} takes rows of atoms, and this is: {x._role.value}")
    if x.shape[:1] != (meta.n_rows,):
        raise DistributedOpError(
            f"{who} takes the {meta.n_rows} rows of atoms of this rank, and this has shape {tuple(x.shape)}; give the "
            "ShardTensor, which knows its rows, or rows as the policy has them (current_dd_context().n_rows)"
        )


def _check_crosses(meta: ShardMeta, who: str) -> None:
    if not meta.reads_remote:
        raise DistributedOpError(
            f"{who} sends rows between ranks, and LocalStoragePolicy lets nothing cross ranks; use a policy that reads remote "
            "rows, for example SPEC_MPNN_HALO's"
        )


def localize(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A dictionary of model inputs with `to_local` of every value, also inside lists, tuples and dictionaries."""
    return {name: _localized(value) for name, value in inputs.items()}


def _localized(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _localized(v) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_localized(v) for v in value)
    return to_local(value)


def autograd_target(x: Tensor) -> Tensor:
    """What to give to ``torch.autograd.grad`` as ``inputs=`` to differentiate by ``x``: the tensor in the graph.

    Raises:
        DistributedOpError: ``x`` is not in the graph: positions are stand-ins under ``ForceStrategy.EDGE_VECTORS``.
    """
    if isinstance(x, ShardTensor) and x._role is Role.ANCHOR:
        raise DistributedOpError(
            "autograd_target: positions, cell and shifts are stand-ins under ForceStrategy.EDGE_VECTORS, by which nothing "
            "can be differentiated; return per-atom energies and let nvdd derive forces, differentiate by "
            "data.edge_vectors, or declare force_strategy=ForceStrategy.MODEL_INTERNAL"
        )
    return x


@dataclass(frozen=True)
class RecombineOutput:
    """Body of the adapters that `neighbor_refresh_adapters` makes.

    Attributes:
        output: which of the results, if there are several.
        always: whether results that dispatch has followed are recombined, too.
    """

    output: int = 0
    always: bool = False

    def __call__(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if isinstance(result, (tuple, list)):
            parts = list(result)
            parts[self.output] = self._recombined(parts[self.output])
            return type(result)(parts)
        return self._recombined(result)

    def _recombined(self, value: Tensor) -> Tensor:
        followed = isinstance(value, ShardTensor)
        return scatter_to_owners(value) if self.always or not followed else value


def neighbor_refresh_adapters(
    modules: Iterable[torch.nn.Module], *, output: int = 0, always: bool = False
) -> tuple[MethodAdapter, ...]:
    """Adapters for message-passing blocks that sum over neighbours out of dispatch's sight.

    One for each class among ``modules``: after its ``forward`` the per-atom result goes through `scatter_to_owners`.

    Args:
        modules: the blocks, for example ``model.interactions``.
        output: which result is per atom, if ``forward`` returns several.
        always: True to recombine results that are ShardTensors, too. Dispatch has seen how these came about and has
            done what their sums need.
    """
    classes: dict[type, None] = {}
    for module in modules:
        classes[next(c for c in type(module).__mro__ if "forward" in vars(c))] = None
    return tuple(MethodAdapter(c, "forward", RecombineOutput(output, always)) for c in classes)
