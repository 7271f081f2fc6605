"""MatterSim: its wrapper and its family. Files and calculators are in `nvdd.models.mattersim_files`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nvdd.config import StrategyKind
from nvdd.models import mattersim_files
from nvdd.models.base import BaseModelMixin, Batch, EdgeLayout, ModelConfig, ModelOutputs, NeighborConfig
from nvdd.models.registry import ModelFamily
from nvdd.models.triples import pairs_at_atoms
from nvdd.shard_tensor import to_local
from nvdd.specs import SPEC_MPNN_GP, SPEC_MPNN_HALO, MLIPSpec
from nvdd.verbs import refresh_neighbors

_TINY = 1e-7  # by which MatterSim keeps cosines off -1 and 1, where the angle has no derivative


class MatterSimWrapper(torch.nn.Module, BaseModelMixin):
    """A MatterSim model (https://arxiv.org/abs/2405.04967), an M3GNet (https://doi.org/10.1038/s43588-022-00349-3).

    Its blocks run as they are. Triples are two edges of one centre, which are on the rank that owns it, so that of the
    others only the features of atoms cross ranks: once in each block.

    Args:
        model: an eager ``M3Gnet`` of mattersim.

    Attributes:
        model: the module.

    Raises:
        InputError: the module is of another class.
        MissingDependencyError: mattersim, or a package that it imports, is missing.
    """

    edge_layout = EdgeLayout(sender_column=1, vector="receiver_minus_sender")

    def __init__(self, model: torch.nn.Module) -> None:
        mattersim_files.check(model)
        super().__init__()
        self.model = model
        self.model_config = ModelConfig(
            neighbor_config=NeighborConfig(cutoff=float(model.model_args["cutoff"])),
            elements=frozenset(range(1, model.max_z + 1)),
        )

    def forward(self, data: Batch) -> ModelOutputs:
        """Energies (n_atoms,) in eV, in the type of the weights."""
        model, n = self.model, data.n_atoms
        numbers, centre, neighbour = map(to_local, (data.atomic_numbers, data.receivers, data.senders))
        vectors = to_local(data.edge_vectors).to(self.dtype)
        length = torch.linalg.vector_norm(vectors, dim=1)
        triples = self._triples(length, centre, n)
        first, second = triples.unbind(1)
        cosine = (vectors[first] * vectors[second]).sum(1) / (length[first] * length[second])
        three_basis = model.sbf(length[second], torch.acos(cosine.clamp(-1 + _TINY, 1 - _TINY)))
        radial = model.rbf(length)
        edges = model.edge_encoder(radial)
        atoms = model.atom_embedding(model.one_hot_atoms(numbers).to(self.dtype))
        per_edge = torch.bincount(first, minlength=len(length))
        index = torch.stack([centre, neighbour])  # of neighbours also rows behind those of owned atoms
        for block in model.graph_conv:
            rows = to_local(refresh_neighbors(atoms, pad=True))
            rows, edges = block(
                rows, edges, radial, index, three_basis, triples, length.unsqueeze(1), None, per_edge, None,
                total_num_atoms=len(rows), total_num_bonds=len(length), three_body_edge_map=first,
            )  # fmt: skip
            atoms = rows[:n]
        return ModelOutputs(energies=model.normalizer(model.final(atoms).view(-1), numbers))

    def _triples(self, length: Tensor, centre: Tensor, n_atoms: int) -> Tensor:
        """(T, 2) edges ij and ik, j other than k, that are no longer than the cutoff of triples."""
        short = (length.detach() <= self.model.model_args["threebody_cutoff"]).nonzero().squeeze(1)
        short = short[centre[short].argsort(stable=True)]
        return short[torch.stack(pairs_at_atoms(centre[short], n_atoms), 1)]

    def distribution_spec(self, strategy: Any = None) -> MLIPSpec:
        """Owned rows; those of neighbours fetched before each block."""
        return SPEC_MPNN_GP if strategy is StrategyKind.GRAPH_PARTITION else SPEC_MPNN_HALO


# --- family -------------------------------------------------------------------------------------------------


def _build(checkpoint: str | None, *, dtype: torch.dtype | None = None) -> MatterSimWrapper:
    return MatterSimWrapper(mattersim_files.load(checkpoint)).to(dtype).eval().requires_grad_(False)


def _from_calculator(calc: Any) -> MatterSimWrapper | None:
    module = mattersim_files.module_of_calculator(calc)
    return None if module is None else MatterSimWrapper(module).eval().requires_grad_(False)


def _configuration(wrapper: MatterSimWrapper) -> dict[str, Any]:
    return dict(wrapper.model.model_args)


def _rebuild(configuration: dict[str, Any], dtype: torch.dtype) -> MatterSimWrapper:
    mattersim_files.import_mattersim()
    return MatterSimWrapper(mattersim_files.build_model(configuration)).to(dtype)


FAMILY = ModelFamily(
    name="mattersim",
    description="MatterSim, M3GNet for 94 elements (weights are downloaded by mattersim)",
    build=_build,
    checkpoints=tuple(mattersim_files.NAMES.values()),
    options={},
    package="mattersim",
    install=mattersim_files.INSTALL,
    licence="package MIT; weights as their authors state",
    from_calculator=_from_calculator,
    configuration=_configuration,
    rebuild=_rebuild,
)
