"""PET's dense table of edges, and the messages of their reverses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nvdd.models.base import Batch
from nvdd.shard_tensor import to_local
from nvdd.verbs import refresh_neighbors

_TINY = 1e-15  # what PET adds to distances


class EdgeTable:
    """The edges of each atom in a dense table (n_atoms, most edges of an atom), as PET's transformers take them.

    Args:
        wrapper: the `PETWrapper`.
        data: the step.

    Attributes:
        inputs: PET's tensors by name.
    """

    def __init__(self, wrapper: Any, data: Batch) -> None:
        from metatrain.pet.modules import nef, utilities

        backend, n = wrapper.backend, data.n_atoms
        centre, vectors = to_local(data.receivers), to_local(data.edge_vectors).to(wrapper.dtype)
        distance = torch.linalg.vector_norm(vectors, dim=1) + _TINY
        cutoffs = self._cutoffs(wrapper, data, centre, distance)
        self._kept = (distance <= cutoffs).nonzero().squeeze(1)  # an edge and its reverse alike
        self._reverse, self._n_edges = data.reverse_edges, len(centre)
        self._centre = centre[self._kept]
        count = torch.bincount(self._centre, minlength=n)
        width = int(count.max()) if n else 0
        rows, self._place, mask = nef.get_nef_indices(self._centre, count, width)
        self._shape = (n, width)
        dense = lambda x: nef.edge_array_to_nef(x[self._kept], rows)  # also of no edges, that gradients are exchanged
        function = {"bump": utilities.cutoff_func_bump, "cosine": utilities.cutoff_func_cosine}
        factors = function[backend.cutoff_function.lower()](distance, cutoffs, backend.cutoff_width)
        species = backend.species_to_species_index
        vectors = dense(vectors)
        self.inputs = {
            "element_indices_nodes": species[to_local(data.atomic_numbers)],
            "element_indices_neighbors": dense(species[to_local(data.atomic_numbers[data.senders])]),
            "edge_vectors": vectors,
            "edge_distances": torch.sqrt((vectors**2).sum(2) + _TINY),
            "padding_mask": mask,
            "cutoff_factors": torch.where(mask, dense(factors), 0.0),
        }

    @staticmethod
    def _cutoffs(wrapper: Any, data: Batch, centre: Tensor, distance: Tensor) -> Tensor:
        """(E,) A: the model's cutoff, or the mean of those that the two atoms have by their numbers of neighbours."""
        from metatrain.pet.modules import adaptive_cutoff

        backend = wrapper.backend
        if backend.num_neighbors_adaptive is None:
            return torch.full_like(distance, backend.cutoff)
        find = getattr(adaptive_cutoff, f"get_adaptive_cutoffs_{backend.adaptive_cutoff_method.lower()}")
        width = wrapper.description.hypers["cutoff_width_adaptive"]
        own = find(centre, distance, backend.num_neighbors_adaptive, data.n_atoms, backend.cutoff, cutoff_width=width)
        padded = to_local(refresh_neighbors(own, pad=True))
        return (own[centre] + padded[to_local(data.senders)]) / 2.0

    def reversed(self, messages: Tensor) -> Tensor:
        """(n_atoms, width, d) the message of the reverse of each edge; zeros where there is no edge."""
        of_edges = messages.new_zeros(self._n_edges, messages.shape[2])
        of_edges = of_edges.index_copy(0, self._kept, messages[self._centre, self._place])
        theirs = to_local(of_edges[self._reverse])[self._kept]
        return messages.new_zeros(*self._shape, messages.shape[2]).index_put((self._centre, self._place), theirs)
