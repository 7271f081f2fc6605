"""What generated specs are made of: operations, functions and classes that another process can import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

import custom_ops  # noqa: F401  (registers operations)
from nvdd import (
    AllReduceSum,
    AsIs,
    CompilePolicy,
    DistributionSpec,
    ForceStrategy,
    FunctionAdapter,
    GatherInputs,
    GatherInputsFull,
    JitAdapter,
    MethodAdapter,
    MLIPSpec,
    OpAdapter,
    OutputKind,
    OutputSpec,
    PythonAdapter,
    Reduce,
    Role,
    ScatterOutputs,
    SliceOutputsOwned,
    SliceOwned,
)
from nvdd.policy import POLICIES


def helper(x: Any) -> Any:
    """A helper of a third-party package, as it were."""
    return x + 1


def other_helper(x: Any) -> Any:
    """Another one."""
    return x + 2


def replacement(x: Any, times: int = 1) -> Any:
    """What stands in for `helper`."""
    return x + 10 * times


def body(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """What is called instead of a method."""
    return original(self, *args, **kwargs)


class Block:
    """A class with a method."""

    def forward(self, x: Any) -> Any:
        return 2 * x


@dataclass(frozen=True)
class Body:
    """A body with a setting."""

    times: int = 1

    def __call__(self, original: Any, self_: Any, *args: Any) -> Any:
        return self.times * original(self_, *args)


_NAMES = ["messages", "cube_and_mean", "structure_sum", "pair_table", "scale"]
_ARGUMENTS = {"messages": 5, "cube_and_mean": 1, "structure_sum": 2, "pair_table": 4, "scale": 2}
_RESULTS = {name: 2 if name == "cube_and_mean" else 1 for name in _NAMES}


@st.composite
def op_adapters(draw) -> OpAdapter:
    """Any adapter of a registered operation."""
    name = draw(st.sampled_from(_NAMES))
    arguments = st.sampled_from([GatherInputs(), GatherInputsFull(), SliceOwned(), AsIs()])
    results = st.sampled_from([ScatterOutputs(), AllReduceSum(), SliceOutputsOwned()])
    output_transforms = draw(st.dictionaries(st.integers(0, _RESULTS[name] - 1), results))
    roles = draw(
        st.dictionaries(st.integers(0, _RESULTS[name] - 1), st.sampled_from([Role.OWNED, Role.EDGE, Role.SYSTEM]))
    )
    roles = {k: v for k, v in roles.items() if k not in output_transforms}
    inputs = draw(st.dictionaries(st.integers(0, _ARGUMENTS[name] - 1), arguments))
    return OpAdapter(f"nvddtest::{name}", inputs, output_transforms, roles)


HELPERS = [
    FunctionAdapter(helper, replacement),
    PythonAdapter("spec_parts", "other_helper", replacement),
    PythonAdapter("spec_parts", "helper", Body(times=3)),
    PythonAdapter("spec_parts", "Block.forward"),
    JitAdapter("custom_ops", "scripted_square", mode="marshal"),
    JitAdapter("custom_ops", "scripted_gather"),
    MethodAdapter(Block, "forward", body),
    MethodAdapter(module_path="spec_parts", class_name="Body", method_name="__call__", replacement=Body(4)),
]


def _distinct(adapters: list) -> tuple:
    return tuple({a.target: a for a in adapters}.values())


outputs = st.one_of(
    st.sampled_from(list(OutputKind)).map(OutputSpec),
    st.just(OutputSpec(OutputKind.PER_GRAPH, Reduce.ALL_REDUCE)),
    st.just(OutputSpec(OutputKind.PER_NODE, Reduce.OWNED_ONLY)),
)
policies = st.sampled_from([kind(s, g, r) for kind in POLICIES.values() for g, s in kind.meanings for r in (True, False)])
compile_policies = st.builds(
    CompilePolicy,
    st.booleans(),
    st.sampled_from([None, "spec_parts:Block"]),
    st.sampled_from([None, *ForceStrategy]),
)
op_tuples = st.lists(op_adapters(), max_size=3).map(_distinct)


@st.composite
def specs(draw) -> MLIPSpec:
    """Any spec."""
    helpers = _distinct(draw(st.lists(st.sampled_from(HELPERS), max_size=4)))
    cut = draw(st.integers(0, len(helpers)))
    return MLIPSpec(
        DistributionSpec(draw(policies), draw(op_tuples), helpers[:cut]),
        draw(st.dictionaries(st.text(max_size=5), outputs, max_size=4)),
        force_strategy=draw(st.sampled_from(list(ForceStrategy))),
        adapters=helpers[cut:],
        compile_policy=draw(st.none() | compile_policies),
        name=draw(st.sampled_from(["", "a", "b", "c"])),
    )
