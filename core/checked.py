"""Reading JSON objects field by field, so that nothing in a file is overlooked."""

from __future__ import annotations

from typing import Any

from nvdd.errors import InputError

_REQUIRED = object()


class Fields:
    """The fields of one JSON object; each is taken once, and `done` refuses what is left.

    Args:
        value: the object.
        where: its place in the file, for messages.

    Raises:
        InputError: it is no object.
    """

    def __init__(self, value: Any, where: str) -> None:
        self.where = where
        if not isinstance(value, dict):
            raise InputError(f"{where}: an object with named fields is expected, not {value!r}")
        self._left = dict(value)

    def take(self, name: str, kind: Any, default: Any = _REQUIRED) -> Any:
        """The field ``name``, which must be of type ``kind``; null where the default is None.

        Raises:
            InputError: it is missing and has no default, or is of another type.
        """
        if name not in self._left:
            if default is _REQUIRED:
                raise InputError(f"{self.where}: the field {name!r} is missing")
            return default
        value = self._left.pop(name)
        if value is None and default is None:
            return None
        wrong_bool = isinstance(value, bool) and kind is not bool
        if wrong_bool or not isinstance(value, kind):
            names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
            raise InputError(f"{self.where}: the field {name!r} is {value!r}, where {names} is expected")
        return value

    def done(self) -> None:
        """Raises InputError for fields that nobody has taken."""
        if self._left:
            raise InputError(
                f"{self.where}: unknown field {', '.join(map(repr, self._left))}; was the file written by a newer nvdd, or "
                "is the name misspelt?"
            )
