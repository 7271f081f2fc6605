"""Strategy "graph": the numbers of one process, whoever owns which atom, and what goes from rank to rank for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import parity
import sharded_models
import toys
from nvdd import (
    NVE,
    SPEC_MPNN_GP,
    SPEC_UMA_HALO,
    Batch,
    DistributedModel,
    DomainConfig,
    DomainParallel,
    GraphParallelPolicy,
    InputError,
    StrategyKind,
    dispatch_trace,
)
from nvdd.index_partition import GRAPH_PLANS
from structures import silica

# torch's own warning, of a model that calls it
pytestmark = pytest.mark.filterwarnings("ignore:index_reduce")

NAMES = tuple(name for name in toys.TOYS if not name.startswith("own vectors"))


def toys_on_rank(comm, names: tuple[str, ...], structure: str, plan: str) -> dict[str, Any]:
    return toys.on_rank(comm, names, structure, None, strategy="graph", graph_plan=plan)


def check_toys(ranks, world_size: int, structure: str, plan: str, names: tuple[str, ...] = NAMES) -> None:
    parts = ranks.run(world_size, toys_on_rank, names, structure, plan)
    for name in names:
        toys.assert_equal(parts, name, structure)


@pytest.mark.parametrize("world_size,structure,plan", ((3, "several", "curve"), (4, "pair", "blocks")))
def test_toys(ranks, world_size, structure, plan):
    """Systems that a rank lacks, ranks that own nothing, open axes; models of every force strategy."""
    check_toys(ranks, world_size, structure, plan, NAMES[::4])


@pytest.mark.slow
@pytest.mark.parametrize("plan", GRAPH_PLANS)
@pytest.mark.parametrize("structure", toys.STRUCTURES)
@pytest.mark.parametrize("world_size", (1, 2, 3, 4))
def test_all_toys_on_all_structures(ranks, world_size, structure, plan):
    check_toys(ranks, world_size, structure, plan)


@pytest.mark.parametrize("plan", GRAPH_PLANS)
@pytest.mark.parametrize("world_size", (1, 2, 3, 4))
def test_mace(ranks, world_size, plan):
    check(ranks, world_size, "mace", "quartz", plan)


@pytest.mark.parametrize("structure,plan", (("silica left-handed", "curve"), ("silica wire", "blocks"), ("silica gas", "curve"), ("silica atom", "blocks")))  # fmt: skip
def test_mace_envelope(ranks, structure, plan):
    check(ranks, 4, "mace", structure, plan)


@pytest.mark.parametrize("plan", GRAPH_PLANS)
def test_sevennet(ranks, plan):
    check(ranks, 3, "7net-0/float64", "quartz unit", plan)


SLOW = pytest.mark.slow  # compiles its kernels on each rank


@pytest.mark.parametrize("model,structure", (("lj", "unwrapped"), ("dftd3", "slab"), pytest.param("aimnet2", "silica left-handed", marks=SLOW)))  # fmt: skip
def test_others(ranks, model, structure):
    """Pairs alone; triples and coordination numbers; charges that are equilibrated over all ranks in each layer."""
    check(ranks, 3, model, structure, "curve")


def check(ranks, world_size: int, model: str, structure: str, plan: str) -> None:
    parts = ranks.run(world_size, parity.on_rank, model, structure, {"strategy": "graph", "graph_plan": plan})
    n = len(parity.structure(structure))
    parity.assert_parity(parity.assemble(parts, n), parity.reference(model, structure), tight=True)
    assert {len(p["ids"]) for p in parts} <= {n // world_size, -(-n // world_size)}, "equal parts"
    assert len({p["exchanges"] for p in parts}) == 1 and not parts[0]["setup"]
    if plan == "blocks":
        np.testing.assert_array_equal(np.concatenate([p["ids"] for p in parts]), np.arange(n))
    if model == "mace":
        # features of both layers, the gradients of those of the second one, and forces
        assert parts[0]["exchanges"] == (0 if world_size == 1 else 4), parts[0]["sites"]


def test_what_is_sent(ranks):
    """With blocks every row goes to every other rank; along the curve the rows that edges read, which are fewer."""
    halo = {plan: ranks.run(3, traffic_on_rank, plan) for plan in GRAPH_PLANS}
    n = len(LONG)
    for parts in halo.values():
        assert sum(p["owned"] for p in parts) == n
        for p in parts:
            # rows of owned atoms to those who read them and back: 24 bytes of forces, once
            assert p["rows"][-1] == p["read"], "forces are folded from the rows that were read"
            assert p["bytes"][-1] == 24 * p["read"]
        assert sum(sum(p["rows"]) for p in parts) == len(parts[0]["rows"]) * sum(p["read"] for p in parts)
    assert [p["read"] for p in halo["blocks"]] == [n - p["owned"] for p in halo["blocks"]]
    assert sum(p["read"] for p in halo["curve"]) < 0.6 * sum(p["read"] for p in halo["blocks"])


LONG = silica((1, 1, 12))  # 53 A


def traffic_on_rank(comm, plan: str) -> dict[str, Any]:
    model = DistributedModel(parity.wrapper("mace"), DomainConfig(mesh=comm, strategy="graph", graph_plan=plan))
    batch = Batch.from_atoms(LONG)
    model(batch)
    with dispatch_trace() as trace:
        out = model(batch)
    return {
        "owned": len(out.ids),
        "read": out.n_halo,
        "rows": [e.rows_sent for e in trace.exchanges],
        "bytes": [e.bytes_sent for e in trace.exchanges],
    }


@pytest.mark.parametrize("world_size", (2, 3))
def test_order_is_kept_and_made_anew(ranks, world_size):
    """Atoms keep their rank while they move a little; where they are mixed the order is made anew, with equal numbers."""
    for found in ranks.run(world_size, mixing_on_rank):
        assert found["orders"] == [1, 1, 1, 2], "kept, kept although the list is rebuilt, told that more is read, anew"
        assert found["same owners"] == [True, True, False]
        assert found["rows"][2] > 1.1 * found["rows"][0] > 0 and found["rows"][3] < found["rows"][2]
        assert found["builds"] == [1, 2, 3, 4]
        assert max(found["errors"]) < 1e-11


def mixing_on_rank(comm) -> dict[str, Any]:
    atoms = parity.structure("bar")
    model = DistributedModel(parity.wrapper("lj"), DomainConfig(mesh=comm, strategy="graph", skin=0.2))
    rng = np.random.default_rng(1)
    moved, mixed = atoms.copy(), atoms.copy()
    moved.positions += rng.uniform(-0.12, 0.12, atoms.positions.shape)
    mixed.positions = atoms.positions[rng.permutation(len(atoms))]
    again = mixed.copy()
    again.positions[0, 0] += 0.15
    found: dict[str, Any] = {"orders": [], "builds": [], "rows": [], "errors": [], "same owners": []}
    owned = None
    for step in (atoms, moved, mixed, again):
        out = model(Batch.from_atoms(step))
        expected = parity.exact("lj", step)
        found["orders"].append(model.graphs.partitioner.n_orders)
        found["builds"].append(model.graphs.n_builds)
        found["rows"].append(int(sum(comm.all_gather_object(out.n_halo))))
        scale = np.abs(expected.forces).max()
        found["errors"].append(float(np.abs(out["forces"].numpy() - expected.forces[out.ids.numpy()]).max() / scale))
        found["errors"].append(abs(float(out["energy"][0]) / expected.energy - 1))
        if owned is not None:
            found["same owners"].append(np.array_equal(owned, out.ids.numpy()))
        owned = out.ids.numpy()
    return found


def test_presets():
    """Named specs of the message-passing families; of others the policy is changed, and no more."""
    from nvdd import HaloStoragePolicy
    from nvdd.runtime.block import laid_out
    from nvdd.specs.declared import spec_of

    mace, lj = parity.wrapper("mace"), parity.wrapper("lj")
    spec = mace.distribution_spec(StrategyKind.GRAPH_PARTITION)
    assert spec.distribution is SPEC_MPNN_GP.distribution and {a.kind for a in spec.adapters} == {"atoms", "edges"}
    assert isinstance(mace.distribution_spec().distribution.policy, HaloStoragePolicy)
    of_lj = laid_out(spec_of(lj, StrategyKind.GRAPH_PARTITION), StrategyKind.GRAPH_PARTITION)
    assert of_lj == lj.distribution_spec().with_policy(GraphParallelPolicy())
    assert DistributedModel(lj, DomainConfig(strategy="graph")).spec == of_lj


def test_refused():
    lj = parity.wrapper("lj")
    graph = DomainConfig(strategy=StrategyKind.GRAPH_PARTITION)
    with pytest.raises(InputError, match=r"'graph' keeps computed rows of owned atoms only.*GraphParallelPolicy.*halo_read"):
        DistributedModel(lj, graph, spec=SPEC_UMA_HALO)
    with pytest.raises(InputError, match="graph_plan must be one of 'curve', 'blocks', got 'ring'"):
        DomainConfig(graph_plan="ring")
    with pytest.raises(InputError, match=r"divides the list of atoms in equal parts, and grid=\(2, 1, 1\)"):
        DomainConfig(strategy="graph", grid_dims=(2, 1, 1))
    with pytest.raises(InputError, match="in equal parts, and balance='rcb'"):
        DomainConfig(strategy="graph", balance="rcb")
    with pytest.raises(InputError, match="strategy 'graph' has every position on every rank"):
        DomainParallel(NVE(1.0), lj, graph)


def test_global_ids(ranks):
    """Sharded storage: a model that computes with global ids has them under either strategy."""
    runs = {strategy: ranks.run(3, sharded_on_rank, strategy) for strategy in ("halo", "graph")}
    one = ranks.run(1, sharded_on_rank, "halo")[0]
    for parts in runs.values():
        for p in parts:
            np.testing.assert_allclose(p["forces"], one["forces"][p["ids"]], rtol=0, atol=1e-11 * np.abs(one["forces"]).max())
            assert abs(p["energy"] / one["energy"] - 1) < 1e-12
    assert not np.array_equal(runs["halo"][1]["ids"], runs["graph"][1]["ids"]), "divided in another way"


def sharded_on_rank(comm, strategy: str) -> dict[str, Any]:
    model = DistributedModel(sharded_models.Equilibrated(), DomainConfig(mesh=comm, strategy=strategy))
    out = model(Batch.from_atoms(toys.structure("triclinic")))
    return {"ids": out.ids.numpy(), "forces": out["forces"].numpy(), "energy": float(out["energy"][0])}


@pytest.mark.parametrize("plan", GRAPH_PLANS)
def test_sum_of_models(ranks, plan):
    """Blocks with a cutoff each share the owners; a shorter cutoff reads fewer rows, with blocks all the same."""
    one = ranks.run(1, sum_on_rank, plan)[0]
    mace, lj = parity.exact("mace", LONG), one["lj"]
    assert abs(one["energy"] / (mace.energy + lj["energy"]) - 1) < 1e-12
    scale = np.abs(one["forces"]).max()
    np.testing.assert_allclose(one["forces"], mace.forces + lj["forces"], rtol=0, atol=1e-11 * scale)
    for p in ranks.run(3, sum_on_rank, plan):
        assert abs(p["energy"] / one["energy"] - 1) < 1e-12
        np.testing.assert_allclose(p["forces"], one["forces"][p["ids"]], rtol=0, atol=1e-11 * scale)
        if plan == "blocks":
            assert set(p["received"]) == {len(one["ids"]) - len(p["ids"])}


def sum_on_rank(comm, plan: str) -> dict[str, Any]:
    from nvdd import PipelineModelWrapper
    from nvdd.models.lj import LennardJonesModelWrapper

    lj = LennardJonesModelWrapper(epsilon={"Si": 0.01, "O": 0.02}, sigma={"Si": 1.5, "O": 1.4}, cutoff=8.5)
    config = DomainConfig(mesh=comm, strategy="graph", graph_plan=plan)
    batch = Batch.from_atoms(LONG)
    model = DistributedModel(PipelineModelWrapper([parity.wrapper("mace"), lj]), config)
    model(batch)
    with dispatch_trace() as trace:
        out = model(batch)
    alone = DistributedModel(lj, config)(batch)
    return {
        "ids": out.ids.numpy(),
        "energy": float(out["energy"][0]),
        "forces": out["forces"].numpy(),
        "received": [e.rows_received for e in trace.exchanges if "fold" not in e.site and e.site != "forces"],
        "lj": {"energy": float(alone["energy"][0]), "forces": alone["forces"].numpy()},
    }
