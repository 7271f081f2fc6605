"""`AdapterRegistry`: installs the adapters of a model while it runs, all of them or none."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from nvdd.adapters.base import Adapter, AdapterStatus, Installed
from nvdd.context import DDContext, enter
from nvdd.errors import InputError
from nvdd.roles import ShardMeta


@dataclass(eq=False)
class _Entry:
    adapter: Adapter
    state: str = "pending"
    error: str | None = None
    calls: int = 0


class AdapterRegistry:
    """The adapters of one model::

        registry = AdapterRegistry(spec.all_adapters)
        with registry.installed():
            model(batch)

    Blocks nest, also those of different registries that replace the same function; what was there is put back
    exactly, after an exception too.

    Args:
        adapters: `OpAdapter`, `MethodAdapter`, `FunctionAdapter`, `PythonAdapter`, `JitAdapter`, in any mixture.
    """

    def __init__(self, adapters: Iterable[Adapter] = ()) -> None:
        self._entries: dict[str, _Entry] = {}
        self._open: list[list[tuple[_Entry, Installed]]] = []
        self._lock = threading.Lock()
        for adapter in adapters:
            self.add(adapter)

    def add(self, adapter: Adapter) -> None:
        """One more adapter; one of the same target that has no replacement yet is completed by it.

        Raises:
            InputError: another adapter has this target.
        """
        if not isinstance(adapter, Adapter):
            raise InputError(f"{adapter!r} is not an adapter; give an OpAdapter, MethodAdapter, FunctionAdapter, ...")
        present = self._entries.get(adapter.target)
        complete = present is not None and not present.adapter.is_declaration and not adapter.is_declaration
        if complete and present.adapter != adapter:
            raise InputError(
                f"two adapters for {adapter.target}: one from {present.adapter.install_site or 'an unknown place'}, the "
                f"other from {adapter.install_site or 'an unknown place'}; leave one out"
            )
        if present is None or not adapter.is_declaration:
            self._entries[adapter.target] = _Entry(adapter)

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """All adapters."""
        return tuple(e.adapter for e in self._entries.values())

    def install(self, scope: DDContext | None = None) -> None:
        """Installs all adapters; if one fails, none stays.

        Args:
            scope: the forward in which they apply; None: everywhere in this process.

        Raises:
            InputError: of the adapter that could not be installed.
        """
        self._install(scope)

    def _install(self, scope: DDContext | None) -> list[tuple[_Entry, Installed]]:
        done: list[tuple[_Entry, Installed]] = []
        for entry in self._entries.values():
            try:
                done.append((entry, entry.adapter.install(scope)))
                entry.state, entry.error = "installed", None
            except BaseException as error:
                self._close(done)
                entry.state, entry.error = "failed", str(error)
                raise
        with self._lock:
            self._open.append(done)
        return done

    def restore(self) -> None:
        """Undoes the last `install`; without one it does nothing."""
        with self._lock:
            done = self._open.pop() if self._open else []
        self._close(done)

    def _close(self, done: list[tuple[_Entry, Installed]]) -> None:
        for entry, installed in reversed(done):
            installed.restore()
            entry.calls += installed.calls
            if not any(e is entry for level in self._open for e, _ in level):
                entry.state = "restored"

    @contextmanager
    def installed(self, scope: DDContext | None = None) -> Iterator[AdapterRegistry]:
        """`install` with this ``scope`` for a block; in threads of their own, blocks end in any order."""
        mine = self._install(scope)
        try:
            yield self
        finally:
            with self._lock:
                self._open = [level for level in self._open if level is not mine]
            self._close(mine)

    @contextmanager
    def running(self, meta: ShardMeta, model: str = "") -> Iterator[DDContext]:
        """Around one forward and its backward: it becomes the current context, and the adapters apply in it.

        Args:
            meta: the partition of the forward.
            model: name of the model, for messages.
        """
        context = DDContext(meta, model)
        with enter(context), self.installed(context):
            yield context

    def __enter__(self) -> AdapterRegistry:
        self.install()
        return self

    def __exit__(self, *_: Any) -> None:
        self.restore()

    def statuses(self) -> list[AdapterStatus]:
        """What has become of each adapter."""
        out = []
        for entry in self._entries.values():
            now = [i.calls for level in self._open for e, i in level if e is entry]
            status = entry.adapter.describe(entry.state, entry.error)
            out.append(replace(status, calls=entry.calls + sum(now)))
        return out

    def list_active(self) -> list[AdapterStatus]:
        """Those that are installed now."""
        return [s for s in self.statuses() if s.state == "installed"]
