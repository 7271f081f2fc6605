"""PET: its wrapper and its family. Files are read by `nvdd.models.pet_files`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nvdd.config import StrategyKind
from nvdd.errors import InputError
from nvdd.models.base import BaseModelMixin, Batch, ModelConfig, ModelOutputs, NeighborConfig
from nvdd.models.pet_files import INSTALL, Description, build_backend, describe, load_file
from nvdd.models.pet_table import EdgeTable
from nvdd.models.precise import Float64Table
from nvdd.models.registry import ModelFamily
from nvdd.shard_tensor import to_local
from nvdd.specs import SPEC_MPNN_GP, SPEC_MPNN_HALO, MLIPSpec


class PETWrapper(torch.nn.Module, BaseModelMixin):
    """PET, the point edge transformer (https://arxiv.org/abs/2305.19302), of metatrain.

    The transformers, heads and cutoff functions run as they are, on a dense table of the edges of each atom. Between layers
    an edge reads the message of its reverse, which is with the other atom: in each layer the messages of edges to other
    ranks' atoms cross.

    Args:
        backend: a ``PETBackend``.
        description: what it is made of, which output is the energy, and what is added to it.

    Attributes:
        backend: the module.
        scales, shifts: by atomic number, of the network's energy of an atom, in float64.
    """

    def __init__(self, backend: torch.nn.Module, description: Description) -> None:
        super().__init__()
        self.backend, self.description = backend, description
        self.scales, self.shifts = Float64Table(description.scales), Float64Table(description.shifts)
        self.model_config = ModelConfig(
            neighbor_config=NeighborConfig(cutoff=float(backend.cutoff), bonds=True),
            elements=frozenset(description.atomic_types),
        )

    @classmethod
    def from_model(cls, model: Any, target: str | None = None) -> PETWrapper:
        """From an eager ``metatrain.pet.PET``, whose weights are shared.

        Args:
            model: the module.
            target: name of the output that is the energy; None for the only one that is.

        Raises:
            InputError: a scripted model or one of another architecture, parts that can't be divided over ranks, no such
                output.
            MissingDependencyError: metatrain is missing.
        """
        description = describe(model, target)
        return cls(model.backend, description)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return next(self.backend.parameters()).dtype

    def forward(self, data: Batch) -> ModelOutputs:
        """Energies (n_atoms,) in eV, float64."""
        table = EdgeTable(self, data)
        feedforward = self.backend.featurizer_type == "feedforward"
        nodes, edges = self._feedforward(table) if feedforward else self._residual(table)
        target = self.description.target
        found, _, _ = self.backend.predict(nodes, edges, table.inputs, None, None, [target])
        energies = found[target][0].reshape(-1).to(torch.float64)
        numbers = to_local(data.atomic_numbers)
        return ModelOutputs(energies=energies * self.scales(numbers) + self.shifts(numbers))

    def _layer(self, layer: torch.nn.Module, nodes: Tensor, edges: Tensor, table: EdgeTable) -> tuple[Tensor, Tensor]:
        i = table.inputs
        return layer(
            nodes, edges, i["element_indices_neighbors"], i["edge_vectors"], i["padding_mask"], i["edge_distances"],
            i["cutoff_factors"], self.training,
        )  # fmt: skip

    def _feedforward(self, table: EdgeTable) -> tuple[list[Tensor], list[Tensor]]:
        """Features of the last layer; forward and reverse messages are mixed by a network."""
        b = self.backend
        nodes = b.node_embedders[0](table.inputs["element_indices_nodes"])
        edges = b.edge_embedder(table.inputs["element_indices_neighbors"])
        for layer, norm, mix in zip(b.gnn_layers, b.combination_norms, b.combination_mlps, strict=True):
            nodes, messages = self._layer(layer, nodes, edges, table)
            edges = edges + messages + mix(norm(torch.cat([messages, table.reversed(messages)], -1)))
        return [nodes], [edges]

    def _residual(self, table: EdgeTable) -> tuple[list[Tensor], list[Tensor]]:
        """Features of all layers; edges become the mean of what they were and of the reverse message."""
        b, nodes, edges = self.backend, [], []
        current = b.edge_embedder(table.inputs["element_indices_neighbors"])
        for k, (embedder, layer) in enumerate(zip(b.node_embedders, b.gnn_layers, strict=True)):
            of_atoms, messages = self._layer(layer, embedder(table.inputs["element_indices_nodes"]), current, table)
            nodes.append(of_atoms)
            edges.append(messages)
            if k + 1 < len(b.gnn_layers):  # nothing reads what would follow
                current = 0.5 * (current + table.reversed(messages))
        return nodes, edges

    def distribution_spec(self, strategy: Any = None) -> MLIPSpec:
        """Owned rows; messages of reverse edges fetched."""
        return SPEC_MPNN_GP if strategy is StrategyKind.GRAPH_PARTITION else SPEC_MPNN_HALO


# --- family -------------------------------------------------------------------------------------------------


def _build(checkpoint: str | None, *, dtype: torch.dtype | None = None, target: str | None = None) -> PETWrapper:
    if checkpoint is None:
        raise InputError("'pet' needs a model: pet:FILE.ckpt, the checkpoint of a training by metatrain")
    return PETWrapper.from_model(load_file(checkpoint), target).to(dtype).eval().requires_grad_(False)


def _rebuild(configuration: dict[str, Any], dtype: torch.dtype) -> PETWrapper:
    description = Description.from_json(configuration)
    return PETWrapper(build_backend(description), description).to(dtype)


FAMILY = ModelFamily(
    name="pet",
    description="PET, point edge transformer (checkpoints of metatrain)",
    build=_build,
    options={"target": "name of the output that is the energy, where a model has several"},
    package="metatrain",
    install=INSTALL,
    licence="package BSD-3-Clause; weights as their authors state",
    configuration=lambda wrapper: wrapper.description.to_json(),
    rebuild=_rebuild,
)
