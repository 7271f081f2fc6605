"""The waves of one mesh, with its planes divided over ranks.

Each rank spreads its own atoms on a mesh of its own. Planes that they touch go to the ranks that own them, which transform
them along the second and third axis; a transposition gives each rank some of the waves along the second axis and all
planes, which it transforms along the first. The way back is the same, and so is that of gradients: each step is linear and
the adjoint of its reverse.

    mesh, this rank's atoms (n1, n2, n3) -> planes (m1, n2, n3) -> (m1, n2, n3 // 2 + 1) -> (n1, m2, n3 // 2 + 1)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nvdd.communicator import Communicator
from nvdd.exchange import redistribute


def cuts(n: int, parts: int) -> list[int]:
    """(parts + 1,) where each of ``parts`` nearly equal ranges of n begins, and n."""
    return [n * k // parts for k in range(parts + 1)]


@dataclass(frozen=True, eq=False)
class DividedMesh:
    """One mesh over ranks.

    Attributes:
        comm: the ranks.
        shape: (n1, n2, n3) points.
        touched: (n_ranks, n1) bool on the CPU, which planes hold charge of each rank's atoms.
    """

    comm: Communicator
    shape: Sequence[int]
    touched: Tensor

    @classmethod
    def around(cls, comm: Communicator, shape: Sequence[int], scaled: Tensor, order: int) -> DividedMesh:
        """With the planes that splines of this order around ``scaled`` (n, 3) reach; all ranks call it at once."""
        n = shape[0]
        # the same arithmetic as where charges are spread
        below = ((scaled[:, 0] - scaled[:, 0].floor()) * float(n)).floor().long()
        planes = (below[:, None] - torch.arange(order, device=scaled.device)) % n
        touched = torch.zeros(comm.size, n, dtype=torch.int32, device=scaled.device)
        touched[comm.rank, planes.reshape(-1)] = 1
        return cls(comm, shape, comm.all_reduce(touched, "sum", "planes of the mesh").cpu() > 0)

    @property
    def waves(self) -> tuple[int, int]:
        """First and last (excluded) of this rank's waves along the second axis."""
        at = cuts(self.shape[1], self.comm.size)
        return at[self.comm.rank], at[self.comm.rank + 1]

    def transform(self, mesh: Tensor) -> Tensor:
        """This rank's share of all points (n1, n2, n3) -> its waves of their sum (n1, m2, n3 // 2 + 1), complex."""
        planes = self._to_owners(mesh)
        return torch.fft.fft(self._by_waves(torch.fft.rfft2(planes)), dim=0)

    def inverse(self, waves: Tensor) -> Tensor:
        """This rank's waves -> the points of all planes that its atoms touch (n1, n2, n3), not divided by their number."""
        n2, n3 = self.shape[1:]
        planes = self._by_planes(torch.fft.ifft(waves, dim=0, norm="forward"))
        return self._from_owners(torch.fft.irfft2(planes, s=(n2, n3), norm="forward"))

    # -- planes to the ranks that own them

    def _planes(self) -> tuple[Tensor, list[int], Tensor, list[int]]:
        """Planes to send and how many to each rank; own planes that others touch and how many by each rank."""
        at, rank = cuts(self.shape[0], self.comm.size), self.comm.rank
        send, send_counts, recv, recv_counts = [], [], [], []
        for peer in range(self.comm.size):
            theirs = self.touched[rank, at[peer] : at[peer + 1]].nonzero().squeeze(1) + at[peer]
            mine = self.touched[peer, at[rank] : at[rank + 1]].nonzero().squeeze(1)
            if peer == rank:
                theirs, mine = theirs[:0], mine[:0]
            send.append(theirs)
            recv.append(mine)
            send_counts.append(len(theirs))
            recv_counts.append(len(mine))
        device = self.comm.device
        return torch.cat(send).to(device), send_counts, torch.cat(recv).to(device), recv_counts

    def _own(self) -> slice:
        at = cuts(self.shape[0], self.comm.size)
        return slice(at[self.comm.rank], at[self.comm.rank + 1])

    def _to_owners(self, mesh: Tensor) -> Tensor:
        send, send_counts, recv, recv_counts = self._planes()
        theirs = redistribute(mesh.index_select(0, send), send_counts, recv_counts, self.comm, "planes of the mesh")
        return mesh[self._own()].index_add(0, recv, theirs)

    def _from_owners(self, planes: Tensor) -> Tensor:
        send, send_counts, recv, recv_counts = self._planes()
        theirs = redistribute(planes.index_select(0, recv), recv_counts, send_counts, self.comm, "planes of potentials")
        mine = torch.arange(self.shape[0], device=planes.device)[self._own()]
        return planes.new_zeros(*self.shape).index_copy(0, torch.cat([send, mine]), torch.cat([theirs, planes]))

    # -- transposition

    def _by_waves(self, planes: Tensor) -> Tensor:
        """(m1, n2, w) -> (n1, m2, w), complex."""
        rows, columns = cuts(self.shape[0], self.comm.size), cuts(self.shape[1], self.comm.size)
        blocks = [planes[:, columns[p] : columns[p + 1]] for p in range(self.comm.size)]
        shapes = [(rows[p + 1] - rows[p], self.waves[1] - self.waves[0]) for p in range(self.comm.size)]
        return torch.cat(self._swapped(blocks, shapes), 0)

    def _by_planes(self, waves: Tensor) -> Tensor:
        """(n1, m2, w) -> (m1, n2, w), complex."""
        rows, columns, own = cuts(self.shape[0], self.comm.size), cuts(self.shape[1], self.comm.size), self._own()
        blocks = [waves[rows[p] : rows[p + 1]] for p in range(self.comm.size)]
        shapes = [(own.stop - own.start, columns[p + 1] - columns[p]) for p in range(self.comm.size)]
        return torch.cat(self._swapped(blocks, shapes), 1)

    def _swapped(self, blocks: list[Tensor], shapes: list[tuple[int, int]]) -> list[Tensor]:
        """Block p to rank p; those of all ranks, of the shapes given, in their order."""
        rank, width = self.comm.rank, blocks[0].shape[2]
        flat = [torch.view_as_real(b.contiguous()).reshape(-1, 2 * width) for b in blocks]
        counts = [len(f) * (p != rank) for p, f in enumerate(flat)]
        wanted = [a * b * (p != rank) for p, (a, b) in enumerate(shapes)]
        rows = torch.cat([f[: counts[p]] for p, f in enumerate(flat)])
        found = redistribute(rows, counts, wanted, self.comm, "transposition of the mesh").split(wanted)
        blocks_found = []
        for p, (a, b) in enumerate(shapes):
            block = flat[p] if p == rank else found[p]
            blocks_found.append(torch.view_as_complex(block.reshape(a, b, width, 2)))
        return blocks_found
