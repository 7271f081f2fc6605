"""The JSON schema of files of specs, made from the same enumerations, policies and adapters as the specs themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nvdd.adapters.callables import JIT_MODES
from nvdd.adapters.transforms import TRANSFORMS, ArgTransform, OutputTransform
from nvdd.policy import POLICIES, StoragePolicy
from nvdd.roles import Role
from nvdd.specs.compiling import ForceStrategy
from nvdd.specs.outputs import REDUCED_KIND, OutputKind, Reduce
from nvdd.specs.serialize import VERSION

_TEXT = {"type": "string"}
_FLAG = {"type": "boolean"}


def spec_schema() -> dict[str, Any]:
    """What `MLIPSpec.save` writes and `MLIPSpec.load` takes, as a JSON schema (draft 2020-12).

    The schema knows the form. That operations are registered, functions can be imported and adapters fit their
    operations, `MLIPSpec.load` finds out.
    """
    adapters = {"type": "array", "items": {"anyOf": [_op(), _method(), _attribute("function", "python"), _jit(), *_stages()]}}
    force = _one_of(strategy.value for strategy in ForceStrategy)
    distribution = _object(
        policy={"anyOf": [_policy(policy) for policy in POLICIES.values()]},
        custom_ops={"type": "array", "items": _op()},
        third_party_helpers=adapters,
    )
    compiling = _object(
        {"graph_padder", "force_strategy"},
        static_shapes=_FLAG,
        graph_padder=_or_null({**_TEXT, "pattern": "^[^:]+:.+$"}),
        force_strategy=_or_null(force),
    )
    content = _object(
        {"name", "compile_policy"},
        version={"const": VERSION},
        name=_TEXT,
        distribution=distribution,
        outputs={"type": "object", "additionalProperties": {"anyOf": list(_outputs())}},
        force_strategy=force,
        adapters=adapters,
        compile_policy=_or_null(compiling),
    )
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "nvdd MLIPSpec", **content}


def _policy(policy: type[StoragePolicy]) -> dict[str, Any]:
    pairs = [{"properties": {"gather_mode": {"const": g}, "scatter_mode": {"const": s}}} for g, s in policy.meanings]
    fields = _object(kind={"const": policy.kind}, scatter_mode=_TEXT, gather_mode=_TEXT, system_reductions=_FLAG)
    return {**fields, "anyOf": pairs}


def _outputs() -> Iterable[dict[str, Any]]:
    """A form for each reduction, with the kinds of output that it is for."""
    for reduce in Reduce:
        kinds = [REDUCED_KIND[reduce]] if reduce in REDUCED_KIND else list(OutputKind)
        yield _object(kind=_one_of(kind.value for kind in kinds), reduce={"const": reduce.value})


def _op() -> dict[str, Any]:
    names = lambda base: _one_of(name for name, cls in TRANSFORMS.items() if issubclass(cls, base))
    by_position = lambda values: {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]+$"},
        "additionalProperties": values,
    }
    return _object(
        {"registered_by", "arg_transforms", "output_transforms", "output_roles"},
        kind={"const": "op"},
        op={**_TEXT, "pattern": "^.+::.+$"},
        arg_transforms=by_position(names(ArgTransform)),
        output_transforms=by_position(names(OutputTransform)),
        output_roles=by_position(_one_of(Role.__members__)),
        registered_by=_or_null(_TEXT),
    )


def _method() -> dict[str, Any]:
    return _object(
        kind={"const": "method"},
        module_path=_TEXT,
        class_name=_TEXT,
        method_name=_TEXT,
        replacement=_replacement(),
    )


def _attribute(*kinds: str, **more: Any) -> dict[str, Any]:
    replacement = _or_null(_replacement())
    optional = {"replacement", "mode"}
    return _object(optional, kind=_one_of(kinds), module_path=_TEXT, attr_name=_TEXT, replacement=replacement, **more)


def _stages() -> Iterable[dict[str, Any]]:
    """`EdgeStage` and `AtomStage`."""
    for kind in ("edges", "atoms"):
        names = {"type": "array", "items": {**_TEXT, "minLength": 1}, "minItems": 1}
        yield _object(kind={"const": kind}, module_path=_TEXT, class_name=_TEXT, method_name=_TEXT, **{kind: names})


def _jit() -> dict[str, Any]:
    return _attribute("jit", mode=_one_of(JIT_MODES))


def _replacement() -> dict[str, Any]:
    """An import path, or one with the arguments of the object that is made there."""
    made = _object(path=_TEXT, arguments={"type": "object"})
    return {"anyOf": [_TEXT, made]}


def _object(optional: Iterable[str] = (), /, **properties: Any) -> dict[str, Any]:
    required = [name for name in properties if name not in set(optional)]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _one_of(values: Iterable[str]) -> dict[str, Any]:
    return {"enum": list(values)}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}
