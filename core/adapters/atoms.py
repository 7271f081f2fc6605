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

from nvdd.adapters.stage import Stage, name_of
from nvdd.context import current_dd_context
from nvdd.errors import DistributedOpError
from nvdd.roles import Role, ShardMeta
from nvdd.shard_tensor import ShardTensor, promote, to_local


@dataclass(frozen=True)
class _InParts:
    """Calls the method for some atoms after the others, and again in the backward."""

    names: tuple[str, ...]

    def __call__(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        context = current_dd_context()
        if context is None:
            return original(*args, **kwargs)
        given = inspect.signature(inspect.unwrap(original)).bind(*args, **kwargs)
        missing = [name for name in self.names if name not in given.signature.parameters]
        if missing:
            raise DistributedOpError(f"{name_of(original)} has no argument {', '.join(missing)}, which its AtomStage declares")
        rows = {name: given.arguments[name] for name in self.names if given.arguments.get(name) is not None}
        role = self._role(original, rows, context.meta)
        local = {name: to_local(value) for name, value in rows.items()}

        def some(versions: tuple[int, ...], start: int, stop: int, *parts: Tensor) -> Tensor:
            given.arguments.update(zip(local, parts, strict=True))
            out = original(*given.args, **given.kwargs) if _versions(parts) == versions else None
            if _versions(parts) != versions:
                raise DistributedOpError(
                    f"an argument of {name_of(original)} that its AtomStage declares is changed in place, and is needed as it was "
                    "when the method runs again. Compute out of place, or leave max_edges_per_chunk and recompute out"
                )
            if not isinstance(out, Tensor) or out.shape[:1] != (stop - start,):
                raise DistributedOpError(
                    f"{name_of(original)} has given {_shape(out)} for {stop - start} rows of atoms: it does not work atom by atom, as "
                    "its AtomStage says"
                )
            return out

        found = []
        for start, stop in _parts(len(next(iter(local.values()))), context.meta):
            parts = [value[start:stop] for value in local.values()]
            found.append(checkpoint(some, _versions(parts), start, stop, *parts, use_reentrant=False))
        out = torch.cat(found) if len(found) > 1 else found[0]
        return out if role is None else promote(out, role, context.meta)

    @staticmethod
    def _role(original: Callable, rows: dict[str, Any], meta: ShardMeta) -> Role | None:
        """What the results are: rows as the arguments that have a role; plain tensors give a plain one."""
        if not rows or not all(isinstance(value, Tensor) for value in rows.values()):
            raise DistributedOpError(f"{name_of(original)} got no tensors for the rows of atoms that its AtomStage declares")
        roles = {value._role for value in rows.values() if isinstance(value, ShardTensor)}
        if len(roles) > 1 or not all(role.is_atoms for role in roles):
            words = ", ".join(sorted(role.value for role in roles))
            raise DistributedOpError(f"the arguments of {name_of(original)} that its AtomStage declares are no rows of atoms: {words}")
        numbers = {len(value) for value in rows.values()}
        if len(numbers) > 1:
            raise DistributedOpError(
                f"the arguments of {name_of(original)} that its AtomStage declares have {sorted(numbers)} rows; rows of atoms are as "
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


def _versions(parts: Iterable[Tensor]) -> tuple[int, ...]:
    return tuple(part._version for part in parts)


def _shape(value: Any) -> str:
    return f"a result of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


class AtomStage(Stage):
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
    body = _InParts

    def __init__(
        self,
        target_class: type | None = None,
        method_name: str = "forward",
        atoms: Iterable[str] = (),
        *,
        module_path: str = "",
        class_name: str = "",
    ) -> None:
        super().__init__(target_class, method_name, atoms, module_path, class_name)
