"""Models that read reverse edges and bonds across ranks, against one process without nvdd's runtime."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import bond_models
import parity
from nvdd import Batch, DistributedModel, DomainConfig, dispatch_trace
from nvdd.communicator import Communicator
from nvdd.neighbors import attach_neighbors

STRUCTURES = ("argon", "triclinic", "slab", "tiny cell", "gas", "wire", "pair")


def single_process(model: str, structure: str) -> tuple[float, np.ndarray]:
    """Energy and forces by plain autograd on plain tensors."""
    wrapper = getattr(bond_models, model)()
    batch = Batch.from_atoms(parity.structure(structure))
    positions = batch.positions.requires_grad_(True)
    attach_neighbors(batch, bond_models.CUTOFF)
    energy = wrapper(batch)["energies"].sum()
    (gradient,) = torch.autograd.grad(energy, positions)
    return float(energy.detach()), -gradient.numpy()


def on_rank(comm: Communicator, model: str, structure: str, steps: int) -> dict:
    wrapper = getattr(bond_models, model)()
    distributed = DistributedModel(wrapper, DomainConfig(mesh=comm, skin=0.8))
    atoms = parity.structure(structure).copy()
    for _ in range(steps):  # the same topology, other edges within the cutoff
        distributed(Batch.from_atoms(atoms), {"energy"})
        atoms.rattle(0.05, seed=1)
    atoms = parity.structure(structure)
    with dispatch_trace() as trace:
        out = distributed(Batch.from_atoms(atoms))
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
        assert abs(part["energy"][0] - energy) <= 1e-12 * abs(energy) + 1e-14
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
