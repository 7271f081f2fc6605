"""Ranks with planted faults: what a bug in a distributed runtime would do, by hooks around the real one.

Each fault is a function of `Mutant`, named in ``FAULTS``; none of them is in the product's code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nvdd import DistributedModel
from nvdd.validate.rank_side import ModelRanks


class MutantRanks(ModelRanks):
    """The validator's ranks, with the fault of the last `plant`."""

    fault = ""

    def plant(self, name: str) -> None:
        """Chooses the fault of the models that are made from now on; ``""`` for none."""
        self.fault = name

    def run(self, request: Any) -> Any:
        comm = self.comm
        try:
            return super().run(request)
        finally:
            for name in ("exchange", "all_reduce"):
                comm.__dict__.pop(name, None)

    def distribute(self, wrapper: Any, config: Any, spec: Any) -> DistributedModel:
        model = Mutant(wrapper, config, spec, self.phase)
        if self.fault:
            FAULTS[self.fault](model)
        return model


class Mutant(DistributedModel):
    """A distributed model with places where faults are hooked in."""

    after: Callable[[Any, Any], None] | None = None
    before: Callable[[Any], Any] | None = None
    edges: Callable[[Any], Any] | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        update = self.graphs.update
        self.graphs.update = lambda batch: update(batch) if self.edges is None else self.edges(update(batch))
        self.comm.__dict__.pop("exchange", None)
        self.comm.__dict__.pop("all_reduce", None)
        self.n_fetches = 0

    def __call__(self, batch: Any, outputs: Any = ("energy",), create_graph: bool = False) -> Any:
        self.n_fetches = 0
        out = super().__call__(batch if self.before is None else self.before(batch), outputs, create_graph)
        if self.after is not None:
            self.after(out, batch)
        return out

    @property
    def rank(self) -> int:
        return self.comm.rank

    def on_exchange(self, change: Callable[[str, Tensor], Tensor]) -> None:
        """Changes what is received in exchanges of rows."""
        exchange = self.comm.exchange

        def wrapped(send, send_counts, recv_counts, site, setup=False):
            received = exchange(send, send_counts, recv_counts, site, setup)
            return received if setup else change(site, received)

        self.comm.exchange = wrapped

    def on_reduce(self, when: Callable[[str], bool]) -> None:
        """Leaves sums over ranks out."""
        reduce = self.comm.all_reduce
        self.comm.all_reduce = lambda value, op="sum", site="": value.clone() if when(site) else reduce(value, op, site)

    def on_values(self, change: Callable[[dict[str, Tensor], Any], None]) -> None:
        """Changes what is given back."""
        self.after = lambda out, batch: change(out.values, batch)


def _is_fetch(site: str) -> bool:
    return not site.startswith("fold") and site != "forces"


# --- exchanges of rows -------------------------------------------------------------------------------------------


def skip_halo_row(m: Mutant) -> None:
    def change(site, rows):
        if _is_fetch(site) and m.rank == 0 and len(rows):
            rows[-1] = 0
        return rows

    m.on_exchange(change)


def halo_in_another_order(m: Mutant) -> None:
    m.on_exchange(lambda site, rows: rows.roll(1, 0) if _is_fetch(site) and m.rank == 1 else rows)


def stale_halo_in_second_layer(m: Mutant) -> None:
    kept: list[Tensor] = []

    def change(site, rows):
        if not _is_fetch(site):
            return rows
        m.n_fetches += 1
        if m.n_fetches == 1:
            kept[:] = [rows.clone()]
        return kept[0] if m.n_fetches == 2 and kept[0].shape == rows.shape else rows

    m.on_exchange(change)


def skip_adjoint(m: Mutant) -> None:
    m.on_exchange(lambda site, rows: torch.zeros_like(rows) if site.startswith("fold of") else rows)


def forces_without_fold(m: Mutant) -> None:
    m.on_exchange(lambda site, rows: torch.zeros_like(rows) if site == "forces" else rows)


def single_precision_halo(m: Mutant) -> None:
    m.on_exchange(lambda site, rows: rows.half().to(rows.dtype) if _is_fetch(site) and m.rank == 1 else rows)


def skip_an_exchange(m: Mutant) -> None:
    """Once, on one rank: the others wait for rows of it."""
    exchange, left = m.comm.exchange, [1]

    def wrapped(send, send_counts, recv_counts, site, setup=False):
        if m.rank == 1 and not setup and left:
            left.clear()
            return send.new_zeros((sum(recv_counts), *send.shape[1:]))
        return exchange(send, send_counts, recv_counts, site, setup)

    m.comm.exchange = wrapped


# --- sums over ranks ----------------------------------------------------------------------------------------------


def missing_reduce_of_an_output(m: Mutant) -> None:
    reduce, seen = m.comm.all_reduce, []

    def wrapped(value, op="sum", site=""):
        seen.append(site)
        return value.clone() if value.shape == (value.shape[0], 6) and "system" in site else reduce(value, op, site)

    m.comm.all_reduce = wrapped


def missing_reduce_in_a_layer(m: Mutant) -> None:
    m.on_reduce(lambda site: "by system" in site and "adjoint" not in site)


def missing_adjoint_of_a_sum(m: Mutant) -> None:
    m.on_reduce(lambda site: "adjoint" in site)


# --- edges and owners ---------------------------------------------------------------------------------------------


def _keep(graph: Any, rows: Tensor) -> Any:
    return replace(graph, near=graph.near[rows], pair=graph.pair[:, rows], vectors=graph.vectors[rows])


def drop_an_edge(m: Mutant) -> None:
    m.edges = lambda g: _keep(g, torch.arange(max(len(g.near) - 1, 0))) if m.rank == 1 else g


def double_an_edge(m: Mutant) -> None:
    m.edges = lambda g: _keep(g, torch.cat([torch.arange(len(g.near)), torch.arange(min(len(g.near), 1))]))


def wrong_image(m: Mutant) -> None:
    """One vector to another image of the same atom, at about the same distance."""

    def change(graph):
        vectors = graph.vectors.clone()
        if m.rank == 0 and len(vectors):
            vectors[0] = vectors[0] * torch.tensor([-1.0, 1.0, 1.0], dtype=vectors.dtype) * 1.01
        return replace(graph, vectors=vectors)

    m.edges = change


def edges_of_the_skin(m: Mutant) -> None:
    m.graphs.cutoff += 0.5 * m.graphs.skin


def stale_neighbours(m: Mutant) -> None:
    valid = m.graphs._still_valid
    m.graphs._still_valid = lambda batch: (
        valid(batch) or (m.graphs._topology is not None and m.graphs._reference[0].shape == batch.positions.shape)
    )


def stale_owners_on_one_rank(m: Mutant) -> None:
    assign, kept = m.graphs.partitioner.assign, {}

    def stale(positions, cell, pbc):
        found = assign(positions, cell, pbc)
        return kept.setdefault(len(found), found) if m.rank == 1 else found

    m.graphs.partitioner.assign = stale


def wrong_system(m: Mutant) -> None:
    def change(graph):
        topology = graph.topology
        if m.rank == 1 and topology.system.numel() and int(topology.atoms_per_system.numel()) > 1:
            system = topology.system.clone()
            system[0] = 1 - system[0]
            return replace(graph, topology=replace(topology, system=system))
        return graph

    m.edges = change


# --- inputs -------------------------------------------------------------------------------------------------------


def _stale(m: Mutant, name: str) -> None:
    kept: dict[Any, Any] = {}

    def change(batch):
        value = getattr(batch, name)
        first = kept.setdefault(batch.n_systems, value)
        setattr(batch, name, first)
        return batch

    import copy

    m.before = lambda batch: change(copy.copy(batch))


def stale_cell(m: Mutant) -> None:
    _stale(m, "cell")


def stale_charge(m: Mutant) -> None:
    _stale(m, "system_fields")


def other_weights_on_one_rank(m: Mutant) -> None:
    if m.rank == 1:
        with torch.no_grad():
            next(m.wrapper.readout.parameters()).add_(1e-3)


# --- outputs ------------------------------------------------------------------------------------------------------


def _changed(name: str, change: Callable[[Mutant, Tensor], Tensor]) -> Callable[[Mutant], None]:
    def fault(m: Mutant) -> None:
        def apply(values, batch):
            if name in values:
                values[name] = change(m, values[name])

        m.on_values(apply)

    return fault


def double_count(m: Mutant) -> None:
    """The energy of rank 0's first atom counts on each rank."""

    def change(values, batch):
        share = values["energies"][:1].sum() if m.rank == 0 else values["energies"].new_zeros(())
        values["energy"] = values["energy"] + m.comm.all_reduce(share, "sum", "planted")

    m.on_values(change)


FAULTS: dict[str, Callable[[Mutant], None]] = {
    f.__name__: f
    for f in (
        skip_halo_row, halo_in_another_order, stale_halo_in_second_layer, skip_adjoint, forces_without_fold,
        single_precision_halo, skip_an_exchange, missing_reduce_of_an_output, missing_reduce_in_a_layer,
        missing_adjoint_of_a_sum, drop_an_edge, double_an_edge, wrong_image, edges_of_the_skin, stale_neighbours,
        stale_owners_on_one_rank, wrong_system, stale_cell, stale_charge, other_weights_on_one_rank, double_count,
    )
} | {
    "permuted_forces": _changed("forces", lambda m, v: v.flip(0) if m.rank == 0 else v),
    "forces_times_world_size": _changed("forces", lambda m, v: v * m.comm.size),
    "energy_times_world_size": _changed("energy", lambda m, v: v * m.comm.size),
    "energy_over_world_size": _changed("energy", lambda m, v: v / m.comm.size),
    "virial_sign": _changed("virial", lambda m, v: -v),
    "virial_axes_swapped": _changed("virial", lambda m, v: v[:, [1, 0, 2]][:, :, [1, 0, 2]]),
    "per_atom_order": _changed("energies", lambda m, v: v.roll(1, 0) if m.rank == 1 else v),
    "per_system_output_of_one_rank": _changed("moment", lambda m, v: v * (1 + 1e-5 * m.rank)),
    "small_force_error_on_one_atom": _changed(
        "forces", lambda m, v: torch.cat([v[:1] + 1e-7, v[1:]]) if m.rank == 1 and len(v) else v
    ),
}  # fmt: skip
