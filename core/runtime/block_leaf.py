"""What the energy of a model is differentiated by that takes its edges in blocks: `BlockLeaf`, beside `nvdd.runtime.leaves`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nvdd.data import Batch
from nvdd.edge_sums import SearchedEdges
from nvdd.model_config import EdgeLayout
from nvdd.nearby import block_size
from nvdd.roles import ShardMeta
from nvdd.runtime.graph import LocalGraph
from nvdd.runtime.leaves import Derivatives, gradients, local_batch, reaches, stand_in


class BlockLeaf:
    """The energy is a function of edge vectors that nobody keeps: it is differentiated by what these depend on.

    That is the place of each row's atom, and a strain at each row: a vector is strained by the mean of those of its two
    atoms, so that the derivative by them is the per-atom virial of `EdgeVectorLeaf`, half of r f at each end.

    Args:
        batch: of all atoms, or of this rank's rows.
        graph: whose ``nearby`` has the points.
        meta: the partition.
        layout: of the edges.
        dtype: of the vectors.
        cutoff: A.
    """

    def __init__(
        self, batch: Batch, graph: LocalGraph, meta: ShardMeta, layout: EdgeLayout, dtype: torch.dtype, cutoff: float
    ) -> None:
        self.graph, self.meta = graph, meta
        device, n = graph.pair.device, meta.n_padded
        new = lambda *shape: torch.zeros(*shape, dtype=torch.float64, device=device, requires_grad=True)
        self.place = new(n, 3) if graph.place is None else graph.place.view_as(graph.place)
        self.strain = new(n, 3, 3)
        self.blocks = graph.nearby.blocks(cutoff, block_size(meta.edges_at_once))
        self.batch = local_batch(
            batch,
            graph,
            meta,
            dtype,
            positions=stand_in(torch.zeros(meta.n_rows, 3, dtype=dtype, device=device), meta, "positions"),
            cell=stand_in(torch.eye(3, dtype=dtype, device=device).expand(batch.n_systems, 3, 3), meta, "cell"),
            edge_layout=layout,
        )
        self.batch.edge_blocks = SearchedEdges(
            self.blocks, self.place, self.strain, graph.cell, graph.topology.system, dtype, layout.sign, meta
        )

    def reaches(self, value: Tensor) -> bool:
        """Whether ``value`` is a function of the edge vectors as far as autograd knows; True where there are none."""
        return not self.blocks.n_edges or reaches(value, (self.place,))

    def anchored(self, value: Tensor) -> Tensor:
        """``value`` as a function of the edge vectors also where this rank has none; see `EdgeVectorLeaf.anchored`."""
        if self.blocks.n_edges or value.requires_grad or not value.is_floating_point():
            return value
        return value + self.place[:0].sum().to(value.dtype)

    def derive(
        self,
        outputs: Sequence[Tensor],
        seeds: Sequence[Tensor | None],
        wanted: set[str],
        inputs: Sequence[Tensor],
        create_graph: bool,
        again: bool = False,
    ) -> tuple[Derivatives, list[Tensor]]:
        """As `EdgeVectorLeaf.derive`; ``pair_forces`` there are none."""
        leaves = [self.place, self.strain] if wanted else []
        zeros = bool(inputs) or again or not self.blocks.n_edges
        found = gradients(outputs, seeds, [*leaves, *inputs], create_graph, zeros, again)
        if not wanted:
            return Derivatives(), found
        place, strain, *found = found
        padded = {"forces": -place} if "forces" in wanted else {}
        virials = 0.5 * (strain + strain.transpose(1, 2))
        if "virials" in wanted:
            padded["virials"] = virials
        virial = None
        if "virial" in wanted:
            system = self.graph.topology.system
            virial = virials.new_zeros(self.meta.n_systems, 3, 3).index_add(0, system, virials)
        return Derivatives(None, padded, None, virial), found
