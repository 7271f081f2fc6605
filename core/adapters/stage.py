"""`Stage`: what declarations of a method's arguments have in common, as `EdgeStage` and `AtomStage`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeVar

from nvdd.adapters.callables import MethodAdapter
from nvdd.errors import InputError

S = TypeVar("S", bound="Stage")


class Stage(MethodAdapter):
    """Says what some arguments of a method are; a run that saves memory acts on it, any other does not.

    A subclass sets ``kind``, which is also the name of its table in files, and ``body``: made of the names, it is called
    as ``body(original, *args, **kwargs)``.
    """

    body: ClassVar[type[Any]]

    def __init__(
        self, target_class: type | None, method_name: str, names: Iterable[str], module_path: str, class_name: str
    ) -> None:
        names = (names,) if isinstance(names, str) else tuple(names)
        if not names or not all(isinstance(name, str) and name for name in names):
            raise InputError(f"{type(self).__name__}: {self.kind}={names!r} are no names of arguments")
        super().__init__(target_class, method_name, type(self).body(names), module_path=module_path, class_name=class_name)

    @classmethod
    def of(cls: type[S], modules: Iterable[Any], names: Iterable[str], method_name: str = "forward") -> tuple[S, ...]:
        """One for each class among ``modules``, such as the layers of a network."""
        classes = dict.fromkeys(type(module) for module in modules)
        return tuple(cls(kind, method_name, names) for kind in classes)

    @classmethod
    def from_names(cls: type[S], module_path: str, class_name: str, method_name: str, names: Iterable[str]) -> S:
        """Of a class that is given by names, as in files."""
        return cls(None, method_name, names, module_path=module_path, class_name=class_name)

    @property
    def names(self) -> tuple[str, ...]:
        """The arguments."""
        return self.replacement.names

    @property
    def target(self) -> str:
        """``<kind> of module.Class.method``: a method may have another adapter besides."""
        return f"{self.kind} of {super().target}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({super().target!r}, {self.kind}={self.names!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_names, (self.module_path, self.class_name, self.method_name, self.names)

    def to_dict(self) -> dict[str, Any]:
        """The adapter as JSON values."""
        where = ("module_path", "class_name", "method_name")
        return {"kind": self.kind, **{name: getattr(self, name) for name in where}, self.kind: list(self.names)}


def name_of(original: Callable) -> str:
    """The method, for messages."""
    return getattr(inspect.unwrap(original), "__qualname__", "the method")
