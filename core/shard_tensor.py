"""`ShardTensor`: a tensor that knows what its rows stand for. What an op means for it is registered elsewhere."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from nvdd.errors import DistributedOpError
from nvdd.roles import Role, ShardMeta


class ShardTensor(Tensor):
    """A view of a plain tensor with a role and the partition that it belongs to (no copy).

    Model code never makes one: it gets index tensors and per-atom inputs that are ShardTensors, and torch calls
    `nvdd.dispatch` for each operation on them.
    """

    _role: Role
    _meta: ShardMeta
    _row_dim: int
    _entry: Role
    _of: str
    _sender_at: int
    _total: Tensor
    _system: Tensor
    _node: Any = None  # of `nvdd.deferred.Deferred`: how its rows are computed

    @staticmethod
    def wrap(
        tensor: Tensor,
        *,
        role: Role | None = None,
        meta: ShardMeta,
        spec: Any = None,
        config: Any = None,
        n_systems: int | None = None,
        **details: Any,
    ) -> ShardTensor:
        """Gives a tensor a role.

        Args:
            tensor: plain tensor, any shape; the result shares its memory and its place in the autograd graph.
            role: what it is; None for per-atom rows as the policy lays them out (OWNED or PADDED).
            meta: the partition.
            spec: an MLIPSpec whose policy and custom operations differ from those of ``meta``.
            config: accepted for symmetry with the other entry points; the ranks come from ``meta``.
            n_systems: number of systems if ``meta`` was made for another.
            details: see `promote`.
        """
        if spec is not None or n_systems is not None:
            policy = spec.distribution.policy if spec is not None else meta.policy
            meta = ShardMeta(
                meta.plan,
                n_systems or meta.n_systems,
                meta.n_phantom,
                policy,
                meta.more_plans,
                directory=meta.directory,
                custom_ops=_custom_ops(spec) if spec is not None else meta.custom_ops,
            )
        return promote(tensor, role or meta.atom_role, meta, **details)

    @property
    def role(self) -> Role:
        """What the tensor is."""
        return self._role

    @property
    def meta(self) -> ShardMeta:
        """The partition that it belongs to."""
        return self._meta

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return _dispatch(func, args, kwargs or {})

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]  # torch's stub has a keyword of no name
        return f"ShardTensor({self._role.name}, {to_local(self)!r})"

    def __deepcopy__(self, memo):
        return like(to_local(self).detach().clone(), self)


def promote(
    tensor: Tensor,
    role: Role,
    meta: ShardMeta,
    row_dim: int = 0,
    entry: Role = Role.EDGE,
    of: str = "atoms",
    sender_at: int = 1,
) -> ShardTensor:
    """`ShardTensor.wrap` for handlers.

    Args:
        tensor: plain tensor.
        role: what it is.
        meta: the partition.
        row_dim: dimension that counts the rows (atoms, edges, bonds).
        entry: for an index: what its entries stand for, and so what is read by it (EDGE for edge indices; the
            role of atoms or edges for SYSTEM_INDEX).
        of: for an index: the rows that it points to (``"atoms"``, ``"edges"``, ``"bonds"``); for a stand-in: what it
            stands for (``"positions"``, ``"cell"``, ``"shifts"``).
        sender_at: for EDGE_INDEX: where in the pair the sender is.
    """
    with torch._C.DisableTorchFunctionSubclass():
        out = _as_shard(tensor)
    out._role, out._meta, out._row_dim = role, meta, row_dim
    out._entry, out._of, out._sender_at = entry, of, sender_at
    return out


def like(tensor: Tensor, model: ShardTensor, row_dim: int | None = None, role: Role | None = None) -> ShardTensor:
    """``tensor`` with the role and partition of ``model``."""
    return promote(
        tensor,
        model._role if role is None else role,
        model._meta,
        model._row_dim if row_dim is None else row_dim,
        model._entry,
        model._of,
        model._sender_at,
    )


def adopt(tensor: Tensor, model: ShardTensor) -> Tensor:
    """Gives a plain tensor that a handler has written to the role of ``model``, so that whoever holds it sees it."""
    if type(tensor) is Tensor:
        base = tensor._base if tensor._is_view() else None
        if type(base) is Tensor:
            _adopt_base(base, tensor, model)
        tensor.__class__ = ShardTensor
        tensor.__dict__.update(model.__dict__)
    return tensor


def _adopt_base(base: Tensor, view: Tensor, model: ShardTensor) -> None:
    """What was written into a part of ``base`` is seen through ``base`` as well."""
    row_dim = model._row_dim
    if model._role.has_rows:
        size, step = view.shape[row_dim], view.stride(row_dim)
        same = [d for d in range(base.dim()) if base.shape[d] == size and (base.stride(d) == step or size == 1)]
        if not same:
            raise DistributedOpError(
                f"rows of atoms or edges are written into a part of a tensor of shape {tuple(base.shape)}, whose rows they "
                "are not: allocate that with torch.zeros_like of such rows, or put parts together with torch.cat"
            )
        row_dim = row_dim if row_dim in same else same[0]
    base.__class__ = ShardTensor
    base.__dict__.update(model.__dict__)
    base.__dict__["_row_dim"] = row_dim


def to_local(value: Any) -> Any:
    """The plain tensor behind ``value``, if it is a ShardTensor; anything else unchanged.

    In a wrapper: says that what follows is meant to be local (row-wise work on owned atoms).
    """
    if isinstance(value, ShardTensor):
        if value._node is not None:
            return cast(Any, value)._whole  # a recipe of nvdd.deferred
        with torch._C.DisableTorchFunctionSubclass():
            return _alias(value, Tensor) if _is_traced() else value.as_subclass(Tensor)
    return value


# How many modes of torch's see the operations of this thread. A trace knows tensors by their Python object, and
# as_subclass makes one that it has never seen.
_is_traced = torch._C._len_torch_dispatch_stack


def is_traced() -> bool:
    """Whether operations are being written down, to be run on other values later: values must not be looked at."""
    return torch.compiler.is_compiling() or bool(_is_traced())  # in the order that torch.compile can follow


def _as_shard(tensor: Tensor) -> ShardTensor:
    return _alias(tensor, ShardTensor) if _is_traced() else tensor.as_subclass(ShardTensor)


def _alias(tensor: Tensor, kind: type) -> Any:
    out = torch.ops.aten.alias(tensor)
    out.__class__ = kind
    return out


def _custom_ops(spec: Any) -> dict[str, list[Any]]:
    from nvdd.adapters.op import InstalledOp, OpAdapter  # which imports this module

    table: dict[str, list[Any]] = {}
    for adapter in spec.all_adapters:
        if isinstance(adapter, OpAdapter):
            InstalledOp(adapter, table)
    return table


def _dispatch(func, args, kwargs):
    from nvdd.dispatch import dispatch

    globals()["_dispatch"] = dispatch  # resolved once: dispatch imports this module
    return dispatch(func, args, kwargs)
