"""Edges in chunks: the numbers of all edges at once, the same exchanges, a fraction of what autograd keeps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import parity
import toys
from memory import SavedBytes
from nvdd import Batch, DistributedModel, DistributedOpError, DomainConfig, EdgeStage, MLIPSpec, dispatch_trace
from nvdd.errors import InputError
from nvdd.specs import SPEC_MPNN_HALO

# torch's own warning, of a model that calls it
pytestmark = pytest.mark.filterwarnings("ignore:index_reduce")

# combined otherwise than by a sum over an index with one entry for each edge, or changed in place in between
NOT_SUMS = ("masked", *(f"messages, {n}" for n in toys.SCATTERS if any(w in n for w in ("mean", "amax", "repeated"))))
IN_PLACE = ("fields",)
ALL = tuple(n for n in toys.TOYS if not n.startswith("own vectors"))  # those that tests/runtime/test_toys.py evaluates
NAMES = [n for n in ALL if n not in (*NOT_SUMS, *IN_PLACE)]
CHUNKS = [(2, "triclinic", "halo_correction"), (4, "pair", "halo_correction")]  # thin domains; ranks without edges
CHUNKS += [pytest.param(n, "several", "halo_fetch", marks=pytest.mark.slow) for n in (1, 3)]  # half a minute each


def in_chunks(comm, names, structure, policy):
    """Runs on each rank."""
    return toys.on_rank(comm, names, structure, policy, max_edges_per_chunk=60)


@pytest.mark.parametrize(("world_size", "structure", "policy"), CHUNKS)
def test_small_models_of_every_kind(ranks, evaluated_toys, world_size, structure, policy):
    parts = ranks.run(world_size, in_chunks, NAMES, structure, policy)
    for name in NAMES:
        toys.assert_equal(parts, name, structure)
        whole = evaluated_toys(ALL, world_size, structure, policy, name)
        assert [p[name]["sites"] for p in parts] == [p[name]["sites"] for p in whole], "chunks must not exchange anything"


@pytest.mark.parametrize("name", NOT_SUMS)
def test_a_model_without_sums_over_edges_is_refused(name):
    model = DistributedModel(toys.toy(name), DomainConfig(max_edges_per_chunk=23))
    with pytest.raises(InputError, match=r"max_edges_per_chunk=23: .* sums no rows of edges where nvdd sees it"):
        model(toys.batch_of("slab"))


def test_a_change_in_place_is_noticed():
    model = DistributedModel(toys.toy("fields"), DomainConfig(recompute=True))
    with pytest.raises(DistributedOpError, match="is changed in place after rows of edges were computed with it"):
        model(toys.batch_of("triclinic"))


def test_autocast_is_refused():
    model = DistributedModel(toys.toy("messages, index_add"), DomainConfig(recompute=True))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(InputError, match="recompute under autocast"):
        model(toys.batch_of("slab"))


class InPlace(toys.MessagePassing):
    """Changes rows of edges in place, after taking a part of them as a view, or without."""

    def messages(self, data, h, waves, layer=0):
        m = super().messages(data, h, waves, layer)
        part = m[:, :2] if self.options["viewed"] else 0.0
        m.mul_(1.5)
        return m + (part.sum(1, keepdim=True) if self.options["viewed"] else 0.0)


@pytest.mark.parametrize("viewed", (False, True))
def test_rows_of_edges_changed_in_place(viewed):
    toy = InPlace(scatter="index_add", viewed=viewed)
    model = DistributedModel(toy, DomainConfig(max_edges_per_chunk=23))
    if viewed:
        with pytest.raises(DistributedOpError, match="rows of edges are changed in place"):
            model(toys.batch_of("slab"))
        return
    whole = DistributedModel(toy)(toys.batch_of("slab"))
    torch.testing.assert_close(model(toys.batch_of("slab"))["forces"], whole["forces"], rtol=0, atol=1e-14)


@pytest.mark.parametrize("options", ({"max_edges_per_chunk": 40}, {"recompute": True}))
def test_gradients_of_forces_by_parameters(options):
    name = "messages, index_add"
    toy, found = toys.toy(name), []
    for domain in ({}, options):
        out = DistributedModel(toy, DomainConfig(**domain))(toys.batch_of("several"), ("energy", "forces"), create_graph=True)
        loss = out["forces"].square().sum() + out["energy"].sum()
        found.append(torch.autograd.grad(loss, list(toy.parameters()), allow_unused=True))
    assert any(g is not None and g.abs().max() > 1e-6 for g in found[0])
    for whole, chunked in zip(*found, strict=True):
        if whole is not None:
            assert (whole - chunked).abs().max() <= 1e-11 * whole.abs().max() + 1e-14


def saved_by(model: str, structure: str, **domain) -> tuple[int, dict]:
    """Peak of bytes that autograd keeps in a step, and its results."""
    distributed = DistributedModel(parity.wrapper(model), DomainConfig(**domain))
    batch = Batch.from_atoms(parity.structure(structure))
    distributed(batch)
    with SavedBytes() as saved:
        out = distributed(batch, ("energy", "forces", "stress"))
    return saved.peak, {**out, "edges": out.n_edges}


def test_memory_of_mace_does_not_grow_with_edges():
    whole, expected = saved_by("mace", "quartz")
    edges = expected["edges"]
    recomputed, _ = saved_by("mace", "quartz", recompute=True)
    chunked, out = saved_by("mace", "quartz", max_edges_per_chunk=edges // 10)
    assert chunked < recomputed < whole
    # of an edge stay vectors, harmonics, radial functions; of the messages, some hundred numbers, nothing
    assert whole - chunked > 0.5 * whole, (whole, recomputed, chunked, edges)
    assert abs(out["energy"] / expected["energy"] - 1).max() <= 1e-12
    for key in ("forces", "stress"):
        assert (out[key] - expected[key]).abs().max() <= 1e-11 * expected[key].abs().max() + 1e-14


@pytest.mark.parametrize("strategy", ("halo", "graph"))
@pytest.mark.parametrize("world_size", (1, 2, 3))
def test_mace(ranks, world_size, strategy):
    whole = ranks.run(world_size, parity.on_rank, "mace", "quartz", {"strategy": strategy})
    parts = ranks.run(world_size, parity.on_rank, "mace", "quartz", {"strategy": strategy, "max_edges_per_chunk": 100})
    found = parity.assemble(parts, len(parity.structure("quartz")))
    parity.assert_parity(found, parity.reference("mace", "quartz"), tight=True)
    assert [p["exchanges"] for p in parts] == [p["exchanges"] for p in whole]


@pytest.mark.parametrize("world_size", (1, pytest.param(2, marks=pytest.mark.slow)))  # a minute a rank
def test_sevennet(ranks, world_size):
    parts = ranks.run(world_size, parity.on_rank, "7net-0/float64", "quartz", {"max_edges_per_chunk": 500})
    found = parity.assemble(parts, len(parity.structure("quartz")))
    parity.assert_parity(found, parity.reference("7net-0/float64", "quartz"), tight=True)


def test_edge_stage_is_a_value_in_files():
    from nvdd.models.lj import LennardJonesModelWrapper

    stage = EdgeStage(LennardJonesModelWrapper, "forward", ("waves", "mask"))
    spec = SPEC_MPNN_HALO.with_adapters(stage)
    again = MLIPSpec.from_dict(spec.to_dict())
    assert again == spec and again.adapters[0].names == ("waves", "mask")
    assert EdgeStage.of([toys.toy("chunks"), toys.toy("chunks")], ("m",)) == (EdgeStage(toys.Chunks, "forward", ("m",)),)


def test_edge_stage_names_that_are_not_there():
    toy = toys.toy("chunks")
    spec = toy.distribution_spec().with_adapters(EdgeStage(toys.Chunks, "summed", ("nothing",)))
    DistributedModel(toy, DomainConfig(), spec=spec)(toys.batch_of("slab"))  # without chunks it does nothing
    with pytest.raises(DistributedOpError, match="of the names nothing that its EdgeStage declares"):
        DistributedModel(toy, DomainConfig(recompute=True), spec=spec)(toys.batch_of("slab"))
    wrong = toy.distribution_spec().with_adapters(EdgeStage(toys.Chunks, "summed", ("h",)))
    with pytest.raises(DistributedOpError, match="is declared as rows of edges, of which this rank has"):
        DistributedModel(toy, DomainConfig(recompute=True), spec=wrong)(toys.batch_of("slab"))
    with pytest.raises(InputError, match="edges=\\(\\) are no names"):
        EdgeStage(toys.Chunks, "summed", ())


@pytest.mark.parametrize(
    ("options", "message"),
    (
        ({"max_edges_per_chunk": 0}, "must be a positive whole number or None, got 0"),
        ({"max_edges_per_chunk": True}, "must be a positive whole number or None, got True"),
        ({"recompute": "yes"}, "recompute must be True or False, got 'yes'"),
        ({"recompute": True, "compile": True}, "leave out compile, or recompute=True"),
        ({"max_edges_per_chunk": 9, "compile": "eager"}, "leave out compile, or max_edges_per_chunk=9"),
    ),
)
def test_options(options, message):
    with pytest.raises(InputError, match=message):
        DomainConfig(**options)


def test_chunks_are_few_and_even():
    batch = toys.batch_of("slab")
    toy = toys.toy("messages, index_add")
    with dispatch_trace() as whole:
        edges = DistributedModel(toy, DomainConfig(recompute=True))(batch).n_edges
    with dispatch_trace() as chunked:
        DistributedModel(toy, DomainConfig(max_edges_per_chunk=-(-edges // 2)))(batch)
    tanh = lambda trace: sum(n for (name, _), n in trace.fired.items() if name == "tanh")
    # in each of 2 layers: the sample, forward, backward; with two chunks the last two twice
    assert (tanh(whole), tanh(chunked)) == (2 * 3, 2 * 5)
    assert np.isfinite(edges)
