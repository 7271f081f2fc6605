"""What the rows of a tensor stand for, and the partition that they belong to."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from nvdd.communicator import Communicator
from nvdd.plan import ExchangePlan
from nvdd.policy import HaloStoragePolicy, StoragePolicy


class Role(Enum):
    """What a ShardTensor is. Declared where the tensor is made, never guessed from a shape."""

    OWNED = "one row for each atom that this rank owns"
    EDGE = "one row for each edge of this rank"
    SENDER = "rows of senders, in [0, n_owned + n_halo)"
    RECEIVER = "rows of receivers, in [0, n_owned)"
    EDGE_INDEX = "senders and receivers as a pair"
    SYSTEM_INDEX = "the system of each owned atom (or of each edge)"
    SYSTEM = "a value for each system, the same on every rank"
    ANCHOR = "a stand-in for positions or cell: the geometry is in the edge vectors"

    @property
    def is_index(self) -> bool:
        """Whether the values are rows of other tensors, so that nothing may be computed with them."""
        return self in (Role.SENDER, Role.RECEIVER, Role.EDGE_INDEX)

    @property
    def has_rows(self) -> bool:
        """Whether rows belong to this rank's atoms or edges."""
        return self in (Role.OWNED, Role.EDGE, Role.SYSTEM_INDEX)


@dataclass(eq=False)
class ShardMeta:
    """The partition behind a set of ShardTensors, on one rank, for one forward.

    Attributes:
        plan: halo exchange of atom rows.
        n_systems: number of systems in the batch, on all ranks together.
        n_phantom: 1 where a rank owns nothing and computes an isolated atom that counts nowhere, else 0;
            it is the last of the ``n_owned`` rows.
        policy: storage policy.
    """

    plan: ExchangePlan
    n_systems: int = 1
    n_phantom: int = 0
    policy: StoragePolicy = field(default_factory=lambda: HaloStoragePolicy("local", "halo_fetch"))
    _fetched: list[tuple[Tensor, int, Tensor]] = field(default_factory=list)
    _required: list[tuple[Tensor, Exception]] = field(default_factory=list)

    def require(self, condition: Tensor, error: Exception) -> None:
        """Raises ``error`` unless the 0-d ``condition`` holds; on a GPU at the end of the forward, in `settle`."""
        if condition.device.type != "cpu":
            self._required.append((condition, error))
        elif not condition:
            raise error

    def settle(self) -> None:
        """Checks everything that `require` put off, with one synchronisation."""
        if self._required and not bool(torch.stack([c for c, _ in self._required]).all()):
            raise next(error for condition, error in self._required if not condition)

    @property
    def comm(self) -> Communicator:
        """The ranks."""
        return self.plan.comm

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
        """Owned rows that count in sums: without the phantom."""
        return self.plan.n_owned - self.n_phantom
