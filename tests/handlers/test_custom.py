"""Custom operations with an `OpAdapter`, scripted functions, and marshalled ones, on 1 to 4 ranks; see `ops`."""

from __future__ import annotations

import pytest
import torch

import custom_ops
import ops
from nvdd import (
    AdapterRegistry,
    AllReduceSum,
    AsIs,
    GatherInputs,
    JitAdapter,
    OpAdapter,
    Role,
    ScatterOutputs,
    SliceOutputsOwned,
    SliceOwned,
)
from nvdd.adapters.scripted import ScriptedCalls

OPS = torch.ops.nvddtest
K = torch.tensor([[0.3, -0.2, 0.5], [1.0, 0.1, 0.0]], dtype=torch.float64)


def with_adapters(function, *adapters, read=()):
    """A case under adapters; ``read``: those for a policy with halo rows, if they are others."""

    def case(w):
        padded = getattr(w.x, "_role", None) is Role.PADDED
        with AdapterRegistry(read if padded and read else adapters):
            return function(w)

    return case


def messages(**tables):
    return OpAdapter(OPS.messages.default, **tables)


MESSAGES = {
    "adapters": messages(arg_transforms={0: GatherInputs()}, output_transforms={0: SliceOutputsOwned()}),
    "read": (messages(output_transforms={0: ScatterOutputs()}),),
}


def _messages(w):
    return OPS.messages(w.x, w.e, w.w, w.senders, w.receivers)


CASES = {
    "atoms": {
        "a fused gather-multiply-scatter": with_adapters(_messages, MESSAGES["adapters"], read=MESSAGES["read"]),
        "the overload, by keywords": with_adapters(
            lambda w: OPS.messages.default(w.x, e=w.e, w=w.w, receivers=w.receivers, senders=w.senders),
            MESSAGES["adapters"], read=MESSAGES["read"],
        ),
        "two layers of it": with_adapters(
            lambda w: OPS.messages(_messages(w)[:, :3], w.e, w.w, w.senders, w.receivers),
            MESSAGES["adapters"], read=MESSAGES["read"],
        ),
        "partial sums in halo rows": with_adapters(
            _messages, messages(arg_transforms={0: GatherInputs()}, output_transforms={0: ScatterOutputs()}),
            read=MESSAGES["read"],
        ),
        "to the senders": with_adapters(
            # each edge's contribution goes to its sender, which may be another rank's
            lambda w: OPS.messages(w.x, w.e, w.w, w.receivers, w.senders),
            messages(arg_transforms={0: GatherInputs()}, output_transforms={0: ScatterOutputs()}), read=MESSAGES["read"],
        ),
        "row by row, with a per-system value": with_adapters(
            lambda w: OPS.scale(w.x, w.s.sum()), OpAdapter(OPS.scale, output_roles={0: Role.OWNED})
        ),
        "each atom once, then back to rows": with_adapters(
            lambda w: OPS.scale(w.x, w.s[1]), OpAdapter(OPS.scale, {0: SliceOwned()}, output_roles={0: Role.OWNED}),
            read=(OpAdapter(OPS.scale, output_roles={0: Role.OWNED}),),
        ),
        "a scripted function of rows, marshalled": with_adapters(
            lambda w: custom_ops.scripted_square(w.x), JitAdapter("custom_ops", "scripted_square", mode="marshal")
        ),
    },
    "edges": {
        "both results of an operation on edges": with_adapters(
            lambda w: (lambda out: out[0] * out[1][:, None])(OPS.cube_and_mean(w.e)),
            OpAdapter(OPS.cube_and_mean, output_roles={0: Role.EDGE, 1: Role.EDGE}),
        ),
        "a scripted gather by senders, run as Python": with_adapters(
            lambda w: custom_ops.scripted_gather(w.x, w.senders), JitAdapter("custom_ops", "scripted_gather")
        ),
    },
    "systems": {
        "a sum over atoms, each once": with_adapters(
            lambda w: OPS.structure_sum(w.x, K) ** 2, OpAdapter(OPS.structure_sum, {0: SliceOwned()}, {0: AllReduceSum()})
        ),
        "a sum over edges": with_adapters(
            lambda w: OPS.structure_sum(w.e, K) ** 2, OpAdapter(OPS.structure_sum, {}, {0: AllReduceSum()})
        ),
    },
}  # fmt: skip


def _scripted(function):
    def case(w):
        with AdapterRegistry([ScriptedCalls()]):
            return function(w)

    return case


REFUSED = {
    "no adapter": (_messages, "nvddtest::messages"),
    "no transform of the result": (with_adapters(_messages, messages(arg_transforms={0: AsIs()})), "nvddtest::messages"),
    "rows twice padded, or halo rows taken away": (
        with_adapters(
            _messages, messages(output_transforms={0: SliceOutputsOwned()}),  # halo_fetch: x is not gathered
            read=(messages(arg_transforms={0: GatherInputs()}, output_transforms={0: ScatterOutputs()}),),
        ),
        "nvddtest::messages",
    ),
    "edges padded as atoms": (
        with_adapters(
            _messages,
            messages(arg_transforms={0: GatherInputs(), 1: GatherInputs()}, output_transforms={0: ScatterOutputs()}),
            read=(messages(arg_transforms={1: SliceOwned()}, output_transforms={0: ScatterOutputs()}),),
        ),
        "nvddtest::messages",
    ),
    "a sum over halo and phantom rows": (
        with_adapters(lambda w: OPS.structure_sum(w.x, K), OpAdapter(OPS.structure_sum, {}, {0: AllReduceSum()})),
        "nvddtest::structure_sum",
    ),
    "numbers of atoms": (
        with_adapters(
            lambda w: OPS.scale(w.x, w.n_atoms_per_system.sum()) if not ops.is_sharded(w.x)
            else OPS.scale(w.x, w.n_atoms_per_system),
            OpAdapter(OPS.scale, output_roles={0: Role.OWNED}),
        ),
        "nvddtest::scale",
    ),
    "a scripted gather by senders": (_scripted(lambda w: custom_ops.scripted_gather(w.x, w.senders)), "custom_ops.scripted_gather"),
    "a scripted gather by systems": (_scripted(lambda w: custom_ops.scripted_gather(w.s, w.batch)), "custom_ops.scripted_gather"),
    "a marshalled gather": (
        with_adapters(
            lambda w: custom_ops.scripted_gather(w.x, w.receivers), JitAdapter("custom_ops", "scripted_gather", mode="marshal")
        ),
        "custom_ops.scripted_gather",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind,name", [(kind, name) for kind in CASES for name in CASES[kind]])
def test_same_as_one_process(ranks, kind, name):
    ops.check(ranks, __file__, kind, name)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(ranks, name):
    ops.check_refused(ranks, __file__, name)


SAYS = {
    "no adapter": "OpAdapter('nvddtest::messages', arg_transforms=",
    "no transform of the result": "output_roles={0: Role.EDGE}",
    "a sum over halo and phantom rows": "arg_transforms={0: SliceOwned()}",
    "a scripted gather by senders": "the scripted custom_ops.scripted_gather (defined at",
    "numbers of atoms": "Give to_local(x) for this rank's",
}


@pytest.mark.parametrize("name", SAYS)
def test_messages_say_what_to_do(ranks, name):
    for part in ops.table(ranks, __file__, 2, "halo_fetch"):
        assert SAYS[name] in part["cases"][name]["error"]


def test_double_padding_and_missing_gather_are_told_apart(ranks):
    name = "rows twice padded, or halo rows taken away"
    assert "pad rows twice" in ops.table(ranks, __file__, 2, "halo_read")[0]["cases"][name]["error"]
    assert "GatherInputs()}), or AsIs()" in ops.table(ranks, __file__, 2, "halo_fetch")[0]["cases"][name]["error"]
