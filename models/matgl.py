"""Potentials of matgl: TensorNet, M3GNet and CHGNet. Files are read by `nvdd.models.matgl_files`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from nvdd.adapters import JitAdapter
from nvdd.config import StrategyKind
from nvdd.models import matgl_files
from nvdd.models.base import BaseModelMixin, Batch, ModelConfig, ModelOutputs, NeighborConfig
from nvdd.models.matgl_chgnet import CHGNetLayers
from nvdd.models.precise import Float64Table
from nvdd.models.registry import ModelFamily
from nvdd.models.triples import pairs_at_atoms
from nvdd.shard_tensor import to_local
from nvdd.specs import SPEC_MPNN_GP, SPEC_MPNN_HALO, MLIPSpec, OutputKind, OutputSpec
from nvdd.verbs import refresh_neighbors

_OUTPUTS = frozenset({"energy", "energies", "forces", "stress", "stresses"})


class MatGLWrapper(torch.nn.Module, BaseModelMixin):
    """A network of matgl behind edge vectors, with the offsets of its potential. `wrap` makes the one for a potential.

    matgl's layers run as they are, on a copy of the network.

    Args:
        potential: a ``matgl.apps.pes.Potential`` of an extensive network.

    Attributes:
        model: the network.
        scale: factor of its energies.
        references: energies of the potential's element offsets by atomic number, eV, in float64.

    Raises:
        InputError: another model, or a potential whose energy is no sum over atoms or has further terms.
        MissingDependencyError: matgl is missing.
    """

    def __init__(self, potential: torch.nn.Module) -> None:
        super().__init__()
        matgl_files.check(potential)
        from ase.data import atomic_numbers

        self.model = matgl_files.twin(potential.model)
        self.register_buffer("scale", potential.data_std.detach().clone())
        numbers = torch.tensor([atomic_numbers[symbol] for symbol in self.model.element_types])
        kinds = torch.full((120,), -1)
        kinds[numbers] = torch.arange(len(numbers))
        self.register_buffer("_kinds", kinds, persistent=False)
        self.references = Float64Table(matgl_files.offsets(potential, numbers))
        self.has_magmoms = False
        self.model_config = ModelConfig(neighbor_config=self._neighbors(), elements=frozenset(numbers.tolist()))

    def _neighbors(self) -> NeighborConfig:
        return NeighborConfig(float(self.model.cutoff))

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return matgl_files.model_dtype(self.model)

    def forward(self, data: Batch) -> ModelOutputs:
        """``energies`` (n_atoms,) eV in float64; of a CHGNet with moments ``magmoms`` (n_atoms,), as it was trained on."""
        numbers = to_local(data.atomic_numbers)
        outputs = self._network(data, self._kinds[numbers])
        energies = self.scale * outputs["energies"].reshape(-1)
        outputs["energies"] = energies.to(torch.float64) + self.references(numbers)
        return outputs

    def _network(self, data: Batch, kinds: Tensor) -> ModelOutputs:
        """``energies`` (n_atoms,) of the network; ``kinds`` (n_atoms,) numbers its elements."""
        raise NotImplementedError

    def distribution_spec(self, strategy: Any = None) -> MLIPSpec:
        """Owned rows, remote ones fetched where they are read."""
        return SPEC_MPNN_GP if strategy is StrategyKind.GRAPH_PARTITION else SPEC_MPNN_HALO


class TensorNetWrapper(MatGLWrapper):
    """A TensorNet (https://arxiv.org/abs/2306.06482), without matgl's Warp kernels, which gather rows by themselves.

    What crosses ranks are the three parts of the tensors of each layer.
    """

    def _network(self, data: Batch, kinds: Tensor) -> ModelOutputs:
        vectors = to_local(data.edge_vectors).to(self.dtype)
        graph = SimpleNamespace(node_type=kinds, pos=_Origin(), edge_index=data.edge_index, pbc_offshift=vectors)
        return ModelOutputs(energies=self.model.final_layer(self.model.forward_features(graph)["readout"]))

    def distribution_spec(self, strategy: Any = None) -> MLIPSpec:
        """As of the others; matgl's scripted sum runs as Python."""
        return super().distribution_spec(strategy).with_third_party_helpers(JitAdapter("matgl.utils.maths", "_scatter_add"))


class M3GNetWrapper(MatGLWrapper):
    """An M3GNet (https://doi.org/10.1038/s43588-022-00349-3). Its triples are pairs of edges of one centre, and cross no
    ranks; what does are atoms' features, once in each block."""

    def _network(self, data: Batch, kinds: Tensor) -> ModelOutputs:
        from matgl.graph._compute import compute_theta_and_phi
        from matgl.utils.cutoff import polynomial_cutoff

        model, n = self.model, data.n_atoms
        centre, neighbour = to_local(data.receivers), to_local(data.senders)
        vectors = to_local(data.edge_vectors).to(self.dtype)
        length = torch.norm(vectors, dim=1)
        radial = model.bond_expansion(length)
        short = (length.detach() <= model.threebody_cutoff).nonzero().squeeze(1)
        triples = short[torch.stack(pairs_at_atoms(centre[short], n))]
        if triples.shape[1]:  # else no basis, and three-body terms change nothing
            angle = compute_theta_and_phi(vectors, length, triples)
            basis = model.basis_expansion(angle["triple_bond_lengths"], angle["cos_theta"], angle["phi"])
            near = polynomial_cutoff(length, model.threebody_cutoff)
        atoms, edges, _ = model.embedding(kinds, radial, None)
        index = torch.stack([centre, neighbour])  # of neighbours also rows behind those of owned atoms
        for three_body, layer in zip(model.three_body_interactions, model.graph_layers, strict=True):
            rows = to_local(refresh_neighbors(atoms, pad=True))
            if triples.shape[1]:
                edges = three_body(neighbour, triples, None, len(length), basis, near, rows, edges)
            edges, rows, _ = layer(index, edges, rows, None, radial, None, None, len(rows), 1)
            atoms = rows[:n]
        return ModelOutputs(energies=model.final_layer(atoms))


class CHGNetWrapper(MatGLWrapper):
    """matgl's CHGNet (https://doi.org/10.1038/s42256-023-00716-3), whose bonds have a feature for each direction.

    What crosses ranks are atoms' features, once a layer, and features of bonds shorter than the model's cutoff for angles,
    once between layers. Magnetic moments where the potential computes them (``calc_magmom``).
    """

    def __init__(self, potential: torch.nn.Module) -> None:
        super().__init__(potential)
        self.has_magmoms = bool(potential.calc_magmom) and self.model._init_args.get("num_site_targets", 1) == 1
        self.model_config.outputs = _OUTPUTS | ({"magmoms"} if self.has_magmoms else set())

    def _neighbors(self) -> NeighborConfig:
        cutoff, bonds = float(self.model.cutoff), float(self.model.three_body_cutoff)
        return NeighborConfig(cutoff, bonds=True, bond_cutoff=min(cutoff, bonds)) if bonds > 0 else NeighborConfig(cutoff)

    def _network(self, data: Batch, kinds: Tensor) -> ModelOutputs:
        atoms, before_last = CHGNetLayers(self.model, data, self.dtype)(kinds)
        outputs = ModelOutputs(energies=self.model.final_layer(atoms))
        if self.has_magmoms:
            outputs["magmoms"] = self.model.sitewise_readout(before_last).squeeze(-1)
        return outputs

    def distribution_spec(self, strategy: Any = None) -> MLIPSpec:
        """As of the others, with magnetic moments."""
        magmoms = {"magmoms": OutputSpec(OutputKind.PER_NODE)} if self.has_magmoms else {}
        return super().distribution_spec(strategy).with_outputs(magmoms)


class _Origin:
    """Where all atoms are, for code that adds the edge vectors: ``positions[index]`` is 0."""

    def __getitem__(self, index: Tensor) -> float:
        return 0.0


# --- family -------------------------------------------------------------------------------------------------------


def wrap(potential: Any) -> MatGLWrapper:
    """The wrapper for a ``matgl.apps.pes.Potential``, by its network; raises as `MatGLWrapper` does."""
    kinds = {"M3GNet": M3GNetWrapper, "CHGNet": CHGNetWrapper}
    return kinds.get(type(getattr(potential, "model", None)).__name__, TensorNetWrapper)(potential)


def _build(checkpoint: str | None, *, dtype: torch.dtype | None = None) -> MatGLWrapper:
    wrapper = wrap(matgl_files.load(checkpoint))
    return wrapper.to(dtype=dtype or wrapper.dtype).eval().requires_grad_(False)


def _from_calculator(calculator: Any) -> MatGLWrapper | None:
    potential = matgl_files.potential_of_calculator(calculator)
    return None if potential is None else wrap(potential).cpu().eval().requires_grad_(False)


FAMILY = ModelFamily(
    name="matgl",
    description="TensorNet, M3GNet and CHGNet of matgl",
    build=_build,
    options={},
    package="matgl",
    install=matgl_files.INSTALL,
    licence="package BSD-3; weights as their authors state",
    from_calculator=_from_calculator,
    configuration=lambda wrapper: {**matgl_files.configuration(wrapper.model), "magmoms": wrapper.has_magmoms},
    rebuild=lambda description, dtype: wrap(matgl_files.rebuild(description, dtype)),
)
