"""Bonds of LAMMPS's short pairs: which pair is another one's reverse, and on which rank."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from nvdd.plan import ExchangePlan
from nvdd.runtime.edge_rows import EdgeRows

LIST_MARGIN = 0.5  # A by which LAMMPS's pairs should at least be longer than bonds
_MARGIN = 1.0  # A by which candidates are longer than bonds, where LAMMPS has such pairs
_ROWS = 2**40  # more than a rank has


class BondRows:
    """Keeps reverse pairs while every short pair is one of those for which they were found.

    A pair of LAMMPS is named by its two atoms, ghosts included, until LAMMPS makes its list anew.

    Args:
        plan: the exchange of atoms of this list.
        images: (n_total, 3) whole cell vectors from the owner's place of each atom to where LAMMPS has it.
        reach: within which distance pairs have a bond, A.
    """

    def __init__(self, plan: ExchangePlan, images: Tensor, reach: float) -> None:
        self.comm, self.images, self.reach = plan.comm, images, reach
        self.home, row = _owners(plan)
        self.ids = self.home * _ROWS + row
        self._rows: EdgeRows | None = None
        self._keys = self._place = torch.empty(0)

    def update(self, i: Tensor, j: Tensor, pair: Tensor, vectors: Tensor) -> EdgeRows:
        """The bonds of this step's pairs; every rank calls it at once.

        Args:
            i, j: (E,) numbers of the atoms in LAMMPS.
            pair: (2, E) their rows.
            vectors: (E, 3) A.
        """
        x, y, z = vectors.unbind(1)
        squared = x * x + y * y + z * z  # to the last digit what `LocalGraph.within` compares
        short = (squared < self.reach**2).nonzero().squeeze(1)
        key = i.to(torch.int64) * len(self.images) + j
        place, known = self._look_up(key[short])
        if self._any_rank(self._rows is None or not bool(known.all())):
            self._find(key, j, pair, squared)
            place, known = self._look_up(key[short])
        place, short = place[known], short[known]  # a pair that lacks its reverse by rounding is at the very end
        is_short = torch.zeros(len(self._rows.reverse), dtype=torch.bool, device=key.device)
        is_short[place] = True
        edge = torch.empty(len(is_short), dtype=torch.int64, device=key.device)
        edge[place] = short
        both = is_short & self._of_reverse(is_short)
        return replace(self._rows.select(both), at=edge[both])

    def _find(self, key: Tensor, j: Tensor, pair: Tensor, squared: Tensor) -> None:
        near = (squared < (self.reach + _MARGIN) ** 2).nonzero().squeeze(1)
        receiver, sender = pair[0][near], pair[1][near]
        numpy = lambda t: t.cpu().numpy()
        edges = numpy(self.ids[receiver]), numpy(self.ids[sender]), numpy(self.images[j[near].to(torch.int64)])
        self._rows, kept = EdgeRows.build(self.comm, *edges, numpy(self.home[sender]))
        self._keys, self._place = key[near][torch.from_numpy(kept).to(key.device)].sort()

    def _look_up(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """(S,) row of each pair among the candidates, and whether it is there."""
        if not len(self._keys):
            return torch.zeros_like(key), torch.zeros_like(key, dtype=torch.bool)
        at = torch.searchsorted(self._keys, key).clamp(max=len(self._keys) - 1)
        return self._place[at], self._keys[at] == key

    def _any_rank(self, here: bool) -> bool:
        if self.comm.size == 1:
            return here
        flag = torch.tensor([here], dtype=torch.int32, device=self.comm.message_device)
        return bool(self.comm.all_reduce(flag, "max", "have bonds changed"))

    def _of_reverse(self, mask: Tensor) -> Tensor:
        """(C,) what its owner says of each candidate's reverse: distances of ghosts are rounded in another way."""
        plan = self._rows.edges
        send = mask.to(self.comm.message_device, torch.uint8).index_select(0, plan.send_index.to(self.comm.message_device))
        heard = self.comm.exchange(send, plan.send_counts, plan.recv_counts, "short pairs")
        return torch.cat([mask, heard.to(mask.device).bool()])[self._rows.reverse]


def _owners(plan: ExchangePlan) -> tuple[Tensor, Tensor]:
    """(n_padded,) and (n_padded,): rank and row of the owner of each of this rank's rows."""
    comm, device = plan.comm, plan.comm.message_device
    send = plan.send_index.to(device)
    halo = comm.exchange(send, plan.send_counts, plan.recv_counts, "owners' rows", setup=True)
    row = torch.cat([torch.arange(plan.n_owned, device=device), halo])
    counts = torch.tensor([plan.n_owned, *plan.recv_counts], device=device)
    home = torch.tensor([comm.rank, *range(comm.size)], device=device).repeat_interleave(counts)
    return home.to(comm.device), row.to(comm.device)
