"""CHGNet: message passing on atoms, on the bonds between near ones, and on the angles between these bonds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nvdd.adapters import PythonAdapter
from nvdd.config import StrategyKind
from nvdd.models import chgnet_files
from nvdd.models.base import BaseModelMixin, Batch, ModelConfig, ModelOutputs, NeighborConfig
from nvdd.models.chgnet_graph import Columns, changes_all, sum_by_owner
from nvdd.models.precise import Float64Table
from nvdd.models.registry import ModelFamily
from nvdd.models.triples import pairs_at_atoms
from nvdd.shard_tensor import to_local
from nvdd.specs import SPEC_MPNN_GP, SPEC_MPNN_HALO, MLIPSpec, OutputKind, OutputSpec
from nvdd.verbs import Scope, entries_at, system_sum

_OUTPUTS = frozenset({"energy", "energies", "forces", "stress", "stresses"})


class CHGNetWrapper(torch.nn.Module, BaseModelMixin):
    """A CHGNet (https://doi.org/10.1038/s42256-023-00716-3) behind edge vectors.

    The layers of chgnet run as they are. An edge keeps the features of its bond; those shorter than the model's bond cutoff
    share them with their reverse edge as one row, which hears from the angles at both of its ends, on whichever ranks these
    are. What crosses ranks are atoms' features, once a layer, and short bonds' features and sums, once each a layer.

    Args:
        model: a ``chgnet.model.CHGNet`` whose energy is a sum over atoms (``mlp_first``).

    Attributes:
        model: the module.
        references: energies of the composition model by atomic number, eV, in float64.

    Raises:
        InputError: another module, or one whose energy is no sum over atoms.
        MissingDependencyError: chgnet is missing.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        chgnet_files.check_module(model)
        self.model = model
        self.references = Float64Table(chgnet_files.references(model))
        converter = model.graph_converter
        cutoff = float(converter.atom_graph_cutoff)
        bonds = min(cutoff, float(converter.bond_graph_cutoff))
        self.has_magmoms = model.n_conv > 1
        self.model_config = ModelConfig(
            outputs=_OUTPUTS | ({"magmoms"} if self.has_magmoms else set()),
            neighbor_config=NeighborConfig(cutoff, bonds=True, bond_cutoff=bonds),
            elements=frozenset(range(1, model.atom_embedding.embedding.num_embeddings + 1)),
        )

    def forward(self, data: Batch) -> ModelOutputs:
        """``energies`` (n_atoms,) eV in float64, ``magmoms`` (n_atoms,) in Bohr magnetons."""
        model, outputs = self.model, ModelOutputs()
        vectors = to_local(data.edge_vectors).to(self.dtype)
        lengths = torch.norm(vectors, dim=1)
        basis = model.bond_basis_expansion.rbf_expansion_ag(lengths)
        every_edge = torch.arange(len(lengths), device=lengths.device)
        atoms = {"bond_weights": model.bond_weights_ag(basis), "atom_graph": data.neighbor_list, "directed2undirected": every_edge}
        numbers = to_local(data.atomic_numbers)
        x, on_edges = model.atom_embedding(numbers - 1), model.bond_embedding(basis)
        # from here on `short` are the edges with a bond, and angles are pairs of these at one atom
        short = every_edge if data.bonded_edges is None else to_local(data.bonded_edges)
        stands_for = short[to_local(data.edge_of_bond)]
        weights = model.bond_weights_bg(model.bond_basis_expansion.rbf_expansion_bg(lengths[stands_for]))
        centre = to_local(data.receivers)[short]
        one, other = pairs_at_atoms(centre, data.n_atoms)
        unit = vectors[short] / lengths[short, None]
        angle = model.angle_embedding(model.angle_basis_expansion(unit[one], unit[other]))
        graph = Columns(centre[one], entries_at(data.bond_of_edge, one), entries_at(data.bond_of_edge, other))
        has_angles, no_graph = self._has_angles(data, centre[one]), Columns(one[:0], one[:0], one[:0])
        bonds = on_edges[stands_for]
        for k, layer in enumerate(model.atom_conv_layers[:-1]):
            x = layer(atom_feas=x, bond_feas=on_edges, **atoms)
            bond_layer, angle_layer = model.bond_conv_layers[k], model.angle_layers[k]
            if bond_layer is not None:
                if has_angles is not None:  # bonds without angles change as well
                    changed = bond_layer(x, on_edges, on_edges, angle[:0], no_graph)
                    on_edges = torch.where(has_angles, changed, on_edges)
                changed = bond_layer(x, bonds, weights, angle, graph)
                bonds = changed if has_angles is None else torch.where(has_angles[stands_for], changed, bonds)
                on_edges = on_edges.index_copy(0, short, to_local(bonds[data.bond_of_edge]))
                if angle_layer is not None:
                    angle = angle_layer(x, bonds, angle, graph)
        if self.has_magmoms:
            outputs["magmoms"] = torch.abs(model.site_wise(x)).squeeze(-1)
        x = model.atom_conv_layers[-1](atom_feas=x, bond_feas=on_edges, **atoms)
        if model.readout_norm is not None:
            x = model.readout_norm(x)
        outputs["energies"] = model.mlp(x).squeeze(-1).to(torch.float64) + self.references(numbers)
        return outputs

    def _has_angles(self, data: Batch, vertex: Tensor) -> Tensor | None:
        """(E, 1) bool, edges in systems with an angle anywhere: in others chgnet leaves out the layers for bonds.

        None where that makes no difference, since these layers change nothing that has no angle.
        """
        if not any(layer is not None and changes_all(layer) for layer in self.model.bond_conv_layers):
            return None
        ones = torch.ones(len(vertex), device=vertex.device)
        at_atom = torch.zeros(data.n_atoms, device=vertex.device).index_add(0, vertex, ones)
        total = to_local(system_sum(at_atom, data.batch, data.n_systems, Scope.OWNED))
        return (total[to_local(data.batch)] > 0)[to_local(data.receivers), None]

    def distribution_spec(self, strategy: Any = None) -> MLIPSpec:
        """Owned rows of atoms and bonds, remote ones fetched where they are read; sums of bonds sent to their owners."""
        base = SPEC_MPNN_GP if strategy is StrategyKind.GRAPH_PARTITION else SPEC_MPNN_HALO
        magmoms = {"magmoms": OutputSpec(OutputKind.PER_NODE)} if self.has_magmoms else {}
        return base.with_outputs(magmoms).with_third_party_helpers(
            PythonAdapter("chgnet.model.layers", "aggregate", sum_by_owner)
        )


# --- family -------------------------------------------------------------------------------------------------------


def _build(checkpoint: str | None, *, dtype: torch.dtype | None = None) -> CHGNetWrapper:
    wrapper = CHGNetWrapper(chgnet_files.load(checkpoint))
    return wrapper.to(dtype=dtype or wrapper.dtype).eval().requires_grad_(False)


def _from_calculator(calculator: Any) -> CHGNetWrapper | None:
    model = chgnet_files.module_of_calculator(calculator)
    return None if model is None else CHGNetWrapper(model).eval().requires_grad_(False)


def _rebuild(description: dict[str, Any], dtype: torch.dtype) -> CHGNetWrapper:
    return CHGNetWrapper(chgnet_files.rebuild(description, dtype))


FAMILY = ModelFamily(
    name="chgnet",
    description="CHGNet, message passing on atoms, bonds and angles, with magnetic moments (weights come with the package)",
    build=_build,
    checkpoints=chgnet_files.SHIPPED,
    options={},
    package="chgnet",
    install=chgnet_files.INSTALL,
    licence="package Modified BSD (LBNL); the weights in it carry no statement of their own",
    from_calculator=_from_calculator,
    configuration=lambda wrapper: chgnet_files.configuration(wrapper.model),
    rebuild=_rebuild,
)
