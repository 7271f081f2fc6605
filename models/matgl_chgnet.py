"""The layers of matgl's CHGNet over ranks: a directed edge has a feature, and hears from edges that end where it begins."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nvdd.models.base import Batch
from nvdd.models.triples import pairs_at_atoms
from nvdd.shard_tensor import to_local
from nvdd.verbs import refresh_neighbors


class CHGNetLayers:
    """Runs matgl's layers on the edges of one step.

    An edge's row is where it ends, but what changes its feature is where it begins, and in the row of its reverse. So each
    row keeps two: ``into``, of the edge that ends at the row's centre, and ``out``, of its reverse, which begins there.
    Layers for atoms read ``into`` and layers for bonds change ``out``; then ``into`` of short edges is fetched anew from
    the rows of their reverses. Long edges, changed by atoms' features alone, are computed in both rows.

    Args:
        model: a ``matgl.models.CHGNet``.
        data: the step.
        dtype: of the weights.
    """

    def __init__(self, model: Any, data: Batch, dtype: torch.dtype) -> None:
        from matgl.graph._compute import compute_theta
        from matgl.utils.cutoff import polynomial_cutoff

        self.model, self.n_atoms = model, data.n_atoms
        centre = to_local(data.receivers)
        self._index = torch.stack([to_local(data.senders), centre])  # of senders also rows behind those of owned atoms
        vectors = to_local(data.edge_vectors).to(dtype)
        length = torch.norm(vectors, dim=1)
        expand = lambda basis, r, cutoff: polynomial_cutoff(basis(r), cutoff, model.cutoff_exponent) * basis(r)
        self._basis = expand(model.bond_expansion, length, model.cutoff)
        self._weights = [_applied(w, self._basis) for w in (model.atom_bond_weights, model.bond_bond_weights)]
        if not model.use_bond_graph:
            return
        every = torch.arange(len(length), device=length.device)
        self._short = every if data.bonded_edges is None else to_local(data.bonded_edges)
        self._reverse = data.reverse_edges
        near = expand(model.threebody_bond_expansion, length[self._short], model.three_body_cutoff)
        self._near = torch.cat([near, near])
        self._near_weights = _applied(model.threebody_bond_weights, self._near)
        self._vertex = centre[self._short]
        one, other = pairs_at_atoms(self._vertex, self.n_atoms)
        cosine = compute_theta(vectors[self._short], None, one, other, directed=False)
        self._angles = model.angle_embedding(model.angle_expansion(torch.acos(cosine)))
        self._vertex = self._vertex[one]
        self._pairs = torch.stack([one, len(self._short) + other])  # from ``into`` to ``out``, one behind the other

    def __call__(self, kinds: Tensor) -> tuple[Tensor, Tensor]:
        """(n_atoms, d) and (n_atoms, d): atoms' features, and those before the last layer; ``kinds`` numbers elements."""
        model, atoms, before = self.model, self.model.atom_embedding(kinds), None
        into = out = model.bond_embedding(self._basis)
        for k, layer in enumerate(model.atom_graph_layers):
            before = atoms
            rows = to_local(refresh_neighbors(atoms, pad=True))
            out = self._edges(layer, rows, out)
            rows, into, _ = layer(self._index, rows, into, self._basis, None, None, *self._weights)
            atoms = rows[: self.n_atoms]
            if model.use_bond_graph and k + 1 < len(model.atom_graph_layers):
                into, out = self._bonds(model.bond_graph_layers[k], atoms, into, out)
        return atoms, before

    def _edges(self, layer: Any, rows: Tensor, out: Tensor) -> Tensor:
        """What a layer for atoms makes of the features of the reverse edges."""
        if layer.conv.edge_update_func is not None:
            centre_to_neighbour = self._index.flip(0)
            out = out + layer.conv.edge_update_(*centre_to_neighbour, rows, out, self._basis, None, self._weights[1])
        out = layer.dropout(out)
        return out if layer.bond_norm is None else layer.bond_norm(out)

    def _bonds(self, layer: Any, atoms: Tensor, into: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        """Features of short edges that have heard from those that end where they begin; angles change too."""
        conv, short, at = layer.conv, self._short, atoms[self._vertex]
        both = torch.cat([into[short], out[short]])
        change = conv.node_update_(self._pairs, both, self._angles, at, self._near, self._near_weights, len(both))
        begins = layer.bond_dropout(out[short] + change[len(short) :])
        ends = to_local(begins[self._reverse])
        if conv.edge_update_func is not None:
            both = torch.cat([ends, begins])
            self._angles = layer.angle_dropout(self._angles + conv.edge_update_(self._pairs, both, self._angles, at))
        return into.index_copy(0, short, ends), out.index_copy(0, short, begins)


def _applied(layer: Any, basis: Tensor) -> Tensor | None:
    return None if layer is None else layer(basis)
