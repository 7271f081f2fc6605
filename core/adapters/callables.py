"""Adapters of Python code: a function, a method, a value of a module, a scripted function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from nvdd.adapters import patching
from nvdd.adapters.base import Adapter, Installed, caller
from nvdd.adapters.marshal import marshalled
from nvdd.adapters.paths import import_module, walk
from nvdd.adapters.replacements import replacement_to_dict
from nvdd.context import DDContext
from nvdd.errors import InputError

JIT_MODES = ("eager", "marshal")


class InstalledPatch(Installed):
    """A replacement of an attribute that is in place."""

    def __init__(self, owner: Any, name: str, replacement: patching.Replacement, who: str) -> None:
        patching.replace(owner, name, replacement, who)
        self._owner, self._name, self._replacement = owner, name, replacement

    @property
    def calls(self) -> int:  # type: ignore[override]  # here the replacement counts
        return self._replacement.calls

    def restore(self) -> None:
        if self._owner is not None:
            owner, self._owner = self._owner, None
            patching.restore(owner, self._name, self._replacement)


@dataclass(frozen=True, repr=False)
class _Attribute(Adapter):
    """An adapter of ``module_path.attr_name``."""

    module_path: str
    attr_name: str
    replacement: Any = None
    install_site: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        _check_names(self, "module_path", "attr_name")
        if not self.install_site:
            object.__setattr__(self, "install_site", caller())

    @property
    def target(self) -> str:
        """``module.attribute``."""
        return f"{self.module_path}.{self.attr_name}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.target!r}, {self.replacement!r})"

    def _owner(self) -> tuple[Any, str]:
        module = import_module(self.module_path, str(self))
        holder, _, name = self.attr_name.rpartition(".")
        try:
            return (walk(module, holder) if holder else module), name
        except AttributeError:
            raise InputError(
                f"{self}: {self.module_path} has no {holder!r}; is the package's version the one that the adapter was "
                "written for?"
            ) from None

    def to_dict(self) -> dict[str, Any]:
        """The adapter as JSON values."""
        return {
            "kind": self.kind,
            "module_path": self.module_path,
            "attr_name": self.attr_name,
            "replacement": replacement_to_dict(self.replacement, str(self)),
        }


@dataclass(frozen=True, repr=False)
class PythonAdapter(_Attribute):
    """Puts something else in the place of ``module_path.attr_name`` while the model runs.

    A function is replaced for this model alone; a value or a class, which cannot see who reads it, for the whole
    process while the model runs.

    Args:
        module_path: the module, ``"aimnet.nbops"``.
        attr_name: the attribute there, ``"mol_sum"`` or ``"SomeClass.attribute"``. Only the name in this module is
            replaced: where other modules have imported the function by name, they need adapters of their own.
        replacement: with the signature of what it replaces. None: the wrapper's ``distributed_setup`` gives it, by
            ``ctx.adapters.add(PythonAdapter(module_path, attr_name, replacement))``.
    """

    kind: ClassVar[str] = "python"

    @property
    def is_declaration(self) -> bool:
        """Whether the replacement is still to come."""
        return self.replacement is None

    def install(self, scope: DDContext | None = None) -> Installed:
        """Puts the replacement in place, in the forward ``scope`` or everywhere.

        Raises:
            InputError: there is no such attribute, or no replacement yet.
        """
        if self.replacement is None:
            raise InputError(
                f"{self} has no replacement; give one, or add it in the wrapper's distributed_setup(ctx): "
                f"ctx.adapters.add({type(self).__name__}({self.module_path!r}, {self.attr_name!r}, function))"
            )
        owner, name = self._owner()
        return InstalledPatch(owner, name, patching.Replacement(self.replacement, scope=scope), str(self))


class FunctionAdapter(PythonAdapter):
    """Replaces a module-level function that is given itself: ``FunctionAdapter(mol_sum, distributed_mol_sum)``.

    Args:
        func: the function; it must be found in the module that it says it comes from, under its name.
        replacement: with the same signature.

    Raises:
        InputError: a scripted function, no function of a module, or one that is not found where it says it
            comes from.
    """

    kind: ClassVar[str] = "function"

    def __init__(self, func: Callable, replacement: Callable | None = None) -> None:
        module, name = getattr(func, "__module__", None), getattr(func, "__qualname__", None)
        if isinstance(func, torch.jit.ScriptFunction):
            raise InputError(f"FunctionAdapter: {func.qualified_name} is a scripted function; use JitAdapter for it")
        if not callable(func) or module is None or name is None or "." in name:
            raise InputError(f"FunctionAdapter: {func!r} is not a function of a module; give one, or use MethodAdapter")
        if getattr(import_module(module, "FunctionAdapter"), name, None) is not func:
            raise InputError(
                f"FunctionAdapter: {module}.{name} is something else than the function that was given, which says that it "
                "comes from there; name the place to replace: PythonAdapter(module_path=..., attr_name=...)"
            )
        super().__init__(module, name, replacement)


@dataclass(frozen=True, repr=False)
class JitAdapter(_Attribute):
    """Stands in for a scripted function of a module (``@torch.jit.script``), into which dispatch does not see.

    Args:
        module_path, attr_name: where it is.
        replacement: with the same signature; None for its own Python source, run as Python.
        mode: ``"eager"``: the replacement runs, and dispatch sees each of its operations; ``"marshal"``: the scripted
            function itself runs, on plain tensors, and its results are rows of what its arguments are rows of. That
            is right if it works row by row, with rows first; edge indices are refused.

    Raises:
        InputError: another mode, or ``"marshal"`` with a replacement; when it is installed: no Python source
            to run.
    """

    kind: ClassVar[str] = "jit"
    mode: str = "eager"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode not in JIT_MODES:
            raise InputError(f"{self}: mode={self.mode!r} is neither 'eager' nor 'marshal'")
        if self.mode == "marshal" and self.replacement is not None:
            raise InputError(f"{self}: mode='marshal' runs the scripted function itself; leave the replacement out")

    def install(self, scope: DDContext | None = None) -> Installed:
        """Puts the replacement in place, in the forward ``scope`` or everywhere.

        Raises:
            InputError: there is no such function, or its Python source is not known.
        """
        owner, name = self._owner()
        value, wraps = self.replacement, False
        if self.mode == "marshal":
            value, wraps = marshalled, True
        elif value is None:
            present: Any = getattr(owner, name, None)
            scripted = inspect.unwrap(present, stop=_is_scripted)
            value = getattr(scripted, "_torchdynamo_inline", None)
            if value is None:
                raise InputError(f"{self}: its Python source is not known; give a replacement, or mode='marshal'")
        return InstalledPatch(owner, name, patching.Replacement(value, wraps, scope), str(self))

    def to_dict(self) -> dict[str, Any]:
        """The adapter as JSON values."""
        return super().to_dict() | {"mode": self.mode}


def _is_scripted(function: Any) -> bool:
    return isinstance(function, torch.jit.ScriptFunction)


@dataclass(frozen=True, repr=False, init=False)
class MethodAdapter(Adapter):
    """Wraps a method of a class: ``replacement(original, self, *args, **kwargs)`` is called instead of it.

    ``MethodAdapter(InteractionBlock, "forward", body)``, or by names, for a class that is not imported yet:
    ``MethodAdapter(module_path="mace.modules.blocks", class_name="InteractionBlock", method_name="forward",
    replacement=body)``. Subclasses with a method of their own are not touched.

    Args:
        target_class: the class.
        method_name: the method; static and class methods do as well.
        replacement: the body; ``original`` is the method without its instance.
        module_path, class_name: the class by names.

    Raises:
        InputError: no class, or a replacement that can't be called; when it is installed: no such class or
            method.
    """

    module_path: str
    class_name: str
    method_name: str
    replacement: Any
    install_site: str = field(default="", compare=False)
    _class: type | None = field(default=None, compare=False)

    kind: ClassVar[str] = "method"

    def __init__(
        self,
        target_class: type | None = None,
        method_name: str = "",
        replacement: Any = None,
        *,
        module_path: str = "",
        class_name: str = "",
        install_site: str = "",
    ) -> None:
        if (target_class is None) == (not module_path and not class_name):
            raise InputError(
                "MethodAdapter: give a class, MethodAdapter(Class, 'method', body), or its names, module_path= and class_name="
            )
        if target_class is not None and not inspect.isclass(target_class):
            raise InputError(f"MethodAdapter: {target_class!r} is not a class")
        if target_class is not None:
            module_path, class_name = target_class.__module__, target_class.__qualname__
        for name, value in (
            ("module_path", module_path),
            ("class_name", class_name),
            ("method_name", method_name),
            ("replacement", replacement),
            ("install_site", install_site or caller()),
            ("_class", target_class),
        ):
            object.__setattr__(self, name, value)
        _check_names(self, "module_path", "class_name", "method_name")
        if not callable(replacement):
            raise InputError(f"{self}: replacement={replacement!r} can't be called; give body(original, self, ...)")
        if target_class is not None:
            self._check_method(target_class)

    @property
    def target(self) -> str:
        """``module.Class.method``."""
        return f"{self.module_path}.{self.class_name}.{self.method_name}"

    def __repr__(self) -> str:
        return f"MethodAdapter({self.target!r}, {self.replacement!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        names = {"module_path": self.module_path, "class_name": self.class_name}
        return _method_adapter, (self.method_name, self.replacement, names)

    def install(self, scope: DDContext | None = None) -> Installed:
        """Wraps the method, in the forward ``scope`` or everywhere.

        Raises:
            InputError: there is no such class or method, or no replacement yet.
        """
        owner = self._class
        if owner is None:
            module = import_module(self.module_path, str(self))
            try:
                owner = walk(module, self.class_name)
            except AttributeError:
                raise InputError(
                    f"{self}: {self.module_path} has no class {self.class_name!r}; is the package's version the one that the "
                    "adapter was written for?"
                ) from None
        self._check_method(owner)
        replacement = patching.Replacement(self.replacement, wraps=True, scope=scope)
        return InstalledPatch(owner, self.method_name, replacement, str(self))

    def _check_method(self, owner: type) -> None:
        if not callable(getattr(owner, self.method_name, None)):
            raise InputError(f"{self}: {self.class_name} has no method {self.method_name!r}")

    def to_dict(self) -> dict[str, Any]:
        """The adapter as JSON values.

        Raises:
            InputError: its class can't be found again by name.
        """
        if "<" in self.class_name or self.module_path == "__main__":
            raise InputError(
                f"{self} adapts a class that is defined in a script or inside a function, so it can't be written to a file "
                "and found again; move the class to the top level of a module"
            )
        return {
            "kind": "method",
            "module_path": self.module_path,
            "class_name": self.class_name,
            "method_name": self.method_name,
            "replacement": replacement_to_dict(self.replacement, str(self)),
        }


def _method_adapter(method_name: str, replacement: Any, names: dict[str, str]) -> MethodAdapter:
    return MethodAdapter(None, method_name, replacement, **names)


def _check_names(adapter: Any, *names: str) -> None:
    for name in names:
        value = getattr(adapter, name)
        if not isinstance(value, str) or not value:
            raise InputError(f"{type(adapter).__name__}: {name}={value!r} is not a name")
