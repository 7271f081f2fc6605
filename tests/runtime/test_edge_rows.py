"""Models that read reverse edges and bonds across ranks, against one process without nvdd's runtime."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ase import Atoms

import bond_models
import parity
import toys
from nvdd import Batch, DistributedModel, DomainConfig, NeighborConfig, dispatch_trace
from nvdd.communicator import Communicator
from nvdd.neighbors import attach_neighbors

STRUCTURES = ("argon", "triclinic", "slab", "tiny cell", "gas", "wire", "pair", "several")


def systems(structure: str) -> list[Atoms]:
    """Copies of a named structure, or of several."""
    return (
        [a.copy() for a in toys.structure("several")]
        if structure == "several"
        else [parity.structure(structure).copy()]
    )


def single_process(model: str, structure: str) -> tuple[np.ndarray, np.ndarray]:
    """Energy of each system and forces, by plain autograd on plain tensors."""
    wrapper = getattr(bond_models, model)()
    batch = Batch.from_atoms(systems(structure))
    positions = batch.positions.requires_grad_(True)
    attach_neighbors(batch, bond_models.CUTOFF, bond_cutoff=wrapper.bond_cutoff)
    energies = wrapper(batch)["energies"]
    (gradient,) = torch.autograd.grad(energies.sum(), positions)
    by_system = np.bincount(batch.batch.numpy(), energies.detach().numpy())
    return by_system, -gradient.numpy()


def on_rank(comm: Communicator, model: str, structure: str, steps: int) -> dict:
    wrapper = getattr(bond_models, model)()
    distributed = DistributedModel(wrapper, DomainConfig(mesh=comm, skin=0.8))
    many = systems(structure)
    for _ in range(steps):  # the same topology, other edges within the cutoff
        distributed(Batch.from_atoms(many), {"energy"})
        for atoms in many:
            atoms.rattle(0.05, seed=1)
    with dispatch_trace() as trace:
        out = distributed(Batch.from_atoms(systems(structure)))
    return {"ids": out.ids.numpy(), "energy": out["energy"].numpy(), "forces": out["forces"].numpy(),
            "sites": [e.site for e in trace.exchanges]}  # fmt: skip


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("model", ("ReverseEdges", "Bonds", "ShortBonds"))
@pytest.mark.parametrize("world_size", (1, 2, 3, 4))
def test_equals_one_process(ranks, world_size, model, structure):
    energy, forces = single_process(model, structure)
    parts = ranks.run(world_size, on_rank, model, structure, 2)
    found = np.zeros_like(forces)
    for part in parts:
        found[part["ids"]] = part["forces"]
        assert (np.abs(part["energy"] - energy) <= 1e-12 * np.abs(energy) + 1e-14).all()
    assert np.abs(found - forces).max() <= 1e-11 * np.abs(forces).max() + 1e-14
    assert len({tuple(p["sites"]) for p in parts}) == 1
    if world_size > 1:
        assert any("getitem" in site for site in parts[0]["sites"])


@pytest.mark.parametrize("model", ("Bonds", "ShortBonds"))
def test_forces_are_derivatives(model):
    """The reference itself: central differences."""
    atoms = parity.structure("triclinic").copy()
    wrapper = getattr(bond_models, model)()
    batch = lambda a: attach_neighbors(Batch.from_atoms(a), bond_models.CUTOFF, bond_cutoff=wrapper.bond_cutoff)
    energy = lambda a: float(wrapper(batch(a))["energies"].sum().detach())
    _, forces = single_process(model, "triclinic")
    moved = [atoms.copy(), atoms.copy()]
    for sign, a in zip((1, -1), moved, strict=True):
        a.positions[7, 1] += sign * 1e-4
    numeric = -(energy(moved[0]) - energy(moved[1])) / 2e-4
    assert abs(numeric - forces[7, 1]) < 1e-6 * max(1, abs(forces[7, 1]))


def rows_of_bonds(comm: Communicator, model: str) -> dict:
    distributed = DistributedModel(getattr(bond_models, model)(), DomainConfig(mesh=comm, skin=0.8))
    graph = distributed.graphs.update(Batch.from_atoms(parity.structure("triclinic")))
    rows, r = graph.edge_rows, graph.vectors.norm(dim=1)
    at = torch.arange(len(r)) if rows.at is None else rows.at
    return {"at": at.tolist(), "short": (r < bond_models.SHORT).nonzero().squeeze(1).tolist(), "edges": len(r),
            "bonds": len(rows.edge_of_bond), "halo": rows.bonds.n_halo}  # fmt: skip


def test_only_short_edges_have_bonds(ranks):
    """So that a long cutoff costs no rows of bonds, at home or on other ranks."""
    short, all_of_them = (ranks.run(2, rows_of_bonds, model) for model in ("ShortBonds", "Bonds"))
    for part in short:
        assert part["at"] == part["short"] and 0 < len(part["at"]) < part["edges"]
    assert sum(p["bonds"] for p in short) == sum(len(p["at"]) for p in short) / 2
    assert sum(p["halo"] for p in short) < 0.8 * sum(p["halo"] for p in all_of_them)
    assert all(len(p["at"]) == p["edges"] for p in all_of_them)


def test_bond_cutoff_that_cannot_be():
    for options in ({"bond_cutoff": 2.0}, {"bonds": True, "bond_cutoff": 5.0}, {"bonds": True, "bond_cutoff": 0.0}):
        with pytest.raises(ValueError, match="bond_cutoff must be between 0 and the cutoff"):
            NeighborConfig(cutoff=4.0, **options)
