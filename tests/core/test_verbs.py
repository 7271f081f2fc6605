"""Verbs and adapters of whole models over ranks against one process; verbs are the identity there."""

from __future__ import annotations

import pytest
import torch

import verb_models
from nvdd import (
    DDContext,
    DistributedOpError,
    Scope,
    autograd_target,
    current_dd_context,
    distributed_method,
    entries_at,
    localize,
    refresh_neighbors,
    scatter_to_owners,
    system_sum,
    to_local,
)
from nvdd.communicator import Communicator
from nvdd.context import enter
from nvdd.plan import ExchangePlan
from nvdd.roles import Role, ShardMeta
from nvdd.shard_tensor import promote
from ops import POLICIES, Part

CASES = [(n, p) for p in verb_models.POLICIES for n in (1, 2, 3)]
# the whole table needs owned rows
NOT_PADDED = {"WholeTable"}


@pytest.fixture(scope="module")
def expected():
    return {name: verb_models.in_one_process(name) for name in verb_models.MODELS}


@pytest.mark.parametrize("n_ranks,policy", CASES)
def test_models_with_verbs(ranks, expected, n_ranks, policy):
    names = [n for n in verb_models.MODELS if policy != "halo_correction" or n not in NOT_PADDED]
    parts = ranks.run(n_ranks, on_rank, policy, names)
    for name in names:
        want = expected[name]
        for key in ("energy", "charge", "stress"):
            if key in want:
                for part in parts:
                    close(part[name]["values"][key], want[key], f"{name}, {key}")
        for key in ("forces", *(["charges"] if "charges" in want else [])):
            whole = torch.full_like(want[key], torch.nan)
            for part in parts:
                whole[part[name]["ids"]] = part[name]["values"][key]
            close(whole, want[key], f"{name}, {key}")
        assert all(part[name]["after"] for part in parts), "the context and the adapters are gone afterwards"
    for part in parts:
        calls = part["OpaqueBlocks"]["calls"]
        assert calls["verb_models.Opaque.forward"] == 2  # the subclass inherits the method
        if "WholeTable" in names:
            assert part["WholeTable"]["calls"]["nvddtest::pair_table"] == 2


def on_rank(comm, policy, names):
    return verb_models.on_rank(comm, policy, names)


def close(found, wanted, what):
    assert found.shape == wanted.shape, what
    error, scale = (found - wanted).abs().max(), wanted.abs().max()
    assert error <= 1e-11 * scale + 1e-13, f"{what} differ by {error:.1e}, largest {scale:.1e}"


def test_identity_in_one_process():
    x, index = torch.rand(5, 2), torch.tensor([0, 1, 1, 0, 2])
    assert current_dd_context() is None
    for verb in (refresh_neighbors, scatter_to_owners, to_local, autograd_target):
        assert verb(x) is x
    assert refresh_neighbors(x, pad=True) is x
    assert localize({"a": x, "b": [x, 3], "c": {"d": x}}) == {"a": x, "b": [x, 3], "c": {"d": x}}
    for scope in Scope:
        assert torch.equal(system_sum(x, index, 3, scope), torch.zeros(3, 2).index_add(0, index, x))

    @distributed_method
    def body(original, value):
        raise AssertionError("runs under domain decomposition only")

    assert body(lambda value: value + 1, 1) == 2


def misuse(comm):
    """What verbs say to rows that are not those of the policy."""
    return {policy: _misuse(Part(comm, POLICIES[policy]).meta) for policy in ("halo_fetch", "halo_read")}


def _misuse(meta):
    with enter(DDContext(meta, "Mine")) as context:
        counts = (context.n_owned, context.n_halo, context.n_padded, context.n_counted, context.n_rows)
        assert counts == (meta.n_owned, meta.n_halo, meta.n_padded, meta.n_counted, meta.n_rows)
        assert (context.rank, context.world_size, context.policy) == (meta.comm.rank, meta.comm.size, meta.policy)
        assert current_dd_context() is context
        edges = promote(torch.zeros(3, 2), Role.EDGE, meta)
        wrong = torch.zeros(meta.n_padded + 1, 2)
        out = {
            "refresh of edges": said(lambda: refresh_neighbors(edges)),
            "refresh of rows": said(lambda: refresh_neighbors(wrong)),
            "owners of edges": said(lambda: scatter_to_owners(edges)),
            "owners of rows": said(lambda: scatter_to_owners(wrong)),
            "too few": said(lambda: system_sum(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64), 3)),
            "anchor": said(lambda: autograd_target(promote(torch.zeros(3, 3), Role.ANCHOR, meta, of="positions"))),
        }
    assert current_dd_context() is None
    return out


def said(attempt):
    try:
        return f"accepted: {attempt()}"
    except DistributedOpError as error:
        return str(error)


SAYS = {
    "refresh of edges": "refresh_neighbors takes rows of atoms, and this is: one row for each edge",
    "refresh of rows": "rows of atoms of this rank, and this has shape",
    "owners of edges": "scatter_to_owners takes rows of atoms",
    "owners of rows": "write over owned and halo rows (current_dd_context().n_padded)",
    "too few": "owned rows of this rank (halo rows may follow), and got values of shape (0, 2)",
    "anchor": "declare force_strategy=ForceStrategy.MODEL_INTERNAL",
}


def test_what_verbs_refuse(ranks):
    for found in ranks.run(2, misuse):
        for policy in found:
            for name, message in found[policy].items():
                assert SAYS[name] in message, (policy, name, message)


def test_entries_at():
    """Plain indices are indexed; of ShardTensors the role stays, and only single indices have entries."""
    places = torch.tensor([2, 0, 0])
    assert entries_at(torch.tensor([5, 6, 7]), places).tolist() == [7, 5, 5]
    none = torch.empty(0, dtype=torch.int64)
    meta = ShardMeta(ExchangePlan.build(Communicator(None), 3, none, none))
    index = promote(torch.tensor([1, 0, 2]), Role.SENDER, meta, of="bonds")
    found = entries_at(index, places)
    assert to_local(found).tolist() == [2, 1, 1] and found._role is Role.SENDER and found._of == "bonds"
    with pytest.raises(DistributedOpError, match="entries_at takes one index"):
        entries_at(promote(torch.zeros(3), Role.EDGE, meta), places)
