"""Running code on plain tensors and giving its results the role of its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from nvdd.dispatch import Call
from nvdd.handlers.carriers import carriers, one_kind, with_broadcast
from nvdd.handlers.script import name_of
from nvdd.roles import Role
from nvdd.shard_tensor import ShardTensor, promote, to_local


def marshalled(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """``original`` on plain tensors; its results are rows of what the arguments are rows of.

    Raises:
        DistributedOpError: an argument is an index, or a result has other rows than the arguments.
    """
    call = Call(original, args, kwargs)
    if not call.shards:
        return original(*args, **kwargs)
    call.name = name_of(inspect.unwrap(original))
    if call.has(Role.SENDER, Role.RECEIVER, Role.EDGE_INDEX, Role.SYSTEM_INDEX, Role.ANCHOR, Role.COUNT):
        raise call.refuse(
            "a marshalled function gets an index or a stand-in, and what it does with it can't be seen",
            "Use JitAdapter(mode='eager'), whose operations nvdd sees one by one",
        )
    if not carriers(call):
        return _replicated(call)
    role, first = one_kind(call), carriers(call)[0]
    if any(c._row_dim != 0 for c in carriers(call)):
        raise call.refuse("a marshalled function works on rows, and they are not the first dimension")
    args, kwargs = with_broadcast(call)

    def with_role(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(with_role(v) for v in value)
        if not isinstance(value, Tensor):
            return value
        if value.shape[:1] != first.shape[:1]:
            raise call.refuse(
                f"a marshalled function has given a result of shape {tuple(value.shape)} for {first.shape[0]} rows",
                "It does not work row by row: use JitAdapter(mode='eager')",
            )
        return promote(value, role, first._meta)

    return with_role(original(*args, **kwargs))


def _replicated(call: Call) -> Any:
    """Of per-system values alone: the same on every rank."""
    if any(isinstance(a, Tensor) and not isinstance(a, ShardTensor) and a.requires_grad for a in call.args):
        raise call.refuse(
            "a marshalled function of per-system values and of parameters", "Use JitAdapter(mode='eager')"
        )
    plain = lambda v: type(v)(map(plain, v)) if isinstance(v, (tuple, list)) else to_local(v)
    wrap = lambda v: type(v)(map(wrap, v)) if isinstance(v, (tuple, list)) else _system(v, call)
    return wrap(call.func(*map(plain, call.args), **{k: plain(v) for k, v in call.kwargs.items()}))


def _system(value: Any, call: Call) -> Any:
    return promote(value, Role.SYSTEM, call.meta) if isinstance(value, Tensor) else value
