"""Small models that read reverse edges and undirected bonds, as directed message passing and CHGNet do."""

from __future__ import annotations

import torch
from torch import nn

from nvdd import SPEC_MPNN_HALO, BaseModelMixin, Batch, ModelConfig, ModelOutputs, NeighborConfig

CUTOFF, WIDTH = 4.6, 6
SHORT = 3.9  # A, of bonds in `ShortBonds`


class _Base(nn.Module, BaseModelMixin):
    bond_cutoff: float | None = None

    def __init__(self) -> None:
        super().__init__()
        neighbors = NeighborConfig(cutoff=CUTOFF, bonds=True, bond_cutoff=self.bond_cutoff)
        self.model_config = ModelConfig(neighbor_config=neighbors)
        generator = torch.Generator().manual_seed(5)
        draw = lambda *shape: nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64) / 3)
        self.species, self.a, self.b, self.c, self.out = (
            draw(20, WIDTH),
            draw(WIDTH, WIDTH),
            draw(WIDTH, WIDTH),
            draw(WIDTH, WIDTH),
            draw(WIDTH),
        )

    def distribution_spec(self, strategy=None):
        return SPEC_MPNN_HALO

    def radial(self, data: Batch) -> torch.Tensor:
        r = torch.linalg.vector_norm(data.edge_vectors, dim=1)
        centres = torch.linspace(2.0, CUTOFF, WIDTH, dtype=torch.float64, device=r.device)
        envelope = (0.5 * (1 + torch.cos(torch.pi * r / CUTOFF))).unsqueeze(1)
        return torch.exp(-2 * (r.unsqueeze(1) - centres) ** 2) * envelope


class ReverseEdges(_Base):
    """Messages live on directed edges; each is updated from the atom's sum without its own reverse."""

    def forward(self, data: Batch) -> ModelOutputs:
        h = self.species[data.atomic_numbers]
        rbf = self.radial(data)
        message = torch.tanh(h[data.senders] @ self.a) * rbf
        for _ in range(2):
            total = torch.zeros_like(h).index_add(0, data.receivers, message)
            message = torch.tanh((total[data.senders] - message[data.reverse_edges]) @ self.b) * rbf
        total = torch.zeros_like(h).index_add(0, data.receivers, message)
        return ModelOutputs(energies=torch.tanh(total @ self.c) @ self.out)


class Bonds(_Base):
    """Features on atoms and on undirected bonds; bonds gather from both ends, atoms from their bonds."""

    def forward(self, data: Batch) -> ModelOutputs:
        h = self.species[data.atomic_numbers]
        rbf = self.radial(data)
        bond = rbf[data.edge_of_bond]
        for _ in range(2):
            on_edge = bond[data.bond_of_edge]
            message = torch.tanh(h[data.senders] @ self.a + on_edge @ self.b) * rbf
            h = h + torch.zeros_like(h).index_add(0, data.receivers, message)
            # both directed edges write to their bond, which may be another rank's
            from_ends = torch.zeros_like(bond).index_add(
                0, data.bond_of_edge, torch.tanh(h[data.receivers] @ self.c) * rbf
            )
            bond = bond + from_ends
        per_bond = (bond @ self.out).tanh()
        share = 0.5 * per_bond[data.bond_of_edge]
        energies = torch.tanh(h) @ self.out
        return ModelOutputs(
            energies=energies + torch.zeros_like(energies).index_add(0, data.receivers, share * rbf[:, 0])
        )


class ShortBonds(_Base):
    """All edges carry messages, short ones have a bond as well: it hears from both ends and from its reverse edge."""

    bond_cutoff = SHORT

    def forward(self, data: Batch) -> ModelOutputs:
        h = self.species[data.atomic_numbers]
        rbf = self.radial(data)
        r = torch.linalg.vector_norm(data.edge_vectors, dim=1).unsqueeze(1)
        short = (rbf * (1 - r / SHORT) ** 2)[data.bonded_edges]  # vanishes at the bond cutoff
        bond = short[data.edge_of_bond]
        for _ in range(2):
            h = h + torch.zeros_like(h).index_add(0, data.receivers, torch.tanh(h[data.senders] @ self.a) * rbf)
            of_bonds = torch.tanh(bond[data.bond_of_edge] @ self.b) * short
            on_edge = torch.zeros_like(rbf).index_add(0, data.bonded_edges, of_bonds)
            h = h + torch.zeros_like(h).index_add(0, data.receivers, on_edge)
            message = torch.tanh(h[data.receivers] @ self.c)[data.bonded_edges] * short
            bond = bond + torch.zeros_like(bond).index_add(0, data.bond_of_edge, message + 0.5 * message[data.reverse_edges])
        return ModelOutputs(energies=torch.tanh(h) @ self.out)
