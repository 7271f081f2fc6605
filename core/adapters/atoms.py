"""`AtomStage`: says that a method works atom by atom, so that a run that saves memory can divide its atoms."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nvdd.adapters.callables import MethodAdapter
from nvdd.context import current_dd_context
from nvdd.errors import DistributedOpError, InputError
from nvdd.roles import Role, ShardMeta
from nvdd.shard_tensor import ShardTensor, promote, to_local


@dataclass(frozen=True)
class _InParts:
    """Calls the method for some atoms after the others, and again in the backward."""

    atoms: tuple[str, ...]

    def __call__(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        context = current_dd_context()
        if context is None:
            return original(*args, **kwargs)
        given = inspect.signature(inspect.unwrap(original)).bind(*args, **kwargs)
        missing = [name for name in self.atoms if name not in given.signature.parameters]
        if missing:
            raise DistributedOpError(f"{_name(original)} has no argument {', '.join(missing)}, which its AtomStage declares")
        rows = {name: given.arguments[name] for name in self.atoms if given.arguments.get(name) is not None}
        role = self._role(original, rows, context.meta)
        local = {name: to_local(value) for name, value in rows.items()}

        def some(start: int, stop: int, *parts: Tensor) -> Tensor:
            given.arguments.update(zip(local, parts, strict=True))
            out = original(*given.args, **given.kwargs)
            if not isinstance(out, Tensor) or out.shape[:1] != (stop - start,):
                raise DistributedOpError(
                    f"{_name(original)} has given {_shape(out)} for {stop - start} rows of atoms: it does not work atom by atom, as "
                    "its AtomStage says"
                )
            return out

        found = []
        for start, stop in _parts(len(next(iter(local.values()))), context.meta):
            parts = [value[start:stop] for value in local.values()]
            found.append(checkpoint(some, start, stop, *parts, use_reentrant=False, preserve_rng_state=False))
        out = torch.cat(found) if len(found) > 1 else found[0]
        return out if role is None else promote(out, role, context.meta)

    @staticmethod
    def _role(original: Callable, rows: dict[str, Any], meta: ShardMeta) -> Role | None:
        """What the results are: rows as the arguments that have a role; plain tensors give a plain one."""
        if not rows or not all(isinstance(value, Tensor) for value in rows.values()):
            raise DistributedOpError(f"{_name(original)} got no tensors for the rows of atoms that its AtomStage declares")
        roles = {value._role for value in rows.values() if isinstance(value, ShardTensor)}
        if len(roles) > 1 or not all(role.is_atoms for role in roles):
            words = ", ".join(sorted(role.value for role in roles))
            raise DistributedOpError(f"the arguments of {_name(original)} that its AtomStage declares are no rows of atoms: {words}")
        numbers = {len(value) for value in rows.values()}
        if len(numbers) > 1:
            raise DistributedOpError(
                f"the arguments of {_name(original)} that its AtomStage declares have {sorted(numbers)} rows; rows of atoms are as "
                "many in each"
            )
        return roles.pop() if roles else None


def _parts(n: int, meta: ShardMeta) -> list[tuple[int, int]]:
    """Ranges of ``n`` rows, such that a part has as many as have the edges of one chunk."""
    many = -(-max(1, meta.n_edges or 0) // (meta.edges_at_once or sys.maxsize))
    size = max(1, -(-n // many))
    return [(start, min(n, start + size)) for start in range(0, n, size)] or [(0, 0)]


def _name(original: Callable) -> str:
    return getattr(inspect.unwrap(original), "__qualname__", "the method")


def _shape(value: Any) -> str:
    return f"a result of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


@dataclass(frozen=True, repr=False, init=False)
class AtomStage(MethodAdapter):
    """Declares that a method works atom by atom: row k of its result is made of row k of these arguments.

    With ``DomainConfig.max_edges_per_chunk`` it runs for some atoms after the others, as many as have the edges of one chunk,
    with ``recompute`` for all at once, and again in the backward: what is inside it is not kept. Without these options it
    does nothing. The method exchanges nothing and sums over no atoms.

    Args:
        target_class: the class, or ``module_path`` and ``class_name``.
        method_name: the method, usually ``"forward"``; it gives one tensor.
        atoms: names of the arguments that are rows of atoms (N, ...). None is left alone. Others are given to each part.
    """

    kind: ClassVar[str] = "atoms"

    def __init__(
        self,
        target_class: type | None = None,
        method_name: str = "forward",
        atoms: Iterable[str] = (),
        *,
        module_path: str = "",
        class_name: str = "",
    ) -> None:
        atoms = (atoms,) if isinstance(atoms, str) else tuple(atoms)
        if not atoms or not all(isinstance(name, str) and name for name in atoms):
            raise InputError(f"AtomStage: atoms={atoms!r} are no names of arguments")
        super().__init__(target_class, method_name, _InParts(atoms), module_path=module_path, class_name=class_name)

    @classmethod
    def of(cls, modules: Iterable[Any], atoms: Iterable[str], method_name: str = "forward") -> tuple[AtomStage, ...]:
        """One for each class among ``modules``, such as the layers of a network."""
        classes = dict.fromkeys(type(module) for module in modules)
        return tuple(cls(kind, method_name, atoms) for kind in classes)

    @property
    def target(self) -> str:
        """``atoms of module.Class.method``: a method may have another adapter besides."""
        return f"atoms of {super().target}"

    @property
    def atoms(self) -> tuple[str, ...]:
        """The names."""
        return self.replacement.atoms

    def __repr__(self) -> str:
        return f"AtomStage({super().target!r}, atoms={self.atoms!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return atom_stage, (self.module_path, self.class_name, self.method_name, self.atoms)

    def to_dict(self) -> dict[str, Any]:
        """The adapter as JSON values."""
        names = ("module_path", "class_name", "method_name")
        return {"kind": "atoms", **{name: getattr(self, name) for name in names}, "atoms": list(self.atoms)}


def atom_stage(module_path: str, class_name: str, method_name: str, atoms: Iterable[str]) -> AtomStage:
    """An `AtomStage` from its names."""
    return AtomStage(method_name=method_name, atoms=atoms, module_path=module_path, class_name=class_name)
