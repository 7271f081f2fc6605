"""Rows that stand for edges and undirected bonds, and the exchanges that read them across ranks.

An edge lives with its receiver, so the reverse of an edge (j -> i for i -> j, with the opposite image) may live on
another rank. An undirected bond is one of the two: the one whose receiver has the smaller id, or between images of
one atom the one whose image comes first. Models that keep features on bonds (CHGNet) or read the reverse edge
(directed message passing) get indices for that, and `ExchangePlan`s over these rows behind them. Where only short edges
have a bond, rows are those of these edges alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from nvdd.communicator import Communicator
from nvdd.errors import CommunicationError
from nvdd.neighbors import is_first_of_pair
from nvdd.plan import ExchangePlan


@dataclass(frozen=True, eq=False)
class EdgeRows:
    """Reverse edges and bonds of one set of edges, or of those of them that have a bond; E is their number.

    Attributes:
        at: (E,) which of the edges of the set they are, ascending; None: all.
        reverse: (E,) row of the reverse edge in ``[own edges | halo edges]``.
        first: (E,) bool, whether the edge is the one of the two that stands for the bond.
        halo_first: (n_halo,) bool, the same for the halo edges.
        edges: exchange of edge rows.
        bonds: exchange of bond rows.
        bond_of_edge: (E,) row of each edge's bond in ``[own bonds | halo bonds]``.
        edge_of_bond: (B,) the edge that stands for each own bond.
    """

    at: Tensor | None
    reverse: Tensor
    first: Tensor
    halo_first: Tensor
    edges: ExchangePlan
    bonds: ExchangePlan
    bond_of_edge: Tensor
    edge_of_bond: Tensor

    @property
    def space(self) -> str:
        """What the rows are, in the words of `ShardMeta.more_plans`."""
        return "edges" if self.at is None else "bonded edges"

    @classmethod
    def build(cls, comm: Communicator, receiver, sender, shift, home, bonded=None) -> tuple[EdgeRows, np.ndarray]:
        """For the edges of this rank, given by global ids (E,), (E,) and images (E, 3); every rank calls it at once.

        Args:
            comm: the ranks.
            receiver, sender, shift: the edges.
            home: (E,) owner of each sender.
            bonded: (E,) bool, the edges that have a bond; None: all. On every rank an array, or on every rank None.

        Returns:
            the rows, and which edges are kept, (E',): an edge at the very end of the list may lack its reverse by
            rounding; it is out of any model's reach and dropped. With ``bonded`` all are kept, and that one has no bond.
        """
        if bonded is not None:
            among = np.flatnonzero(bonded)
            rows, kept = cls.build(comm, receiver[among], sender[among], shift[among], home[among])
            at = torch.from_numpy(among[kept]).to(comm.device)
            return replace(rows, at=at), np.arange(len(receiver))
        keys = np.column_stack([receiver, sender, np.rint(shift).astype(np.int64)])
        wanted = np.column_stack([sender, receiver, -np.rint(shift).astype(np.int64)])
        order = np.argsort(home, kind="stable")
        row = _ask(comm, keys, wanted[order], home[order])
        found = np.empty(len(keys), np.int64)
        found[order] = row
        kept = np.flatnonzero(found >= 0)
        if len(kept) < len(keys):  # rows behind the dropped edges move up, here and where they are read
            keys, home = keys[kept], home[kept]
            receiver, sender, shift = receiver[kept], sender[kept], shift[kept]
        if any(comm.all_gather_object(len(kept) < len(found), "edges without reverse")):
            inner, again = cls.build(comm, receiver, sender, shift, home)
            return inner, kept[again]
        return cls._from_rows(comm, keys, home, found[kept]), kept

    @classmethod
    def _from_rows(cls, comm: Communicator, keys: np.ndarray, home: np.ndarray, row: np.ndarray) -> EdgeRows:
        n = len(keys)
        remote = np.flatnonzero(home != comm.rank)
        remote = remote[np.argsort(home[remote], kind="stable")]
        reverse = row.copy()
        reverse[remote] = n + np.arange(len(remote))
        plan = ExchangePlan.build(comm, n, torch.from_numpy(home[remote]), torch.from_numpy(row[remote]), "edges")
        first = is_first_of_pair(keys[:, 0], keys[:, 1], keys[:, 2:])
        put = lambda a: torch.from_numpy(np.ascontiguousarray(a)).to(comm.device)
        return cls._with_bonds(put(reverse), put(first), put(~first[remote]), plan)

    @classmethod
    def _with_bonds(cls, reverse: Tensor, first: Tensor, halo_first: Tensor, edges: ExchangePlan) -> EdgeRows:
        bonds = edges.select(first, halo_first, "bonds")
        number = torch.cat([first, halo_first]).cumsum(0) - 1  # row of the bond that an edge stands for
        own = torch.arange(len(first), device=first.device)
        bond_of_edge = number[torch.where(first, own, reverse)]
        return cls(None, reverse, first, halo_first, edges, bonds, bond_of_edge, first.nonzero().squeeze(1))

    def select(self, mask: Tensor, bonded: Tensor | None = None) -> EdgeRows:
        """The rows of those edges of the set where ``mask`` holds; it must hold for an edge and its reverse alike.

        Args:
            mask: bool, of each edge of the set, the edges that stay.
            bonded: bool, of each edge of the set: of these, those that have a bond; it too must hold for an edge and its
                reverse alike. None: all that stay.
        """
        stay = mask if bonded is None else mask & bonded
        among = stay if self.at is None else stay[self.at]
        rows = self._among(among)
        if bonded is None:
            return rows
        number = mask.cumsum(0) - 1
        at = among.nonzero().squeeze(1) if self.at is None else self.at[among]
        return replace(rows, at=number[at])

    def _among(self, mask: Tensor) -> EdgeRows:
        """Of the edges with rows here those where ``mask`` (E,) holds."""
        n = len(mask)
        halo = torch.zeros(self.edges.n_halo, dtype=torch.bool, device=mask.device)
        reads = self.reverse >= n
        halo[self.reverse[reads] - n] = mask[reads]
        edges = self.edges.select(mask, halo, "edges")
        number = torch.cat([mask, halo]).cumsum(0) - 1
        reverse = number[self.reverse[mask]]
        return self._with_bonds(reverse, self.first[mask], self.halo_first[halo], edges)


def _ask(comm: Communicator, keys: np.ndarray, wanted: np.ndarray, home: np.ndarray) -> np.ndarray:
    """(K,) row of each wanted key on the rank that has it (-1: it has not); ``home`` ascending."""
    counts = np.bincount(home, minlength=comm.size)
    mine = slice(counts[: comm.rank].sum(), counts[: comm.rank + 1].sum())
    out = np.empty(len(wanted), np.int64)
    out[mine] = _look_up(keys, wanted[mine])
    ask = counts.copy()
    ask[comm.rank] = 0
    others = np.ones(len(wanted), bool)
    others[mine] = False
    asked = comm.transpose_counts(ask.tolist(), "reverse edges")
    device = comm.device if comm.backend == "nccl" else "cpu"
    questions = torch.from_numpy(np.ascontiguousarray(wanted[others])).to(device)
    got = comm.exchange(questions, ask.tolist(), asked, "reverse edges", setup=True).cpu().numpy()
    answers = torch.from_numpy(_look_up(keys, got)).to(device)
    out[others] = comm.exchange(answers, asked, ask.tolist(), "rows of reverse edges", setup=True).cpu().numpy()
    return out


def _look_up(keys: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """(K,) index in ``keys`` (E, 5) of each row of ``wanted`` (K, 5), -1 where it is not."""
    if not len(wanted):
        return np.zeros(0, np.int64)
    _, label = np.unique(np.concatenate([keys, wanted]), axis=0, return_inverse=True)
    label = label.reshape(-1)
    place = np.full(label.max() + 1, -1, np.int64)
    if len(np.unique(label[: len(keys)])) != len(keys):
        raise CommunicationError("two edges join the same atoms by the same image")
    place[label[: len(keys)]] = np.arange(len(keys))
    return place[label[len(keys) :]]
