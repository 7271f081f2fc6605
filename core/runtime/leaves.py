"""What the model is given, and what its energy is differentiated by: one class for each force strategy.

Both give the local Batch of this rank, and turn the derivative into forces, virial and per-atom virial.

Signs: the virial here is W = dE/d(strain), so that stress = W / volume is positive under tension, as in ASE.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nvdd.data import Batch
from nvdd.exchange import broadcast, fetch, fold_packed
from nvdd.handlers.count import make_count
from nvdd.model_config import EdgeLayout
from nvdd.roles import Role, ShardMeta
from nvdd.runtime.graph import LocalGraph
from nvdd.shard_tensor import promote


def _index_pair(graph: LocalGraph, layout: EdgeLayout, meta: ShardMeta) -> Tensor:
    pair = (graph.receiver, graph.sender) if layout.sender_column == 1 else (graph.sender, graph.receiver)
    return promote(torch.stack(pair, 1), Role.EDGE_INDEX, meta, row_dim=0, sender_at=layout.sender_column)


def _fields(batch: Batch, graph: LocalGraph, meta: ShardMeta, dtype: torch.dtype) -> dict[str, Any]:
    """Per-atom inputs of this rank's rows (halo rows too under ``halo_read``), per-system inputs as they are."""
    rows = graph.topology.rows[: meta.n_rows]

    def own(value: Tensor) -> Tensor:
        value = value.index_select(0, rows)
        return promote(value.to(dtype) if value.is_floating_point() else value, meta.atom_role, meta)

    def replicated(value: Tensor) -> Tensor:
        return promote(value.to(dtype) if value.is_floating_point() else value, Role.SYSTEM, meta)

    return {
        "atomic_numbers": own(batch.atomic_numbers),
        "pbc": batch.pbc,
        "batch": promote(graph.topology.system[: meta.n_rows], Role.SYSTEM_INDEX, meta, entry=meta.atom_role),
        "n_systems": batch.n_systems,
        "n_atoms_per_system": _counts(batch, graph, meta),
        "node_fields": {k: own(v) for k, v in batch.node_fields.items()},
        "system_fields": {k: replicated(v) for k, v in batch.system_fields.items()},
    }


def _counts(batch: Batch, graph: LocalGraph, meta: ShardMeta) -> Tensor:
    mine = torch.bincount(graph.topology.system[: meta.n_rows], minlength=batch.n_systems)
    return make_count(mine, torch.bincount(batch.batch, minlength=batch.n_systems), meta)


class EdgeVectorLeaf:
    """The energy is a function of edge vectors: pair forces f = dE/dr give everything.

    Forces are the sum of f on receivers minus senders; W = sum r f; each atom gets half of the pair's r f, which is
    the partition that MACE and LAMMPS use for pair styles.
    """

    def __init__(
        self, batch: Batch, graph: LocalGraph, meta: ShardMeta, layout: EdgeLayout, dtype: torch.dtype
    ) -> None:
        self.graph, self.meta = graph, meta
        # vectors that already depend on positions (to be differentiated twice) stay in that graph
        self.leaf = graph.vectors.to(dtype)
        if not self.leaf.requires_grad:
            self.leaf = self.leaf.requires_grad_(True)
        vectors = promote(self.leaf if layout.sign > 0 else -self.leaf, Role.EDGE, meta)
        n, k = meta.n_rows, batch.n_systems
        eye = torch.eye(3, dtype=dtype, device=batch.device).expand(k, 3, 3)
        self.batch = Batch(
            positions=promote(torch.zeros(n, 3, dtype=dtype, device=batch.device), Role.ANCHOR, meta),
            cell=promote(eye, Role.ANCHOR, meta),
            neighbor_list=_index_pair(graph, layout, meta),
            neighbor_list_shifts=vectors,
            edge_vectors=vectors,
            edge_layout=layout,
            **_fields(batch, graph, meta, dtype),
        )

    def derive(self, energy: Tensor, wanted: set[str], create_graph: bool) -> dict[str, Tensor]:
        """forces (n_owned, 3), virial (n_systems, 3, 3; this rank's share), virials (n_owned, 3, 3)."""
        (pair,) = torch.autograd.grad(energy, self.leaf, create_graph=create_graph)
        pair = pair.to(torch.float64)
        vectors = self.leaf.to(torch.float64) if create_graph else self.graph.vectors.detach()
        graph, meta, plan = self.graph, self.meta, self.meta.plan
        out: dict[str, Tensor] = {}
        fields = []
        if "forces" in wanted:
            fields.append(self._to_atoms(pair, -pair))
        if wanted & {"virial", "virials"}:
            product = _symmetric(vectors.unsqueeze(2) * pair.unsqueeze(1))
            if "virial" in wanted:
                system = graph.topology.system.index_select(0, graph.receiver)
                out["virial"] = product.new_zeros(meta.n_systems, 3, 3).index_add(0, system, product)
            if "virials" in wanted:
                fields.append(self._to_atoms(0.5 * product, 0.5 * product))
        if fields:
            done = fold_packed(fields, plan, "forces")
            if "forces" in wanted:
                out["forces"] = done.pop(0)
            if done:
                out["virials"] = done.pop(0)
        return out

    def _to_atoms(self, to_receiver: Tensor, to_sender: Tensor) -> Tensor:
        rows = to_receiver.new_zeros(self.meta.n_padded, *to_receiver.shape[1:])
        return rows.index_add(0, self.graph.receiver, to_receiver).index_add(0, self.graph.sender, to_sender)


class PositionLeaf:
    """The energy is a function of positions and cell: forces by positions, virial by a strain of both."""

    def __init__(
        self, batch: Batch, graph: LocalGraph, meta: ShardMeta, layout: EdgeLayout, dtype: torch.dtype
    ) -> None:
        self.graph, self.meta = graph, meta
        rows = graph.topology.rows[: meta.n_owned]
        positions = batch.positions
        if graph.vectors.requires_grad:  # to be differentiated twice
            self.leaf = broadcast(positions, meta.comm, "positions").index_select(0, rows).to(dtype)
        else:
            self.leaf = positions.detach().index_select(0, rows).to(dtype).requires_grad_(True)
        self.strain = torch.zeros(batch.n_systems, 3, 3, dtype=dtype, device=batch.device, requires_grad=True)
        strain = 0.5 * (self.strain + self.strain.transpose(1, 2))
        by_atom = broadcast(strain, meta.comm, "strain").index_select(0, graph.topology.system[: meta.n_owned])
        cell = batch.cell.to(dtype)
        positions = self.leaf + torch.einsum("ni,nij->nj", self.leaf, by_atom)
        if not meta.fetches:
            positions = fetch(positions, meta.plan, "positions")
        self.batch = Batch(
            positions=promote(positions, meta.atom_role, meta),
            cell=promote(cell + cell @ strain, Role.SYSTEM, meta),
            neighbor_list=_index_pair(graph, layout, meta),
            neighbor_list_shifts=promote(layout.sign * graph.shift.to(dtype), Role.EDGE, meta),
            edge_layout=layout,
            **_fields(batch, graph, meta, dtype),
        )

    def derive(self, energy: Tensor, wanted: set[str], create_graph: bool) -> dict[str, Tensor]:
        """forces (n_owned, 3) and virial (n_systems, 3, 3), which is the same on every rank already."""
        if "virials" in wanted:
            raise ValueError("per-atom virials need ForceStrategy.EDGE_VECTORS")
        leaves = {"forces": self.leaf, "virial": self.strain}
        names = [name for name in leaves if name in wanted]
        if not names:
            return {}
        found = torch.autograd.grad(
            energy, [leaves[n] for n in names], create_graph=create_graph, materialize_grads=True
        )
        out = {name: g.to(torch.float64) for name, g in zip(names, found, strict=True)}
        if "forces" in out:
            out["forces"] = -out["forces"]
        if "virial" in out and self.meta.comm.rank != 0:
            # the sum over ranks that follows must count a replicated value once
            out["virial"] = torch.zeros_like(out["virial"])
        return out


def _symmetric(product: Tensor) -> Tensor:
    return 0.5 * (product + product.transpose(1, 2))
