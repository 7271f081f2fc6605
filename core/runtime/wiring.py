"""What one block of a pipeline reads of another: from rows of one layout to those of another, with its gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from nvdd.data import Batch
from nvdd.errors import DistributedOpError
from nvdd.exchange import fetch, sum_over_ranks
from nvdd.roles import Role, ShardMeta
from nvdd.shard_tensor import promote, to_local
from nvdd.specs import MLIPSpec, OutputKind, Reduce
from nvdd.wires import Wire

_ONE_NUMBER = ("charges", "initial_charges")  # per-atom inputs whose shape is known: (n_atoms,)


class Feed:
    """A value on its way through a `Wire`.

    Args:
        wire: whose.
        raw: what the block ``wire.source`` returned.
        meta, spec: of that block.
        name: of that block, for messages.
        differentiated: whether derivatives are asked for.
        leaf: what that block is differentiated by.

    Attributes:
        value: (n_owned, ...) of a per-atom output, (n_systems, ...) of a per-system one; plain, and where gradients of
            this wire end.
        origin: the same as the source has it, to go on from.

    Raises:
        DistributedOpError: the output is not there, or not of the shape or kind that it can be read in; or the forces
            would lack its part.
    """

    def __init__(
        self,
        wire: Wire,
        raw: Mapping[str, Any],
        meta: ShardMeta,
        spec: MLIPSpec,
        name: str,
        differentiated: bool,
        leaf: Any,
    ) -> None:
        self.wire = wire
        label = f"{wire.output!r} of {name}, which block {wire.target} reads as {wire.input!r},"
        value = raw.get(wire.output)
        if not isinstance(value, Tensor):
            raise DistributedOpError(f"{label} was not returned; it returned {sorted(raw)}")
        declared = spec.outputs[wire.output]
        self.per_atom = declared.kind is OutputKind.PER_NODE
        origin = to_local(value)
        if differentiated and not wire.fixed:
            origin = leaf.anchored(origin)
        if self.per_atom:
            _check_shape(label, wire, origin)
            origin = origin[: meta.n_owned]
        elif origin.shape[:1] != (meta.n_systems,):
            raise DistributedOpError(f"{label} has shape {tuple(origin.shape)} for {meta.n_systems} systems")
        if declared.reduce is Reduce.ALL_REDUCE:
            origin = sum_over_ranks(origin, meta.comm, f"wire of {wire.output}")
        if differentiated and not wire.fixed and not origin.requires_grad:
            raise DistributedOpError(
                f"{label} does not depend on the geometry as far as autograd knows (it was computed under no_grad, or is "
                "detached), so forces would lack its part; if it is meant to be fixed, wire it as (block, output, 'fixed')"
            )
        self.origin = origin.detach() if wire.fixed else origin
        # another tensor, so that gradients by it stop here
        self.value = self.origin.view_as(self.origin)

    def give(self, batch: Batch, meta: ShardMeta, dtype: Any) -> None:
        """Puts the value among the inputs of the block that reads it, whose partition is ``meta``."""
        value = self.value.to(dtype) if self.value.is_floating_point() else self.value
        if not self.per_atom:
            batch.system_fields[self.wire.input] = promote(value, Role.SYSTEM, meta)
            return
        if not meta.fetches:
            value = fetch(value, meta.plan, f"wire of {self.wire.output}")
        batch.node_fields[self.wire.input] = promote(value, meta.atom_role, meta)


def _check_shape(label: str, wire: Wire, value: Tensor) -> None:
    one_number = wire.input in _ONE_NUMBER
    if (one_number and value.dim() != 1) or (value.dim() == 2 and value.shape[1] == 1):
        raise DistributedOpError(
            f"{label} has shape {tuple(value.shape)}; one number for each atom has the shape (n_atoms,): squeeze it there"
        )
