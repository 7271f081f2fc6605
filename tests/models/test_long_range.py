"""`ewald` and `pme` over ranks: against Ewald's sum written out, against one process, and against each other."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import coulomb
from coulomb import Case
from nvdd import Batch


def in_one_process(case: Case) -> dict[str, np.ndarray]:
    """The wrapper on plain tensors, with forces by positions and stress by a strain; nothing of the runtime."""
    from nvdd.neighbors import attach_neighbors

    wrapper, batch = case.wrapper(), Batch.from_atoms(case.atoms())
    attach_neighbors(batch, wrapper.model_config.neighbor_config.cutoff, wrapper.edge_layout)
    x = batch.positions.requires_grad_(True)
    strain = torch.zeros(batch.n_systems, 3, 3, dtype=torch.float64, requires_grad=True)
    even = 0.5 * (strain + strain.transpose(1, 2))
    volumes = torch.linalg.det(batch.cell).abs()
    batch.positions = x + torch.einsum("ni,nij->nj", x, even[batch.batch])
    batch.cell = batch.cell + batch.cell @ even
    energies = wrapper(batch)["energies"]
    forces, virial = torch.autograd.grad(energies.sum(), (x, strain))
    energy = torch.zeros(batch.n_systems, dtype=torch.float64).index_add(0, batch.batch, energies)
    out = {"energy": energy, "energies": energies, "forces": -forces, "stress": virial / volumes[:, None, None]}
    return {name: value.detach().numpy() for name, value in out.items()}


def assembled(parts: list[dict[str, Any]], n_atoms: int) -> dict[str, np.ndarray]:
    """Rows of all ranks in the user's order."""
    ids = np.concatenate([p["ids"] for p in parts])
    assert sorted(ids) == list(range(n_atoms))
    out = {}
    for name in ("energies", "forces"):
        if name in parts[0]:
            rows = np.concatenate([p[name] for p in parts])
            out[name] = np.empty_like(rows)
            out[name][ids] = rows
    for name in ("energy", "stress"):
        if name in parts[0]:
            out[name] = parts[0][name]
            for part in parts[1:]:
                np.testing.assert_array_equal(part[name], out[name])
    return out


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], what: Any) -> None:
    """Energy to 1e-12, the others to 1e-11 of their largest value."""
    for name, value in found.items():
        scale = np.abs(expected[name]).max()
        limit = 1e-12 if name == "energy" else 1e-11
        error = np.abs(value - expected[name]).max()
        # forces of atoms that symmetry holds in place are nothing but rounding
        assert error <= limit * scale + 1e-13, (name, error, scale, what)


PERIODIC = ("argon", "tiny cell", "triclinic", "atom in a box", "left-handed", "unwrapped", "gas", "bar")
LIGHT = {"gas": {"accuracy": 1e-3}, "atom in a box": {"accuracy": 1e-3}}
CASES = [
    *(Case("ewald", (name,), 0.3 * (k % 2), LIGHT.get(name, {})) for k, name in enumerate(PERIODIC)),
    *(Case("pme", (name,), 0.3 * (k % 2), {"accuracy": 1e-4} | LIGHT.get(name, {})) for k, name in enumerate(PERIODIC)),
    *(Case("pme", (name,), 0.3, {"accuracy": 1e-4, "distributed_fft": True}) for name in ("triclinic", "tiny cell", "bar")),
    Case("ewald", ("slab",), 0.0, {"slab": True, "accuracy": 1e-4}),
    Case("ewald", ("slab",), 0.5, {"slab": True, "accuracy": 1e-4}),
    Case("pme", ("slab",), 0.5, {"slab": True, "accuracy": 1e-3, "distributed_fft": True}),
    Case("ewald", ("triclinic", "tiny cell", "bar"), 0.2),
    Case("pme", ("tiny cell", "triclinic", "bar"), 0.2, {"accuracy": 1e-4}),
    Case("pme", ("tiny cell", "triclinic", "bar"), 0.2, {"accuracy": 1e-4, "distributed_fft": True}),
    Case("ewald", ("triclinic",), 0.1, domain={"skin": 1.0, "balance": "rcb"}),
    Case("ewald", ("bar",), 0.1, domain={"skin": 0.0}),
    Case("pme", ("triclinic",), 0.1, {"accuracy": 1e-4}, {"skin": 1.0, "balance": "rcb"}),
]


@cache
def expected() -> list[dict[str, np.ndarray]]:
    return [in_one_process(case) for case in CASES]


@pytest.mark.parametrize("world_size", (1, 2, 3, 4))
def test_parity(ranks, world_size):
    """Every case, on ranks as in one process; the second step makes no plan."""
    parts = ranks.run(world_size, coulomb.on_rank, CASES)
    for k, case in enumerate(CASES):
        mine = [part[k] for part in parts]
        assert len({len(m["exchanges"]) for m in mine}) == 1 and not mine[0]["setup"]
        assert_equal(assembled(mine, sum(map(len, case.atoms()))), expected()[k], (case, world_size))
