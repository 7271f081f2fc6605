"""Replacements as JSON values: the import path of a function, or of a class with the arguments that make an object."""

from __future__ import annotations

import dataclasses
from typing import Any

from nvdd.adapters.paths import from_path, path_of
from nvdd.errors import InputError


def replacement_to_dict(replacement: Any, who: str) -> Any:
    """``"module:function"``; ``{"path": ..., "arguments": {...}}`` for an object of a frozen dataclass.

    Raises:
        InputError: another process could not find or make the replacement.
    """
    if replacement is None:
        return None
    if dataclasses.is_dataclass(replacement) and not isinstance(replacement, type):
        fields = {f.name: getattr(replacement, f.name) for f in dataclasses.fields(replacement) if f.init}
        return {"path": path_of(type(replacement), who), "arguments": _plain(fields, who)}
    return path_of(replacement, who)


def replacement_from_dict(value: Any, who: str) -> Any:
    """The other way round."""
    if value is None or isinstance(value, str):
        return None if value is None else from_path(value, who)
    if not isinstance(value, dict) or set(value) != {"path", "arguments"}:
        raise InputError(f"{who}: {value!r} is not a replacement; write an import path 'package.module:function'")
    made_by = from_path(value["path"], who)
    try:
        return made_by(**value["arguments"])
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
