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
from nvdd.handlers import rows
from nvdd.handlers.carriers import carriers, has_carrier, one_kind, with_broadcast
from nvdd.roles import Role
from nvdd.shard_tensor import ShardTensor, promote

# elementwise without the tag in every version of torch
_MORE = {
    "where", "masked_fill", "broadcast_tensors", "copy", "fill", "zero", "relu6", "softplus", "silu", "gelu", "mish",
    "selu", "celu", "elu", "leaky_relu", "hardtanh", "logsigmoid", "softsign", "tanhshrink", "threshold", "positive",
    "clip", "nan_to_num", "float_power", "square", "rsqrt", "isnan", "isinf", "isfinite", "isclose", "real", "imag",
    "conj",
}  # fmt: skip


@cache
def is_pointwise(name: str) -> bool:
    """Whether torch calls the operation pointwise."""
    packet = getattr(torch.ops.aten, name, None) if name not in _MORE else None
    return name in _MORE or (
        packet is not None and any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads())
    )


@register(
    "*", when="elementwise, at least one operand with rows", does="row by row; per-system operands are broadcast",
    predicate=lambda call: is_pointwise(call.name) and has_carrier(call),
)  # fmt: skip
def pointwise(call: Call):
    role, having = one_kind(call), carriers(call)
    first = call.args[0]
    if call.inplace and isinstance(first, ShardTensor) and first._role is Role.SYSTEM:
        raise call.refuse("a per-system value is changed in place by rows of atoms or edges")
    args, kwargs = with_broadcast(call)
    out = call.run(*args, **kwargs)
    shape = (out[0] if isinstance(out, tuple) else out).shape
    places = {rows.after_broadcast(c.dim(), c._row_dim, len(shape)) for c in having}
    place = places.pop()
    if places or shape[place] != having[0].shape[having[0]._row_dim]:
        raise call.refuse("operands whose rows are in different dimensions give every pair of rows")
    if call.inplace and isinstance(first, ShardTensor):
        return first
    wrap = lambda t: promote(t, role, having[0]._meta, place)
    return tuple(map(wrap, out)) if isinstance(out, tuple) else wrap(out)


@register(
    "*", when="SYSTEM with plain tensors only", does="the same on every rank",
    predicate=lambda call: bool(call.shards) and all(s._role is Role.SYSTEM for s in call.shards),
)  # fmt: skip
def replicated(call: Call):
    _refuse_lost_roles(call)
    out = call.run()
    if call.inplace and isinstance(call.args[0], ShardTensor):
        return call.args[0]
    wrap = lambda t: promote(t, Role.SYSTEM, call.meta) if isinstance(t, Tensor) else t
    return type(out)(map(wrap, out)) if type(out) in (tuple, list) else wrap(out)


_ASK = "Read it by atom first: value[data.batch]"


def _refuse_lost_roles(call: Call) -> None:
    """A plain tensor that depends on positions may be rows of this rank whose role got lost in scripted code."""
    system = call.shards[0]

    def check(value: Any) -> None:
        if isinstance(value, (list, tuple)):
            for v in value:
                check(v)
        elif isinstance(value, Tensor) and not isinstance(value, ShardTensor):
            if value.requires_grad and value.grad_fn is not None and system.requires_grad:
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
