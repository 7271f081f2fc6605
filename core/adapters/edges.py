"""`EdgeStage`: says which arguments of a method are rows of edges, where their roles have got lost."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from nvdd.adapters.callables import MethodAdapter
from nvdd.context import current_dd_context
from nvdd.deferred import defer
from nvdd.errors import DistributedOpError, InputError
from nvdd.roles import ShardMeta


@dataclass(frozen=True)
class _Declares:
    """Calls the method with the named arguments as edge rows that are computed in chunks (`nvdd.deferred`)."""

    edges: tuple[str, ...]

    def __call__(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        context = current_dd_context()
        if context is None:
            return original(*args, **kwargs)
        given = inspect.signature(inspect.unwrap(original)).bind(*args, **kwargs)
        holders = [given.arguments, *(v for v in given.arguments.values() if isinstance(v, dict))]
        found = [self._declare(name, holders, context.meta, original) for name in self.edges]
        if not any(found):
            raise DistributedOpError(
                f"{getattr(inspect.unwrap(original), '__qualname__', 'the method')} has no argument, and no "
                f"dictionary among them a key, of the names {', '.join(self.edges)} that its EdgeStage declares as rows of edges"
            )
        return original(*given.args, **given.kwargs)

    @staticmethod
    def _declare(name: str, holders: list[dict], meta: ShardMeta, original: Callable) -> bool:
        holder = next((h for h in holders if name in h), None)
        if holder is not None and holder[name] is not None:
            holder[name] = defer(holder[name], meta, tracked=False)
        return holder is not None


@dataclass(frozen=True, repr=False, init=False)
class EdgeStage(MethodAdapter):
    """Declares arguments of a method as rows of this rank's edges, so that a run in chunks of edges can divide them.

    Rows that a model gathers by ``data.senders`` or ``data.receivers``, and what it computes from ``data.edge_vectors``,
    are known to be edges. Where a wrapper works with plain tensors (``to_local``) or scripted code makes them, they are
    not, and the method that combines them with gathered rows and sums over receivers is declared. It does nothing
    without ``DomainConfig.max_edges_per_chunk`` or ``recompute``.

    Args:
        target_class: the class, or ``module_path`` and ``class_name``.
        method_name: the method, usually ``"forward"``.
        edges: names of arguments (E, ...), or keys of a dictionary that is an argument. None is left alone. Scripted code in
            the method must work row by row.
    """

    kind: ClassVar[str] = "edges"

    def __init__(
        self,
        target_class: type | None = None,
        method_name: str = "forward",
        edges: Iterable[str] = (),
        *,
        module_path: str = "",
        class_name: str = "",
    ) -> None:
        edges = (edges,) if isinstance(edges, str) else tuple(edges)
        if not edges or not all(isinstance(name, str) and name for name in edges):
            raise InputError(f"EdgeStage: edges={edges!r} are no names of arguments")
        super().__init__(target_class, method_name, _Declares(edges), module_path=module_path, class_name=class_name)

    @classmethod
    def of(cls, modules: Iterable[Any], edges: Iterable[str], method_name: str = "forward") -> tuple[EdgeStage, ...]:
        """One for each class among ``modules``, such as the layers of a network."""
        classes = dict.fromkeys(type(module) for module in modules)
        return tuple(cls(kind, method_name, edges) for kind in classes)

    @property
    def target(self) -> str:
        """``edges of module.Class.method``: a method may have another adapter besides."""
        return f"edges of {super().target}"

    @property
    def edges(self) -> tuple[str, ...]:
        """The names."""
        return self.replacement.edges

    def __repr__(self) -> str:
        return f"EdgeStage({super().target!r}, edges={self.edges!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return edge_stage, (self.module_path, self.class_name, self.method_name, self.edges)

    def to_dict(self) -> dict[str, Any]:
        """The adapter as JSON values."""
        names = ("module_path", "class_name", "method_name")
        return {"kind": "edges", **{name: getattr(self, name) for name in names}, "edges": list(self.edges)}


def edge_stage(module_path: str, class_name: str, method_name: str, edges: Iterable[str]) -> EdgeStage:
    """An `EdgeStage` from its names."""
    return EdgeStage(method_name=method_name, edges=edges, module_path=module_path, class_name=class_name)
