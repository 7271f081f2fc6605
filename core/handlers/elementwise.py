"""Elementwise operations, recognised by torch's own tag: row by row.

Where a per-system value meets rows of atoms or edges it is broadcast, and the adjoint sums its gradient over
ranks. Per-system values among themselves are the same on every rank, whatever is done with them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from nvdd.dispatch import Call, register
from nvdd.exchange import shared
from nvdd.handlers import rows
from nvdd.handlers.carriers import carriers, has_carrier, of_parameters, one_kind, with_broadcast
from nvdd.roles import Role
from nvdd.shard_tensor import ShardTensor, adopt, promote, to_local

# elementwise without the tag in every version of torch
_MORE = {
    "where", "masked_fill", "broadcast_tensors", "copy", "fill", "zero", "relu6", "softplus", "silu", "gelu", "mish",
    "selu", "celu", "elu", "leaky_relu", "hardtanh", "logsigmoid", "softsign", "tanhshrink", "threshold", "positive",
    "clip", "nan_to_num", "float_power", "square", "rsqrt", "isnan", "isinf", "isfinite", "isclose", "real", "imag",
    "conj", "hardswish", "log_sigmoid", "prelu", "floor_divide", "lshift", "rshift",
}  # fmt: skip
_NOT = {"equal"}  # with the tag, but one answer for all elements


@cache
def is_pointwise(name: str) -> bool:
    """Whether torch calls the operation pointwise."""
    packet = getattr(torch.ops.aten, name, None) if name not in _MORE | _NOT else None
    return name in _MORE or (
        isinstance(packet, torch._ops.OpOverloadPacket)
        and any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads())
    )


@register(
    "*", when="elementwise, at least one operand with rows", does="row by row; per-system operands are broadcast",
    predicate=lambda call: is_pointwise(call.name) and has_carrier(call),
)  # fmt: skip
def pointwise(call: Call):
    role, having = one_kind(call), carriers(call)
    first = call.args[0] if call.args else None
    if call.inplace and isinstance(first, ShardTensor) and first._role is Role.SYSTEM:
        raise call.refuse("a per-system value is changed in place by rows of atoms or edges")
    if call.name == "where" and len(call.args) + len(call.kwargs) == 1:
        raise call.refuse("the places where a condition holds are places on this rank")
    if call.name == "rrelu" and call.arg(3, "training", False):
        raise call.refuse("random numbers would depend on how atoms are divided", "Call model.eval()")
    args, kwargs = with_broadcast(call)
    out = call.run(*args, **kwargs)
    if out is NotImplemented:  # x == None and the like
        return out
    shape = (out[0] if isinstance(out, (tuple, list)) else out).shape
    places = {rows.after_broadcast(c.dim(), c._row_dim, len(shape)) for c in having}
    place = places.pop()
    if places or shape[place] != having[0].shape[having[0]._row_dim]:
        raise call.refuse("operands whose rows are in different dimensions give every pair of rows")
    if call.inplace and isinstance(first, ShardTensor):
        return first
    wrap = lambda t: promote(t, role, having[0]._meta, place)
    written = first if call.inplace else call.kwargs.get("out")
    if isinstance(written, Tensor):
        return adopt(written, wrap(out))
    return type(out)(tuple(map(wrap, out))) if isinstance(out, (tuple, list)) else wrap(out)


@register(
    "*", when="SYSTEM with plain tensors only", does="the same on every rank",
    predicate=lambda call: bool(call.shards) and all(s._role is Role.SYSTEM for s in call.shards),
)  # fmt: skip
def replicated(call: Call):
    _refuse_lost_roles(call)
    _refuse_rows_of_one_rank(call)
    _refuse_plain_target(call)
    out = call.run(*_shared(call.args, call), **{k: _shared(v, call) for k, v in call.kwargs.items()})
    if call.inplace and isinstance(call.args[0], ShardTensor):
        return call.args[0]
    wrap = lambda t: promote(t, Role.SYSTEM, call.meta) if isinstance(t, Tensor) else t
    return type(out)(tuple(map(wrap, out))) if isinstance(out, (tuple, list)) else wrap(out)


def _refuse_plain_target(call: Call) -> None:
    """A tensor that is not known to be per-system would lose what is written into it: its gradient, a share."""
    target = call.args[0] if call.inplace and call.args else call.kwargs.get("out")
    plain = isinstance(target, Tensor) and not isinstance(target, ShardTensor)
    if plain and torch.is_grad_enabled() and any(s.requires_grad for s in call.shards):
        raise call.refuse(
            "a per-system value is written into a tensor that is not known to be one",
            "Allocate it with torch.zeros_like(value), put values together with torch.stack or cat, or compute out of place",
        )


def _shared(value: Any, call: Call) -> Any:
    """The arguments as plain tensors, parameters prepared for use with what all ranks have alike."""
    if isinstance(value, (tuple, list)):
        return type(value)(tuple(_shared(v, call) for v in value))
    if type(value) is Tensor or isinstance(value, torch.nn.Parameter):
        in_place = call.inplace and value is call.args[0]
        return shared(value, call.meta.comm) if value.requires_grad and not in_place else value
    return to_local(value)


_ASK = "Read it by atom first: value[data.batch]"
# how the argument that says how often is called, and its value for a dimension that stays
_REPEATS = {"expand": ("size", -1), "broadcast_to": ("size", -1), "repeat": ("repeats", 1), "tile": ("dims", 1)}


def _grows_in_front(call: Call, system: Tensor) -> bool:
    """Whether a per-system value is repeated along its systems, or along new dimensions before them.

    Judged by what is asked for: an outcome that has as many rows as there are systems may be a coincidence.
    """
    if call.name == "repeat_interleave":
        dim = call.arg(2, "dim")
        return dim is None or system.dim() == 0 or rows.positive(dim, system.dim()) == 0
    if call.name == "expand_as":
        other = call.arg(1, "other")
        if isinstance(other, ShardTensor):  # per-system as well
            return False
        sizes, stays = tuple(other.shape), -1
    else:
        name, stays = _REPEATS[call.name]
        sizes = call.arg(1, name)
        sizes = tuple(sizes) if isinstance(sizes, (tuple, list)) else call.args[1:]
    if len(sizes) < system.dim():  # tile leaves the first dimensions alone
        return False
    # expand to 1 row where there is 1 may mean one system or one atom
    kept = {stays} if stays == 1 or system.shape[:1] == (1,) else {stays, *system.shape[:1]}
    return len(sizes) > system.dim() or system.dim() == 0 or sizes[0] not in kept


def _refuse_rows_of_one_rank(call: Call) -> None:
    """Per-system values repeated to the number of this rank's atoms or edges would be no per-system values."""
    system, item = call.args[0] if call.args else None, call.arg(1, "index")
    if not isinstance(system, ShardTensor):
        return
    if call.name in _REPEATS or call.name in ("expand_as", "repeat_interleave"):
        if _grows_in_front(call, system):
            raise call.refuse(
                "a per-system value is repeated to rows of one rank", _ASK + ", or write -1 for what stays"
            )
    elif call.name in ("getitem", "index_select", "gather", "take_along_dim"):
        if call.name != "getitem":
            item = call.arg(2, "index") if call.name != "take_along_dim" else call.arg(1, "indices")
        item = item[0] if isinstance(item, tuple) and item else item
        if isinstance(item, Tensor) and item.dim() and not isinstance(item, ShardTensor):
            raise call.refuse("a per-system value is read by rows of one rank", _ASK)


def _refuse_lost_roles(call: Call) -> None:
    """A plain tensor that depends on positions may be rows of this rank whose role got lost in scripted code."""
    system = call.shards[0]

    def check(value: Any) -> None:
        if isinstance(value, (list, tuple)):
            for v in value:
                check(v)
        elif isinstance(value, Tensor) and not isinstance(value, ShardTensor):
            if value.requires_grad and system.requires_grad and not of_parameters(value):
                raise call.refuse(
                    "a per-system value meets a tensor of which it is not known whether it is per atom, per edge or "
                    "the same on every rank",
                    _ASK,
                )
            aligned = value.dim() == 0 or value.dim() < system.dim() or value.shape[0] in (1, *system.shape[:1])
            if not aligned and is_pointwise(call.name):
                raise call.refuse(
                    f"a per-system value {tuple(system.shape)} meets a plain tensor {tuple(value.shape)}: rows that "
                    "lost their role?",
                    _ASK,
                )

    check(call.args)
    check(tuple(call.kwargs.values()))
