"""Adapters from JSON values, checked."""

from __future__ import annotations

from typing import Any

from nvdd.adapters.atoms import AtomStage
from nvdd.adapters.base import Adapter
from nvdd.adapters.callables import FunctionAdapter, JitAdapter, MethodAdapter, PythonAdapter
from nvdd.adapters.edges import EdgeStage
from nvdd.adapters.op import OpAdapter, resolve
from nvdd.adapters.paths import from_path
from nvdd.adapters.replacements import replacement_from_dict
from nvdd.adapters.stage import Stage
from nvdd.adapters.transforms import TRANSFORMS
from nvdd.checked import Fields
from nvdd.errors import InputError
from nvdd.roles import Role


def adapter_from_dict(value: Any, where: str = "adapter") -> Adapter:
    """The adapter that ``to_dict`` of it gave.

    Raises:
        InputError: a field is missing, unknown or wrong; an operation is not registered; a module can't be imported.
    """
    fields = Fields(value, where)
    kind = fields.take("kind", str)
    readers = {"op": _op, "method": _method, "function": _attribute, "python": _attribute, "jit": _attribute, "edges": _stage, "atoms": _stage}
    if kind not in readers:
        raise InputError(f"{where}: kind {kind!r} is not one of {', '.join(map(repr, readers))}")
    adapter = readers[kind](kind, fields)
    fields.done()
    return adapter


def _op(kind: str, fields: Fields) -> Adapter:
    name, module = fields.take("op", str), fields.take("registered_by", str, default=None)
    resolve(name, fields.where, module)
    tables = {}
    for table in ("arg_transforms", "output_transforms"):
        tables[table] = {p: _one_of(TRANSFORMS, v, fields.where)() for p, v in _positions(fields, table).items()}
    roles = {p: _one_of(Role.__members__, v, fields.where) for p, v in _positions(fields, "output_roles").items()}
    adapter = OpAdapter(name, **tables, output_roles=roles)
    adapter._check_schema()
    return adapter


def _positions(fields: Fields, table: str) -> dict[int, str]:
    found = fields.take(table, dict, default={})
    for key in found:
        if not key.isdigit():
            raise InputError(f"{fields.where}: {table} has {key!r}; its keys are positions 0, 1, ...")
    return {int(k): v for k, v in found.items()}


def _one_of(table: Any, name: Any, where: str) -> Any:
    if name not in table:
        raise InputError(f"{where}: {name!r} is not one of {', '.join(table)}")
    return table[name]


def _method(kind: str, fields: Fields) -> Adapter:
    names = {key: fields.take(key, str) for key in ("module_path", "class_name", "method_name")}
    return MethodAdapter(**names, replacement=_replacement(fields))


def _stage(kind: str, fields: Fields) -> Adapter:
    names = [fields.take(key, str) for key in ("module_path", "class_name", "method_name")]
    stages: dict[str, type[Stage]] = {stage.kind: stage for stage in (EdgeStage, AtomStage)}
    return stages[kind].from_names(*names, fields.take(kind, list))


def _attribute(kind: str, fields: Fields) -> Adapter:
    module_path, attr_name = fields.take("module_path", str), fields.take("attr_name", str)
    replacement = _replacement(fields)
    if kind == "jit":
        return JitAdapter(module_path, attr_name, replacement, mode=fields.take("mode", str, default="eager"))
    if kind == "function":
        return FunctionAdapter(from_path(f"{module_path}:{attr_name}", fields.where), replacement)
    return PythonAdapter(module_path, attr_name, replacement)


def _replacement(fields: Fields) -> Any:
    return replacement_from_dict(fields.take("replacement", (str, dict), default=None), fields.where)
