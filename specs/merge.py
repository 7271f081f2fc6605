"""What ``spec | other`` is: both specs for one model that does what both do. Nothing is lost, conflicts are errors.

Policies:

| one | other | both |
|---|---|---|
| halo | halo | halo, if their modes agree |
| halo | sharded | sharded |
| sharded | sharded | sharded, if their modes agree |
| graph-parallel | graph-parallel | graph-parallel |
| local | any | the other |

In a sum of models (`PipelineModelWrapper`) each keeps its own modes, so there two halo or two sharded policies always
agree. Anything else is a conflict, and so are different ``system_reductions``. Outputs, adapters: all of both; of one name or
target they must be equal. Force strategies: equal ones; edge vectors with positions are positions, of which edge
vectors are functions. Compile policies: what one leaves open the other fills in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from nvdd.adapters import Adapter
from nvdd.policy import HaloStoragePolicy, LocalStoragePolicy, ShardedStoragePolicy, StoragePolicy
from nvdd.specs.compiling import CompilePolicy, ForceStrategy
from nvdd.specs.distribution import DistributionSpec
from nvdd.specs.outputs import OutputSpec

A = TypeVar("A", bound=Adapter)


class SpecConflictError(ValueError):
    """Two specs that can't be composed; the message names both sides."""


def _conflict(what: str, left: Any, right: Any, names: tuple[str, str], remedy: str) -> SpecConflictError:
    return SpecConflictError(
        f"{names[0] or 'the left spec'} | {names[1] or 'the right spec'}: {what} is {left} on the left and {right} on the "
        f"right; {remedy}"
    )


def merge_policies(left: StoragePolicy, right: StoragePolicy, names: tuple[str, str]) -> StoragePolicy:
    """The policy for both."""
    if left.system_reductions != right.system_reductions:
        raise _conflict(
            "system_reductions",
            left.system_reductions,
            right.system_reductions,
            names,
            "give both the same, by with_policy",
        )
    if isinstance(left, LocalStoragePolicy):
        return right
    if isinstance(right, LocalStoragePolicy) or left == right:
        return left
    kinds = {type(left), type(right)}
    if kinds == {HaloStoragePolicy, ShardedStoragePolicy}:
        return left if isinstance(left, ShardedStoragePolicy) else right
    remedy = (
        "give both the same modes, by with_policy"
        if len(kinds) == 1
        else "one forward has one layout of rows: run the two models one after the other"
    )
    raise _conflict("the storage policy", left, right, names, remedy)


def composed_policy(left: StoragePolicy, right: StoragePolicy, names: tuple[str, str]) -> StoragePolicy:
    """What stands for the policies of two models that are evaluated one after the other, each under its own."""
    if isinstance(left, LocalStoragePolicy):
        return right
    if isinstance(right, LocalStoragePolicy) or type(left) is type(right):
        return left
    if {type(left), type(right)} == {HaloStoragePolicy, ShardedStoragePolicy}:
        return left if isinstance(left, ShardedStoragePolicy) else right
    raise _conflict(
        "the storage policy", left, right, names, "atoms are divided in one way for both: run them separately"
    )


def merge_outputs(
    left: Mapping[str, OutputSpec], right: Mapping[str, OutputSpec], names: tuple[str, str]
) -> dict[str, OutputSpec]:
    """All outputs of both."""
    for name in left.keys() & right.keys():
        if left[name] != right[name]:
            words = [f"{s.kind.value} with reduce={s.reduce.value}" for s in (left[name], right[name])]
            raise _conflict(f"the output {name!r}", words[0], words[1], names, "declare it alike, by with_outputs")
    return {**left, **right}


def merge_adapters(left: tuple[A, ...], right: tuple[A, ...], what: str, names: tuple[str, str]) -> tuple[A, ...]:
    """All adapters of both, in their order."""
    have = {a.target: a for a in left}
    for adapter in right:
        if adapter.target in have and have[adapter.target] != adapter:
            raise _conflict(
                f"the adapter of {adapter.target} in {what}",
                repr(have[adapter.target]),
                repr(adapter),
                names,
                "keep one of them",
            )
    return left + tuple(a for a in right if a.target not in have)


def merge_distributions(left: DistributionSpec, right: DistributionSpec, names: tuple[str, str]) -> DistributionSpec:
    """Policy and adapters for both."""
    return DistributionSpec(
        merge_policies(left.policy, right.policy, names),
        merge_adapters(left.custom_ops, right.custom_ops, "custom_ops", names),
        merge_adapters(left.third_party_helpers, right.third_party_helpers, "third_party_helpers", names),
    )


def merge_force_strategies(left: ForceStrategy, right: ForceStrategy, names: tuple[str, str]) -> ForceStrategy:
    """What the energy of both can be differentiated by."""
    if left is right:
        return left
    if {left, right} == {ForceStrategy.EDGE_VECTORS, ForceStrategy.POSITIONS}:
        return ForceStrategy.POSITIONS
    raise _conflict(
        "force_strategy", left.value, right.value, names, "one forward has one: run the two models one after the other"
    )


def merge_compile_policies(
    left: CompilePolicy | None, right: CompilePolicy | None, names: tuple[str, str]
) -> CompilePolicy | None:
    """Each setting from the one that makes it."""
    if left is None or right is None:
        return left if right is None else right
    merged = {}
    for field in fields(CompilePolicy):
        mine, theirs = getattr(left, field.name), getattr(right, field.name)
        if None not in (mine, theirs) and mine != theirs:
            raise _conflict(
                f"compile_policy.{field.name}", mine, theirs, names, "give both the same, by with_compile_policy"
            )
        merged[field.name] = theirs if mine is None else mine
    return CompilePolicy(**merged)


def merge_names(left: str, right: str) -> str:
    """``"left | right"``, each part once."""
    parts = [p for name in (left, right) for p in name.split(" | ") if p]
    return " | ".join(dict.fromkeys(parts))
