"""What the rows of a tensor stand for, and the partition that they belong to."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, cast

import torch
from torch import Tensor

from nvdd.communicator import Communicator
from nvdd.directory import AtomDirectory
from nvdd.errors import DistributedOpError
from nvdd.plan import ExchangePlan
from nvdd.policy import HaloStoragePolicy, LocalStoragePolicy, ShardedStoragePolicy, StoragePolicy


class Role(Enum):
    """What a ShardTensor is. Declared where the tensor is made, never guessed from a shape."""

    OWNED = "one row for each atom that this rank owns"
    PADDED = "one row for each atom that this rank owns or reads"
    EDGE = "one row for each edge of this rank"
    BOND = "one row for each undirected bond that this rank owns"
    SENDER = "rows that may be another rank's"
    RECEIVER = "rows that this rank owns"
    EDGE_INDEX = "senders and receivers as a pair"
    SYSTEM_INDEX = "the system of each atom (or of each edge)"
    SYSTEM = "a value for each system, the same on every rank"
    COUNT = "a number of atoms: this rank's where it lays out memory, everybody's where it is computed with"
    ANCHOR = "a stand-in for positions, cell or shifts: the geometry is in the edge vectors"

    @property
    def is_index(self) -> bool:
        """Whether the values are rows of other tensors, so that nothing may be computed with them."""
        return self in (Role.SENDER, Role.RECEIVER, Role.EDGE_INDEX)

    @property
    def has_rows(self) -> bool:
        """Whether rows belong to this rank's atoms, edges or bonds."""
        return self in (Role.OWNED, Role.PADDED, Role.EDGE, Role.BOND, Role.SYSTEM_INDEX)

    @property
    def is_atoms(self) -> bool:
        """Whether rows are atoms."""
        return self in (Role.OWNED, Role.PADDED)


@dataclass(eq=False)
class ShardMeta:
    """The partition behind a set of ShardTensors, on one rank, for one forward.

    Attributes:
        plan: halo exchange of atom rows.
        n_systems: number of systems in the batch, on all ranks together.
        n_phantom: 1 where a rank owns nothing and computes an isolated atom that counts nowhere, else 0;
            it is the last of the ``n_owned`` rows.
        policy: storage policy.
        more_plans: halo exchanges of other rows (``"edges"``, ``"bonded edges"``, ``"bonds"``) that the model reads across
            ranks.
        known: inputs of which this rank knows the halo rows already: the tensor, its version, owned and halo rows.
        directory: where each atom is, for sharded storage.
        plans_by_id: exchanges that were made for computed ids: the ids, their version, the plan, their rows in it.
        n_edges: edges of this rank.
        edges_at_once: how many edges to compute with at a time (`nvdd.deferred`); None for all, which autograd then keeps.
        sums_in_chunks: sums over edges that were computed so.
        custom_ops: operation -> `OpAdapter`s of the model, installed for this forward.
        counts: (n_owned,) bool, the owned rows that count in sums, where these are filled up to a capacity (compiled
            forwards); None where they are the first ``n_counted``.
        edges_count: (E,) bool, the same for edges.
    """

    plan: ExchangePlan
    n_systems: int = 1
    n_phantom: int = 0
    policy: StoragePolicy = field(
        default_factory=lambda: HaloStoragePolicy(scatter_mode="local", gather_mode="halo_fetch")
    )
    more_plans: dict[str, ExchangePlan] = field(default_factory=dict)
    known: list[tuple[Tensor, int, Tensor]] = field(default_factory=list)
    directory: AtomDirectory | None = None
    plans_by_id: list[tuple[Tensor, int, ExchangePlan, Tensor]] = field(default_factory=list)
    custom_ops: dict[str, list[Any]] = field(default_factory=dict)
    counts: Tensor | None = None
    edges_count: Tensor | None = None
    n_edges: int | None = None
    edges_at_once: int | None = None
    sums_in_chunks: int = 0
    _fetched: list[tuple[Tensor, int, Tensor]] = field(default_factory=list)
    _required: list[tuple[Tensor, Exception]] = field(default_factory=list)

    def require(self, condition: Tensor, error: Exception) -> None:
        """Raises ``error`` unless the 0-d ``condition`` holds; on a GPU at the end of the forward, in `settle`."""
        if condition.device.type != "cpu" or self.counts is not None:
            self._required.append((condition, error))
        elif not condition:
            raise error

    @property
    def put_off(self) -> list[tuple[Tensor, Exception]]:
        """What `require` has put off so far."""
        return list(self._required)

    def settle(self) -> None:
        """Checks everything that `require` put off, with one synchronisation; not while a forward is traced."""
        if self.counts is None and self._required and not bool(torch.stack([c for c, _ in self._required]).all()):
            raise next(error for condition, error in self._required if not condition)

    def release(self) -> None:
        """Lets go of the tensors of a forward that has ended.

        They refer to this object, so that they, and the autograd graph behind them, would else stay until Python
        next looks for cycles: that is some steps of memory.
        """
        for kept in (self.known, self.plans_by_id, self._fetched, self._required):
            kept.clear()

    @property
    def comm(self) -> Communicator:
        """The ranks."""
        return self.plan.comm

    @property
    def fetches(self) -> bool:
        """Whether per-atom tensors have owned rows and reading senders fetches the others (``halo_fetch``)."""
        return not isinstance(self.policy, HaloStoragePolicy) or self.policy.fetches

    @property
    def corrects(self) -> bool:
        """Whether a scatter sends halo rows to their owners and back (``halo_correction``)."""
        return isinstance(self.policy, HaloStoragePolicy) and self.policy.scatter_mode == "halo_correction"

    @property
    def reads_remote(self) -> bool:
        """Whether the model may read computed rows of other ranks; not with `LocalStoragePolicy`."""
        return not isinstance(self.policy, LocalStoragePolicy)

    @property
    def writes_remote(self) -> bool:
        """Whether the model may add to rows of other ranks."""
        return self.reads_remote and not (self.distributed and self.policy.scatter_mode == "local")

    @property
    def distributed(self) -> bool:
        """Whether the values of indices are global ids to the model (sharded storage)."""
        return isinstance(self.policy, ShardedStoragePolicy)

    @property
    def atom_directory(self) -> AtomDirectory:
        """Where each atom is."""
        if self.directory is None:
            raise DistributedOpError(
                "sharded storage needs to know where every atom is, which the host of this run (LAMMPS) does not tell; "
                "use a halo policy there"
            )
        return self.directory

    @property
    def atom_role(self) -> Role:
        """OWNED or PADDED: what per-atom tensors are under this policy."""
        return Role.OWNED if self.fetches else Role.PADDED

    @property
    def n_rows(self) -> int:
        """Rows of per-atom tensors: owned ones, under ``halo_read`` also halo rows."""
        return self.plan.n_owned if self.fetches else self.plan.n_padded

    def plan_of(self, space: str) -> ExchangePlan:
        """The exchange of rows of ``"atoms"``, ``"edges"``, ``"bonded edges"`` or ``"bonds"``."""
        return self.plan if space == "atoms" else self.more_plans[space]

    def rows_of(self, space: str) -> int:
        """Rows that a tensor over that space has on this rank."""
        if space == "atoms":
            return self.n_rows
        plan = self.more_plans.get(space)
        return cast(int, self.n_edges) if plan is None else plan.n_owned

    def role_of(self, space: str) -> Role:
        """Role of a tensor over that space."""
        return {"atoms": self.atom_role, "bonds": Role.BOND}.get(space, Role.EDGE)

    @property
    def n_owned(self) -> int:
        """Rows of owned atoms, a phantom included."""
        return self.plan.n_owned

    @property
    def n_halo(self) -> int:
        """Remote rows that this rank reads."""
        return self.plan.n_halo

    @property
    def n_padded(self) -> int:
        """Owned and halo rows."""
        return self.plan.n_padded

    @property
    def n_counted(self) -> int:
        """Owned rows that count in sums over atoms: the first of them, without phantom and halo.

        Raises:
            DistributedOpError: in a compiled forward, where that is no fixed number; see `only_counted`.
        """
        if self.counts is not None:
            raise DistributedOpError(
                "this model needs the number of atoms of this rank, which a compiled forward doesn't have (its rows are "
                "filled up to a capacity); leave compile out for it"
            )
        return self.plan.n_owned - self.n_phantom

    def only_counted(self, values: Tensor, dim: int = 0, fill: float | bool = 0, edges: bool = False) -> Tensor:
        """Rows of ``values`` that count: the first ``n_counted``, or all with ``fill`` where they don't count.

        Args:
            values: plain rows of atoms, or of edges.
            dim: dimension of the rows.
            fill: neutral in what will be done with them.
            edges: whether they are edges, of which all count except where a capacity is filled up.
        """
        if self.counts is None:
            return values if edges else values.narrow(dim, 0, self.n_counted)
        counts = self.edges_count if edges else self.counts
        if not edges:
            values = values.narrow(dim, 0, self.n_owned)
        shape = [-1 if d == dim else 1 for d in range(values.dim())]
        return torch.where(counts.view(shape), values, torch.full((), fill, dtype=values.dtype, device=values.device))

    def number_counted(self, rows: Tensor, dim: int, edges: bool = False) -> Tensor:
        """0-d int64: how many of the rows that `only_counted` gave do count."""
        if self.counts is None:
            return torch.tensor(rows.shape[dim], device=rows.device)
        return (self.edges_count if edges else self.counts).sum()
