"""A small potential in which every atom attends to every other one of its system, whatever their distance."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nvdd import (
    SPEC_MPNN_GP,
    SPEC_MPNN_HALO,
    BaseModelMixin,
    Batch,
    ForceStrategy,
    MLIPSpec,
    ModelConfig,
    ModelOutputs,
    NeighborConfig,
    OutputSpec,
    StrategyKind,
    gather_atoms,
)

CUTOFF, WIDTH, HEADS = 4.6, 6, 2


class AllPairs(nn.Module, BaseModelMixin):
    """Messages within the cutoff, then attention over all pairs, twice; energies of atoms.

    Args:
        by_distance: pairs are weighted by their distance too, for which positions are read: open boundaries only.
    """

    def __init__(self, by_distance: bool = False) -> None:
        super().__init__()
        self.by_distance = by_distance
        self.model_config = ModelConfig(neighbor_config=NeighborConfig(cutoff=CUTOFF))
        generator = torch.Generator().manual_seed(7)
        draw = lambda *shape: nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64) / 2)
        self.species, self.query, self.key, self.value = draw(20, WIDTH), *(draw(2, WIDTH, HEADS * WIDTH) for _ in range(3))
        self.join, self.out = draw(2, HEADS * WIDTH, WIDTH), draw(WIDTH)

    def distribution_spec(self, strategy: Any = None) -> MLIPSpec:
        spec = SPEC_MPNN_GP if strategy is StrategyKind.GRAPH_PARTITION else SPEC_MPNN_HALO
        if not self.by_distance:
            return spec
        outputs: dict[str, OutputSpec] = {k: v for k, v in spec.outputs.items() if k != "stresses"}
        return MLIPSpec(spec.distribution, outputs, force_strategy=ForceStrategy.POSITIONS)

    def forward(self, data: Batch) -> ModelOutputs:
        i, j = data.receivers, data.senders
        vectors = data.edge_vectors
        if self.by_distance:
            vectors = data.positions[j] - data.positions[i]
        r = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
        centres = torch.linspace(1.5, CUTOFF, WIDTH, dtype=torch.float64)
        waves = torch.exp(-((r - centres) ** 2)) * (0.5 * (1 + torch.cos(torch.pi * r / CUTOFF)))
        h = self.species[data.atomic_numbers]
        far = (data.batch.unsqueeze(1) != gather_atoms(data.batch).unsqueeze(0)).to(torch.float64) * -1e9
        bias = far
        if self.by_distance:
            x = data.positions
            squared = (x.unsqueeze(1) - gather_atoms(x).unsqueeze(0)).square().sum(2)
            bias = far - 0.02 * squared
        for layer in range(2):
            h = h + torch.zeros_like(h).index_add(0, i, torch.tanh(h[j]) * waves)
            h = h + self.attend(h, bias, layer)
        return ModelOutputs(energies=torch.tanh(h) @ self.out)

    def attend(self, h: Tensor, bias: Tensor, layer: int) -> Tensor:
        """(n, WIDTH): queries of the rows of ``h``, keys and values of all atoms."""
        query, key, value = h @ self.query[layer], gather_atoms(h @ self.key[layer]), gather_atoms(h @ self.value[layer])
        found = []
        for head in range(HEADS):
            part = slice(head * WIDTH, (head + 1) * WIDTH)
            weights = torch.softmax(query[:, part] @ key[:, part].T / WIDTH**0.5 + bias, 1)
            found.append(weights @ value[:, part])
        return torch.cat(found, 1) @ self.join[layer]
