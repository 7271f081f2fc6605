"""`MLIPSpec` to JSON and back: every field of every part, and nothing that this version does not know."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Any

from nvdd.errors import InputError
from nvdd.policy import HaloStoragePolicy, StoragePolicy
from nvdd.specs.outputs import OutputSpec
from nvdd.specs.spec import DistributionSpec, MLIPSpec

VERSION = 1

# the parts of a spec, by the name under which they stand in a file
_PARTS = {part.__name__: part for part in (MLIPSpec, DistributionSpec, OutputSpec, StoragePolicy, HaloStoragePolicy)}


def spec_to_json(spec: MLIPSpec) -> dict[str, Any]:
    """The spec as a dictionary that ``json.dumps`` takes.

    Raises:
        InputError: a part or value that has no form in JSON, such as a policy class of one's own.
    """
    return {"version": VERSION, "spec": _encode(spec, "spec")}


def spec_from_json(content: Mapping[str, Any]) -> MLIPSpec:
    """The spec that `spec_to_json` wrote.

    Raises:
        InputError: another version, a part or field that this version lacks, a field that is missing, or a value
            that the field can't have.
    """
    version = content.get("version") if isinstance(content, Mapping) else None
    if version != VERSION:
        raise InputError(
            f"the spec has format version {version!r}, but this nvdd reads version {VERSION}; write it again with this nvdd"
        )
    spec = _decode(content.get("spec"), MLIPSpec, "spec")
    if not isinstance(spec, MLIPSpec):
        raise InputError(f"spec: expected an MLIPSpec, found {content.get('spec')!r}; write the file again")
    return spec


def _encode(value: Any, where: str) -> Any:
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _encode(item, f"{where}.{key}") for key, item in value.items()}
    name = type(value).__name__
    if _PARTS.get(name) is not type(value):
        raise InputError(
            f"{where}: a {type(value).__module__}.{name} can't be written as JSON; a spec in a file is made of nvdd's own classes"
        )
    fields = {f.name: _encode(getattr(value, f.name), f"{where}.{f.name}") for f in dataclasses.fields(value)}
    return {"class": name, **fields}


def _decode(value: Any, hint: Any, where: str) -> Any:
    if isinstance(value, Mapping) and "class" in value:
        return _decode_part(dict(value), where)
    if isinstance(value, Mapping):
        return {key: _decode(item, None, f"{where}.{key}") for key, item in value.items()}
    if isinstance(hint, type) and issubclass(hint, Enum):
        try:
            return hint(value)
        except ValueError:
            known = ", ".join(repr(member.value) for member in hint)
            raise InputError(f"{where}: {value!r} is not known to this nvdd; it knows {known}: update nvdd") from None
    return value


def _decode_part(value: dict[str, Any], where: str) -> Any:
    name = value.pop("class")
    part = _PARTS.get(name)
    if part is None:
        raise InputError(f"{where}: no class {name!r} in this nvdd; the spec was written by another one: update nvdd")
    hints, known = typing.get_type_hints(part), {field.name for field in dataclasses.fields(part)}
    if unknown := sorted(value.keys() - known):
        raise InputError(
            f"{where}: {name} has no field {', '.join(unknown)} in this nvdd; the spec is newer: update nvdd"
        )
    if missing := sorted(known - value.keys()):
        raise InputError(f"{where}: the field {', '.join(missing)} of {name} is missing; write the file again")
    fields = {key: _decode(item, hints[key], f"{where}.{key}") for key, item in value.items()}
    try:
        return part(**fields)
    except (TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{where}: {name} can't be made of what the file says: {error}") from error
