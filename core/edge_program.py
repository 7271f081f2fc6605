"""Recipes of edge rows, and running them for a part of the edges at a time, forward and backward."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from nvdd.dispatch import dispatch, op_name
from nvdd.errors import DistributedOpError
from nvdd.roles import Role, ShardMeta
from nvdd.shard_tensor import ShardTensor, promote, to_local


class _Start:
    """A tensor that a recipe begins with, and its version when that was written.

    Attributes:
        detail: what the kind of start needs besides.
    """

    def __init__(self, tensor: Tensor, detail: Any = None) -> None:
        self.tensor, self.detail, self.version = tensor, detail, tensor._version

    @property
    def requires_grad(self) -> bool:
        return self.tensor.requires_grad

    def check(self) -> None:
        """Raises if the tensor holds something else by now."""
        if self.tensor._version != self.version:
            raise DistributedOpError(
                f"a tensor of shape {tuple(self.tensor.shape)} is changed in place after rows of edges were computed with it, "
                "which happens where they are summed, some edges at a time. Compute out of place, or leave "
                "max_edges_per_chunk and recompute out"
            )


class Given(_Start):
    """Rows of edges that are in memory; ``detail`` is the dimension that counts them."""

    def __init__(self, tensor: Tensor, row_dim: int = 0) -> None:
        super().__init__(tensor, row_dim)


class Read(_Start):
    """Rows of atoms, read by an index ``detail`` with an entry for each edge."""


class Whole(_Start):
    """A tensor that all edges use alike, such as a parameter."""


class Rows:
    """Stands for the number of edges at hand."""


@dataclass(eq=False)
class Operation:
    """A torch operation; its arguments have nodes where there were rows of edges.

    Attributes:
        gradients: whether autograd was on.
    """

    func: Callable
    name: str
    args: tuple
    kwargs: dict[str, Any]
    gradients: bool = field(default_factory=torch.is_grad_enabled)
    requires_grad: bool = False

    def __post_init__(self) -> None:
        if any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")):  # a model's own: then all edges at once
            raise DistributedOpError(f"{self.name} computes rows of edges under autocast, which the backward would not be under")
        found: list[bool] = []
        mapped((self.args, tuple(self.kwargs.values())), lambda v: found.append(getattr(v, "requires_grad", False) is True))
        self.requires_grad = self.gradients and any(found) and self.name != "detach"

    def sample(self, meta: ShardMeta, n: int, samples: dict[int, ShardTensor]) -> Any:
        """What comes of the first ``n`` edges, with roles; ``samples`` has them of nodes, by their ``id``."""

        def put(value: Any) -> Any:
            if id(value) in samples:
                known = samples[id(value)]
                rows = to_local(known).narrow(known._row_dim, 0, n)
                return promote(rows, Role.EDGE, meta, known._row_dim)
            if isinstance(value, Given):
                return promote(value.tensor.detach().narrow(value.detail, 0, n), Role.EDGE, meta, value.detail)
            return value.tensor.detach() if isinstance(value, Whole) else n if isinstance(value, Rows) else value

        with torch.no_grad():
            return self.call(mapped(self.args, put), mapped(self.kwargs, put), meta, n)

    def call(self, args: tuple, kwargs: dict[str, Any], meta: ShardMeta, n: int) -> Any:
        """The operation on ``n`` edges; of scripted code, which loses roles, the result is rows of edges as well."""
        if op_name(self.func)[1]:
            args = (args[0].clone(), *args[1:])
        with torch.set_grad_enabled(self.gradients and torch.is_grad_enabled()):
            out = dispatch(self.func, args, kwargs)
        if type(self.func).__name__ in ("ScriptMethod", "ScriptFunction"):
            out = mapped(out, lambda v: promote(v, Role.EDGE, meta) if type(v) is Tensor and v.shape[:1] == (n,) else v)
        mapped(out, lambda v: self._check(v, n))
        return out

    def _check(self, rows: Any, n: int) -> None:
        if not isinstance(rows, ShardTensor) or rows._role is not Role.EDGE or rows.shape[rows._row_dim] != n:
            raise DistributedOpError(
                f"{self.name} gives other rows for some of the edges than for the first ones. Leave max_edges_per_chunk and "
                "recompute out for this model"
            )


@dataclass(frozen=True, eq=False)
class Item:
    """One of several results."""

    operation: Operation
    number: int

    @property
    def requires_grad(self) -> bool:
        return self.operation.requires_grad


@dataclass(frozen=True)
class _Step:
    """The result of an earlier step."""

    number: int


def mapped(values: Any, change: Callable[[Any], Any]) -> Any:
    """``change`` of each value, also inside lists, tuples and dicts."""
    if type(values) is dict:
        return {k: mapped(v, change) for k, v in values.items()}
    if isinstance(values, (tuple, list)):
        changed = [mapped(v, change) for v in values]
        if type(values) in (tuple, list, torch.Size):
            return tuple(changed) if type(values) is not list else changed
        return type(values)(*changed) if hasattr(values, "_fields") else type(values)(changed)
    return change(values)


class _Program:
    """A recipe in the order in which it runs, and the tensors that it begins with.

    The steps have numbers for these tensors, so that autograd alone decides how long they live.
    """

    def __init__(self, node: Any, meta: ShardMeta) -> None:
        self.meta, self.tensors = meta, []
        self._steps: list[tuple] = []
        self._slots: dict[int, int] = {}
        done: dict[int, int] = {}
        todo = [node]
        while todo:  # no recursion: recipes are long
            this = todo[-1]
            before = [] if id(this) in done else [n for n in _before(this) if id(n) not in done]
            if before:
                todo += before
                continue
            todo.pop()
            if id(this) not in done:
                done[id(this)] = len(self._steps)
                self._steps.append(self._step(this, done))
        self._last_use = self._uses()

    def _uses(self) -> list[list[int]]:
        """For each step the earlier ones whose results nothing needs after it."""
        last: dict[int, int] = {}
        for k, step in enumerate(self._steps):
            if step[0] is Item:
                last[step[1]] = k
            elif step[0] not in (Given, Read, Whole):
                mapped(step[1:], lambda v, k=k: last.__setitem__(v.number, k) if isinstance(v, _Step) else None)
        return [[s for s, at in last.items() if at == k] for k in range(len(self._steps))]

    def _step(self, node: Any, done: dict[int, int]) -> tuple:
        if isinstance(node, Operation):
            refer = lambda v: _Step(done[id(v)]) if isinstance(v, _NODES) else v
            return node.call, mapped(node.args, refer), mapped(node.kwargs, refer)
        if isinstance(node, Item):
            return Item, done[id(node.operation)], node.number
        slot = self._slots.setdefault(id(node.tensor), len(self.tensors))
        if slot == len(self.tensors):
            self.tensors.append(node.tensor)
        node.check()
        return type(node), slot, node.detail

    def run(self, tensors: list[Tensor], start: int, stop: int, leaf: Callable | None = None) -> Any:
        """The last step's result for these edges.

        Args:
            tensors: to begin with, in the place of those of the recipe.
            start, stop: the edges.
            leaf: is given what each beginning step reads: (slot, kind, detail, value), and gives what is used for it.
        """
        n, values = stop - start, []
        for step, over in zip(self._steps, self._last_use, strict=True):
            kind = step[0]
            if kind is Item:
                values.append(values[step[1]][step[2]])
            elif kind in (Given, Read, Whole):
                value = tensors[step[1]]
                if kind is Given:
                    value = value.narrow(step[2], start, n)
                elif kind is Read:
                    value = value.index_select(0, step[2][start:stop])
                value = value if leaf is None else leaf(*step, value)
                rows = kind is not Whole
                values.append(promote(value, Role.EDGE, self.meta, step[2] if kind is Given else 0) if rows else value)
            else:
                put = lambda v: values[v.number] if isinstance(v, _Step) else n if isinstance(v, Rows) else v
                values.append(kind(mapped(step[1], put), mapped(step[2], put), self.meta, n))
            for k in over:
                values[k] = None
        return values[-1]

    def rows(self, tensors: list[Tensor], start: int, stop: int, leaf: Callable | None = None) -> tuple[Tensor, int]:
        """The rows of these edges, plain, and their dimension."""
        out = self.run(tensors, start, stop, leaf)
        return to_local(out), out._row_dim

    def parts(self) -> list[tuple[int, int]]:
        """The chunks of edges: as few as the limit allows, of nearly the same size."""
        n = self.meta.n_edges
        many = -(-n // self.meta.edges_at_once)
        cuts = [n * k // many for k in range(many + 1)] if many else []
        return list(itertools.pairwise(cuts))


_NODES = (Given, Read, Whole, Operation, Item)


def _before(node: Any) -> list[Any]:
    if isinstance(node, Item):
        return [node.operation]
    found: list[Any] = []
    if isinstance(node, Operation):
        mapped((node.args, node.kwargs), lambda v: found.append(v) if isinstance(v, _NODES) else None)
    return found


class _InChunks(Function):
    """Sums of edge rows over the entries of an index, or the rows themselves; its backward runs the recipe again."""

    @staticmethod
    def forward(ctx, program: _Program, index: Tensor | None, allocate: Callable, row_dim: int, *tensors: Tensor) -> Tensor:
        out = allocate()
        ctx.program, ctx.index, ctx.row_dim = program, index, row_dim
        ctx.save_for_backward(*tensors)
        for start, stop in program.parts():
            rows, _ = program.rows(list(tensors), start, stop)
            if rows.dtype != out.dtype:
                raise DistributedOpError(
                    f"edges {start} to {stop} give {rows.dtype} and the first edges gave {out.dtype}; leave "
                    "max_edges_per_chunk and recompute out"
                )
            if index is None:
                out.narrow(row_dim, start, stop - start).copy_(rows)
            else:
                out.index_add_(0, index[start:stop], rows)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        tensors, needs = list(ctx.saved_tensors), ctx.needs_input_grad[4:]
        backward = _derivative_again if torch.is_grad_enabled() else _derivative
        return None, None, None, None, *backward(ctx.program, ctx.index, ctx.row_dim, grad, tensors, needs)


def _seed(grad: Tensor, index: Tensor | None, row_dim: int, start: int, stop: int) -> Tensor:
    return grad.narrow(row_dim, start, stop - start) if index is None else grad.index_select(0, index[start:stop])


def _leaf(leaves: list[tuple], needs: Sequence[bool], kind: type, slot: int, detail: Any, value: Tensor) -> Tensor:
    value = value.detach().requires_grad_(needs[slot])
    if needs[slot]:
        leaves.append((kind, slot, detail, value))
    return value


def _derivative(program, index, row_dim, grad, tensors, needs) -> list[Tensor | None]:
    sums = [torch.zeros_like(t) if need else None for t, need in zip(tensors, needs, strict=True)]
    for start, stop in program.parts():
        leaves: list[tuple] = []
        leaf = functools.partial(_leaf, leaves, needs)
        with torch.enable_grad():
            rows, _ = program.rows(tensors, start, stop, leaf)
        if not rows.requires_grad:
            continue
        seed = _seed(grad, index, row_dim, start, stop)
        found = torch.autograd.grad(rows, [v for *_, v in leaves], seed, allow_unused=True)
        del rows
        for (kind, slot, detail, _), gradient in zip(leaves, found, strict=True):
            if gradient is None:
                continue
            if kind is Given:
                sums[slot].narrow(detail, start, stop - start).add_(gradient)
            elif kind is Read:
                sums[slot].index_add_(0, detail[start:stop], gradient)
            else:
                sums[slot].add_(gradient)
    return sums


def _derivative_again(program, index, row_dim, grad, tensors, needs) -> list[Tensor | None]:
    """The same, to be differentiated again: all edges at once, since autograd would keep every chunk."""
    n = program.meta.n_edges
    # views, for one tensor may be computed from another: what a recipe begins with is where its derivative ends
    tensors = [t.view_as(t) for t in tensors]
    rows, _ = program.rows(tensors, 0, n)
    wanted = [t for t, need in zip(tensors, needs, strict=True) if need]
    if not rows.requires_grad:
        return [None] * len(tensors)
    found = iter(torch.autograd.grad(rows, wanted, _seed(grad, index, row_dim, 0, n), create_graph=True, allow_unused=True))
    return [next(found) if need else None for need in needs]


def _applied(node: Any, program: _Program, index: Tensor | None, allocate: Callable, row_dim: int) -> Tensor:
    with torch.set_grad_enabled(torch.is_grad_enabled() and node.requires_grad):
        return _InChunks.apply(program, index, allocate, row_dim, *program.tensors)


def in_chunks(node: Any, sample: ShardTensor, meta: ShardMeta, index: Tensor, n_rows: int) -> Tensor:
    """(n_rows, ...) sum of the rows of a recipe over the edges with each value of ``index``, (E,)."""
    plain = to_local(sample)
    program = _Program(node, meta)
    allocate = lambda: plain.new_zeros(n_rows, *plain.shape[1:])
    return _applied(node, program, index, allocate, 0)


def in_one(node: Any, sample: ShardTensor, meta: ShardMeta) -> Tensor:
    """The rows of all edges; what they are computed from is not kept for the backward pass."""
    if isinstance(node, Read):
        node.check()
        return node.tensor.index_select(0, node.detail)
    plain, at = to_local(sample), sample._row_dim
    program = _Program(node, meta)
    allocate = lambda: plain.new_empty(*plain.shape[:at], meta.n_edges, *plain.shape[at + 1 :])
    return _applied(node, program, None, allocate, at)
