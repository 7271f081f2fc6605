"""`OpAdapter`: how a registered custom operation is called with rows of a partition."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from nvdd.adapters.base import Adapter, Installed, caller
from nvdd.adapters.transforms import ArgTransform, OutputTransform
from nvdd.context import DDContext
from nvdd.errors import InputError
from nvdd.roles import Role

# what the results of an operation can be declared to be
OUTPUT_ROLES = (Role.OWNED, Role.EDGE, Role.SYSTEM)


class OpAdapter(Adapter):
    """Declares what a custom operation's arguments and results are::

        OpAdapter(
            op=torch.ops.mymodel.gather_multiply_scatter.default,
            arg_transforms={0: GatherInputs()},          # features: the kernel reads rows of neighbours
            output_transforms={0: SliceOutputsOwned()},  # sums over the edges into owned atoms are complete
        )

    The kernel runs on plain tensors of one rank. Its registered autograd is used as it is, twice if it can be
    differentiated twice; the transforms bring their adjoints.

    Args:
        op: ``torch.ops.<namespace>.<op>.default``, the function that ``torch.library.custom_op`` gives, or
            ``"namespace::op"``.
        arg_transforms: position of an argument in the op's schema -> `GatherInputs`, `GatherInputsFull`,
            `SliceOwned` or `AsIs`. Other arguments are given as they are.
        output_transforms: position of a result -> `ScatterOutputs`, `AllReduceSum` or `SliceOutputsOwned`.
        output_roles: position of a result without a transform -> what it is: ``Role.OWNED`` (rows of atoms, as the
            policy lays them out), ``Role.EDGE`` or ``Role.SYSTEM`` (the same on every rank).

    Each result has a transform or a role: what it is is never guessed from its shape.
    """

    kind: ClassVar[str] = "op"

    def __init__(
        self,
        op: Any,
        arg_transforms: Mapping[int, ArgTransform] | None = None,
        output_transforms: Mapping[int, OutputTransform] | None = None,
        output_roles: Mapping[int, Role] | None = None,
    ) -> None:
        self.name = _name(op)
        self.arg_transforms: Mapping[int, ArgTransform] = MappingProxyType(dict(arg_transforms or {}))
        self.output_transforms: Mapping[int, OutputTransform] = MappingProxyType(dict(output_transforms or {}))
        self.output_roles: Mapping[int, Role] = MappingProxyType(dict(output_roles or {}))
        self.install_site = caller()
        self._check_kinds()
        if not isinstance(op, str):
            self._check_schema()

    @property
    def op(self) -> torch._ops.OpOverload:
        """The operation.

        Raises:
            InputError: it is not registered (yet).
        """
        return resolve(self.name, str(self))

    @property
    def target(self) -> str:
        """``namespace::op``, with ``.overload`` if that is not ``default``."""
        return self.name

    def install(self, scope: DDContext | None = None) -> Installed:
        """Makes dispatch call the operation as the adapter says; nothing is replaced."""
        self._check_schema()
        return InstalledOp(self, _everywhere if scope is None else scope.meta.custom_ops)

    def _check_kinds(self) -> None:
        for what, given, kind in (
            ("arg_transforms", self.arg_transforms, ArgTransform),
            ("output_transforms", self.output_transforms, OutputTransform),
            ("output_roles", self.output_roles, Role),
        ):
            for position, value in given.items():
                if not isinstance(position, int) or isinstance(position, bool) or position < 0:
                    raise InputError(f"{self}: {what} has {position!r}; its keys are positions 0, 1, ...")
                if not isinstance(value, kind):
                    words = {"Role": "a Role", "ArgTransform": "a transform of arguments"}.get(
                        kind.__name__, "a transform of results"
                    )
                    raise InputError(f"{self}: {what}[{position}] is {value!r}, which is not {words}")
        for position, role in self.output_roles.items():
            if role not in OUTPUT_ROLES:
                words = ", ".join(f"Role.{r.name}" for r in OUTPUT_ROLES)
                raise InputError(f"{self}: output_roles[{position}] is Role.{role.name}; a result is one of {words}")
            if position in self.output_transforms:
                raise InputError(f"{self}: result {position} has a transform, which gives it its role; leave one out")

    def _check_schema(self) -> None:
        schema = self.op._schema
        if schema.is_mutable:
            raise InputError(
                f"{self}: the operation changes its arguments in place; register one that returns its results"
            )
        arguments, results = schema.arguments, schema.returns
        for position in self.arg_transforms:
            if position >= len(arguments) or "Tensor" not in str(arguments[position].type):
                raise InputError(f"{self}: there is no tensor argument {position} in {schema}")
        for position in (*self.output_transforms, *self.output_roles):
            if position >= len(results):
                raise InputError(f"{self}: there is no result {position} in {schema}")

    def _key(self) -> tuple[Any, ...]:
        tables = (self.arg_transforms, self.output_transforms, self.output_roles)
        return self.name, *(frozenset(t.items()) for t in tables)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OpAdapter) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __reduce__(self) -> tuple[Any, ...]:
        return OpAdapter, (self.name, dict(self.arg_transforms), dict(self.output_transforms), dict(self.output_roles))

    def __repr__(self) -> str:
        return (
            f"OpAdapter({self.name!r}, arg_transforms={dict(self.arg_transforms)}, "
            f"output_transforms={dict(self.output_transforms)}, output_roles={dict(self.output_roles)})"
        )

    def to_dict(self) -> dict[str, Any]:
        """The adapter as JSON values."""
        out: dict[str, Any] = {
            "kind": "op",
            "op": self.name,
            "arg_transforms": {str(k): type(v).__name__ for k, v in sorted(self.arg_transforms.items())},
            "output_transforms": {str(k): type(v).__name__ for k, v in sorted(self.output_transforms.items())},
            "output_roles": {str(k): v.name for k, v in sorted(self.output_roles.items())},
        }
        if (module := registered_by(self.name)) is not None:
            out["registered_by"] = module
        return out


class InstalledOp(Installed):
    """An `OpAdapter` that dispatch knows of.

    Args:
        adapter: the adapter.
        table: operation -> adapters that are in place, the last of which counts.
    """

    def __init__(self, adapter: OpAdapter, table: dict[str, list[InstalledOp]]) -> None:
        self.adapter, self._table = adapter, table
        table.setdefault(adapter.name, []).append(self)

    def restore(self) -> None:
        """Takes the adapter out of the table."""
        present = self._table.get(self.adapter.name, [])
        if self in present:
            present.remove(self)
        if not present:
            self._table.pop(self.adapter.name, None)


# Adapters that were installed by hand, for every model of this process; a model's own are in its forward's ShardMeta.
_everywhere: dict[str, list[InstalledOp]] = {}


def find(name: str, table: Mapping[str, list[InstalledOp]]) -> InstalledOp | None:
    """The adapter for an operation, from a forward's table or from those installed by hand."""
    present = table.get(name) or _everywhere.get(name)
    return present[-1] if present else None


def _name(op: Any) -> str:
    """``namespace::op`` or ``namespace::op.overload`` of what is given for an operation."""
    op = getattr(op, "_opoverload", op)  # what torch.library.custom_op gives
    if isinstance(op, torch._ops.OpOverloadPacket):
        if len(op.overloads()) != 1:
            raise InputError(f"OpAdapter: {op} has the overloads {op.overloads()}; give one, torch.ops.ns.op.default")
        op = getattr(op, op.overloads()[0])
    if isinstance(op, torch._ops.OpOverload):
        return op.name().removesuffix(".default")
    if isinstance(op, str) and op.count("::") == 1 and all(op.split("::")):
        return op.removesuffix(".default")
    raise InputError(f"OpAdapter: {op!r} is not an operation; give torch.ops.<namespace>.<op>.default")


def resolve(name: str, who: str, module: str | None = None) -> torch._ops.OpOverload:
    """The operation ``namespace::op[.overload]``.

    Raises:
        InputError: it is not registered; the message names ``module``, which registers it, if that is known.
    """
    qualified, _, overload = name.partition(".")
    namespace, _, op = qualified.partition("::")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), op), overload or "default")
    except AttributeError:
        remedy = (
            f"import the module that registers it: import {module}"
            if module
            else "import the module that registers it (the one that defines the model) first"
        )
        raise InputError(f"{who}: the operation {name} is not registered in this process; {remedy}") from None


def registered_by(name: str) -> str | None:
    """The module that has registered an operation by ``torch.library.custom_op``, if that can be imported."""
    from torch._library.custom_ops import OPDEFS

    definition = OPDEFS.get(name.partition(".")[0])
    module = getattr(getattr(definition, "_init_fn", None), "__module__", None)
    return None if module == "__main__" else module
