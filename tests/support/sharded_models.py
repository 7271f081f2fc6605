"""Models that compute with the values of their edge index, as those do that keep global ids (AIMNet2)."""

from __future__ import annotations

import torch
from torch import nn

from nvdd import SPEC_MPNN_HALO, BaseModelMixin, Batch, ModelConfig, ModelOutputs, NeighborConfig
from nvdd.policy import LocalStoragePolicy, ShardedStoragePolicy
from nvdd.specs import DistributionSpec, MLIPSpec

CUTOFF, WIDTH = 4.6, 6


class _Base(nn.Module, BaseModelMixin):
    def __init__(self) -> None:
        super().__init__()
        self.model_config = ModelConfig(neighbor_config=NeighborConfig(cutoff=CUTOFF))
        generator = torch.Generator().manual_seed(5)
        draw = lambda *shape: nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64) / 3)
        self.species, self.a, self.b, self.out = draw(20, WIDTH), draw(WIDTH, WIDTH), draw(WIDTH, WIDTH), draw(WIDTH)
        self.charge, self.weight, self.parity = draw(WIDTH), draw(WIDTH), draw(2, WIDTH)

    def distribution_spec(self, strategy=None) -> MLIPSpec:
        return MLIPSpec(
            DistributionSpec(ShardedStoragePolicy()),
            SPEC_MPNN_HALO.outputs,
            force_strategy=SPEC_MPNN_HALO.force_strategy,
        )

    def radial(self, data: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        r = torch.linalg.vector_norm(data.edge_vectors, dim=1)
        centres = torch.linspace(2.0, CUTOFF, WIDTH, dtype=torch.float64, device=r.device)
        envelope = 0.5 * (1 + torch.cos(torch.pi * r / CUTOFF))
        return r, torch.exp(-2 * (r.unsqueeze(1) - centres) ** 2) * envelope.unsqueeze(1)


class Equilibrated(_Base):
    """In each layer charges are shifted so that those of a system sum to zero, nonlinearly in the weights' sum."""

    def forward(self, data: Batch) -> ModelOutputs:
        h = self.species[data.atomic_numbers]
        r, rbf = self.radial(data)
        i, j = data.receivers, data.senders
        q = torch.zeros_like(h[:, 0])
        for _ in range(3):
            message = torch.tanh(h[j] @ self.a + q[j].unsqueeze(1)) * rbf
            h = torch.tanh(torch.zeros_like(h).index_add(0, i, message) @ self.b) + h
            raw, weight = h @ self.charge, nn.functional.softplus(h @ self.weight)
            empty = torch.zeros(data.n_systems, dtype=h.dtype, device=h.device)
            excess = empty.index_add(0, data.batch, raw) / empty.index_add(0, data.batch, weight)
            q = raw - weight * excess[data.batch]
        # each pair once: the edge from the larger to the smaller id stands for both (images of one atom, for itself)
        once = torch.where(i < j, 1.0, torch.where(i == j, 0.5, 0.0)).to(h.dtype)
        pair = once * q[i] * q[j] * rbf.sum(1) / r
        half = torch.zeros_like(q).index_add(0, i, 0.5 * pair).index_add(0, j, 0.5 * pair)
        return ModelOutputs(energies=torch.tanh(h) @ self.out + half)


class ComputedIds(_Base):
    """Reads and writes atoms by ids that were computed from those of the edges, and looks ids up in a table."""

    def forward(self, data: Batch) -> ModelOutputs:
        h = self.species[data.atomic_numbers]
        _, rbf = self.radial(data)
        ends = data.edge_index
        first, last = torch.minimum(ends[0], ends[1]), ends.amax(0)
        valid = (ends >= 0).all(0) & (first < 10**6)
        ends, first, last, rbf = ends[:, valid], first[valid], last[valid], rbf[valid]
        for _ in range(2):
            message = torch.tanh(h[last] @ self.a + h.index_select(0, first) @ self.b) * rbf
            h = h + torch.zeros_like(h).index_add(0, last, message + self.parity[(first + last) % 2] * rbf)
        flat = torch.zeros_like(h).scatter_add_(0, first.unsqueeze(1).expand(-1, WIDTH), h[ends[0]] * rbf)
        return ModelOutputs(energies=torch.tanh(flat + h) @ self.out)


class OutOfRange(_Base):
    """The dummy row of models that pad."""

    def forward(self, data: Batch) -> ModelOutputs:
        h = self.species[data.atomic_numbers]
        r, _ = self.radial(data)
        filled = torch.where(r < 3.0, data.senders, 10**6)
        return ModelOutputs(
            energies=h[:, 0] + torch.zeros_like(h[:, 0]).index_add(0, data.receivers, h[filled][:, 0] * r)
        )


class MadeLocal(_Base):
    """Reads by computed ids what it has taken out of the framework's hands."""

    def forward(self, data: Batch) -> ModelOutputs:
        from nvdd import to_local

        h = self.species[data.atomic_numbers]
        r, rbf = self.radial(data)
        h = to_local(torch.zeros_like(h).index_add(0, data.receivers, rbf))
        return ModelOutputs(
            energies=torch.zeros_like(h[:, 0]).index_add(0, data.receivers, r * h[data.senders + 0][:, 0])
        )


class HaloPolicy(Equilibrated):
    """The same model where index values mean nothing."""

    def distribution_spec(self, strategy=None) -> MLIPSpec:
        return SPEC_MPNN_HALO


class ScatterLocal(ComputedIds):
    """Writes by ids under a policy that sends nothing."""

    def distribution_spec(self, strategy=None) -> MLIPSpec:
        return MLIPSpec(DistributionSpec(ShardedStoragePolicy(scatter_mode="local")), SPEC_MPNN_HALO.outputs)


class LocalPolicy(_Base):
    """Reads computed rows of its neighbours under a policy by which nothing crosses."""

    def distribution_spec(self, strategy=None) -> MLIPSpec:
        return MLIPSpec(DistributionSpec(LocalStoragePolicy()), SPEC_MPNN_HALO.outputs)

    def forward(self, data: Batch) -> ModelOutputs:
        h = self.species[data.atomic_numbers]
        _, rbf = self.radial(data)
        of_sender = self.species[data.atomic_numbers[data.senders]]  # inputs are at hand
        h = torch.zeros_like(h).index_add(0, data.receivers, of_sender * rbf)
        h = torch.zeros_like(h).index_add(0, data.receivers, h[data.senders] * rbf)
        return ModelOutputs(energies=h @ self.out)
