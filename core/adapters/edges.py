"""`EdgeStage`: says which arguments of a method are rows of edges, where their roles have got lost."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from nvdd.adapters.stage import Stage, name_of
from nvdd.context import current_dd_context
from nvdd.deferred import defer
from nvdd.errors import DistributedOpError
from nvdd.roles import ShardMeta


@dataclass(frozen=True)
class _Declares:
    """Calls the method with the named arguments as edge rows that are computed in chunks (`nvdd.deferred`)."""

    names: tuple[str, ...]

    def __call__(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        context = current_dd_context()
        if context is None:
            return original(*args, **kwargs)
        given = inspect.signature(inspect.unwrap(original)).bind(*args, **kwargs)
        holders = [given.arguments, *(v for v in given.arguments.values() if isinstance(v, dict))]
        found = [self._declare(name, holders, context.meta, original) for name in self.names]
        if not any(found):
            raise DistributedOpError(
                f"{name_of(original)} has no argument, and no "
                f"dictionary among them a key, of the names {', '.join(self.names)} that its EdgeStage declares as rows of edges"
            )
        return original(*given.args, **given.kwargs)

    @staticmethod
    def _declare(name: str, holders: list[dict], meta: ShardMeta, original: Callable) -> bool:
        holder = next((h for h in holders if name in h), None)
        if holder is not None and holder[name] is not None:
            holder[name] = defer(holder[name], meta, tracked=False)
        return holder is not None


class EdgeStage(Stage):
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
    body = _Declares

    def __init__(
        self,
        target_class: type | None = None,
        method_name: str = "forward",
        edges: Iterable[str] = (),
        *,
        module_path: str = "",
        class_name: str = "",
    ) -> None:
        super().__init__(target_class, method_name, edges, module_path, class_name)
