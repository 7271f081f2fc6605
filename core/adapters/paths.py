"""Import paths of Python objects, ``package.module:attribute``, and back."""

from __future__ import annotations

import importlib
from typing import Any

from nvdd.errors import InputError


def walk(value: Any, dotted: str) -> Any:
    """``value.a.b`` for ``"a.b"``."""
    for name in dotted.split("."):
        value = getattr(value, name)
    return value


def import_module(module_path: str, who: str) -> Any:
    """The module of that name.

    Raises:
        InputError: there is none; ``who`` wants it.
    """
    try:
        return importlib.import_module(module_path)
    except ModuleNotFoundError as error:
        if error.name and f"{module_path}.".startswith(f"{error.name}."):
            raise InputError(
                f"{who} names the module {module_path!r}, which can't be imported here (no module {error.name!r}); "
                "install the model's package, or put the module's folder on Python's path"
            ) from error
        raise


def path_of(value: Any, who: str) -> str:
    """The import path of a function or class.

    Raises:
        InputError: it has none, so that another process could not find it.
    """
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module is None or name is None:
        raise InputError(
            f"{who} has {value!r}, which is not a function or class of a module, so it can't be written to a file; define "
            "it with def at the top level of a module (with settings: as a frozen dataclass with __call__)"
        )
    if "<" in name or module == "__main__":
        where = "in the script itself" if module == "__main__" else "inside a function"
        raise InputError(
            f"{who} has {module}.{name}, which is defined {where}, so it can't be written to a file and found again; move "
            "it to the top level of a module"
        )
    try:
        found = walk(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        found = None
    if found is not value:
        raise InputError(
            f"{who} has a function that says it is {module}.{name}, but something else is found there, so it can't be "
            "written to a file; give the function that is defined under that name"
        )
    return f"{module}:{name}"


def from_path(path: Any, who: str) -> Any:
    """The object at an import path.

    Raises:
        InputError: there is nothing.
    """
    module_path, colon, name = str(path).partition(":")
    if not isinstance(path, str) or not colon or not module_path or not name:
        raise InputError(f"{who}: {path!r} is not an import path; write 'package.module:attribute'")
    module = import_module(module_path, who)
    try:
        return walk(module, name)
    except AttributeError:
        raise InputError(
            f"{who}: the module {module_path} has no {name!r}; is its version the one of the file?"
        ) from None
