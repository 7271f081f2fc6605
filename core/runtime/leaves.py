"""What the model is given, and what its energy is differentiated by: one class for each force strategy.

Both give the local Batch of this rank, and turn the derivative into forces, virial and per-atom virial.

Signs: the virial here is W = dE/d(strain), so that stress = W / volume is positive under tension, as in ASE.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nvdd.data import Batch
from nvdd.exchange import broadcast, counted_once, fetch, fold_packed
from nvdd.handlers.count import make_count
from nvdd.model_config import EdgeLayout
from nvdd.roles import Role, ShardMeta
from nvdd.runtime.graph import LocalGraph
from nvdd.shard_tensor import promote, to_local


def _index_pair(graph: LocalGraph, layout: EdgeLayout, meta: ShardMeta) -> Tensor:
    # (E, 2) whose columns are contiguous in memory: what models take apart are columns
    pair = graph.pair if layout.sender_column == 1 else graph.pair.flip(0)
    return promote(pair.T, Role.EDGE_INDEX, meta, row_dim=0, sender_at=layout.sender_column)


def _local_batch(batch: Batch, graph: LocalGraph, meta: ShardMeta, dtype: torch.dtype, **geometry: Any) -> Batch:
    """What the wrapper gets: inputs of this rank's rows (halo rows too under ``halo_read``), and the geometry."""
    topology, device = graph.topology, graph.pair.device
    system = topology.system[: meta.n_rows]

    def cast(value: Tensor) -> Tensor:
        value = value.to(device)
        return value.to(dtype) if value.is_floating_point() else value

    def own(padded: Tensor) -> Tensor:
        mine = promote(padded[: meta.n_rows].clone(), meta.atom_role, meta)  # the model may change it in place
        meta.known.append((mine, mine._version, padded))  # every rank has all inputs: nothing need be fetched
        return mine

    local = Batch(
        atomic_numbers=own(topology.atomic_numbers),
        pbc=batch.pbc,
        batch=promote(system, Role.SYSTEM_INDEX, meta, entry=meta.atom_role),
        n_systems=batch.n_systems,
        n_atoms_per_system=make_count(_count(system, batch.n_systems), topology.atoms_per_system, system, meta),
        node_fields={k: own(cast(v).index_select(0, topology.rows)) for k, v in batch.node_fields.items()},
        system_fields={k: promote(cast(v), Role.SYSTEM, meta) for k, v in batch.system_fields.items()},
        **geometry,
    )
    rows = graph.edge_rows
    if rows is not None:
        local.reverse_edges = promote(rows.reverse, Role.SENDER, meta, of="edges")
        local.bond_of_edge = promote(rows.bond_of_edge, Role.SENDER, meta, of="bonds")
        local.edge_of_bond = promote(rows.edge_of_bond, Role.RECEIVER, meta, of="edges", entry=Role.BOND)
    return local


def _count(system: Tensor, n_systems: int) -> Tensor:
    if n_systems == 1:  # without a synchronisation
        return torch.full((1,), len(system), device=system.device)
    return torch.bincount(system, minlength=n_systems)


def _stand_in(value: Tensor, meta: ShardMeta, of: str) -> Tensor:
    return promote(value, Role.ANCHOR, meta, of=of)


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
        device = graph.pair.device
        eye = torch.eye(3, dtype=dtype, device=device).expand(batch.n_systems, 3, 3)
        self.batch = _local_batch(
            batch,
            graph,
            meta,
            dtype,
            positions=_stand_in(torch.zeros(meta.n_rows, 3, dtype=dtype, device=device), meta, "positions"),
            cell=_stand_in(eye, meta, "cell"),
            neighbor_list=_index_pair(graph, layout, meta),
            neighbor_list_shifts=_stand_in(to_local(vectors), meta, "shifts"),
            edge_vectors=vectors,
            edge_layout=layout,
        )

    def derive(self, energy: Tensor, wanted: set[str], create_graph: bool) -> dict[str, Tensor]:
        """forces (n_owned, 3), virial (n_systems, 3, 3; this rank's share), virials (n_owned, 3, 3).

        ``pair_forces`` (E, 3) are the derivatives by the edge vectors themselves; they cost no message.
        """
        (pair,) = torch.autograd.grad(energy, self.leaf, create_graph=create_graph)
        pair = pair.to(torch.float64)
        vectors = self.leaf.to(torch.float64) if create_graph else self.graph.vectors.detach()
        out: dict[str, Tensor] = {"pair_forces": pair} if "pair_forces" in wanted else {}
        fields = []
        if "forces" in wanted:
            fields.append(self._to_atoms(pair, -pair))
        if "virials" in wanted:
            half = 0.5 * _symmetric(vectors.unsqueeze(2) * pair.unsqueeze(1))
            fields.append(self._to_atoms(half, half))
        if "virial" in wanted:
            out["virial"] = self._virial(vectors, pair)
        if fields:
            done = fold_packed(fields, self.meta.plan, "forces")
            if "forces" in wanted:
                out["forces"] = done.pop(0)
            if done:
                out["virials"] = done.pop(0)
        return out

    def _virial(self, vectors: Tensor, pair: Tensor) -> Tensor:
        """(n_systems, 3, 3) sum of r f over this rank's edges."""
        n = self.meta.n_systems
        if n == 1:  # a product of matrices: no tensor for each edge
            return _symmetric((vectors.T @ pair).unsqueeze(0))
        system = self.graph.topology.system.index_select(0, self.graph.receiver)
        product = vectors.unsqueeze(2) * pair.unsqueeze(1)
        return _symmetric(product.new_zeros(n, 3, 3).index_add(0, system, product))

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
        device = graph.pair.device
        positions, cell = batch.positions.to(device), batch.cell.to(device, dtype)
        if graph.vectors.requires_grad:  # to be differentiated twice
            self.leaf = broadcast(positions, meta.comm, "positions").index_select(0, rows).to(dtype)
        else:
            self.leaf = positions.detach().index_select(0, rows).to(dtype).requires_grad_(True)
        self.strain = torch.zeros(batch.n_systems, 3, 3, dtype=dtype, device=device, requires_grad=True)
        strain = 0.5 * (self.strain + self.strain.transpose(1, 2))
        by_atom = broadcast(strain, meta.comm, "strain").index_select(0, graph.topology.system[: meta.n_owned])
        positions = self.leaf + torch.einsum("ni,nij->nj", self.leaf, by_atom)
        if not meta.fetches:
            positions = fetch(positions, meta.plan, "positions")
        self.batch = _local_batch(
            batch,
            graph,
            meta,
            dtype,
            positions=promote(positions, meta.atom_role, meta),
            cell=promote(cell + cell @ strain, Role.SYSTEM, meta),
            neighbor_list=_index_pair(graph, layout, meta),
            neighbor_list_shifts=promote(layout.sign * graph.shift.to(dtype), Role.EDGE, meta),
            edge_layout=layout,
        )

    def derive(self, energy: Tensor, wanted: set[str], create_graph: bool) -> dict[str, Tensor]:
        """forces (n_owned, 3) and virial (n_systems, 3, 3; the same on every rank, given as this rank's share)."""
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
        if "virial" in out:
            out["virial"] = counted_once(out["virial"], self.meta.comm)
        return out


def _symmetric(product: Tensor) -> Tensor:
    return 0.5 * (product + product.transpose(1, 2))
