"""What the model is given, and what its energy is differentiated by: one class for each force strategy.

Both give the local Batch of this rank, and turn the derivative into forces, virial and per-atom virial. What ranks must
still exchange is left to the caller, who does it once for all models that are summed.

Signs: the virial here is W = dE/d(strain), so that stress = W / volume is positive under tension, as in ASE.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nvdd.data import Batch
from nvdd.deferred import defer
from nvdd.exchange import broadcast, counted_once, fetch
from nvdd.handlers.count import make_count
from nvdd.model_config import EdgeLayout
from nvdd.roles import Role, ShardMeta
from nvdd.runtime.graph import LocalGraph
from nvdd.shard_tensor import promote, to_local


def _index_pair(graph: LocalGraph, layout: EdgeLayout, meta: ShardMeta) -> Tensor:
    # (E, 2) whose columns are contiguous in memory: what models take apart are columns
    pair = graph.pair if layout.sender_column == 1 else graph.pair.flip(0)
    return promote(pair.T, Role.EDGE_INDEX, meta, row_dim=0, sender_at=layout.sender_column)


def local_batch(batch: Batch, graph: LocalGraph, meta: ShardMeta, dtype: torch.dtype, **geometry: Any) -> Batch:
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
        local.reverse_edges = promote(rows.reverse, Role.SENDER, meta, of=rows.space)
        local.bond_of_edge = promote(rows.bond_of_edge, Role.SENDER, meta, of="bonds")
        local.edge_of_bond = promote(rows.edge_of_bond, Role.RECEIVER, meta, of=rows.space, entry=Role.BOND)
        if rows.at is not None:
            local.bonded_edges = promote(rows.at, Role.RECEIVER, meta, of="edges")
    return local


def _count(system: Tensor, n_systems: int) -> Tensor:
    if n_systems == 1:  # without a synchronisation
        return torch.full((1,), len(system), device=system.device)
    return torch.bincount(system, minlength=n_systems)


def stand_in(value: Tensor, meta: ShardMeta, of: str) -> Tensor:
    return promote(value, Role.ANCHOR, meta, of=of)


@dataclass(frozen=True, eq=False)
class Derivatives:
    """What one model's derivative comes to on this rank, float64.

    Attributes:
        pair_forces: (E, 3) dE/d(edge vector), eV/A; None unless asked for, or of a function of positions.
        padded: name -> (n_padded, ...) shares of owned and halo rows, to be folded: ``forces`` (3) eV/A, ``virials``
            (3, 3) eV.
        forces: (n_owned, 3) eV/A, complete; or None.
        virial: (n_systems, 3, 3) eV, this rank's share; or None.
    """

    pair_forces: Tensor | None = None
    padded: dict[str, Tensor] = field(default_factory=dict)
    forces: Tensor | None = None
    virial: Tensor | None = None

    def beside(self, other: Derivatives) -> Derivatives:
        """Both, which have different names."""
        first = lambda a, b: b if a is None else a
        return Derivatives(
            first(self.pair_forces, other.pair_forces),
            self.padded | other.padded,
            first(self.forces, other.forces),
            first(self.virial, other.virial),
        )


class EdgeVectorLeaf:
    """The energy is a function of edge vectors: pair forces f = dE/dr give everything.

    Forces are the sum of f on receivers minus senders; W = sum r f; each atom gets half of the pair's r f, which is
    the partition that MACE and LAMMPS use for pair styles.
    """

    def __init__(
        self, batch: Batch, graph: LocalGraph, meta: ShardMeta, layout: EdgeLayout, dtype: torch.dtype
    ) -> None:
        self.graph, self.meta = graph, meta
        # A tensor of this block's own, also where another one has the same edges: what that one reads of this must not be
        # a path to it. Vectors that already depend on positions (to be differentiated twice) stay in that graph.
        vectors = graph.vectors.to(dtype)
        self.leaf = vectors.view_as(vectors) if vectors.requires_grad else vectors.detach().requires_grad_(True)
        vectors = promote(self.leaf if layout.sign > 0 else -self.leaf, Role.EDGE, meta)
        device = graph.pair.device
        eye = torch.eye(3, dtype=dtype, device=device).expand(batch.n_systems, 3, 3)
        self.batch = local_batch(
            batch,
            graph,
            meta,
            dtype,
            positions=stand_in(torch.zeros(meta.n_rows, 3, dtype=dtype, device=device), meta, "positions"),
            cell=stand_in(eye, meta, "cell"),
            neighbor_list=_index_pair(graph, layout, meta),
            neighbor_list_shifts=stand_in(to_local(vectors), meta, "shifts"),
            edge_vectors=defer(vectors, meta),
            edge_layout=layout,
        )

    def reaches(self, value: Tensor) -> bool:
        """Whether ``value`` is a function of the edge vectors as far as autograd knows; True where there are none."""
        return not len(self.leaf) or reaches(value, (self.leaf,))

    def anchored(self, value: Tensor) -> Tensor:
        """``value`` as a function of the edge vectors also where this rank has none.

        There a model may take a branch that makes a constant of it, which is right; its derivative, of no numbers, goes
        through the same exchanges as those of the other ranks.
        """
        if len(self.leaf) or value.requires_grad or not value.is_floating_point():
            return value
        return value + self.leaf.sum().to(value.dtype)

    def derive(
        self,
        outputs: Sequence[Tensor],
        seeds: Sequence[Tensor | None],
        wanted: set[str],
        inputs: Sequence[Tensor],
        create_graph: bool,
        again: bool = False,
    ) -> tuple[Derivatives, list[Tensor]]:
        """The derivative of ``sum(seed * output)``.

        Args:
            outputs: the energy, and what other models read of this one.
            seeds: the gradient of each; None for 1.
            wanted: of ``forces``, ``virial``, ``virials``, ``pair_forces``; the last cost no message.
            inputs: what this model reads of others.
            create_graph: to differentiate the result again.
            again: whether the outputs will be differentiated once more.

        Returns:
            The derivative by the geometry, and that by each of ``inputs``.
        """
        leaves = [self.leaf] if wanted else []
        found = gradients(outputs, seeds, [*leaves, *inputs], create_graph, bool(inputs) or again or not len(self.leaf), again)
        if not wanted:
            return Derivatives(), found
        pair = found.pop(0).to(torch.float64)
        vectors = self.leaf.to(torch.float64) if create_graph else self.graph.vectors.detach()
        padded = {}
        if "forces" in wanted:
            padded["forces"] = self._on(self.graph.receiver, pair) - self._on(self.graph.sender, pair)
        if "virials" in wanted:
            half = 0.5 * _symmetric(vectors.unsqueeze(2) * pair.unsqueeze(1))
            padded["virials"] = self._on(self.graph.receiver, half) + self._on(self.graph.sender, half)
        virial = self._virial(vectors, pair) if "virial" in wanted else None
        return Derivatives(pair if "pair_forces" in wanted else None, padded, None, virial), found

    def _virial(self, vectors: Tensor, pair: Tensor) -> Tensor:
        """(n_systems, 3, 3) sum of r f over this rank's edges."""
        n = self.meta.n_systems
        if n == 1:  # a product of matrices: no tensor for each edge
            return _symmetric((vectors.T @ pair).unsqueeze(0))
        system = self.graph.topology.system.index_select(0, self.graph.receiver)
        product = vectors.unsqueeze(2) * pair.unsqueeze(1)
        return _symmetric(product.new_zeros(n, 3, 3).index_add(0, system, product))

    def _on(self, rows: Tensor, of_edges: Tensor) -> Tensor:
        """Sums over the edges of each row, ``[owned | halo]``."""
        return of_edges.new_zeros(self.meta.n_padded, *of_edges.shape[1:]).index_add(0, rows, of_edges)


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
        self.batch = local_batch(
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

    def reaches(self, value: Tensor) -> bool:
        """Whether ``value`` is a function of positions or cell as far as autograd knows."""
        return reaches(value, (self.leaf, self.strain))

    def anchored(self, value: Tensor) -> Tensor:
        """``value``: every rank has the position of some atom."""
        return value

    def derive(
        self,
        outputs: Sequence[Tensor],
        seeds: Sequence[Tensor | None],
        wanted: set[str],
        inputs: Sequence[Tensor],
        create_graph: bool,
        again: bool = False,
    ) -> tuple[Derivatives, list[Tensor]]:
        """As `EdgeVectorLeaf.derive`; of a function of positions there are no ``virials`` and ``pair_forces``."""
        leaves = {"forces": self.leaf, "virial": self.strain}
        names = [name for name in leaves if name in wanted]
        found = gradients(outputs, seeds, [*(leaves[n] for n in names), *inputs], create_graph, True, again)
        mine = {name: g.to(torch.float64) for name, g in zip(names, found, strict=False)}
        forces = -mine["forces"] if "forces" in mine else None
        # the same on every rank
        virial = counted_once(mine["virial"], self.meta.comm) if "virial" in mine else None
        return Derivatives(forces=forces, virial=virial), found[len(names) :]


def gradients(
    outputs: Sequence[Tensor],
    seeds: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    create_graph: bool,
    zeros: bool,
    again: bool,
) -> list[Tensor]:
    """Gradients of the outputs, one for each of ``inputs``; zeros for one that nothing depends on, else an error."""
    if not inputs or not outputs:
        return [torch.zeros_like(t) for t in inputs]
    found = torch.autograd.grad(
        list(outputs),
        list(inputs),
        list(seeds),
        retain_graph=create_graph or again,
        create_graph=create_graph,
        materialize_grads=zeros,
    )
    return list(found)


def reaches(value: Tensor, leaves: Sequence[Tensor]) -> bool:
    ends = {torch.autograd.graph.get_gradient_edge(leaf).node for leaf in leaves}
    todo, seen = [value.grad_fn], set()
    while todo:
        node = todo.pop()
        if node in ends:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            todo += [after for after, _ in node.next_functions]
    return False


def _symmetric(product: Tensor) -> Tensor:
    return 0.5 * (product + product.transpose(1, 2))
