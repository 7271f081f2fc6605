"""`OwnedGraph`: the graph of one rank, made of the atoms that each rank owns; no rank has all atoms.

The same as `nvdd.runtime.graph.GraphBuilder`, which is given all atoms on every rank, but here ranks that are near
each other exchange the atoms within cutoff + skin of one another's bounding boxes to find candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from nvdd.cells import Frame
from nvdd.communicator import Communicator
from nvdd.data import Batch
from nvdd.directory import AtomDirectory
from nvdd.dynamics.candidates import Records, gather_near, search
from nvdd.dynamics.domains import Domains
from nvdd.dynamics.state import DynamicsState
from nvdd.errors import InputError
from nvdd.exchange import fetch
from nvdd.nearby import Nearby, Points, within_reach
from nvdd.plan import ExchangePlan
from nvdd.runtime.edge_rows import EdgeRows
from nvdd.runtime.graph import LocalGraph, Topology, rows_within

_VALID, _SOON, _NOW, _FAILED = range(4)  # whether candidates must be found anew


class OwnedGraph:
    """Keeps a `Topology` of owned atoms while it is valid, and filters its candidates at each step.

    Args:
        comm: the ranks.
        cutoff: of the list of edges, A; 0 for none.
        skin: A.
        width: where atoms are searched that a rank reads, A; at least the larger cutoff and the skin.
        bonds: within which distance edges have reverse edges or bonds that the model reads, A; None if it reads none.
        directory: whether the model finds atoms by id (sharded storage), so that each rank keeps two numbers for
            every atom.
        reach: cutoff of the models that take edges in blocks, A; None if none does.

    Attributes:
        chooses: whether a graph has the candidates with r < cutoff only; else it has them all.
        n_builds: how often candidates were found.
        due: whether an atom may have moved by half the skin at the next step: time to migrate atoms and to `build`.
    """

    def __init__(
        self,
        comm: Communicator,
        cutoff: float,
        skin: float,
        width: float,
        bonds: float | None = None,
        directory: bool = False,
        reach: float | None = None,
    ) -> None:
        self.comm, self.cutoff, self.skin, self.width = comm, cutoff, skin, width
        self.reach, self._widest = reach, max(cutoff, reach or 0.0)
        self.bonds, self.directory = bonds, directory
        self.chooses = True
        self.n_builds = 0
        self.due = self.failed = self._fresh = False
        self._topology: Topology | None = None

    # -- whether candidates are still right

    def _agree(self, code: Tensor) -> Tensor:
        """The largest code of all ranks, in one message."""
        if self.comm.size == 1:
            return code
        return self.comm.all_reduce(code.to(self.comm.message_device), "max", "have atoms moved far")

    def _code(self, state: DynamicsState) -> Tensor:
        """A pair of candidates that was farther apart than the search width R must still be farther than the cutoff.

        Let F take the old cell to the new one, and u be an atom's displacement beside it. Then the distance is at
        least (1 - |F - 1|) R - 2 max |u|, with the Frobenius norm.
        """
        before, moved = self._reference, state.positions - self._reference.positions
        room = torch.full(
            (state.n_systems,), 0.5 * (self.width - self._widest), dtype=torch.float64, device=moved.device
        )
        if not self._cell_is(state, before.cell):
            if before.inverse is None:  # a cell without volume
                return torch.tensor([_NOW])
            deformation = before.inverse @ state.cell
            moved = state.positions - torch.einsum("ni,nij->nj", before.positions, state.of_atoms(deformation))
            off = torch.linalg.matrix_norm(deformation - torch.eye(3, dtype=torch.float64, device=moved.device))
            room = room - 0.5 * off * self.width
        if not len(moved):
            return torch.where((room < 0).any(), _NOW, _VALID).reshape(1)
        share = (moved.square().sum(1) / state.of_atoms(room.clamp(min=1e-12)).square()).max().sqrt()
        growth, self._share = share - self._share, share
        # what is not a number must not pass for valid
        now = torch.where((share <= 1.0) & (room >= 0).all(), _VALID, _NOW)
        return torch.where(share + 2.0 * growth > 1.0, torch.clamp(now, min=_SOON), now).reshape(1)

    @staticmethod
    def _cell_is(state: DynamicsState, known: tuple[Tensor, int]) -> bool:
        """Whether it is that tensor, unchanged; without a look at the numbers, which would wait for a GPU."""
        return state.cell is known[0] and state.cell._version == known[1]

    # -- candidates

    def build(self, state: DynamicsState, domains: list[Domains]) -> None:
        """Finds candidates and the exchange of halo rows; every rank calls it at once.

        Raises:
            InputError: a position or the cell is not finite; on every rank.
        """
        self._topology = None  # if it fails, nothing old is used
        positions, system = state.positions.cpu().numpy(), state.system.cpu().numpy()
        cells, pbc = state.cell.cpu().numpy(), state.pbc.cpu().numpy()
        species = self._check_finite(positions, cells, state)
        frames = [Frame.of(c, p) for c, p in zip(cells, pbc, strict=True)]
        members = [np.flatnonzero(system == k) for k in range(state.n_systems)]
        home, images = np.zeros_like(positions), np.zeros_like(positions)
        for domain, frame, rows in zip(domains, frames, members, strict=True):
            scaled = frame.scaled(positions[rows])
            home[rows] = domain.beside(scaled, self.comm.rank, frame.pbc)
            images[rows] = np.rint(home[rows] - scaled)
        own = Records.of(
            home, images, state.ids.cpu().numpy(), state.atomic_numbers.cpu().numpy(), system, self.comm.rank
        )
        others = gather_near(self.comm, own.table, members, frames, self.width)
        width = self.cutoff + self.width - self._widest  # with the same room to move in
        sought = members if self.cutoff else [rows[:0] for rows in members]
        edges = [search(own.table, rows, others[k], frames[k], width) for k, rows in enumerate(sought)]
        receiver, shift, senders = (np.concatenate(parts) for parts in zip(*edges, strict=True))
        points = None if self.reach is None else self._points(own, np.concatenate(others), frames)
        self._set(state, species, receiver.astype(np.int64), shift, Records(senders), points)
        self.n_builds += 1
        self.due, self._fresh = False, True

    def _points(self, own: Records, others: np.ndarray, frames: list[Frame]) -> Records:
        """This rank's atoms, and the atoms and images near one of them."""
        found = Records(np.concatenate([own.table, others]))
        cells = np.stack([frame.cell for frame in frames])
        places = np.einsum("pi,pij->pj", found.table[:, :3], cells[found.system])
        no_image = np.zeros_like(places)
        near = within_reach(places, no_image, found.system, cells, len(own.table), self.width, self.comm.device)
        return Records(found.table[near])

    def _check_finite(self, positions: np.ndarray, cells: np.ndarray, state: DynamicsState) -> int:
        """The largest atomic number of all ranks, which a rank without atoms borrows for its phantom."""
        bad = np.flatnonzero(~np.isfinite(positions).all(1))
        worst = -1 if not len(bad) else int(state.ids[int(bad[0])])
        if not np.isfinite(cells).all():
            worst = max(worst, 0)
        largest = int(state.atomic_numbers.max()) if len(positions) else 0
        flag = torch.tensor([worst, largest], device=self.comm.message_device)
        worst, largest = self.comm.all_reduce(flag, "max", "finite positions").tolist()
        if worst >= 0:
            raise InputError(
                f"step {state.step}: the position of atom {worst} or the cell is not a finite number. Relax the structure first, "
                "or use a smaller timestep"
            )
        return largest

    def _set(
        self,
        state: DynamicsState,
        species: int,
        receiver: np.ndarray,
        shift: np.ndarray,
        senders: Records,
        points: Records | None,
    ) -> None:
        """From senders and points on other ranks to halo rows, and the exchange of these."""
        comm, edge_rows = self.comm, None
        ids = state.ids.cpu().numpy()
        if self.bonds == self.cutoff:
            edge_rows, kept = EdgeRows.build(comm, ids[receiver], senders.id, shift, senders.rank)
            receiver, shift, senders = receiver[kept], shift[kept], Records(senders.table[kept])
        n_phantom = int(len(state.ids) == 0)
        n_owned = len(state.ids) + n_phantom
        read = senders if points is None else points  # whatever the list reads is among the points, too
        _, first = np.unique(read.key[read.rank != comm.rank], return_index=True)
        halo = Records(read.table[read.rank != comm.rank][first])
        plan = ExchangePlan.build(comm, n_owned, torch.from_numpy(halo.rank), torch.from_numpy(halo.row), "atoms")
        row_of = lambda r: np.where(r.rank == comm.rank, r.row, n_owned + np.searchsorted(halo.key, r.key))
        put = lambda array: torch.from_numpy(np.ascontiguousarray(array)).to(comm.device)
        own_system = torch.zeros(1, dtype=torch.int64, device=comm.device) if n_phantom else state.system
        own_number = torch.full((1,), species, device=comm.device) if n_phantom else state.atomic_numbers
        self._topology = Topology(
            ids=state.ids,
            rows=torch.arange(plan.n_padded, device=comm.device),
            n_phantom=n_phantom,
            candidates=put(np.stack([receiver, row_of(senders)])),
            shift=put(shift),
            shift_vector=torch.empty(0),
            system=torch.cat([own_system, put(halo.system)]),
            atomic_numbers=torch.cat([own_number, put(halo.number)]),
            atoms_per_system=state.n_atoms,
            plan=plan,
            edge_rows=edge_rows,
            directory=self._directory(state, plan, put(halo.id)) if self.directory else None,
            points=None if points is None else Points(put(row_of(points)), put(points.table[:, 3:6]), len(state.ids)),
        )
        self._node_fields = {name: self._padded(rows, plan, name) for name, rows in state.node_fields.items()}
        has_volume = bool((torch.linalg.det(state.cell) != 0).all())
        self._reference = _Reference(
            state.positions.clone(),
            torch.linalg.inv(state.cell) if has_volume else None,
            (state.cell, state.cell._version),
        )
        self._share = torch.zeros((), dtype=torch.float64, device=comm.device)
        self._set_cell(state)
        if self.bonds is not None and self.bonds < self.cutoff:
            squared = self._topology.vectors(self._of_rows(state)).square().sum(0)
            bonded = (squared < (self.bonds + self.width - self._widest) ** 2).cpu().numpy()
            edge_rows, _ = EdgeRows.build(comm, ids[receiver], senders.id, shift, senders.rank, bonded)
            self._topology = replace(self._topology, edge_rows=edge_rows)

    def _directory(self, state: DynamicsState, plan: ExchangePlan, halo_ids: Tensor) -> AtomDirectory:
        n, comm = int(state.n_atoms.sum()), self.comm
        table = torch.zeros(2, n, dtype=torch.int64, device=comm.message_device)
        own = state.ids.to(comm.message_device)
        table[0, own], table[1, own] = comm.rank, torch.arange(len(own), device=own.device)
        table = comm.all_reduce(table, "sum", "directory of atoms").to(comm.device)
        own = state.ids if len(state.ids) else state.ids.new_zeros(1)
        return AtomDirectory(table[0], table[1], torch.cat([own, halo_ids]))

    # -- this step

    def update(self, state: DynamicsState, failed: bool = False) -> tuple[Batch, LocalGraph] | None:
        """Inputs of this rank's rows ``[owned | halo]``, and the edges with r < cutoff; every rank calls it at once.

        None, on every rank, if candidates must be found first (`build`), which all agree on by one number. With
        ``failed`` a rank says that something else has gone wrong on it; then `failed` is True on every rank.
        """
        stale = self._topology is None or (self.skin == 0 and not self._fresh)
        self._fresh = False
        x = None if stale else self._of_rows(state)
        mask = vectors = squared = None
        if not stale and self.chooses:
            vectors = self._topology.vectors(x)
            squared = vectors.square().sum(0)
            mask = squared < self.cutoff**2
        code = torch.tensor([_FAILED if failed else _NOW]) if stale or failed else self._code(state)
        code, count = self._read(self._agree(code), mask)
        self.due, self.failed = code >= _SOON, code == _FAILED
        if code >= _NOW:
            return None
        if not self.chooses:
            return self._batch(state), self._topology.whole(x)
        near = mask.nonzero().squeeze(1) if count is None else torch.nonzero_static(mask, size=count).squeeze(1)
        topology = self._topology
        graph = LocalGraph(
            topology,
            near,
            topology.candidates.index_select(1, near),
            vectors.index_select(1, near).T.contiguous(),
            rows_within(topology.edge_rows, mask, squared, self.cutoff, self.bonds),
            nearby=None if topology.points is None else self._nearby(state, topology),
        )
        return self._batch(state), graph

    def _nearby(self, state: DynamicsState, topology: Topology) -> Nearby:
        return Nearby(topology.points, self._positions, state.cell, topology.system)

    @staticmethod
    def _read(code: Tensor, mask: Tensor | None) -> tuple[int, int | None]:
        """The code, and on a GPU how many edges there are: the only time in a step at which the host waits for it."""
        if mask is None or not mask.is_cuda:
            return int(code), None
        return tuple(torch.stack([code.to(mask.device).reshape(()).to(torch.int64), mask.sum()]).tolist())

    def _of_rows(self, state: DynamicsState) -> Tensor:
        """(n_padded, 3) positions of the topology's rows, A, whose images are those of the state's cell."""
        if not self._cell_is(state, self._cell):
            self._set_cell(state)
        self._positions = self._padded(state.positions, self._topology.plan, "positions")
        return self._positions

    def _batch(self, state: DynamicsState) -> Batch:
        topology = self._topology
        return Batch(
            positions=self._positions,
            atomic_numbers=topology.atomic_numbers,
            cell=state.cell,
            pbc=state.pbc,
            batch=topology.system,
            n_systems=state.n_systems,
            node_fields=self._node_fields,
            system_fields=state.system_fields,
        )

    def _padded(self, rows: Tensor, plan: ExchangePlan, name: str) -> Tensor:
        """Owned rows (a phantom's are zero), and those of the halo."""
        if not len(rows):
            rows = rows.new_zeros(1, *rows.shape[1:])
        return fetch(rows, plan, name)

    def _set_cell(self, state: DynamicsState) -> None:
        topology = self._topology
        system = topology.system.index_select(0, topology.candidates[0])
        vectors = torch.einsum("ei,eij->je", topology.shift, state.cell.index_select(0, system)).contiguous()
        self._topology = replace(topology, shift_vector=vectors)
        self._cell = (state.cell, state.cell._version)


@dataclass(frozen=True, eq=False)
class _Reference:
    """When candidates were found: positions (n, 3), inverse cells (n_systems, 3, 3) or None without volume, and the
    tensor of cells with its version."""

    positions: Tensor
    inverse: Tensor | None
    cell: tuple[Tensor, int]
