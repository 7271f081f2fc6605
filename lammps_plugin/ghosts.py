"""From LAMMPS's ghosts to halo rows: who owns each ghost, and what this rank must read of others.

LAMMPS makes a ghost for every periodic image; the core wants one row for every atom, images are in the edges. A ghost
that is an image of an atom of this rank is that atom's own row, so that one rank has no halo at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from nvdd.communicator import Communicator
from nvdd.errors import CommunicationError, InputError
from nvdd.plan import ExchangePlan

_SITE = "owners of ghosts"


@dataclass(frozen=True, eq=False)
class GhostMap:
    """Local rows ``[owned | halo]`` for LAMMPS's numbers of atoms, until LAMMPS makes its list anew.

    Attributes:
        row_of_atom: (n_total,) the row of each of LAMMPS's atoms; -1 for one that no pair can name.
        atom_of_row: (n_padded,) one of LAMMPS's atoms for each row; -1 for a phantom.
        n_owned: owned rows: list atoms in list order, or one phantom if there are none.
        n_phantom: 1 if this rank has no list atoms and computes an isolated one that counts nowhere, else 0.
        plan: the exchange of halo rows.
    """

    row_of_atom: np.ndarray
    atom_of_row: np.ndarray
    n_owned: int
    n_phantom: int
    plan: ExchangePlan

    @classmethod
    def by_tags(
        cls, comm: Communicator, tags: np.ndarray, list_atoms: np.ndarray, n_local: int, neighbors: np.ndarray | None
    ) -> GhostMap:
        """From ids of atoms; every rank calls it at once.

        Args:
            comm: the ranks.
            tags: (n_total,) id of each atom, ghosts too.
            list_atoms: (n_list,) the atoms that this rank owns and computes, in list order.
            n_local: atoms before the ghosts.
            neighbors: the atoms that a pair may name as j; None for all ghosts.

        Raises:
            InputError: two atoms have one id.
        """
        own = tags[list_atoms]
        order = np.argsort(own, kind="stable")
        row_of_atom = np.full(len(tags), -1, np.int64)
        row_of_atom[list_atoms] = np.arange(len(list_atoms))
        ghosts = np.arange(n_local, len(tags)) if neighbors is None else neighbors[neighbors >= n_local]
        if not len(list_atoms):  # it has no pairs
            ghosts = ghosts[:0]
        if len(ghosts):
            row_of_atom[ghosts] = _find(own, order, tags[ghosts])
            ghosts = ghosts[row_of_atom[ghosts] < 0]
        distinct, inverse = np.unique(tags[ghosts], return_inverse=True)
        rank, row = _ask_directory(comm, own, distinct)
        if comm.size == 1:
            _check_distinct(own[order])
        return cls._of(comm, row_of_atom, list_atoms, ghosts, rank[inverse], row[inverse])

    @classmethod
    def by_owners(
        cls, comm: Communicator, rank: np.ndarray, row: np.ndarray, list_atoms: np.ndarray, n_local: int
    ) -> GhostMap:
        """From the owner rank and row of each of LAMMPS's atoms, (n_total,), -1 where none; every rank calls it at once."""
        row_of_atom = np.full(len(rank), -1, np.int64)
        row_of_atom[list_atoms] = np.arange(len(list_atoms))
        ghosts = np.arange(n_local, len(rank)) if len(list_atoms) else np.arange(0)
        mine = ghosts[rank[ghosts] == comm.rank]
        row_of_atom[mine] = row[mine]
        ghosts = ghosts[(rank[ghosts] >= 0) & (rank[ghosts] != comm.rank)]
        return cls._of(comm, row_of_atom, list_atoms, ghosts, rank[ghosts], row[ghosts])

    @classmethod
    def _of(cls, comm, row_of_atom, list_atoms, ghosts, rank, row) -> GhostMap:
        """``ghosts`` of other ranks' atoms, with their owner's ``rank`` and ``row``; halo rows in the order of these."""
        known = rank >= 0  # an atom of a type that this model doesn't compute is in nobody's list
        ghosts, rank, row = ghosts[known], rank[known], row[known]
        if (rank == comm.rank).any():
            raise CommunicationError("a ghost of another rank's atom has come back as this rank's own")
        n_phantom = int(len(list_atoms) == 0)
        n_owned = len(list_atoms) + n_phantom
        key = rank * (int(row.max()) + 1 if len(row) else 1) + row
        _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
        row_of_atom[ghosts] = n_owned + inverse
        atom_of_row = np.concatenate([list_atoms, np.full(n_phantom, -1), ghosts[first]]).astype(np.int64)
        plan = ExchangePlan.build(comm, n_owned, torch.from_numpy(rank[first]), torch.from_numpy(row[first]), "atoms")
        return cls(row_of_atom, atom_of_row, n_owned, n_phantom, plan)

    @property
    def halo_atoms(self) -> np.ndarray:
        """(n_halo,) one ghost for each halo row."""
        return self.atom_of_row[self.n_owned :]

    def values(self, of_atoms: np.ndarray, phantom: float) -> np.ndarray:
        """(n_padded, ...) rows of what LAMMPS has for each atom, ghosts too."""
        if not self.n_phantom:
            return of_atoms[self.atom_of_row]
        return np.full((1, *of_atoms.shape[1:]), phantom, of_atoms.dtype)  # it reads nobody

    def verify(self, of_atoms: np.ndarray) -> None:
        """Sends values that owners and ghosts both know, (n_total,) integers, and compares; every rank calls it at once.

        Raises:
            CommunicationError: ghosts are not what their owners say.
        """
        values = torch.from_numpy(np.asarray(self.values(of_atoms, -1), np.int64)).to(self.plan.comm.device)
        plan = self.plan
        send = values[: self.n_owned].index_select(0, plan.send_index)
        heard = plan.comm.exchange(send, plan.send_counts, plan.recv_counts, "check of ghosts", setup=True)
        wrong = (heard != values[self.n_owned :]).nonzero()
        if wrong.numel():
            k = int(wrong[0])
            raise CommunicationError(
                f"the map of ghosts is wrong: ghost {int(self.halo_atoms[k])} of rank {plan.comm.rank} has "
                f"{int(values[self.n_owned + k])}, its owner says {int(heard[k])}"
            )


def _find(values: np.ndarray, order: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """(K,) place in ``values``, which ``order`` sorts, of each of ``wanted``; -1 where it is not."""
    if not len(values):
        return np.full(len(wanted), -1, np.int64)
    at = np.minimum(np.searchsorted(values, wanted, sorter=order), len(values) - 1)
    found = order[at]
    return np.where(values[found] == wanted, found, -1)


def _check_distinct(tags: np.ndarray) -> None:
    """``tags`` ascending."""
    twice = np.flatnonzero(tags[1:] == tags[:-1])
    if len(twice):
        raise InputError(
            f"two atoms have the id {tags[twice[0]]}: ids must be distinct (reset_atoms id, or fix the data file)"
        )


def _ask_directory(comm: Communicator, own: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(K,) rank and row of the owner of each of ``wanted``; -1 where nobody has it.

    Rank ``tag % size`` keeps the owner of each tag, so that no rank holds more than its part of them.
    """
    if comm.size == 1:
        return np.full(len(wanted), -1, np.int64), np.full(len(wanted), -1, np.int64)
    entries = np.column_stack([own, np.full(len(own), comm.rank), np.arange(len(own))])
    book, _, _, _ = _to_directory(comm, own, entries)
    book = book[np.argsort(book[:, 0], kind="stable")]
    questions, counts, asked, order = _to_directory(comm, wanted, wanted[:, None])
    at = _find(book[:, 0], np.arange(len(book)), questions[:, 0])
    answers = np.full((len(questions), 2), -1, np.int64)
    answers[at >= 0] = book[at[at >= 0], 1:]
    back = _exchange(comm, answers, asked, counts)
    out = np.empty((len(wanted), 2), np.int64)
    out[order] = back
    # the keeper of a tag that two atoms have is the only one to see it; all messages are through by now
    _check_distinct(book[:, 0])
    return out[:, 0], out[:, 1]


def _to_directory(comm: Communicator, tags: np.ndarray, rows: np.ndarray):
    """Sends ``rows`` to the keepers of ``tags``: what arrived, counts out and in, the order in which they went."""
    keeper = tags % comm.size
    order = np.argsort(keeper, kind="stable")
    counts = np.bincount(keeper, minlength=comm.size).tolist()
    incoming = comm.transpose_counts(counts, _SITE)
    return _exchange(comm, rows[order], counts, incoming), counts, incoming, order


def _exchange(comm: Communicator, rows: np.ndarray, send_counts: list[int], recv_counts: list[int]) -> np.ndarray:
    """(sum(recv_counts), w) int64; what stays on this rank needs no message."""
    own = comm.rank
    ends = np.cumsum(send_counts)
    mine = slice(ends[own] - send_counts[own], ends[own])
    others = np.ones(len(rows), bool)
    others[mine] = False
    out_counts, in_counts = list(send_counts), list(recv_counts)
    out_counts[own] = in_counts[own] = 0
    device = comm.device if comm.backend == "nccl" else "cpu"
    send = torch.from_numpy(np.ascontiguousarray(rows[others], np.int64)).to(device)
    recv = comm.exchange(send, out_counts, in_counts, _SITE, setup=True).cpu().numpy()
    at = int(np.sum(recv_counts[:own]))
    return np.concatenate([recv[:at], rows[mine].astype(np.int64), recv[at:]])
