"""Rules that change a spec where an attempt failed in a way that the rule knows.

A rule proposes, the validator decides: a changed spec counts only if every output passes in every geometry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from nvdd.adapters import GatherInputs, OpAdapter, ScatterOutputs
from nvdd.policy import HaloStoragePolicy, ShardedStoragePolicy
from nvdd.roles import Role
from nvdd.specs import ForceStrategy, MLIPSpec, OutputKind, OutputSpec, Reduce


@dataclass(frozen=True)
class Fix:
    """One change of a spec.

    Attributes:
        rule: name of the rule.
        output: the output, or the custom op, that it is about, if any.
        value: kind, strategy or position that it sets, if any.
    """

    rule: str
    output: str = ""
    value: str = ""

    @property
    def speculative(self) -> bool:
        """Whether the rule tries something else rather than what the message says."""
        return self.rule in ("store_sharded", "halo_correction_to_fetch", "halo_correction_to_local", "scatter_outputs")

    def __str__(self) -> str:
        return f"{self.rule}({self.output})" if self.output else self.rule


def _declare(spec: MLIPSpec, fix: Fix) -> MLIPSpec:
    return spec.with_outputs({fix.output: OutputSpec(OutputKind(fix.value))})


def _promote(spec: MLIPSpec, fix: Fix) -> MLIPSpec:
    return spec.with_outputs({fix.output: OutputSpec(OutputKind.PER_GRAPH, Reduce.ALL_REDUCE)})


def _drop(spec: MLIPSpec, fix: Fix) -> MLIPSpec:
    return spec.with_outputs({fix.output: replace(spec.outputs[fix.output], reduce=Reduce.NONE)})


def _halo(spec: MLIPSpec, gather_mode: str) -> MLIPSpec:
    return spec.with_policy(replace(spec.distribution.policy, gather_mode=gather_mode, scatter_mode="local"))


def _adapter(spec: MLIPSpec, fix: Fix, change: Callable[[dict, dict, dict], None]) -> MLIPSpec:
    """Changes the tables of the adapter of ``fix.output`` (arguments, outputs, roles)."""

    def changed(adapter: OpAdapter) -> OpAdapter:
        if adapter.name != fix.output:
            return adapter
        tables = dict(adapter.arg_transforms), dict(adapter.output_transforms), dict(adapter.output_roles)
        change(*tables)
        return OpAdapter(adapter.name, *tables)

    ops = tuple(map(changed, spec.distribution.custom_ops))
    return replace(spec, distribution=replace(spec.distribution, custom_ops=ops))


def _pad(spec: MLIPSpec, fix: Fix) -> MLIPSpec:
    return _adapter(spec, fix, lambda args, outs, roles: args.update({int(fix.value): GatherInputs()}))


def _unpad(spec: MLIPSpec, fix: Fix) -> MLIPSpec:
    def change(args: dict, outs: dict, roles: dict) -> None:
        for position in [p for p, t in args.items() if isinstance(t, GatherInputs)]:
            del args[position]

    return _adapter(spec, fix, change)


def _scatter(spec: MLIPSpec, fix: Fix) -> MLIPSpec:
    def change(args: dict, outs: dict, roles: dict) -> None:
        roles.pop(int(fix.value), None)
        outs[int(fix.value)] = ScatterOutputs()

    return _adapter(spec, fix, change)


# rule -> what it does to a spec. The first three are the usual suspects; the order is that of the attempts.
RULES: dict[str, Callable[[MLIPSpec, Fix], MLIPSpec]] = {
    "declare_output": _declare,
    "drop_extra_all_reduce": _drop,
    "promote_to_all_reduce": _promote,
    "force_strategy": lambda spec, fix: spec.with_force_strategy(ForceStrategy(fix.value)),
    "add_gather_inputs": _pad,
    "drop_gather_inputs": _unpad,
    "scatter_outputs": _scatter,
    "store_sharded": lambda spec, fix: spec.with_policy(ShardedStoragePolicy()),
    "halo_correction_to_fetch": lambda spec, fix: _halo(spec, "halo_fetch"),
    "halo_correction_to_local": lambda spec, fix: _halo(spec, "halo_read"),
}


def apply_fixes(spec: MLIPSpec, fixes: Iterable[Fix]) -> MLIPSpec:
    """The spec after all fixes."""
    for fix in fixes:
        spec = RULES[fix.rule](spec, fix)
    return spec


def propose(
    spec: MLIPSpec,
    kinds: Mapping[str, OutputKind],
    problems: frozenset[str],
    failed: Iterable[str],
    returned: frozenset[str],
) -> list[Fix]:
    """The fixes that suit what went wrong, best first.

    Args:
        spec: of the attempt that failed.
        kinds: kind of each output that the wrapper returns.
        problems: kinds of its diagnoses (`nvdd.validate.diagnosis`), as ``kind`` or ``kind:output``.
        failed: outputs that did not pass.
        returned: outputs that the wrapper returns.
    """
    fixes = []
    for name, kind in sorted(kinds.items()):
        declared = spec.outputs.get(name)
        if (
            declared is None
            or declared.kind is OutputKind.UNKNOWN
            or (declared.kind is not kind and {f"wrong-kind:{name}", f"wrong-shape:{name}"} & problems)
        ):
            fixes.append(Fix("declare_output", name, kind.value))
    for name, declared in sorted(spec.outputs.items()):
        if declared.reduce is Reduce.ALL_REDUCE and f"times-world-size:{name}" in problems:
            fixes.append(Fix("drop_extra_all_reduce", name))
        unsummed = {f"not-known-summed:{name}", f"share:{name}"} & problems
        if unsummed and declared.kind is OutputKind.PER_GRAPH and declared.reduce is not Reduce.ALL_REDUCE:
            fixes.append(Fix("promote_to_all_reduce", name))
    strategy = spec.force_strategy
    if "stand-in" in problems and strategy is ForceStrategy.EDGE_VECTORS:
        # a model that differentiates by positions itself returns the forces
        other = ForceStrategy.MODEL_INTERNAL if "forces" in returned else ForceStrategy.POSITIONS
        fixes.append(Fix("force_strategy", value=other.value))
    if "index-values" in problems and isinstance(spec.distribution.policy, HaloStoragePolicy):
        fixes.append(Fix("store_sharded"))  # where the values are global ids
    fixes += _of_adapters(spec, problems, bool(set(failed)))
    policy = spec.distribution.policy
    if isinstance(policy, HaloStoragePolicy) and policy.scatter_mode == "halo_correction" and (set(failed) or problems):
        fixes += [Fix("halo_correction_to_fetch"), Fix("halo_correction_to_local")]
    return fixes


def _of_adapters(spec: MLIPSpec, problems: frozenset[str], wrong: bool) -> list[Fix]:
    fixes = []
    for adapter in spec.distribution.custom_ops:
        name = adapter.name
        if f"double-padding:{name}" in problems:
            fixes.append(Fix("drop_gather_inputs", name))
        for problem in sorted(problems):
            if problem.startswith(f"missing-gather-inputs:{name}:"):
                fixes.append(Fix("add_gather_inputs", name, problem.rsplit(":", 1)[1]))
            if problem.startswith(f"missing-output-transform:{name}:"):
                fixes.append(Fix("scatter_outputs", name, problem.rsplit(":", 1)[1]))
        if wrong:  # what is said to be final may be partial sums
            fixes += [Fix("scatter_outputs", name, str(p)) for p, r in adapter.output_roles.items() if r is Role.OWNED]
    return fixes
