"""Sharded storage: models that keep global ids, against one process without nvdd's runtime."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import parity
import sharded_models
from nvdd import Batch, DistributedModel, DomainConfig, dispatch_trace
from nvdd.communicator import Communicator
from nvdd.neighbors import attach_neighbors

STRUCTURES = (
    "argon",
    "triclinic",
    "tiny cell",
    "gas",
    "wire",
    "pair",
    "argon, gas",
    "pair, triclinic",
    "tiny cell, wire",
)


def systems(structure: str) -> list:
    return [parity.structure(name) for name in structure.split(", ")]


def single_process(model: str, structure: str) -> tuple[np.ndarray, np.ndarray]:
    """Energies of the systems and forces, by plain autograd on plain tensors."""
    wrapper = getattr(sharded_models, model)()
    batch = Batch.from_atoms(systems(structure))
    positions = batch.positions.requires_grad_(True)
    attach_neighbors(batch, sharded_models.CUTOFF)
    energies = wrapper(batch)["energies"]
    (gradient,) = torch.autograd.grad(energies.sum(), positions)
    total = torch.zeros(batch.n_systems, dtype=torch.float64).index_add(0, batch.batch, energies.detach())
    return total.numpy(), -gradient.numpy()


def on_rank(comm: Communicator, model: str, structure: str) -> dict:
    wrapper = getattr(sharded_models, model)()
    rows = []
    wrapper.register_forward_pre_hook(lambda module, args: rows.append(args[0].atomic_numbers.shape[0]))
    distributed = DistributedModel(wrapper, DomainConfig(mesh=comm, skin=0.8))
    with dispatch_trace() as trace:
        out = distributed(Batch.from_atoms(systems(structure)))
    return {"ids": out.ids.numpy(), "energy": out["energy"].numpy(), "forces": out["forces"].numpy(), "rows": rows,
            "exchanges": len(trace.exchanges), "fired": {name for (_, name) in trace.fired}}  # fmt: skip


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("model", ("Equilibrated", "ComputedIds"))
@pytest.mark.parametrize("world_size", (1, 2, 3, 4))
def test_equals_one_process(ranks, world_size, model, structure):
    energy, forces = single_process(model, structure)
    parts = ranks.run(world_size, on_rank, model, structure)
    found = np.zeros_like(forces)
    for part in parts:
        found[part["ids"]] = part["forces"]
        assert np.abs(part["energy"] - energy).max() <= 1e-12 * np.abs(energy).max() + 1e-14
        assert part["rows"] == [max(1, len(part["ids"]))]  # owned rows only
    assert np.abs(found - forces).max() <= 1e-11 * np.abs(forces).max() + 1e-14
    assert sorted(np.concatenate([part["ids"] for part in parts])) == list(range(len(forces)))
    assert all((part["exchanges"] > 0) == (world_size > 1) for part in parts)
    if model == "ComputedIds":
        assert any("all_to_all for these ids" in name for name in parts[0]["fired"])


def test_forces_are_derivatives():
    """The reference itself: central differences."""
    batch = Batch.from_atoms(parity.structure("triclinic"))
    for model in ("Equilibrated", "ComputedIds"):
        wrapper = getattr(sharded_models, model)()

        def energy(step: float, wrapper=wrapper) -> float:
            moved = parity.structure("triclinic").copy()
            moved.positions[7, 1] += step
            return float(
                wrapper(attach_neighbors(Batch.from_atoms(moved), sharded_models.CUTOFF))["energies"].sum().detach()
            )

        _, forces = single_process(model, "triclinic")
        assert abs(-(energy(1e-4) - energy(-1e-4)) / 2e-4 - forces[7, 1]) < 1e-7 * max(1.0, np.abs(forces).max())
    assert batch.n_systems == 1


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("OutOfRange", "There is no dummy atom"),
        ("MadeLocal", "made local|to_local was applied"),
        ("LocalPolicy", "LocalStoragePolicy lets nothing cross ranks"),
        ("ScatterLocal", "sends no sums to other ranks"),
        ("HaloPolicy", "a comparison or arithmetic with them has another outcome on each rank"),
    ],
)
@pytest.mark.parametrize("world_size", (2, 3))
def test_refused(ranks, world_size, model, text):
    from nvdd.errors import DistributedOpError

    with pytest.raises(DistributedOpError, match=text):
        ranks.run(world_size, on_rank, model, "argon")
