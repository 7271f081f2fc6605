"""A `Topology` filled up to capacities: rows that are dummies, a plan of fixed counts, the same shapes step after step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nvdd.communicator import Communicator
from nvdd.padding import filled, resolve_cap
from nvdd.plan import ExchangePlan
from nvdd.runtime.graph import Topology

N_DUMMIES = 2  # an edge that fills up joins two: at a distance, also to a model of positions


@dataclass
class Capacities:
    """How many rows each rank has room for; they only grow, by the same rule on every rank.

    Attributes:
        owned: rows of owned atoms, dummies included; the same on every rank.
        halo: [reader][owner] rows.
    """

    owned: int = 0
    halo: list[list[int]] = field(default_factory=list)

    def reserve(self, topology: Topology, comm: Communicator) -> None:
        """Makes room for a topology; every rank calls it at once."""
        slack = {} if comm.size > 1 else {"slack": 0.0}  # the atoms of a single rank are all there are
        self.owned = resolve_cap(
            topology.plan.n_owned + N_DUMMIES, self.owned, comm=comm, site="capacity of atoms", **slack
        )
        reads = torch.tensor(topology.plan.recv_counts or (0,), dtype=torch.int64, device=comm.message_device)
        table = comm.all_gather(reads, "capacity of halos").tolist()
        old = self.halo or [[0] * comm.size for _ in range(comm.size)]
        self.halo = [
            [resolve_cap(n, was, multiple=8) if n or was else 0 for n, was in zip(row, before, strict=True)]
            for row, before in zip(table, old, strict=True)
        ]

    @property
    def key(self) -> tuple[Any, ...]:
        """The same on every rank, and another one where a capacity of any rank has grown."""
        return self.owned, tuple(map(tuple, self.halo))


@dataclass(frozen=True, eq=False)
class FilledTopology:
    """The rows of a topology in their places at capacity, ``[owned | dummies | halo of each rank, filled up]``.

    Attributes:
        place: (n_padded,) the place of each row.
        source: (P,) the row whose inputs a place has; the first for what fills up.
        counts: (A,) bool, places of owned atoms that count.
        sent: places of what this rank sends: ``send_index``, ``boundary``, ``boundary_slot`` of the plan at capacity.
        send_caps, recv_caps: its counts.
    """

    place: Tensor
    source: Tensor
    counts: Tensor
    sent: tuple[Tensor, Tensor, Tensor]
    send_caps: tuple[int, ...]
    recv_caps: tuple[int, ...]

    @classmethod
    def of(cls, topology: Topology, caps: Capacities, comm: Communicator) -> FilledTopology:
        """At these capacities, which hold it."""
        plan, device, rank = topology.plan, topology.rows.device, comm.rank
        several = comm.size > 1
        recv_caps = tuple(caps.halo[rank]) if several else ()
        send_caps = tuple(row[rank] for row in caps.halo) if several else ()
        owned = torch.arange(plan.n_owned, device=device)
        halo = _spread(plan.recv_counts if several else (), recv_caps, device) + caps.owned
        place = torch.cat([owned, halo])
        source = torch.zeros(caps.owned + sum(recv_caps), dtype=torch.int64, device=device)
        source[place] = torch.arange(plan.n_padded, device=device)
        counts = torch.arange(caps.owned, device=device) < plan.n_owned - topology.n_phantom
        last = caps.owned - 1
        n_sent = sum(send_caps)
        at = _spread(plan.send_counts if several else (), send_caps, device)
        send = torch.full((n_sent,), last, device=device)
        send[at] = plan.send_index
        # what fills up reads and writes the last dummy; of the boundary's entries one at least is that
        boundary = filled(plan.boundary, n_sent + 1, last)
        slot = torch.full((n_sent,), n_sent, device=device)
        slot[at] = plan.boundary_slot
        return cls(place, source, counts, (send, boundary, slot), send_caps, recv_caps)

    def plan(self, comm: Communicator, sent: Sequence[Tensor]) -> ExchangePlan:
        """The halo exchange at capacity, of indices that are given as tensors of their own."""
        send, boundary, slot = sent
        n_halo = sum(self.recv_caps)
        return ExchangePlan(comm, len(self.counts), n_halo, send, self.send_caps, self.recv_caps, boundary, slot)


def _spread(counts: Sequence[int], caps: Sequence[int], device: torch.device) -> Tensor:
    """Places of rows that come in groups of ``counts``, in groups of ``caps``."""
    starts = torch.tensor([0, *caps[:-1]] if caps else [], dtype=torch.int64).cumsum(0)
    parts = [torch.arange(n) + start for n, start in zip(counts, starts.tolist(), strict=True)]
    return torch.cat(parts).to(device) if parts else torch.zeros(0, dtype=torch.int64, device=device)
