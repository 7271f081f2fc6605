"""Compiled forwards: the eager numbers, on steps other than the one that was traced."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import toys
from nvdd import Batch, DistributedModel, DistributedOpError, DomainConfig, ForceStrategy, InputError

# torch's own warning, of a model that calls it
pytestmark = pytest.mark.filterwarnings("ignore:index_reduce")


def steps(atoms: Any, n: int, size: float = 0.1) -> list[Batch]:
    """The structure, and others near it."""
    rng = np.random.default_rng(7)
    found = [Batch.from_atoms(atoms)]
    for _ in range(n - 1):
        atoms = atoms.copy()
        atoms.positions += rng.normal(scale=size / 3, size=atoms.positions.shape)
        found.append(Batch.from_atoms(atoms))
    return found


def toys_on_rank(comm, names: tuple[str, ...], structure_name: str, compile: Any, **domain: Any) -> dict[str, Any]:
    """Of each toy the difference from its eager run, relative, on steps that were not traced; or why it is refused."""
    out: dict[str, Any] = {}
    for name in names:
        model = toys.toy(name)
        spec = model.distribution_spec()
        wanted = {"energy", "forces"} | (set(spec.outputs) - {"energies"})
        if spec.force_strategy in (ForceStrategy.EDGE_VECTORS, ForceStrategy.POSITIONS):
            wanted |= {"virial"}
        batches = steps(toys.structure(structure_name), 3)
        eager = DistributedModel(model, DomainConfig(mesh=comm, skin=0.6, **domain))
        try:
            fast = DistributedModel(model, DomainConfig(mesh=comm, skin=0.6, compile=compile, **domain))
            worst = 0.0
            for batch in batches:
                ours, theirs = fast(batch, wanted), eager(batch, wanted)
                for key, value in theirs.items():
                    scale = max(1e-3, float(value.abs().max())) if value.numel() else 1.0
                    assert ours[key].shape == value.shape, (name, key)
                    worst = max(worst, float((ours[key] - value).abs().max()) / scale if value.numel() else 0.0)
            out[name] = worst, fast._compiled[0].n_traces
        except (InputError, DistributedOpError) as error:
            out[name] = str(error), 0
    return out
