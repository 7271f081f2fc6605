"""Models of a user's module that are exported for LAMMPS as ``"py:exported_models:..."``."""

from __future__ import annotations

from typing import Any

import torch

from nvdd.models.base import BaseModelMixin, Batch, ModelConfig, ModelOutputs, NeighborConfig
from nvdd.specs import SPEC_MPNN_HALO, MLIPSpec, OutputKind, OutputSpec


class Pairs(torch.nn.Module, BaseModelMixin):
    """``E = scale / 2 sum_ij (1 - r / cutoff)^3``."""

    def __init__(self, cutoff: float = 4.0, scale: float = 1.0) -> None:
        super().__init__()
        self.cutoff = cutoff
        self.scale = torch.nn.Parameter(torch.tensor(scale, dtype=torch.float64))
        self.model_config = ModelConfig(neighbor_config=NeighborConfig(cutoff=cutoff), elements=frozenset({8, 14}))

    def forward(self, data: Batch) -> ModelOutputs:
        pair = (1 - data.edge_vectors.norm(dim=1) / self.cutoff) ** 3
        zero = torch.zeros(data.n_atoms, dtype=pair.dtype, device=pair.device)
        return ModelOutputs(energies=0.5 * self.scale * zero.index_add(0, data.receivers, pair))

    def distribution_spec(self, strategy: Any = None):
        return SPEC_MPNN_HALO


class Charged(Pairs):
    """`Pairs` times the charge of the centre."""

    def __init__(self, cutoff: float = 4.0, inputs: str = "charges") -> None:
        super().__init__(cutoff)
        self.model_config = ModelConfig(
            neighbor_config=NeighborConfig(cutoff=cutoff), elements=frozenset({8, 14}), node_inputs=frozenset({inputs})
        )

    def forward(self, data: Batch) -> ModelOutputs:
        (name,) = self.model_config.node_inputs
        return ModelOutputs(energies=super().forward(data)["energies"] * getattr(data, name))


class Forgetful(Pairs):
    """Keeps a number that decides what it computes neither in its options nor in its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.secret = 1.0

    def forward(self, data: Batch) -> ModelOutputs:
        return ModelOutputs(energies=super().forward(data)["energies"] * self.secret)


READY = Pairs(scale=3.0)
CHANGED = Forgetful()


def annotated(scale: float = 2.0) -> Pairs:
    return Pairs(scale=scale)


def unannotated(scale: float = 2.0):
    return Pairs(scale=scale)


def forgetful() -> Forgetful:
    """Another one each time."""
    model = Forgetful()
    model.secret = next(_SECRETS)
    return model


_SECRETS = iter(range(1, 1000))


class Charges(Pairs):
    """Charges, and no energy, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.model_config = ModelConfig(outputs=frozenset({"charges"}), active_outputs={"charges"},
                                        neighbor_config=NeighborConfig(cutoff=3.0), elements=frozenset({8, 14}))  # fmt: skip
        self.float()

    def forward(self, data: Batch) -> ModelOutputs:
        pair = torch.exp(-data.edge_vectors.norm(dim=1))
        zero = torch.zeros(data.n_atoms, dtype=pair.dtype, device=pair.device)
        return ModelOutputs(charges=self.scale * zero.index_add(0, data.receivers, pair))

    def distribution_spec(self, strategy: Any = None):
        return MLIPSpec(SPEC_MPNN_HALO.distribution, {"charges": OutputSpec(OutputKind.PER_NODE)})


def charges() -> Charges:
    return Charges()
