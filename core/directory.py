"""`AtomDirectory`: which rank owns each atom, so that atoms can be found by their global ids."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from nvdd.communicator import Communicator
from nvdd.plan import ExchangePlan


@dataclass(frozen=True, eq=False)
class AtomDirectory:
    """Where atoms are. The same on every rank, but for ``ids``.

    Attributes:
        owner: (n_global,) the rank that owns each atom.
        row: (n_global,) its row there.
        ids: (n_padded,) global id behind each of this rank's rows, ``[owned | halo]``.
    """

    owner: Tensor
    row: Tensor
    ids: Tensor
    _of_all: list[tuple[ExchangePlan, Tensor]] = field(default_factory=list, init=False, repr=False)

    def plan_of_all(self, comm: Communicator, n_owned: int) -> tuple[ExchangePlan, Tensor]:
        """`plan` of all atoms in the order of their ids, made once for this division of atoms; collective."""
        if not self._of_all:
            self._of_all.append(self.plan(comm, n_owned, torch.arange(len(self.owner), device=self.owner.device)))
        return self._of_all[0]

    def plan(self, comm: Communicator, n_owned: int, ids: Tensor) -> tuple[ExchangePlan, Tensor]:
        """The exchange that brings rows of the atoms ``ids``, any shape, from wherever they are; collective.

        Returns:
            The plan, and for each entry of ``ids`` its row in ``[owned | halo]`` of that plan.
        """
        wanted, place = torch.unique(ids, return_inverse=True)
        owner = self.owner.index_select(0, wanted)
        here = owner == comm.rank
        remote = (~here).nonzero().squeeze(1)
        remote = remote[torch.argsort(owner.index_select(0, remote), stable=True)]
        rows = self.row.index_select(0, wanted)
        halo_rows = rows.index_select(0, remote)
        plan = ExchangePlan.build(comm, n_owned, owner.index_select(0, remote).cpu(), halo_rows.cpu(), "atoms by id")
        rows = rows.index_copy(0, remote, n_owned + torch.arange(len(remote), device=rows.device))
        return plan, rows.index_select(0, place.reshape(-1)).view(place.shape)
