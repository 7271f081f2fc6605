"""`sum_over_edges`: one number whether edges come from a list, in parts of it, or are made in blocks; and its derivatives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nvdd import (
    BaseModelMixin,
    Batch,
    DistributedModel,
    DistributedOpError,
    DistributionSpec,
    DomainConfig,
    EdgeLayout,
    ForceStrategy,
    HaloStoragePolicy,
    InputError,
    MLIPSpec,
    ModelConfig,
    ModelOutputs,
    NeighborConfig,
    OutputKind,
    OutputSpec,
    refresh_neighbors,
    sum_over_edges,
    to_local,
)
from nvdd.edge_sums import _Listed
from nvdd.neighbors import attach_neighbors
from structures import structure

CUTOFF = 5.5
LAYOUTS = (EdgeLayout(), EdgeLayout(sender_column=0, vector="receiver_minus_sender"))


class TwoSums(torch.nn.Module, BaseModelMixin):
    """Each atom counts its neighbours; an energy of pairs of these counts, with a part that is odd in the vectors."""

    def __init__(self, blocks: bool = True, layout: EdgeLayout = LAYOUTS[0], dtype=torch.float64, strategy=None) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(0.7, dtype=dtype))
        self.edge_layout = layout
        self.strategy = strategy or ForceStrategy.EDGE_VECTORS
        self.calls: list[int] = []
        self.model_config = ModelConfig(neighbor_config=NeighborConfig(CUTOFF, blocks=blocks))

    def forward(self, data: Batch) -> ModelOutputs:
        into = lambda values, receivers: values.new_zeros(data.n_atoms).index_add(0, receivers, values)

        def count(vectors, receivers, senders):
            self.calls.append(len(vectors))
            return into((1 - vectors.norm(dim=1) / CUTOFF) ** 2, receivers)

        def pairs(vectors, receivers, senders, n, scale):
            odd = self.edge_layout.sign * vectors @ vectors.new_tensor([0.3, 0.1, -0.2])
            return into((scale * n[senders] + n[receivers] ** 2) * (1 - vectors.norm(dim=1) / CUTOFF) ** 3 * (2 + odd), receivers)

        n = to_local(refresh_neighbors(sum_over_edges(data, count), pad=True))
        return ModelOutputs(energies=sum_over_edges(data, pairs, n, self.scale))

    def distribution_spec(self, strategy=None) -> MLIPSpec:
        policy = HaloStoragePolicy(scatter_mode="local", gather_mode="halo_fetch")
        return MLIPSpec(DistributionSpec(policy), {"energies": OutputSpec(OutputKind.PER_NODE)}, force_strategy=self.strategy)


WANTED = {"energy", "energies", "forces", "stress", "stresses"}


def values(wrapper, batch, **config):
    wanted = WANTED if float(torch.linalg.det(batch.cell).abs().min()) else {"energy", "energies", "forces", "virial"}
    return dict(DistributedModel(wrapper, DomainConfig(**config))(batch, wanted))


@pytest.mark.parametrize("layout", LAYOUTS, ids=("sender minus receiver", "receiver minus sender"))
@pytest.mark.parametrize("at_once", (None, 1, 100))
@pytest.mark.parametrize("name", ("triclinic", "tiny cell", "slab", "pair", "atom"))
def test_blocks_equal_the_list(name, at_once, layout):
    batch = Batch.from_atoms([structure(name), structure("triclinic")])
    whole = values(TwoSums(blocks=False, layout=layout), batch)
    found = values(TwoSums(layout=layout), batch, max_edges_per_chunk=at_once)
    assert found.keys() == whole.keys()
    for key, value in whole.items():
        assert (found[key] - value).abs().max() <= 1e-13 * value.abs().max(), key


def test_the_list_in_parts_equals_the_list():
    """Without a search: what LAMMPS gives. Edges of one receiver stay together, whatever their order."""
    batch = attach_neighbors(Batch.from_atoms(structure("triclinic")), CUTOFF)
    vectors = batch.edge_vectors.detach().clone().requires_grad_()
    order = torch.randperm(len(vectors), generator=torch.Generator().manual_seed(3))
    for rows in (torch.arange(len(vectors)), order):
        parts = _Listed(vectors[rows], batch.receivers[rows], batch.senders[rows], batch.n_atoms, 60, None)
        edges = [parts.edges(k) for k in range(parts.n_blocks)]
        assert parts.n_blocks > 3 and all(len(e[0]) <= 60 or e[1].unique().numel() == 1 for e in edges)
        owners = [set(e[1].tolist()) for e in edges]
        assert sum(map(len, owners)) == len(set().union(*owners)), "a receiver is in two blocks"
        total = sum((part[0] * (1 + part[2])[:, None] ** 2).sum() for part in edges)
        (gradient,) = torch.autograd.grad(total, vectors)
        torch.testing.assert_close(gradient, ((1.0 + batch.senders)[:, None] ** 2).expand(-1, 3).double(), rtol=0, atol=0)


def test_a_list_is_cut_where_the_run_says_it():
    wrapper, batch = TwoSums(blocks=False), Batch.from_atoms(structure("triclinic"))
    whole = values(wrapper, batch)
    wrapper.calls.clear()
    found = values(wrapper, batch, max_edges_per_chunk=50)
    assert len(wrapper.calls) > 6 and max(wrapper.calls) <= 50
    for key, value in whole.items():
        assert (found[key] - value).abs().max() <= 1e-13 * value.abs().max(), key


def test_gradients_by_positions_cell_and_parameters():
    """What training needs: by all that vectors depend on, where nothing is differentiated twice."""
    found = []
    for blocks, at_once in ((False, None), (True, None), (True, 70)):
        batch, wrapper = Batch.from_atoms(structure("triclinic")), TwoSums(blocks)
        batch.positions.requires_grad_()
        batch.cell.requires_grad_()
        model = DistributedModel(wrapper, DomainConfig(max_edges_per_chunk=at_once))
        energy = model(batch, {"energy"}, create_graph=True)["energy"]
        found.append(torch.autograd.grad(energy.sum(), [batch.positions, batch.cell, wrapper.scale]))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert (a - b).abs().max() <= 1e-12 * a.abs().max()


def test_a_second_derivative_is_an_error():
    batch = Batch.from_atoms(structure("triclinic"))
    batch.positions.requires_grad_()
    forces = DistributedModel(TwoSums())(batch, {"forces"}, create_graph=True)["forces"]
    with pytest.raises(DistributedOpError, match="sums over edges in blocks have first derivatives only"):
        torch.autograd.grad(forces.square().sum(), batch.positions)


def test_float32():
    batch = Batch.from_atoms(structure("triclinic"))
    exact, single = values(TwoSums(), batch), values(TwoSums(dtype=torch.float32), batch, max_edges_per_chunk=90)
    assert (exact["forces"] - single["forces"]).abs().max() <= 2e-6 * exact["forces"].abs().max()


def test_in_blocks_there_is_no_list():
    batch = Batch.from_atoms(structure("triclinic"))
    model = DistributedModel(TwoSums())
    out = model(batch)
    topology = model.graphs.update(batch).topology
    assert topology.candidates.shape == (2, 0) and out.n_edges > 1000 / len(batch.positions)

    class ReadsTheList(TwoSums):
        def forward(self, data):
            return ModelOutputs(energies=data.edge_vectors.norm(dim=1))

    with pytest.raises(DistributedOpError, match="this Batch has no neighbor_list_shifts: its model takes edges in blocks"):
        DistributedModel(ReadsTheList())(batch)


def test_a_compiled_run_lists_edges():
    """Fixed shapes are those of a list."""
    batch = Batch.from_atoms(structure("triclinic"))
    whole, found = values(TwoSums(blocks=False), batch), values(TwoSums(), batch, compile="eager")
    np.testing.assert_allclose(found["forces"], whole["forces"], rtol=0, atol=1e-13 * whole["forces"].abs().max())


def test_refused():
    with pytest.raises(InputError, match=r"NeighborConfig\(blocks=True\) is for functions of edge vectors"):
        DistributedModel(TwoSums(strategy=ForceStrategy.POSITIONS))
    with pytest.raises(ValueError, match="blocks=True makes edges a part at a time, bonds=True is of all edges"):
        NeighborConfig(5.0, bonds=True, blocks=True)
