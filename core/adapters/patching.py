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
from dataclasses import dataclass
from typing import Any

import torch

from nvdd.context import DDContext, context_of
from nvdd.errors import InputError

_MISSING, _UNKNOWN = object(), object()


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


class _Patch:
    """An attribute that has replacements at present.

    Args:
        owner, name: whose attribute.
        raw: as it stands in the owner's ``__dict__``; _MISSING if inherited.
        original: the same as a plain function or value.
    """

    def __init__(self, owner: Any, name: str, raw: Any, original: Any) -> None:
        self.owner, self.name, self.raw, self.original = owner, name, raw, original
        self.replacements: tuple[Replacement, ...] = ()  # exchanged as a whole, so that calls need no lock

    def call(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        meta = _UNKNOWN
        chain = []
        for replacement in self.replacements:
            scope = replacement.scope
            if scope is not None and meta is _UNKNOWN:
                context = context_of(args)
                meta = None if context is None else context.meta
            if scope is None or scope.meta is meta:
                chain.append(replacement)
        return _Original(self.original, chain)(*args, **kwargs)


class _Original:
    """What a wrapping replacement gets for the original: the replacement before it, or at last the original itself."""

    __slots__ = ("__wrapped__", "_chain")

    def __init__(self, original: Callable, chain: list[Replacement]) -> None:
        self.__wrapped__, self._chain = original, chain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._chain:
            return self.__wrapped__(*args, **kwargs)
        last = self._chain[-1]
        last.calls += 1
        if not last.wraps:
            return last.value(*args, **kwargs)
        return last.value(_Original(self.__wrapped__, self._chain[:-1]), *args, **kwargs)


_patches: dict[tuple[int, str], _Patch] = {}
_lock = threading.RLock()


def replace(owner: Any, name: str, replacement: Replacement, who: str) -> None:
    """Puts ``replacement`` in place of ``owner.name`` until `restore`.

    Raises:
        InputError: there is no such attribute, or it is one that can't be replaced.
    """
    with _lock:
        patch = _patches.get((id(owner), name)) or _patch(owner, name, who)
        switched = _is_function(patch.original)
        if switched and not callable(replacement.value):
            raise InputError(f"{who}: what replaces a function must be callable, not {replacement.value!r}")
        if not switched and replacement.wraps:
            raise InputError(f"{who}: {name!r} is a {type(patch.original).__name__}, and only functions can be wrapped")
        if not switched:
            _refuse_two_models(patch, replacement, who)
            setattr(owner, name, replacement.value)
        elif not patch.replacements:
            setattr(owner, name, _switch(patch))
        _patches[id(owner), name] = patch
        patch.replacements = (*patch.replacements, replacement)


def restore(owner: Any, name: str, replacement: Replacement) -> None:
    """Takes ``replacement`` out; with the last one the attribute is what it was before the first."""
    with _lock:
        patch = _patches[id(owner), name]
        patch.replacements = tuple(r for r in patch.replacements if r is not replacement)
        if patch.replacements:
            if not _is_function(patch.original):
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


def _is_function(value: Any) -> bool:
    """Whether a switch can stand in for it: any other value, a class too, is seen by everybody or by nobody."""
    return inspect.isroutine(value) or isinstance(value, torch.jit.ScriptFunction)


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
