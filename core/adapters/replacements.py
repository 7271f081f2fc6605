"""Replacements as JSON values: the import path of a function, or of a class with the arguments that make an object."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from nvdd.adapters.paths import from_path, path_of
from nvdd.errors import InputError


def replacement_to_dict(replacement: Any, who: str) -> Any:
    """``"module:function"``; ``{"path": ..., "arguments": {...}}`` for a frozen dataclass object or a partial.

    Raises:
        InputError: another process could not find or make the replacement.
    """
    if replacement is None:
        return None
    if isinstance(replacement, functools.partial):
        if replacement.args:
            raise InputError(f"{who}: only keyword arguments of functools.partial can be written to a file")
        return {
            "path": path_of(replacement.func, who),
            "partial": True,
            "arguments": _plain(replacement.keywords, who),
        }
    if dataclasses.is_dataclass(replacement) and not isinstance(replacement, type):
        fields = {f.name: getattr(replacement, f.name) for f in dataclasses.fields(replacement) if f.init}
        return {"path": path_of(type(replacement), who), "partial": False, "arguments": _plain(fields, who)}
    return path_of(replacement, who)


def replacement_from_dict(value: Any, who: str) -> Any:
    """The other way round."""
    if value is None or isinstance(value, str):
        return None if value is None else from_path(value, who)
    if not isinstance(value, dict) or set(value) != {"path", "partial", "arguments"}:
        raise InputError(f"{who}: {value!r} is not a replacement; write an import path 'package.module:function'")
    found, arguments = from_path(value["path"], who), value["arguments"]
    try:
        return functools.partial(found, **arguments) if value["partial"] else found(**arguments)
    except TypeError as error:
        raise InputError(
            f"{who}: the replacement {value['path']} does not take the arguments of the file: {error}"
        ) from error


def _plain(arguments: dict[str, Any], who: str) -> dict[str, Any]:
    for name, value in arguments.items():
        if not (value is None or type(value) in (bool, int, float, str)):
            raise InputError(
                f"{who}: the argument {name}={value!r} of its replacement can't be written to a file; use None, bool, int, "
                "float or str"
            )
    return dict(arguments)
