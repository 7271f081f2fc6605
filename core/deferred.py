"""Rows of edges that are computed where they are summed, some edges at a time (`DomainConfig.max_edges_per_chunk`).

A message-passing layer gathers rows of atoms for each edge, computes with them, and sums the result over the edges of
each atom. What lies between is many times as large as the atoms' rows, and autograd keeps it. `Deferred` is such rows as
a recipe: operations on it are written down, after the first two edges have shown what comes out of them. A sum over
edges then runs the recipe for one chunk of edges after the other, and again in the backward pass, so that no more than
one chunk is ever in memory. Rows of other ranks are fetched when the recipe is written: nothing is sent from within a
chunk. What is not understood is computed for all edges at once: memory, not numbers, depends on it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nvdd.dispatch import Call, dispatch, op_name
from nvdd.edge_program import Given, Item, Operation, Read, Rows, Whole, in_chunks, in_one, mapped
from nvdd.errors import DistributedOpError
from nvdd.handlers.carriers import to_rows
from nvdd.handlers.elementwise import is_pointwise
from nvdd.handlers.script import is_scripted_function
from nvdd.local_numbers import LocalInt
from nvdd.roles import Role, ShardMeta
from nvdd.shard_tensor import ShardTensor, promote, to_local

_N_SAMPLE = 2  # edges that show what an operation gives; one alone would hide what is broadcast
SUMS = ("scatter_add", "index_add", "scatter_reduce", "index_put", "scatter")
_OUTLINE = frozenset({
    "get:shape", "size", "get:dtype", "get:device", "get:ndim", "get:layout", "dim", "ndimension", "numel", "nelement",
    "element_size", "get:itemsize", "is_floating_point", "is_complex", "get_device", "get:is_cuda", "get:is_cpu",
    "get:is_sparse", "is_inference", "get:is_meta", "get:is_quantized", "__len__", "__hash__", "get:is_nested", "is_conj", "is_neg",
    "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor", "result_type", "is_same_size",
})  # fmt: skip
_BY_SHAPE = frozenset({"expand_as", "view_as", "reshape_as", "type_as", "to"})  # read no values of their last argument
_ALIGNED = frozenset({"cat", "concat", "concatenate", "stack", "hstack"})  # operands have the same rows
_SIZES = frozenset({"view", "reshape", "expand", "broadcast_to"})
# how many rows come out depends on their values; or derivatives, of which there is no recipe
_COUNTING = frozenset({
    "masked_select", "nonzero", "argwhere", "unique", "unique_consecutive", "repeat_interleave", "bincount", "grad", "backward",
    "item", "tolist", "numpy", "register_hook", "retain_grad", "data_ptr", "untyped_storage", "requires_grad",
})  # fmt: skip
_NO = object()


class Deferred(ShardTensor):
    """Edge rows as a recipe. Its memory is one number, NaN, so that whoever goes round dispatch notices.

    Attributes:
        _node: the recipe.
        _sample: what comes of it for the first edges.
        _tracked: whether the rows would have a role; else the model has made them local.
        _viewed: whether it is a view, or has one, which a change in place would have to reach.
    """

    _tracked: bool
    _viewed: bool
    _sample: ShardTensor

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return _operation(func, args, kwargs or {})

    @property
    def _whole(self) -> Tensor:
        """The rows of all edges, a plain tensor; kept, since what is read once as a whole is often read again."""
        if not isinstance(self._node, Given):
            self._node = Given(in_one(self._node, self._sample, self._meta), self._row_dim)
        return self._node.tensor

    def __repr__(self, **kwargs) -> str:
        return f"Deferred({self._role.name}, {tuple(_outline(self).shape)})"

    def __deepcopy__(self, memo):
        return _all(self).clone()


def defer(tensor: Tensor, meta: ShardMeta, tracked: bool | None = None) -> Tensor:
    """Rows of this rank's edges as the beginning of a recipe, where the run works in chunks; else ``tensor``."""
    if meta.edges_at_once is None or isinstance(tensor, Deferred):
        return tensor
    tracked = isinstance(tensor, ShardTensor) if tracked is None else tracked
    plain = to_local(tensor)
    if plain.shape[:1] != (meta.n_edges,):
        raise DistributedOpError(
            f"a tensor of shape {tuple(plain.shape)} is declared as rows of edges, of which this rank has {meta.n_edges}"
        )
    return _made(Given(plain), promote(plain.detach()[:_N_SAMPLE], Role.EDGE, meta), tracked)


def defer_read(rows: Tensor, index: Tensor, meta: ShardMeta, tracked: bool) -> Tensor:
    """``rows[index]``, with one entry of the index for each edge, as a recipe."""
    sample = rows.detach().index_select(0, index[:_N_SAMPLE])
    return _made(Read(rows, index), promote(sample, Role.EDGE, meta), tracked)


def sum_of(rows: Deferred, index: Tensor, n_rows: int) -> Tensor:
    """(n_rows, ...) sum of the rows over the edges whose plain ``index`` is that row, chunk by chunk."""
    meta = rows._meta
    meta.sums_in_chunks += 1
    return in_chunks(rows._node, rows._sample, meta, row_index(index), n_rows)


def row_index(index: Tensor) -> Tensor:
    """(E,) of an index that is one for each edge, repeated along other dimensions or not."""
    return index[(slice(None), *[0] * (index.dim() - 1))]


def _made(node: Any, sample: ShardTensor, tracked: bool, viewed: bool = False) -> Deferred:
    n, row_dim = sample._meta.n_edges, sample._row_dim
    plain = to_local(sample)
    shape = (*plain.shape[:row_dim], n, *plain.shape[row_dim + 1 :])
    exact = not (plain.is_floating_point() or plain.is_complex())
    fill = torch.full((), torch.iinfo(torch.int32).min if exact and plain.dtype is not torch.bool else float("nan"), device=plain.device)
    out = fill.to(plain.dtype).expand(shape).as_subclass(Deferred)
    out._role, out._meta, out._row_dim, out._entry, out._of, out._sender_at = Role.EDGE, sample._meta, row_dim, Role.EDGE, "atoms", 1
    out._node, out._sample, out._tracked, out._viewed = node, sample, tracked, viewed
    return out


def _outline(value: Any) -> Any:
    """Shape and type without the rows."""
    if not isinstance(value, Deferred):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        plain = value.as_subclass(Tensor)
    return promote(plain, Role.EDGE, value._meta, value._row_dim)


def _all(value: Any) -> Any:
    """The rows of all edges, with the role that they would have."""
    if not isinstance(value, Deferred):
        return value
    plain = value._whole
    return promote(plain, Role.EDGE, value._meta, value._row_dim) if value._tracked else plain


def settled(value: Any) -> Any:
    """What a model returns, without recipes."""
    return _all(value)


def _operation(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    name, inplace = op_name(func)
    first = args[0] if args else None
    deferred = [v for v in Call(func, args, kwargs).shards if isinstance(v, Deferred)]
    if name in ("get:requires_grad", "get:is_leaf"):
        return first._node.requires_grad == (name == "get:requires_grad")
    if name == "requires_grad" and first._node.requires_grad:
        return first
    if name in _OUTLINE or (name in _BY_SHAPE and not isinstance(first, Deferred)):
        return func(*mapped(args, _outline), **mapped(kwargs, _outline))
    if name in SUMS and _sums_edges(name, args, kwargs):
        return dispatch(func, args, kwargs)
    if inplace and isinstance(first, Deferred):
        return _in_place(func, name, args, kwargs)
    known = name not in _COUNTING and "::" not in name and name[:4] not in ("get:", "set:")
    if known and not inplace and kwargs.get("out") is None and not _by_condition(name, args):
        out = _recorded(func, name, args, kwargs, deferred)
        if out is not _NO:
            return out
    return func(*mapped(args, _all), **mapped(kwargs, _all))


def _by_condition(name: str, args: tuple) -> bool:
    """Whether rows are chosen by a condition, so that their number depends on values."""
    if name != "getitem":
        return False
    items = args[1] if isinstance(args[1], tuple) else (args[1],)
    return any(isinstance(i, Tensor) and _outline(i).dtype in (torch.bool, torch.uint8) for i in items)


def _sums_edges(name: str, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether the operation adds deferred rows to rows of atoms."""
    get = lambda k, key: args[k] if len(args) > k else kwargs.get(key)
    target, dim, index = args[0], get(1, "dim"), get(2, "index")
    source = get(3, "source" if name == "index_add" else "src")
    if name == "index_put":
        indices, source = get(1, "indices"), get(2, "values")
        index = indices[0] if isinstance(indices, (tuple, list)) and len(indices) == 1 else None
        dim, how = 0, "sum" if get(3, "accumulate") else ""
    else:
        how = {"scatter_reduce": get(4, "reduce"), "scatter": {"add": "sum"}.get(get(4, "reduce"))}.get(name, "sum")
    if not isinstance(source, Deferred) or isinstance(target, Deferred) or source._row_dim != 0:
        return False
    by = isinstance(index, ShardTensor) and index._role in (Role.RECEIVER, Role.SENDER) and index._of == "atoms"
    if not by or index._row_dim != 0 or how != "sum" or dim not in (0, -target.dim()) or not kwargs.get("include_self", True):
        return False
    plain = to_local(index)
    by_row = all(plain.stride(d) == 0 or plain.shape[d] == 1 for d in range(1, plain.dim()))
    # one entry for each edge: as it stands (index_add, index_put), or repeated over all of a row
    whole = plain.dim() == 1 and (name in ("index_add", "index_put") or source.dim() == 1)
    return by_row and (whole or plain.shape == source.shape) and source.shape[1:] == target.shape[1:]


# --- writing down ---------------------------------------------------------------------------------------------


class _NotWritten(Exception):
    """An argument whose rows have no place in a recipe."""


def _recorded(func: Any, name: str, args: tuple, kwargs: dict[str, Any], deferred: list[Deferred]) -> Any:
    meta, tracked = deferred[0]._meta, any(d._tracked for d in deferred)
    n = meta.n_edges
    summed = _in_einsum(args, deferred[0]) if name == "einsum" else {}

    def node(value: Any) -> Any:
        nonlocal tracked
        if isinstance(value, Deferred):
            return value._node
        if isinstance(value, ShardTensor):
            if value._role is Role.SYSTEM:
                value = to_rows(to_local(value), meta, f"{name} with edges")  # its exchange stays outside of chunks
                return Whole(value)
            if value._role is not Role.EDGE or value.shape[value._row_dim] != n:
                raise _NotWritten
            tracked = True
            return Given(to_local(value), value._row_dim)
        if isinstance(value, LocalInt) and value == n:
            return Rows()
        if not isinstance(value, Tensor):
            return value
        at = summed.get(id(value)) if name == "einsum" else _aligned(name, value, deferred[0])
        if at is not None:
            return Given(value, at)
        if is_scripted_function(func) and value.shape[:1] == (n,) and not isinstance(value, torch.nn.Parameter):
            raise _NotWritten  # rows of edges, or a table? An EdgeStage says it
        return Whole(value)

    try:
        operation = Operation(func, name, mapped(_rows_first(name, args, deferred[0]), node), mapped(kwargs, node))
        samples = {id(d._node): d._sample for d in deferred}
        sample = operation.sample(meta, min(_N_SAMPLE, n), samples)
    except (_NotWritten, DistributedOpError, RuntimeError, ValueError, TypeError, IndexError):
        return _NO  # computed for all edges at once, where what is wrong is raised
    if is_scripted_function(func):
        _check_by_rows(operation, sample, meta, samples)
    operation.requires_grad &= any(p.is_floating_point() for p in _parts(sample) if isinstance(p, Tensor))
    return _given_back(operation, sample, tracked, deferred, min(_N_SAMPLE, n))


def _given_back(operation: Operation, sample: Any, tracked: bool, deferred: list[Deferred], n: int) -> Any:
    parts = sample if isinstance(sample, (tuple, list)) else [sample]
    if not all(isinstance(p, ShardTensor) and p._role is Role.EDGE and p.shape[p._row_dim] == n for p in parts):
        return _NO
    memory = {to_local(d._sample).untyped_storage().data_ptr(): d for d in deferred} if n else {}

    def made(part: ShardTensor, node: Any) -> Deferred:
        base = memory.get(to_local(part).untyped_storage().data_ptr())
        if base is not None:
            base._viewed = True
        return _made(node, part, tracked and not is_scripted_function(operation.func), base is not None)

    if isinstance(sample, (tuple, list)):
        return type(sample)(tuple(made(p, Item(operation, k)) for k, p in enumerate(parts)))
    return made(sample, operation)


def _aligned(name: str, value: Tensor, rows: Deferred) -> int | None:
    """Where a plain tensor has the edges' dimension, if the operation makes that certain whatever its size."""
    n, dims, at = rows._meta.n_edges, _outline(rows).dim(), rows._row_dim
    if is_pointwise(name):
        place = at + value.dim() - dims  # shapes are lined up at the right
        return place if place >= 0 and value.shape[place] == n != 1 else None
    batched = name in ("bmm", "matmul") and value.dim() >= 3 and at == 0 and value.dim() == dims
    same = value.dim() == dims and (name in _ALIGNED or batched)
    return at if same and value.shape[at] == n != 1 else None


def _in_einsum(args: tuple, rows: Deferred) -> dict[int, int]:
    """Where the plain operands of an einsum have the letter that stands for edges."""
    operands = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
    if not isinstance(args[0], str) or "." in args[0]:
        return {}
    terms = args[0].replace(" ", "").partition("->")[0].split(",")
    letter = next(term[rows._row_dim] for term, operand in zip(terms, operands, strict=True) if operand is rows)
    plain = [(t, o) for t, o in zip(terms, operands, strict=True) if not isinstance(o, ShardTensor) and letter in t]
    return {id(o): t.index(letter) for t, o in plain}


def _rows_first(name: str, args: tuple, rows: Deferred) -> tuple:
    """Sizes in which the number of edges stands as a Python number where the rows are."""
    if name not in _SIZES or not args or args[0] is not rows:
        return args
    n, at = rows._meta.n_edges, rows._row_dim
    sizes = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
    if len(sizes) <= at or not all(isinstance(s, int) for s in sizes):
        return args
    sizes = tuple(LocalInt(s) if k == at and s == n else s for k, s in enumerate(sizes))
    return (args[0], sizes)


def _check_by_rows(operation: Operation, sample: Any, meta: ShardMeta, samples: dict[int, ShardTensor]) -> None:
    """Scripted code can't be seen into: that it works row by row is tried on one edge alone."""
    n = min(_N_SAMPLE, meta.n_edges)
    if n < 2:
        return
    for both, alone in zip(_parts(sample), _parts(operation.sample(meta, 1, samples)), strict=True):
        both, alone = to_local(both)[:1], to_local(alone)
        scale = both.abs().amax() if both.numel() else 0
        same = ((both - alone).abs() <= 1e-3 * scale).all() if both.is_floating_point() else (both == alone).all()
        finite = torch.isfinite(both).all() if both.is_floating_point() else True
        site = f"the scripted {operation.name} does not work row by row: one edge alone gives another result than among others"
        meta.require(
            same | ~torch.as_tensor(finite, device=both.device),
            DistributedOpError(site + ". Leave max_edges_per_chunk and recompute out for this model"),
        )


def _parts(value: Any) -> list:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _in_place(func: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    target = args[0]
    out = _NO
    if not target._viewed and not isinstance(target._node, Given) and is_pointwise(name):
        deferred = [v for v in Call(func, args, kwargs).shards if isinstance(v, Deferred)]
        out = _recorded(func, name, args, kwargs, deferred)
    if out is _NO:
        raise Call(func, args, kwargs).refuse(
            "rows of edges are changed in place, while they are only computed where they are summed",
            "Compute out of place, or leave max_edges_per_chunk and recompute out",
        )
    target._node, target._sample, target._tracked = out._node, out._sample, out._tracked
    return target
