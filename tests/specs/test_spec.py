"""Specs as values: what they take, copies with changes, composition."""

from __future__ import annotations

import itertools

import pytest
import spec_parts
from hypothesis import given, settings

from nvdd import (
    SPEC_DFTD3_HALO,
    SPEC_EWALD_HALO,
    SPEC_LJ_HALO,
    SPEC_MPNN_GP,
    SPEC_MPNN_HALO,
    SPEC_PME_HALO,
    SPEC_UMA_HALO,
    CompilePolicy,
    DistributionSpec,
    ForceStrategy,
    GraphParallelPolicy,
    HaloStoragePolicy,
    InputError,
    LocalStoragePolicy,
    MLIPSpec,
    OpAdapter,
    OutputKind,
    OutputSpec,
    PythonAdapter,
    Reduce,
    Role,
    ShardedStoragePolicy,
    SpecConflictError,
)

FETCH = HaloStoragePolicy("local", "halo_fetch")


def spec(policy=FETCH, name="", **parts):
    helpers = {k: parts.pop(k) for k in ("custom_ops", "third_party_helpers") if k in parts}
    return MLIPSpec(DistributionSpec(policy, **helpers), name=name, **parts)


# --- composition ------------------------------------------------------------------------------------------------

MERGED = [
    (FETCH, FETCH, FETCH),
    (HaloStoragePolicy(), HaloStoragePolicy(), HaloStoragePolicy()),
    (FETCH, ShardedStoragePolicy(), ShardedStoragePolicy()),
    (ShardedStoragePolicy(), ShardedStoragePolicy(), ShardedStoragePolicy()),
    *((LocalStoragePolicy(), p, p) for p in (FETCH, ShardedStoragePolicy(), GraphParallelPolicy(), LocalStoragePolicy())),
    (GraphParallelPolicy(), GraphParallelPolicy(), GraphParallelPolicy()),
]


@pytest.mark.parametrize("left,right,both", MERGED)
def test_policies_of_the_table(left, right, both):
    assert (spec(left) | spec(right)).distribution.policy == both
    assert (spec(right) | spec(left)).distribution.policy == both


CONFLICTS = [
    (spec(FETCH), spec(HaloStoragePolicy()), "the storage policy is .*halo_fetch.* on the left and .*halo_read.* on the right"),
    (spec(FETCH), spec(GraphParallelPolicy()), "run the two models one after the other"),
    (spec(ShardedStoragePolicy()), spec(GraphParallelPolicy()), "run the two models one after the other"),
    (spec(ShardedStoragePolicy()), spec(ShardedStoragePolicy("local")), "give both the same modes"),
    (spec(), spec(HaloStoragePolicy("local", "halo_fetch", False)), "system_reductions is True on the left and False"),
    (
        spec(outputs={"e": OutputSpec(OutputKind.PER_NODE)}),
        spec(outputs={"e": OutputSpec(OutputKind.PER_GRAPH, Reduce.ALL_REDUCE)}),
        "the output 'e' is per_node with reduce=none on the left and per_graph with reduce=all_reduce on the right",
    ),
    (
        spec(force_strategy=ForceStrategy.DIRECT),
        spec(),
        "force_strategy is direct on the left and edge_vectors on the right",
    ),
    (
        spec(custom_ops=(OpAdapter("nvddtest::scale", output_roles={0: Role.OWNED}),)),
        spec(custom_ops=(OpAdapter("nvddtest::scale", output_roles={0: Role.EDGE}),)),
        r"the adapter of nvddtest::scale in custom_ops is .*Role.OWNED.* on the left and .*Role.EDGE",
    ),
    (
        spec(adapters=(PythonAdapter("m", "f", spec_parts.helper),)),
        spec(adapters=(PythonAdapter("m", "f", spec_parts.replacement),)),
        r"the adapter of m\.f in adapters is .*helper.* on the left and .*replacement",
    ),
    (
        spec(compile_policy=CompilePolicy(static_shapes=False)),
        spec(compile_policy=CompilePolicy()),
        "compile_policy.static_shapes is False on the left and True on the right",
    ),
]


@pytest.mark.parametrize("left,right,message", CONFLICTS)
def test_conflicts_name_both_sides(left, right, message):
    with pytest.raises(SpecConflictError, match=r"^ours \| theirs: .*" + message):
        _ = left.with_name("ours") | right.with_name("theirs")


def test_an_adapter_declared_in_two_places_is_a_conflict():
    adapter = PythonAdapter("m", "f", spec_parts.helper)
    with pytest.raises(ValueError, match=r"two adapters for m\.f"):
        _ = spec(adapters=(adapter,)) | spec(third_party_helpers=(adapter,))


def test_presets_compose():
    both = SPEC_MPNN_HALO | SPEC_EWALD_HALO
    assert both.force_strategy is ForceStrategy.POSITIONS
    assert both.outputs == SPEC_MPNN_HALO.outputs
    assert both.name == "SPEC_MPNN_HALO | SPEC_EWALD_HALO"
    for left, right in itertools.permutations(
        (SPEC_MPNN_HALO, SPEC_LJ_HALO, SPEC_EWALD_HALO, SPEC_PME_HALO, SPEC_DFTD3_HALO), 2
    ):
        assert (left | right).distribution.policy == FETCH
    for other in (SPEC_MPNN_GP, SPEC_UMA_HALO):
        with pytest.raises(SpecConflictError, match="SPEC_MPNN_HALO"):
            _ = SPEC_MPNN_HALO | other


def test_what_a_local_spec_adds_joins_any_other():
    extra = MLIPSpec(DistributionSpec(LocalStoragePolicy()), {"charges": OutputSpec(OutputKind.PER_NODE)})
    for preset in (SPEC_MPNN_HALO, SPEC_MPNN_GP):
        both = preset | extra
        assert both.distribution == preset.distribution
        assert both.outputs == {**preset.outputs, "charges": OutputSpec(OutputKind.PER_NODE)}


@settings(max_examples=80, deadline=None)
@given(spec_parts.specs(), spec_parts.specs())
def test_composition_loses_nothing(left, right):
    assert left | left == left
    try:
        both = left | right
    except ValueError:
        with pytest.raises(ValueError):
            _ = right | left
        return
    assert set(both.outputs.items()) == set(left.outputs.items()) | set(right.outputs.items())
    assert set(both.all_adapters) == set(left.all_adapters) | set(right.all_adapters)
    assert both.distribution.policy in (left.distribution.policy, right.distribution.policy)
    assert both.force_strategy in (left.force_strategy, right.force_strategy)
    assert both.distribution.policy.system_reductions == left.distribution.policy.system_reductions
    for policy in (left.compile_policy, right.compile_policy):
        if policy is not None:
            assert both.compile_policy.static_shapes == policy.static_shapes
            assert policy.graph_padder in (None, both.compile_policy.graph_padder)
    # the other way round: the same but for order and name
    back = (right | left).with_name(both.name)
    assert back.distribution.policy == both.distribution.policy and back.outputs == both.outputs
    assert back.compile_policy == both.compile_policy and back.force_strategy == both.force_strategy


def test_only_specs_compose():
    with pytest.raises(TypeError):
        _ = SPEC_MPNN_HALO | {"outputs": {}}


# --- copies -----------------------------------------------------------------------------------------------------

CHANGES = {
    "distribution": lambda s: s.with_policy(ShardedStoragePolicy()),
    "outputs": lambda s: s.with_outputs({"a b": OutputSpec(OutputKind.GLOBAL)}, energy=OutputSpec(OutputKind.PER_NODE)),
    "force_strategy": lambda s: s.with_force_strategy(ForceStrategy.DIRECT),
    "adapters": lambda s: s.with_adapters(PythonAdapter("m", "g", spec_parts.helper)),
    "compile_policy": lambda s: s.with_compile_policy(CompilePolicy(False)),
    "name": lambda s: s.with_name("other"),
}
FULL = spec(
    custom_ops=(OpAdapter("nvddtest::scale", output_roles={0: Role.OWNED}),),
    third_party_helpers=(PythonAdapter("m", "f", spec_parts.helper),),
    outputs={"energy": OutputSpec(OutputKind.PER_GRAPH)},
    adapters=(PythonAdapter("m", "h", spec_parts.helper),),
    compile_policy=CompilePolicy(graph_padder="m:Padder"),
    force_strategy=ForceStrategy.POSITIONS,
    name="full",
)


@pytest.mark.parametrize("field", CHANGES)
def test_with_changes_one_field(field):
    changed = CHANGES[field](FULL)
    for name in CHANGES:
        assert (getattr(changed, name) == getattr(FULL, name)) == (name != field), name


def test_with_keeps_the_rest_of_the_distribution():
    assert FULL.with_policy(ShardedStoragePolicy()).distribution.custom_ops == FULL.distribution.custom_ops
    more = OpAdapter("nvddtest::messages")
    assert FULL.with_custom_ops(more).distribution.custom_ops == (*FULL.distribution.custom_ops, more)
    helper = PythonAdapter("m", "g", spec_parts.helper)
    changed = FULL.with_third_party_helpers(helper).distribution
    assert changed.third_party_helpers == (*FULL.distribution.third_party_helpers, helper)
    assert changed.custom_ops == FULL.distribution.custom_ops
    assert FULL.with_outputs(energy=OutputSpec(OutputKind.GLOBAL)).output_kinds == {"energy": OutputKind.GLOBAL}


# --- what is refused --------------------------------------------------------------------------------------------

REFUSED = {
    "reduce of the wrong kind": (
        lambda: OutputSpec(OutputKind.PER_NODE, Reduce.ALL_REDUCE), ValueError, "is for outputs of kind 'per_graph'",
    ),
    "a word for an output": (lambda: MLIPSpec(outputs={"energy": "per_graph"}), ValueError, "write a name and an OutputSpec"),
    "an undeclared share": (lambda: MLIPSpec(all_reduce_outputs=["x"]), ValueError, "all_reduce output 'x' is not declared"),
    "share and owned": (
        lambda: MLIPSpec(output_kinds={"x": "per_graph"}, all_reduce_outputs=["x"], owned_only_outputs=["x"]),
        ValueError, "declared both all_reduce and owned_only",
    ),
    "two kinds": (
        lambda: MLIPSpec(outputs={"x": OutputSpec("per_node")}, output_kinds={"x": "per_graph"}), ValueError, "in output_kinds",
    ),
    "no policy": (lambda: DistributionSpec("halo"), ValueError, "policy='halo' is not a storage policy"),
    "a helper among operations": (
        lambda: DistributionSpec(custom_ops=(PythonAdapter("m", "f"),)), ValueError, "belongs to third_party_helpers",
    ),
    "an operation among helpers": (
        lambda: DistributionSpec(third_party_helpers=(OpAdapter("nvddtest::scale"),)), ValueError, "belongs to custom_ops",
    ),
    "no adapter": (lambda: MLIPSpec(adapters=("x",)), ValueError, "'x', which is not an adapter"),
    "a padder without a class": (lambda: CompilePolicy(graph_padder="coo"), ValueError, "not an import path 'module:Class'"),
    "no compile policy": (lambda: MLIPSpec(compile_policy=True), ValueError, "compile_policy=True is not a CompilePolicy"),
    "no operation": (lambda: OpAdapter(len), InputError, "is not an operation; give torch.ops"),
    "a position that is none": (lambda: OpAdapter("a::b", {"0": None}), InputError, "keys are positions 0, 1"),
    "a transform of results": (
        lambda: OpAdapter("a::b", {0: Role.OWNED}), InputError, "is not a transform of arguments",
    ),
    "a role that results can't have": (
        lambda: OpAdapter("a::b", output_roles={0: Role.SENDER}), InputError, "a result is one of Role.OWNED",
    ),
    "in place": (
        lambda: OpAdapter(__import__("torch").ops.nvddtest.add_in_place), InputError, "changes its arguments in place",
    ),
    "an argument that is not there": (
        lambda: OpAdapter(__import__("torch").ops.nvddtest.scale, output_roles={3: Role.EDGE}), InputError, "no result 3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    make, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        make()
