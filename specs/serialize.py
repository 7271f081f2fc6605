"""`MLIPSpec` to JSON values and back: every field of every part, and nothing that this version does not know.

Operations stand in the file as ``namespace::op``, functions and classes by their import paths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from nvdd.adapters import adapter_from_dict
from nvdd.checked import Fields
from nvdd.errors import InputError
from nvdd.policy import POLICIES, StoragePolicy
from nvdd.specs.compiling import CompilePolicy, ForceStrategy
from nvdd.specs.distribution import DistributionSpec
from nvdd.specs.outputs import OutputKind, OutputSpec, Reduce
from nvdd.specs.spec import MLIPSpec

VERSION = 2


def spec_to_json(spec: MLIPSpec) -> dict[str, Any]:
    """The spec as a dictionary that ``json.dumps`` takes.

    Raises:
        InputError: a part has no form in JSON: a policy class of one's own, a replacement without an import path.
    """
    distribution, compiling = spec.distribution, spec.compile_policy
    return {
        "version": VERSION,
        "name": spec.name,
        "distribution": {
            "policy": _policy_to_json(distribution.policy),
            "custom_ops": [a.to_dict() for a in distribution.custom_ops],
            "third_party_helpers": [a.to_dict() for a in distribution.third_party_helpers],
        },
        "outputs": {k: {"kind": s.kind.value, "reduce": s.reduce.value} for k, s in spec.outputs.items()},
        "force_strategy": spec.force_strategy.value,
        "adapters": [a.to_dict() for a in spec.adapters],
        "compile_policy": None
        if compiling is None
        else {
            "static_shapes": compiling.static_shapes,
            "graph_padder": compiling.graph_padder,
            "force_strategy": None if compiling.force_strategy is None else compiling.force_strategy.value,
        },
    }


def spec_from_json(content: Mapping[str, Any]) -> MLIPSpec:
    """The spec that `spec_to_json` wrote.

    Raises:
        InputError: another version, a field that is unknown, missing or wrong, an operation that is not registered, a
            function that can't be imported.
    """
    top = Fields(dict(content) if isinstance(content, Mapping) else content, "spec")
    version = top.take("version", int)
    if version != VERSION:
        known = f"this nvdd reads version {VERSION}"
        remedy = "update nvdd" if version > VERSION else "save the spec again with this nvdd"
        raise InputError(f"the spec has format version {version}, and {known}; {remedy}")
    part = Fields(top.take("distribution", dict), "spec.distribution")
    compiling = top.take("compile_policy", dict, default=None)
    name, outputs = top.take("name", str, default=""), top.take("outputs", dict)
    force_strategy = _one_of(ForceStrategy, top.take("force_strategy", str), "spec.force_strategy")
    distribution = _made(
        DistributionSpec,
        part.where,
        policy=_policy_from_json(part.take("policy", dict)),
        custom_ops=_adapters(part, "custom_ops"),
        third_party_helpers=_adapters(part, "third_party_helpers"),
    )
    adapters = _adapters(top, "adapters")
    part.done()
    top.done()
    return _made(
        MLIPSpec,
        "spec",
        distribution=distribution,
        outputs={k: _output_from_json(v, f"spec.outputs.{k}") for k, v in outputs.items()},
        force_strategy=force_strategy,
        adapters=adapters,
        compile_policy=None if compiling is None else _compile_policy_from_json(compiling),
        name=name,
    )


def _policy_to_json(policy: StoragePolicy) -> dict[str, Any]:
    if POLICIES.get(policy.kind) is not type(policy):
        raise InputError(
            f"the policy {type(policy).__module__}.{type(policy).__name__} can't be written as JSON; a spec in a file has one "
            f"of {', '.join(p.__name__ for p in POLICIES.values())}"
        )
    return {"kind": policy.kind, **{f.name: getattr(policy, f.name) for f in fields(policy)}}


def _policy_from_json(value: Any) -> StoragePolicy:
    where = "spec.distribution.policy"
    part = Fields(value, where)
    kind = part.take("kind", str)
    if kind not in POLICIES:
        raise InputError(f"{where}: kind {kind!r} is not one of {', '.join(map(repr, POLICIES))}")
    modes = {knob: part.take(knob, str) for knob in ("scatter_mode", "gather_mode")}
    policy = _made(POLICIES[kind], where, **modes, system_reductions=part.take("system_reductions", bool))
    part.done()
    return policy


def _output_from_json(value: Any, where: str) -> OutputSpec:
    part = Fields(value, where)
    kind = _one_of(OutputKind, part.take("kind", str), f"{where}.kind")
    reduce = _one_of(Reduce, part.take("reduce", str), f"{where}.reduce")
    part.done()
    return _made(OutputSpec, where, kind=kind, reduce=reduce)


def _compile_policy_from_json(value: Any) -> CompilePolicy:
    where = "spec.compile_policy"
    part = Fields(value, where)
    shapes, padder = part.take("static_shapes", bool), part.take("graph_padder", str, default=None)
    strategy = part.take("force_strategy", str, default=None)
    part.done()
    strategy = None if strategy is None else _one_of(ForceStrategy, strategy, f"{where}.force_strategy")
    return _made(CompilePolicy, where, static_shapes=shapes, graph_padder=padder, force_strategy=strategy)


def _adapters(part: Fields, name: str) -> tuple:
    given = part.take(name, list)
    return tuple(adapter_from_dict(a, f"{part.where}.{name}[{k}]") for k, a in enumerate(given))


def _one_of(kind: Any, value: str, where: str) -> Any:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(repr(member.value) for member in kind)
        raise InputError(f"{where}: {value!r} is not known to this nvdd; it knows {known}") from None


def _made(make: Any, where: str, /, **values: Any) -> Any:
    try:
        return make(**values)
    except (TypeError, ValueError) as error:
        raise InputError(f"{where}: {error}") from error
