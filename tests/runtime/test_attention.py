"""Attention over all pairs: keys and values of all atoms, queries of owned ones; the numbers of one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import attention
import toys
from nvdd import Batch, DistributedModel, DistributedOpError, DomainConfig, ModelOutputs, dispatch_trace, gather_atoms
from nvdd.neighbors import attach_neighbors
from nvdd.roles import Role
from nvdd.shard_tensor import promote


def one_process(by_distance: bool, structure: str) -> dict[str, np.ndarray]:
    """Plain tensors, torch's own gradients by positions and by a strain."""
    model, batch = attention.AllPairs(by_distance), toys.batch_of(structure)
    positions = batch.positions.clone().requires_grad_(True)
    strain = torch.zeros(batch.n_systems, 3, 3, dtype=torch.float64, requires_grad=True)
    symmetric = 0.5 * (strain + strain.transpose(1, 2))
    attach_neighbors(batch, attention.CUTOFF, model.edge_layout)
    batch.positions = positions + torch.einsum("ni,nij->nj", positions, symmetric[batch.batch])
    batch.cell = batch.cell + batch.cell @ symmetric
    energy = torch.zeros(batch.n_systems, dtype=torch.float64).index_add(0, batch.batch, model(batch)["energies"])
    gradient, virial = torch.autograd.grad(energy.sum(), (positions, strain))
    return {"energy": energy.detach().numpy(), "forces": -gradient.numpy(), "virial": virial.numpy()}


def on_rank(comm, by_distance: bool, structure: str, domain: dict[str, Any]) -> dict[str, Any]:
    model = DistributedModel(attention.AllPairs(by_distance), DomainConfig(mesh=comm, skin=0.4, **domain))
    batch, wanted = toys.batch_of(structure), {"energy", "forces", "virial"}
    model(batch, wanted)
    with dispatch_trace() as trace:
        out = model(batch, wanted)
    sites = [e for e in trace.exchanges if "gather of all atoms" in e.site]
    return {
        "ids": out.ids.numpy(),
        **{k: v.numpy() for k, v in out.items()},
        "gathers": [e.site for e in sites],
        "rows": [e.rows_received for e in sites if not e.site.startswith("fold")],
        "back": [e.rows_sent for e in sites if e.site.startswith("fold")],
        "setup": dict(trace.setup),
    }


@pytest.mark.parametrize("domain", ({"strategy": "graph"}, {"strategy": "graph", "graph_plan": "blocks"}, {}), ids=str)
@pytest.mark.parametrize(
    "world_size,structure,by_distance",
    ((1, "triclinic", False), (2, "triclinic", False), (3, "several", False), (4, "slab", False), (3, "pair", True), (4, "pair", False)),
)  # fmt: skip
def test_equals_one_process(ranks, world_size, structure, by_distance, domain):
    """Several systems, open axes, ranks that own nothing; forces of a function of edges, and of positions."""
    parts = ranks.run(world_size, on_rank, by_distance, structure, domain)
    expected = one_process(by_distance, structure)
    n = len(expected["forces"])
    ids = np.concatenate([p["ids"] for p in parts])
    assert sorted(ids) == list(range(n))
    scale = np.abs(expected["forces"]).max()
    assert scale > 1e-3
    error = np.abs(np.concatenate([p["forces"] for p in parts]) - expected["forces"][ids]).max()
    assert error <= 1e-11 * scale, (error, scale)
    for p in parts:
        np.testing.assert_allclose(p["energy"], expected["energy"], rtol=1e-12)
        np.testing.assert_allclose(p["virial"], expected["virial"], rtol=0, atol=1e-11 * np.abs(expected["virial"]).max())
        assert not p["setup"], "the plan of all atoms is kept with the neighbour list"
        assert p["gathers"] == parts[0]["gathers"]
        if world_size > 1:
            # systems, keys and values of two layers, positions; the gradients of all but the systems
            assert p["rows"] == [n - len(p["ids"])] * (6 if by_distance else 5)
            assert p["back"] == [n - len(p["ids"])] * (5 if by_distance else 4)


def test_far_atoms_matter():
    """Without attention over all pairs the test above would show nothing: an atom out of reach changes another one's energy."""
    model, gas = attention.AllPairs(), toys.batch_of("gas")
    attach_neighbors(gas, attention.CUTOFF, model.edge_layout)
    assert len(gas.positions) - 1 not in gas.neighbor_list.flatten().tolist(), "the last atom is alone"
    before = model(gas)["energies"][0]
    gas.atomic_numbers[-1] = 7
    assert abs(model(gas)["energies"][0] - before) > 1e-3


class OfEdges(attention.AllPairs):
    """Gathers what has no rows of atoms."""

    def forward(self, data: Batch):
        gather_atoms(data.edge_vectors)


class WithSystem(attention.AllPairs):
    """Multiplies what each rank has of its own by what all have alike, whose gradient would be counted by every rank."""

    def forward(self, data: Batch):
        energies = super().forward(data)["energies"]
        total = torch.zeros(data.n_systems, dtype=energies.dtype).index_add(0, data.batch, energies)
        return ModelOutputs(energy=total * torch.tanh(gather_atoms(energies).sum()))


class AsEnergy(attention.AllPairs):
    """A sum that every rank has whole would be summed again."""

    def forward(self, data: Batch):
        return ModelOutputs(energy=gather_atoms(super().forward(data)["energies"]).sum().reshape(1))


def misuse_on_rank(comm) -> list[str]:
    said = []
    for made in (OfEdges(), WithSystem(), AsEnergy()):
        model = DistributedModel(made, DomainConfig(mesh=comm, strategy="graph"))
        try:
            model(toys.batch_of("slab"))
        except DistributedOpError as error:
            said.append(str(error))
    graph = model.graphs.update(toys.batch_of("slab"))
    meta = replace(model.blocks[0].meta(graph, 1), directory=None)
    try:
        gather_atoms(promote(torch.ones(meta.n_owned, 2), Role.OWNED, meta))
    except DistributedOpError as error:
        said.append(str(error))
    return said


def test_refused(ranks):
    for edges, system, energy, host in ranks.run(2, misuse_on_rank):
        assert "a per-system value meets a tensor of which it is not known" in system
        assert "is not known to be summed over ranks" in energy
        assert "gather_atoms takes rows of atoms in the first dimension, and this is: one row for each edge" in edges
        assert "gather_atoms needs to know where every atom is, which the host of this run" in host
