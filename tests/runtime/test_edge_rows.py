"""Models that read reverse edges and bonds across ranks, against one process without nvdd's runtime."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ase import Atoms

import bond_models
import parity
import toys
from nvdd import Batch, DistributedModel, DomainConfig, dispatch_trace
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
    attach_neighbors(batch, bond_models.CUTOFF)
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
@pytest.mark.parametrize("model", ("ReverseEdges", "Bonds"))
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


def test_forces_are_derivatives():
    """The reference itself: central differences."""
    atoms = parity.structure("triclinic").copy()
    wrapper = bond_models.Bonds()
    energy = lambda a: float(
        wrapper(attach_neighbors(Batch.from_atoms(a), bond_models.CUTOFF))["energies"].sum().detach()
    )
    _, forces = single_process("Bonds", "triclinic")
    moved = [atoms.copy(), atoms.copy()]
    for sign, a in zip((1, -1), moved, strict=True):
        a.positions[7, 1] += sign * 1e-4
    numeric = -(energy(moved[0]) - energy(moved[1])) / 2e-4
    assert abs(numeric - forces[7, 1]) < 1e-6 * max(1, abs(forces[7, 1]))
