"""The one path that every torch operation on a ShardTensor takes.

A registry maps the name of an operation (``index_select`` stands for ``torch.index_select``,
``Tensor.index_select``, ...) to handlers, each with a predicate; the first whose predicate holds runs. The
handlers stand in ``nvdd.handlers``, one module a family. What no handler takes is an error: its result on one
rank would not be what the model means.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch

from nvdd.errors import DistributedOpError
from nvdd.local_numbers import check_numbers
from nvdd.roles import Role, ShardMeta
from nvdd.shard_tensor import ShardTensor, to_local
from nvdd.trace import active_traces


class Call:
    """One operation on at least one ShardTensor.

    Attributes:
        func: the torch function.
        name: its canonical name, without the underscores of in-place and dunder forms.
        inplace: whether it changes its first argument.
        args, kwargs: as given, with torch's own names for the arguments and ``input`` as the first of them.
        shards: the ShardTensors among the arguments (also in lists and tuples).
    """

    __slots__ = ("args", "func", "inplace", "kwargs", "name", "shards")

    def __init__(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
        self.name, self.inplace = op_name(func)
        if kwargs and "::" not in self.name:
            kwargs = {_NUMPY_NAMES.get(k, k): v for k, v in kwargs.items()}
            if not args and "input" in kwargs and "condition" not in kwargs:
                args = (kwargs.pop("input"),)
        self.func, self.args, self.kwargs = func, args, kwargs
        self.shards: list[ShardTensor] = []
        _collect(args, self.shards)
        if kwargs:
            _collect(tuple(kwargs.values()), self.shards)

    @property
    def meta(self) -> ShardMeta:
        """The partition of the first ShardTensor."""
        return self.shards[0]._meta

    def has(self, *roles: Role) -> bool:
        """Whether any ShardTensor has one of the roles."""
        return any(s._role in roles for s in self.shards)

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        """An argument by position or keyword."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)

    def role_of(self, position: int, name: str) -> Role | None:
        """Role of an argument, None for a plain tensor or no tensor."""
        return getattr(self.arg(position, name), "_role", None)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The operation on this rank's tensors: of its own arguments, or of those given. Gives plain tensors."""
        if not args and not kwargs:
            args, kwargs = self.args, self.kwargs
        with torch._C.DisableTorchFunctionSubclass():
            return self.func(*args, **kwargs)

    def refuse(self, why: str, remedy: str = "") -> DistributedOpError:
        """The error to raise: what, where in the model, why, and what to do."""
        site = call_site()
        shards = ", ".join(f"{s._role.name}{tuple(to_local(s).shape)}" for s in self.shards)
        remedy = remedy or (
            "Ways out: write the step with gathers by edge index and scatters over receivers or systems; pass "
            "nvdd.to_local(x) where the step is meant to be local to each atom"
        )
        return DistributedOpError(f"{self.name}({shards}) at {site}: {why}. {remedy}.", self.name, site)


def _collect(values: Any, into: list[ShardTensor]) -> None:
    for value in values:
        if isinstance(value, ShardTensor):
            into.append(value)
        elif isinstance(value, (list, tuple)):
            _collect(value, into)


@cache
def op_name(func: Callable) -> tuple[str, bool]:
    """Canonical name of a torch function, and whether it works in place."""
    if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        name = func.name() if isinstance(func, torch._ops.OpOverload) else func._qualified_op_name
        return name.removeprefix("aten::").split(".")[0], False
    name = getattr(func, "__name__", type(func).__name__)
    if name in ("__get__", "__set__", "__delete__"):
        return f"{name[2:5]}:{func.__self__.__name__}", False
    if name.startswith("__") and name.endswith("__"):
        if name in ("__getitem__", "__setitem__"):
            return name[2:-2], name == "__setitem__"
        bare = name[2:-2]
        inplace = bare[:1] == "i" and bare[1:] in _BINARY
        if inplace or (bare[:1] == "r" and bare[1:] in _BINARY):
            bare = bare[1:]
        elif bare not in _BINARY | _UNARY:
            return name, False
        return _ALIASES.get(bare, bare), inplace
    inplace = name.endswith("_") and not name.startswith("_")
    bare = name.rstrip("_") if inplace else name
    return _ALIASES.get(bare, bare), inplace


_BINARY = {
    "add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift",
    "eq", "ne", "lt", "le", "gt", "ge",
}  # fmt: skip
_UNARY = {"neg", "pos", "abs", "invert"}
_ALIASES = {
    "truediv": "div", "true_divide": "div", "divide": "div", "floordiv": "floor_divide", "mod": "remainder",
    "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "invert": "bitwise_not", "absolute": "abs",
    "pos": "positive", "multiply": "mul", "subtract": "sub", "rsub": "sub", "negative": "neg",
}  # fmt: skip


_NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim"}  # which torch takes as well


@dataclass(frozen=True)
class Handler:
    """One row of the dispatch table.

    Attributes:
        family: the module of ``nvdd.handlers`` that defines it.
        op: canonical name of the operation.
        when: the condition, in words.
        does: what happens, in words.
        number: grows in the order of registration.
    """

    family: str
    op: str
    when: str
    does: str
    predicate: Callable[[Call], bool]
    run: Callable[[Call], Any]
    number: int


_REGISTRY: dict[str, list[Handler]] = {}
_numbers = itertools.count()


def register(*ops: str, when: str, does: str, predicate: Callable[[Call], bool]) -> Callable:
    """Registers the decorated function as handler of the named operations, tried after those already there."""

    def decorate(run: Callable[[Call], Any]) -> Callable[[Call], Any]:
        family = run.__module__.rsplit(".", 1)[-1]
        for op in ops:
            _REGISTRY.setdefault(op, []).append(Handler(family, op, when, does, predicate, run, next(_numbers)))
        return run

    return decorate


@lru_cache(maxsize=1)
def _load_handlers() -> bool:
    from nvdd.handlers import load

    load()
    for handlers in _REGISTRY.values():
        handlers.sort(key=_place)
    return True


def _place(handler: Handler) -> tuple[int, int]:
    """By families, whatever imported their modules first; within one as they stand in its module."""
    from nvdd.handlers import FAMILIES

    family = FAMILIES.index(handler.family) if handler.family in FAMILIES else len(FAMILIES)
    return family, handler.number


def handler_table() -> list[Handler]:
    """The dispatch table: families in the order in which they are tried, and what each handles."""
    _load_handlers()
    return sorted((handler for handlers in _REGISTRY.values() for handler in handlers), key=_place)


def dispatch(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Runs ``func`` on arguments of which at least one is a ShardTensor.

    Raises:
        DistributedOpError: no handler takes the operation with these roles.
    """
    _load_handlers()
    call = Call(func, args, kwargs)
    check_numbers(call.name, args, kwargs)
    for handler in _REGISTRY.get(call.name, ()):
        if handler.predicate(call):
            return _fire(handler, call)
    for handler in _REGISTRY["*"]:
        if handler.predicate(call):
            return _fire(handler, call)
    if call.has(Role.SENDER, Role.RECEIVER, Role.EDGE_INDEX):
        to_atoms = any(s._role.is_index and s._of == "atoms" for s in call.shards)
        if call.meta.distributed and to_atoms and not call.inplace:  # to the model the values are global ids
            from nvdd.handlers.distributed import check_not_local, global_ids

            check_not_local(call)
            return func(*_map(args, global_ids), **dict(zip(kwargs, _map(kwargs.values(), global_ids), strict=True)))
        raise call.refuse(
            "the values of an edge index are rows of this rank's atoms and of its halo; a comparison or arithmetic "
            "with them has another outcome on each rank",
            "Use the index only to gather and scatter. There are no padding edges to filter out: the framework "
            "passes exactly the edges with r < cutoff",
        )
    if call.has(Role.ANCHOR):
        raise call.refuse(
            "positions, cell and shifts are stand-ins under ForceStrategy.EDGE_VECTORS; only positions[sender] - "
            "positions[receiver] + shifts @ cell means something",
            "Build on data.edge_vectors, or declare force_strategy=ForceStrategy.POSITIONS in the model's spec",
        )
    raise call.refuse("the operation may mix rows of atoms or edges, which are divided over ranks")


def _map(values: Any, change: Callable[[Any], Any]) -> list:
    """``change`` of each value, also inside lists and tuples."""
    return [type(v)(_map(v, change)) if type(v) in (list, tuple) else change(v) for v in values]


def _fire(handler: Handler, call: Call) -> Any:
    for trace in active_traces():
        trace.fired[call.name, f"{handler.family}: {handler.does}"] += 1
    return handler.run(call)


_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_MODELS = _HERE + "models" + os.sep  # wrappers are model code, wherever they are installed
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


def call_site() -> str:
    """The innermost frame that is neither torch's nor ours: the line of the model."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        # generated code (e3nn, torch.fx) has no file, its caller has
        if not path.startswith((_HERE, _TORCH, "<")) or path.startswith(_MODELS):
            return f"{path}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "an unknown place"
