"""Questions about a tensor that don't depend on what its rows hold, casts and copies, allocation."""

from __future__ import annotations

import torch
from torch import Tensor

from nvdd.dispatch import Call, register
from nvdd.local_numbers import LocalInt
from nvdd.roles import Role
from nvdd.shard_tensor import ShardTensor, like, promote, to_local

_ATTRIBUTES = (
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad", "grad_fn", "is_leaf", "is_cuda", "is_cpu",
    "is_mps", "is_xpu", "is_sparse", "is_quantized", "is_meta", "is_nested", "names", "itemsize", "nbytes", "output_nr",
    "_version", "_backward_hooks", "_post_accumulate_grad_hooks", "_base", "is_mkldnn", "is_sparse_csr", "is_mtia", "name", "retains_grad",
)  # fmt: skip
_SETTABLE = ("requires_grad", "grad", "_backward_hooks", "_post_accumulate_grad_hooks")  # by autograd, too
_METHODS = (
    "size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "is_contiguous",
    "is_floating_point", "is_complex", "is_signed", "is_inference", "get_device", "data_ptr", "is_same_size",
    "result_type", "has_names", "untyped_storage", "_is_view", "register_hook", "retain_grad", "is_conj", "is_neg",
    "__len__", "__hash__", "__format__", "__repr__", "backward",
)  # fmt: skip


def _rows_at(shard: ShardTensor) -> int | None:
    """The dimension that counts rows of this rank."""
    if shard._role.has_rows or shard._role.is_index:
        return shard._row_dim
    return 0 if shard._role is Role.ANCHOR and shard._of != "cell" else None


@register(
    "get:shape", "size", when="rows of atoms or edges", does="this rank's number",
    predicate=lambda call: call.args[0] is call.shards[0] and _rows_at(call.shards[0]) is not None,
)  # fmt: skip
def shape(call: Call):
    found, at, n_dims = call.run(), _rows_at(call.shards[0]), to_local(call.shards[0]).dim()
    if isinstance(found, int):
        return LocalInt(found) if call.arg(1, "dim") in (at, at - n_dims) else found
    return torch.Size([*found[:at], LocalInt(found[at]), *found[at + 1 :]]) if n_dims else found


@register(
    "numel", "nelement", when="rows of atoms or edges", does="this rank's number",
    predicate=lambda call: call.args[0] is call.shards[0] and _rows_at(call.shards[0]) is not None,
)  # fmt: skip
def number(call: Call):
    return LocalInt(call.run())


@register(
    *(f"get:{a}" for a in _ATTRIBUTES), *_METHODS, *(f"set:{a}" for a in _SETTABLE),
    when="any role", does="answered by this rank's tensor", predicate=lambda call: True,
)  # fmt: skip
def local_answer(call: Call):
    return call.run()


@register(
    "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor",
    when="any role", does="a plain tensor of this rank", predicate=lambda call: True,
)  # fmt: skip
def new_plain(call: Call):
    return call.run()


@register(
    "item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__", "is_nonzero",
    when="SYSTEM", does="the same Python value on every rank",
    predicate=lambda call: all(s._role is Role.SYSTEM for s in call.shards),
)  # fmt: skip
def replicated_value(call: Call):
    return call.run()


@register(
    "to", "type", "type_as", "double", "float", "half", "bfloat16", "int", "long", "short", "bool", "contiguous",
    "clone", "detach", "requires_grad", "alias", "cpu", "cuda", "get:data",
    when="any role, as first argument", does="keeps role and partition",
    predicate=lambda call: bool(call.args) and call.args[0] is call.shards[0] and not call.has(Role.COUNT),
)  # fmt: skip
def keep(call: Call):
    # `.data` would hide writes from the version by which fetched rows are known to be current
    out = to_local(call.args[0]).detach() if call.name == "get:data" else call.run()
    return like(out, call.args[0]) if isinstance(out, Tensor) and out is not call.args[0] else out


@register(
    "to", "type_as", when="a plain tensor, to the type and device of another one", does="still a plain tensor",
    predicate=lambda call: bool(call.args) and not isinstance(call.args[0], ShardTensor),
)  # fmt: skip
def cast_plain(call: Call):
    return call.run()


@register(
    "zeros_like", "ones_like", "empty_like", "full_like",
    when="any role but an edge index, as first argument", does="keeps role and partition",
    predicate=lambda call: call.args[0] is call.shards[0] and not call.shards[0]._role.is_index,
)  # fmt: skip
def allocate_like(call: Call):
    model = call.shards[0]
    role = model._role
    if role is Role.COUNT:
        return promote(call.run(), Role.SYSTEM, model._meta)
    if role is Role.ANCHOR:  # zeros in the shape of a stand-in are ordinary zeros
        role = {"positions": model._meta.atom_role, "cell": Role.SYSTEM, "shifts": Role.EDGE}[model._of]
    elif role is Role.SYSTEM_INDEX:
        role = model._entry
    return like(call.run(), model, role=role)
