"""Models as a user writes them, for calculators that are given ``"py:user_models:..."``."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.neighborlist import primitive_neighbor_list

from nvdd.models.base import BaseModelMixin, Batch, ModelConfig, ModelOutputs, NeighborConfig
from nvdd.shard_tensor import to_local
from nvdd.specs import SPEC_MPNN_HALO


class ChargedPairs(torch.nn.Module, BaseModelMixin):
    """``E = charge / 2 sum_ij weight_i weight_j (1 - r / cutoff)^3``: reads ``info["charge"]``, ``arrays["weight"]``."""

    def __init__(self, cutoff: float = 5.0, scale: float = 1.0) -> None:
        super().__init__()
        self.cutoff = cutoff
        self.scale = torch.nn.Parameter(torch.tensor(scale, dtype=torch.float64))
        self.model_config = ModelConfig(
            neighbor_config=NeighborConfig(cutoff=cutoff),
            node_inputs=frozenset({"weight"}),
            system_inputs=frozenset({"charge"}),
        )

    def forward(self, data: Batch) -> ModelOutputs:
        r = data.edge_vectors.norm(dim=1)
        pair = data.weight[data.senders] * (1 - r / self.cutoff) ** 3
        by_atom = torch.zeros_like(data.weight).index_add(0, data.receivers, pair)
        return ModelOutputs(energies=0.5 * self.scale * data.charge[data.batch] * data.weight * by_atom)

    def distribution_spec(self, strategy: Any = None):
        return SPEC_MPNN_HALO


READY = ChargedPairs(cutoff=4.0)  # a model rather than a function that makes one


def charged_pairs_reference(atoms: Atoms, cutoff: float = 5.0, scale: float = 1.0) -> tuple[float, np.ndarray]:
    """Energy and forces of `ChargedPairs` in plain numpy."""
    i, j, vectors = primitive_neighbor_list("ijD", atoms.pbc, atoms.cell, atoms.positions, cutoff)
    r = np.linalg.norm(vectors, axis=1)
    factor = 0.5 * scale * float(atoms.info["charge"]) * atoms.arrays["weight"][i] * atoms.arrays["weight"][j]
    forces = np.zeros((len(atoms), 3))
    # every pair comes up twice, and moves both of its atoms
    pull = (factor * 3 * (1 - r / cutoff) ** 2 / cutoff / r)[:, None] * vectors
    np.add.at(forces, j, pull)
    np.add.at(forces, i, -pull)
    return float((factor * (1 - r / cutoff) ** 3).sum()), forces


class Troubled(ChargedPairs):
    """`ChargedPairs` with unit weights that does what ``info["trouble"] = (what, on which rank, seconds)`` says.

    The rank may be -1 for all. What: 0 nothing; 1 raise in the forward, 2 in the backward; 3 sleep in the forward.
    """

    def __init__(self, cutoff: float = 5.0) -> None:
        super().__init__(cutoff)
        self.model_config = ModelConfig(
            neighbor_config=NeighborConfig(cutoff=cutoff), system_inputs=frozenset({"trouble"})
        )

    def forward(self, data: Batch) -> ModelOutputs:
        what, where, seconds = to_local(data.trouble)[0].tolist()
        here = where in (-1, int(os.environ.get("RANK", 0)))
        if what and here:
            time.sleep(seconds)
        if what == 1 and here:
            raise MemoryError("out of memory, as a test wants it")
        r = data.edge_vectors.norm(dim=1)
        pair = (1 - r / self.cutoff) ** 3
        zero = torch.zeros(data.n_atoms, dtype=pair.dtype)
        energies = 0.5 * self.scale * zero.index_add(0, data.receivers, pair)
        if what == 2 and here:
            energies = _RaisesInBackward.apply(energies)
        return ModelOutputs(energies=energies)


class _RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("no derivative, as a test wants it")


def not_a_wrapper() -> int:
    return 42
