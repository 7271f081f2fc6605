"""`ExchangePlan`: which remote rows this rank reads, and which of its rows the others read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nvdd.communicator import Communicator
from nvdd.errors import CommunicationError


@dataclass(frozen=True, eq=False)
class ExchangePlan:
    """Halo of one kind of rows (atoms, bonds, edges). Rows are laid out ``[owned | halo]``.

    Attributes:
        comm: the ranks.
        n_owned, n_halo: rows that this rank owns, and remote rows that it reads (in the order of their owners).
        send_index: (sum(send_counts),) owned rows that others read, in the order of the readers.
        send_counts, recv_counts: rows to and from each rank.
        boundary: (n_boundary,) the distinct owned rows that somebody reads.
        boundary_slot: (sum(send_counts),) position in ``boundary`` of each entry of ``send_index``.
        kind: name of the rows, for messages.
    """

    comm: Communicator
    n_owned: int
    n_halo: int
    send_index: Tensor
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    boundary: Tensor
    boundary_slot: Tensor
    kind: str = "atoms"

    @property
    def n_padded(self) -> int:
        """Owned and halo rows together."""
        return self.n_owned + self.n_halo

    @classmethod
    def build(
        cls, comm: Communicator, n_owned: int, halo_rank: Tensor, halo_row: Tensor, kind: str = "atoms"
    ) -> ExchangePlan:
        """Makes the plan from what this rank reads; every rank calls it at once.

        Args:
            comm: the ranks.
            n_owned: rows of this rank.
            halo_rank: (n_halo,) owner of each halo row, ascending.
            halo_row: (n_halo,) its row there.
            kind: name of the rows.

        Raises:
            ValueError: halo rows that are not in the order of their owners, or owned here.
            CommunicationError: a peer asks for a row that is not there.
        """
        if halo_rank.numel() and ((halo_rank.diff() < 0).any() or (halo_rank == comm.rank).any()):
            raise ValueError("halo rows must be in the order of their owners, and none of them owned here")
        recv_counts = torch.bincount(halo_rank, minlength=comm.size).tolist()
        send_counts = comm.transpose_counts(recv_counts, site=f"plan of {kind}")
        rows = halo_row.to(comm.device if comm.backend == "nccl" else "cpu", torch.int64)
        wanted = comm.exchange(rows, recv_counts, send_counts, f"plan of {kind}", setup=True).cpu()
        if wanted.numel() and (int(wanted.min()) < 0 or int(wanted.max()) >= n_owned):
            raise CommunicationError(f"rank {comm.rank}: a peer asks for {kind} row {int(wanted.max())} of {n_owned}")
        boundary, slot = torch.unique(wanted, return_inverse=True)
        device = comm.device
        return cls(
            comm,
            n_owned,
            int(halo_rank.numel()),
            wanted.to(device),
            tuple(send_counts),
            tuple(recv_counts),
            boundary.to(device),
            slot.to(device),
            kind,
        )

    def select(self, owned: Tensor, halo: Tensor, kind: str) -> ExchangePlan:
        """The plan of a subset of the rows, without a message.

        Args:
            owned: (n_owned,) bool, the rows that stay.
            halo: (n_halo,) bool, the same for halo rows; their owners choose the same.
            kind: name of the new rows.
        """
        sent = owned[self.send_index]
        number = owned.cumsum(0) - 1
        return self._subset(int(owned.sum()), halo, number[self.send_index[sent]], sent, kind)

    def restrict(self, halo: Tensor) -> ExchangePlan:
        """The plan of all owned rows and of the halo rows where ``halo`` (n_halo,) bool holds; collective.

        The owners are told in one message which of their rows this rank still reads.
        """
        flags = halo.to(self.comm.device if self.comm.backend == "nccl" else "cpu", torch.uint8)
        read = self.comm.exchange(
            flags, self.recv_counts, self.send_counts, f"rows read of {self.kind}", setup=True
        )
        read = read.to(self.send_index.device).bool()
        return self._subset(self.n_owned, halo, self.send_index[read], read, self.kind)

    def _subset(self, n_owned: int, halo: Tensor, index: Tensor, sent: Tensor, kind: str) -> ExchangePlan:
        """Of the rows sent those where ``sent`` holds, with their new numbers ``index``; ``halo`` as in `select`."""
        boundary, slot = torch.unique(index, return_inverse=True)
        count = lambda mask, counts: [int(m.sum()) for m in mask.split(list(counts))] if counts else []
        return ExchangePlan(
            self.comm,
            n_owned,
            int(halo.sum()),
            index,
            tuple(count(sent, self.send_counts)),
            tuple(count(halo, self.recv_counts)),
            boundary,
            slot,
            kind,
        )
