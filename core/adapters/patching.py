"""Replacing an attribute of a module or class for some callers only, and putting back exactly what was there.

A module or class belongs to the whole process, in which several models may run. So a callable is not exchanged for
its replacement, but for a switch that looks who calls: inside a forward of the model that has installed a
replacement it takes that one, anywhere else the original.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nvdd.context import DDContext, context_of
from nvdd.errors import InputError

_MISSING = object()


@dataclass(eq=False)
class Replacement:
    """One replacement of one attribute.

    Attributes:
        value: what stands in for the attribute.
        wraps: whether ``value`` is called as ``value(original, *args, **kwargs)``, else as ``value(*args, **kwargs)``.
        scope: the forward in which it applies; None: everywhere.
        calls: how often it was called.
    """

    value: Any
    wraps: bool = False
    scope: DDContext | None = None
    calls: int = 0


@dataclass(eq=False)
class _Patch:
    """An attribute that has replacements at present."""

    owner: Any
    name: str
    raw: Any  # as it stands in the owner's __dict__; _MISSING if inherited
    original: Any
    replacements: list[Replacement] = field(default_factory=list)

    def call(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        with _lock:
            present = tuple(self.replacements)
        scopes = {r.scope for r in present} - {None}
        context = context_of(args) if scopes else None
        chain = [r for r in present if r.scope is None or (context is not None and r.scope.meta is context.meta)]
        return self._call_from(chain, args, kwargs)

    def _call_from(self, chain: list[Replacement], args: tuple, kwargs: dict[str, Any]) -> Any:
        if not chain:
            return self.original(*args, **kwargs)
        last, before = chain[-1], chain[:-1]
        last.calls += 1
        if not last.wraps:
            return last.value(*args, **kwargs)

        @functools.wraps(self.original)
        def original(*args: Any, **kwargs: Any) -> Any:
            return self._call_from(before, args, kwargs)

        return last.value(original, *args, **kwargs)


_patches: dict[tuple[int, str], _Patch] = {}
_lock = threading.RLock()


def replace(owner: Any, name: str, replacement: Replacement, who: str) -> None:
    """Puts ``replacement`` in place of ``owner.name`` until `restore`.

    Raises:
        InputError: there is no such attribute, or it is one that can't be replaced.
    """
    with _lock:
        patch = _patches.get((id(owner), name))
        if patch is None:
            patch = _patch(owner, name, who)
            if _is_switchable(patch.original):
                if not callable(replacement.value):
                    raise InputError(f"{who}: what replaces a function must be callable, not {replacement.value!r}")
                setattr(owner, name, _switch(patch))
            _patches[id(owner), name] = patch
        elif not _is_switchable(patch.original):
            _refuse_two_models(patch, replacement, who)
        patch.replacements.append(replacement)
        if not _is_switchable(patch.original):
            setattr(owner, name, replacement.value)


def restore(owner: Any, name: str, replacement: Replacement) -> None:
    """Takes ``replacement`` out; with the last one the attribute is what it was before the first."""
    with _lock:
        patch = _patches[id(owner), name]
        patch.replacements.remove(replacement)
        if patch.replacements:
            if not _is_switchable(patch.original):
                setattr(owner, name, patch.replacements[-1].value)
            return
        del _patches[id(owner), name]
        if patch.raw is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, patch.raw)


def _patch(owner: Any, name: str, who: str) -> _Patch:
    raw = vars(owner).get(name, _MISSING)
    static = inspect.getattr_static(owner, name, _MISSING) if inspect.isclass(owner) else raw
    if static is _MISSING and not hasattr(owner, name):
        raise InputError(
            f"{who}: {getattr(owner, '__qualname__', None) or owner.__name__} has no {name!r} to replace; is the package's "
            "version the one that the adapter was written for?"
        )
    if isinstance(static, property):
        raise InputError(f"{who}: {name!r} is a property, and only functions, methods and values can be replaced")
    original = static.__func__ if isinstance(static, (staticmethod, classmethod)) else static
    return _Patch(owner, name, raw, getattr(owner, name) if original is _MISSING else original)


def _is_switchable(original: Any) -> bool:
    """Whether it is a function of some kind: a class or a value is seen by everybody, or by nobody."""
    return callable(original) and not inspect.isclass(original)


def _switch(patch: _Patch) -> Callable:
    def switch(*args: Any, **kwargs: Any) -> Any:
        return patch.call(args, kwargs)

    functools.update_wrapper(switch, patch.original, updated=())
    static = inspect.getattr_static(patch.owner, patch.name, None)
    if isinstance(static, (staticmethod, classmethod)):
        return type(static)(switch)
    return switch


def _refuse_two_models(patch: _Patch, replacement: Replacement, who: str) -> None:
    for other in patch.replacements:
        both = other.scope is not None and replacement.scope is not None
        if both and other.scope is not replacement.scope and other.value is not replacement.value:
            raise InputError(
                f"{who}: {patch.name!r} is a value, which all models of this process see, and another model that runs now "
                "has replaced it by another one; run the two one after the other"
            )
