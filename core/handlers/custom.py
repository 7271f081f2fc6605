"""Custom operations (``torch.library``): called as their `OpAdapter` says, refused without one.

The kernel behind such an operation may read and write rows as it likes, so what it does is declared: which arguments
it reads neighbours of, and what its results are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nvdd.adapters.op import InstalledOp, find
from nvdd.adapters.transforms import (
    AllReduceSum,
    AsIs,
    GatherInputs,
    GatherInputsFull,
    ScatterOutputs,
    SliceOutputsOwned,
    SliceOwned,
)
from nvdd.dispatch import Call, register
from nvdd.exchange import broadcast, correct, fold, sum_over_ranks
from nvdd.handlers.carriers import kind, to_rows
from nvdd.handlers.gather import padded
from nvdd.roles import Role, ShardMeta
from nvdd.shard_tensor import ShardTensor, promote, to_local

_TORCHS_OWN = ("aten", "prim", "prims", "quantized", "_quantized", "profiler", "inductor", "higher_order")


def _is_custom(call: Call) -> bool:
    return "::" in call.name and call.name.split("::")[0] not in _TORCHS_OWN


def _adapter(call: Call) -> InstalledOp | None:
    op = call.func
    if isinstance(op, torch._ops.OpOverloadPacket):
        names = [call.name] if len(op.overloads()) == 1 else []
    else:
        names = [op.name().removesuffix(".default")]
    return next((found for n in names if (found := find(n, call.meta.custom_ops)) is not None), None)


@register(
    "*", when="a custom operation with an OpAdapter", does="transforms arguments, runs the kernel, transforms results",
    predicate=lambda call: _is_custom(call) and _adapter(call) is not None,
)  # fmt: skip
def adapted(call: Call):
    installed = _adapter(call)
    installed.calls += 1
    return _AdaptedCall(call, installed).run()


@register(
    "*", when="a custom operation without an OpAdapter, with rows or indices", does="refused",
    predicate=lambda call: _is_custom(call) and not all(s._role is Role.SYSTEM for s in call.shards),
)  # fmt: skip
def unknown(call: Call):
    raise call.refuse(
        "what the kernel behind a custom operation does with rows can't be seen, and the model's spec has no OpAdapter for it",
        f"Declare it: DistributionSpec(custom_ops=(OpAdapter({call.name!r}, arg_transforms=..., output_transforms=...),))",
    )


class _AdaptedCall:
    """One call of one operation."""

    def __init__(self, call: Call, installed: InstalledOp) -> None:
        self.call, self.adapter, self.meta = call, installed.adapter, call.meta
        self.op = self.adapter.op
        self.transforms = self.adapter.arg_transforms
        self.full = any(isinstance(t, GatherInputsFull) for t in self.transforms.values())

    def run(self) -> Any:
        if any(isinstance(t, AllReduceSum) for t in self.adapter.output_transforms.values()):
            self._check_counted_once()
        self._check_declared()
        args, kwargs = [], {}
        for position, argument in enumerate(self.op._schema.arguments):
            if position < len(self.call.args):
                value = self.call.args[position]
            elif argument.name in self.call.kwargs:
                value = self.call.kwargs[argument.name]
            else:
                continue
            value = self._argument(position, argument.name, value)
            if position < len(self.call.args):
                args.append(value)
            else:
                kwargs[argument.name] = value
        out = self.call.run(*args, **kwargs)
        if isinstance(out, (tuple, list)):
            return tuple(self._result(k, value) for k, value in enumerate(out))
        return self._result(0, out)

    # -- arguments

    def _argument(self, position: int, name: str, value: Any) -> Any:
        transform = self.transforms.get(position)
        if isinstance(value, (tuple, list)):
            return type(value)(self._untransformed(name, v) for v in value)
        if transform is None or value is None:
            return self._untransformed(name, value)
        if not isinstance(value, Tensor):
            raise self._refuse(name, f"it has the transform {type(transform).__name__}, but {value!r} is given for it")
        if isinstance(transform, AsIs):
            return to_local(value)
        return {
            GatherInputs: self._gather,
            GatherInputsFull: self._gather_full,
            SliceOwned: self._slice,
        }[type(transform)](name, value)

    def _untransformed(self, name: str, value: Any) -> Any:
        if not isinstance(value, ShardTensor):
            return value
        role, meta = value._role, self.meta
        if role is Role.ANCHOR:
            raise self._refuse(
                name,
                "positions, cell and shifts are stand-ins under ForceStrategy.EDGE_VECTORS",
                "Give the kernel data.edge_vectors, or declare force_strategy=ForceStrategy.POSITIONS in the model's spec",
            )
        if role is Role.COUNT:
            raise self._refuse(
                name,
                "numbers of atoms are this rank's where they lay out memory and everybody's where they are computed with",
                "Give to_local(x) for this rank's, or x * 1 for everybody's",
            )
        if role is Role.SYSTEM:
            return to_rows(to_local(value), meta, f"{self.call.name} with rows") if self._has_rows else to_local(value)
        if role.is_index and self.full and value._of == "atoms":
            ids = meta.atom_directory.ids
            return ids.index_select(0, to_local(value).reshape(-1)).view(value.shape)
        if kind(value) is Role.OWNED and self._reads_senders and not self.full:
            raise self._refuse(
                name,
                "it has owned rows only, and the kernel gets senders, which are rows of other ranks too",
                f"Declare OpAdapter(..., arg_transforms={{{self._position(name)}: GatherInputs()}}), or AsIs() if the kernel "
                "reads it by receivers alone",
            )
        return to_local(value)

    def _check_counted_once(self) -> None:
        """Sums over atoms must run over each atom once; sums over edges do, for each edge is on one rank."""
        if any(s._role.is_index or s._role is Role.EDGE for s in self.call.shards):
            return
        for position, argument in enumerate(self.op._schema.arguments):
            value = self.call.arg(position, argument.name)
            atoms = isinstance(value, ShardTensor) and kind(value).is_atoms
            if atoms and not isinstance(self.transforms.get(position), (SliceOwned, AsIs)):
                raise self._refuse(
                    argument.name,
                    "AllReduceSum sums what the kernel makes of rows of atoms, among which halo rows, and the phantom atom "
                    "of a rank without atoms, would count too",
                    f"Declare OpAdapter(..., arg_transforms={{{position}: SliceOwned()}})",
                )

    @property
    def _has_rows(self) -> bool:
        return any(s._role is not Role.SYSTEM for s in self.call.shards)

    @property
    def _reads_senders(self) -> bool:
        return any(s._role in (Role.SENDER, Role.EDGE_INDEX) and s._of == "atoms" for s in self.call.shards)

    def _position(self, name: str) -> int:
        return [a.name for a in self.op._schema.arguments].index(name)

    def _rows(self, name: str, value: Tensor, what: str) -> None:
        """Checks that ``value`` has the policy's rows of atoms, by its role or, where that is lost, by their number."""
        if isinstance(value, ShardTensor):
            if kind(value) is not self.meta.atom_role or value._row_dim != 0:
                raise self._refuse(name, f"{what} takes rows of atoms, and this is: {value._role.value}")
        elif value.shape[:1] != (self.meta.n_rows,):
            raise self._refuse(
                name,
                f"{what} takes the {self.meta.n_rows} rows of atoms of this rank, and this has shape {tuple(value.shape)}",
            )

    def _gather(self, name: str, value: Tensor) -> Tensor:
        if not self.meta.fetches:
            raise self._refuse(
                name,
                "GatherInputs would pad rows twice: under halo_read per-atom tensors have their halo rows already",
                "Leave the transform out",
            )
        self._rows(name, value, "GatherInputs")
        return to_local(padded(value, self.meta, "atoms", self.call))

    def _gather_full(self, name: str, value: Tensor) -> Tensor:
        self._rows(name, value, "GatherInputsFull")
        self._check_crosses(name)
        meta, directory = self.meta, self.meta.atom_directory
        mine = to_local(value)[: meta.n_counted]
        table = mine.new_zeros(len(directory.owner) + 1, *mine.shape[1:])
        table = table.index_copy(0, directory.ids[: meta.n_counted], mine)
        site = f"{self.call.name}, all rows of {name}"
        table = sum_over_ranks(table, meta.comm, site)
        # each rank computes with the whole table: its gradients are shares, which the adjoint sums
        return broadcast(table, meta.comm, site) if table.requires_grad else table

    def _slice(self, name: str, value: Tensor) -> Tensor:
        self._rows(name, value, "SliceOwned")
        return to_local(value)[: self.meta.n_counted]

    def _check_crosses(self, what: str) -> None:
        if not self.meta.reads_remote:
            raise self._refuse(
                what,
                "LocalStoragePolicy lets nothing cross ranks",
                "Use a policy that reads remote rows, as SPEC_MPNN_HALO's",
            )

    # -- results

    def _check_declared(self) -> None:
        """Before the kernel runs: without declarations it may read rows that are not there."""
        for position in range(len(self.op._schema.returns)):
            if position not in self.adapter.output_transforms and position not in self.adapter.output_roles:
                raise self._refuse(
                    f"result {position}",
                    "it has neither a transform nor a role, so it is unknown what its rows are",
                    f"Declare OpAdapter(..., output_roles={{{position}: Role.EDGE}}), Role.OWNED or Role.SYSTEM, or a transform",
                )

    def _result(self, position: int, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        transform, role, meta = (
            self.adapter.output_transforms.get(position),
            self.adapter.output_roles.get(position),
            self.meta,
        )
        site = f"{self.call.name}, result {position}"
        if isinstance(transform, ScatterOutputs):
            self._check_crosses(f"result {position}")
            self._check_length(position, value, (meta.n_padded,), "ScatterOutputs takes owned and halo rows")
            value = fold(value, meta.plan, site) if meta.fetches else correct(value, meta.plan, site)
            return promote(value, meta.atom_role, meta)
        if isinstance(transform, SliceOutputsOwned):
            return promote(self._owned(position, value), Role.OWNED, meta)
        if transform is not None:
            return promote(sum_over_ranks(value, meta.comm, site), Role.SYSTEM, meta)
        if role is Role.OWNED:
            return promote(self._atoms(position, value), meta.atom_role, meta)
        if role is Role.EDGE:
            self._check_length(position, value, self._edges(), "Role.EDGE is for rows of edges")
        return promote(value, role, meta)

    def _owned(self, position: int, value: Tensor) -> Tensor:
        """Owned rows of a result over owned and halo rows, or over all atoms."""
        meta = self.meta
        if not meta.fetches:
            raise self._refuse(
                f"result {position}",
                "SliceOutputsOwned would take away halo rows, which per-atom tensors keep under halo_read",
                "Use ScatterOutputs, or a policy with halo_fetch",
            )
        if not self.full:
            self._check_length(
                position, value, (meta.n_padded, meta.n_owned), "SliceOutputsOwned takes owned and halo rows"
            )
            return value[: meta.n_owned]
        n_global = len(meta.atom_directory.owner)
        self._check_length(
            position, value, (n_global + 1, n_global), "after GatherInputsFull, results have all atoms' rows"
        )
        return _with_phantom(value.index_select(0, meta.atom_directory.ids[: meta.n_counted]), meta)

    def _atoms(self, position: int, value: Tensor) -> Tensor:
        meta = self.meta
        if any(isinstance(t, SliceOwned) for t in self.transforms.values()) and meta.fetches:
            self._check_length(
                position, value, (meta.n_counted,), "after SliceOwned, results have a row for each owned atom"
            )
            return _with_phantom(value, meta)
        self._check_length(position, value, (meta.n_rows,), "Role.OWNED is for this rank's rows of atoms")
        return value

    def _edges(self) -> Sequence[int]:
        rows = {s.shape[s._row_dim] for s in self.call.shards if s._role is Role.EDGE}
        rows |= {s.shape[s._row_dim] for s in self.call.shards if s._role.is_index and s._entry is Role.EDGE}
        if len(rows) != 1:
            raise self._refuse("the results", "none of its arguments says how many edges there are")
        return tuple(rows)

    def _check_length(self, position: int, value: Tensor, rows: Sequence[int], what: str) -> None:
        if value.shape[:1] not in [(n,) for n in rows]:
            words = " or ".join(map(str, dict.fromkeys(rows)))
            raise self._refuse(
                f"result {position}",
                f"{what}, {words} here, and this has shape {tuple(value.shape)}",
                "Let the kernel allocate it with the rows of a transformed argument, or declare another transform",
            )

    def _refuse(self, what: str, why: str, remedy: str = "See the transforms in docs/your-own-model.md"):
        return self.call.refuse(f"{what}: {why}", remedy)


def _with_phantom(rows: Tensor, meta: ShardMeta) -> Tensor:
    """A row of zeros for the phantom of a rank that owns nothing."""
    return torch.cat([rows, rows.new_zeros(meta.n_phantom, *rows.shape[1:])]) if meta.n_phantom else rows
