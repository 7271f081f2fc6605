"""A pair potential of neighbours within 5 A, which says that it drops those beyond; it does, or it doesn't."""

from __future__ import annotations

import torch

from nvdd import BaseModelMixin, Batch, EdgeLayout, ModelConfig, ModelOutputs, NeighborConfig
from nvdd.shard_tensor import to_local
from nvdd.specs import SPEC_LJ_HALO

CUTOFF = 5.0


class Repulsion(torch.nn.Module, BaseModelMixin):
    """``exp(-r)`` of each pair."""

    edge_layout = EdgeLayout()

    def __init__(self, drops: bool) -> None:
        super().__init__()
        self.drops = drops
        self.scale = torch.nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        self.model_config = ModelConfig(neighbor_config=NeighborConfig(CUTOFF, drops_far_edges=True))

    def forward(self, data: Batch) -> ModelOutputs:
        r = to_local(data.edge_vectors).norm(dim=1)
        pair = self.scale * torch.exp(-r) * ((r < CUTOFF) if self.drops else 1.0)
        return ModelOutputs(energies=pair.new_zeros(data.n_atoms).index_add(0, to_local(data.receivers), pair))

    def distribution_spec(self, strategy=None):
        return SPEC_LJ_HALO
