"""The part of the graph that one rank computes: owned atoms, the edges into them, and the halo that these read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from nvdd.communicator import Communicator
from nvdd.data import Batch
from nvdd.directory import AtomDirectory
from nvdd.exchange import broadcast
from nvdd.index_partition import IndexPartitioner
from nvdd.nearby import Nearby, Points, points_read
from nvdd.neighbors import edges_within
from nvdd.partition import SpatialPartitioner
from nvdd.plan import ExchangePlan
from nvdd.runtime.edge_rows import EdgeRows


@dataclass(frozen=True, eq=False)
class Topology:
    """Who owns what and who may read whom, until an atom has moved by half the skin.

    Attributes:
        ids: (n_counted,) global ids of the owned atoms, ascending.
        rows: (n_padded,) global id behind each local row, ``[owned | halo]``; for a phantom the id of the atom
            whose species it borrows.
        n_phantom: 1 if this rank owns nothing and computes one isolated atom instead, else 0.
        candidates: (2, C) local rows of receivers and senders with r < cutoff + skin.
        shift: (C, 3) their periodic images, whole cell vectors.
        shift_vector: (3, C) the same in A.
        system: (n_padded,) system of each row.
        atomic_numbers: (n_padded,) of each row.
        atoms_per_system: (n_systems,) atoms of all ranks.
        plan: the halo exchange of atoms.
        edge_rows: reverse edges and bonds of the candidates, if the model reads them.
        directory: where every atom is; None if that is not known.
        wider: (n_padded,) for a topology that was made by `within`: the row of each of its rows in the one that it was
            made of; else None.
        points: atoms and images near the owned atoms, for models that take their edges in blocks; None if none does.
    """

    ids: Tensor
    rows: Tensor
    n_phantom: int
    candidates: Tensor
    shift: Tensor
    shift_vector: Tensor
    system: Tensor
    atomic_numbers: Tensor
    atoms_per_system: Tensor
    plan: ExchangePlan
    edge_rows: EdgeRows | None
    directory: AtomDirectory | None = None
    wider: Tensor | None = None
    points: Points | None = None

    def vectors(self, x: Tensor) -> Tensor:
        """(3, C) vectors of the candidates for positions ``x`` (n_padded, 3) of the rows: contiguous rows to sum over."""
        receiver, sender = self.candidates
        x = x.T.contiguous()
        return x.index_select(1, sender).sub_(x.index_select(1, receiver)).add_(self.shift_vector)

    def whole(self, x: Tensor) -> LocalGraph:
        """The graph of all candidates, for models that drop those out of reach; ``x`` as for `vectors`."""
        receiver, sender = self.candidates
        vectors = x.index_select(0, sender).sub_(x.index_select(0, receiver)).add_(self.shift_vector.T)
        return LocalGraph(self, None, self.candidates, vectors, None)

    def within(self, positions: Tensor, cutoff: float, bonds: float | None, whole_halo: bool = False) -> Topology:
        """Of the same owners, the candidates with r < ``cutoff`` at ``positions`` (N, 3) and the halo rows that these
        read; every rank calls it at once.

        Args:
            positions: those at which this topology was made.
            cutoff: A, skin included.
            bonds: within which distance edges have bonds that are read, A, skin included; None if none are.
            whole_halo: keep all halo rows.
        """
        squared = self.vectors(positions.index_select(0, self.rows)).square().sum(0)
        mask = squared < cutoff**2
        kept = mask.nonzero().squeeze(1)
        pair = self.candidates.index_select(1, kept)
        n_owned = self.plan.n_owned
        read = torch.zeros(self.plan.n_padded, dtype=torch.bool, device=pair.device)
        read[pair[1]] = True
        read[: self.plan.n_padded if whole_halo else n_owned] = True
        wider = read.nonzero().squeeze(1)
        number = read.cumsum(0) - 1
        rows = self.rows.index_select(0, wider)
        known = self.directory
        return Topology(
            ids=self.ids,
            rows=rows,
            n_phantom=self.n_phantom,
            candidates=number[pair],
            shift=self.shift.index_select(0, kept),
            shift_vector=self.shift_vector.index_select(1, kept),
            system=self.system.index_select(0, wider),
            atomic_numbers=self.atomic_numbers.index_select(0, wider),
            atoms_per_system=self.atoms_per_system,
            plan=self.plan.restrict(read[n_owned:]),
            edge_rows=rows_within(self.edge_rows, mask, squared, cutoff, bonds),
            directory=AtomDirectory(known.owner, known.row, rows) if known is not None else None,
            wider=wider,
        )


@dataclass(frozen=True, eq=False)
class LocalGraph:
    """The edges of this step: those candidates with r < cutoff, or all if the model drops the others itself.

    Attributes:
        topology: owners, candidates, plan.
        near: (E,) which candidates they are; None if they are all of them.
        pair: (2, E) local rows of receivers and senders.
        vectors: (E, 3) float64, x_sender - x_receiver with images, A.
        edge_rows: reverse edges and bonds among them, if the model reads them.
        kept: (E,) of a graph that was made by `within`: which edges of the wider graph they are; else None.
        nearby: the points of this step, if the topology has such.
        place, cell: (n_padded, 3) and (n_systems, 3, 3) A, from `differentiable`: what edges of ``nearby`` depend on.
    """

    topology: Topology
    near: Tensor | None
    pair: Tensor
    vectors: Tensor
    edge_rows: EdgeRows | None
    kept: Tensor | None = None
    nearby: Nearby | None = None
    place: Tensor | None = None
    cell: Tensor | None = None

    @property
    def n_edges(self) -> int:
        """Of the list, or of the blocks that a model has read, whichever are more."""
        return max(self.pair.shape[1], 0 if self.nearby is None else self.nearby.n_edges)

    @property
    def load(self) -> tuple[int, int, int]:
        """Owned atoms, halo rows and edges."""
        return len(self.topology.ids), self.topology.plan.n_halo, self.n_edges

    @property
    def receiver(self) -> Tensor:
        """(E,) local rows of receivers."""
        return self.pair[0]

    @property
    def sender(self) -> Tensor:
        """(E,) local rows of senders."""
        return self.pair[1]

    @property
    def shift(self) -> Tensor:
        """(E, 3) whole cell vectors."""
        shift = self.topology.shift
        return shift if self.near is None else shift.index_select(0, self.near)

    def within(self, cutoff: float, bonds: float | None) -> LocalGraph:
        """The edges with r < ``cutoff``, of the same rows; bonds of those with r < ``bonds`` (None: of none)."""
        x, y, z = self.vectors.detach().unbind(1)
        squared = x * x + y * y + z * z
        mask = squared < cutoff**2
        if bonds is not None and bonds >= cutoff and self.edge_rows.at is not None:
            mask &= torch.zeros_like(mask).index_fill(0, self.edge_rows.at, True)  # lacks its reverse by rounding
        kept = mask.nonzero().squeeze(1)
        near = kept if self.near is None else self.near.index_select(0, kept)
        return LocalGraph(
            self.topology,
            near,
            self.pair.index_select(1, kept),
            self.vectors.index_select(0, kept),
            rows_within(self.edge_rows, mask, squared, cutoff, bonds),
            kept,
        )

    def differentiable(self, positions: Tensor, cell: Tensor) -> LocalGraph:
        """The same graph with vectors that depend on ``positions`` (N, 3), which all ranks have alike."""
        x = broadcast(positions, self.topology.plan.comm, "positions").index_select(0, self.topology.rows)
        system = self.topology.system.index_select(0, self.receiver)
        shift = torch.einsum("ei,eij->ej", self.shift, cell.index_select(0, system))
        vectors = x.index_select(0, self.sender) - x.index_select(0, self.receiver) + shift
        return replace(self, vectors=vectors, place=x, cell=cell)


def rows_within(
    rows: EdgeRows | None, mask: Tensor, squared: Tensor, cutoff: float, bonds: float | None
) -> EdgeRows | None:
    """Of the edges where ``mask`` holds, r < ``cutoff``, the bonds of those with r < ``bonds``; both A."""
    if rows is None or bonds is None:
        return None
    return rows.select(mask, squared < bonds**2 if bonds < cutoff else None)


class GraphBuilder:
    """Keeps a `Topology` while it is valid and filters its candidates at each step.

    Args:
        comm: the ranks.
        partitioner: gives owners.
        cutoff: of the list of edges, A; 0 for none.
        skin: A.
        search_cutoff: where candidates are searched, before the skin is added; at least the larger cutoff.
        bonds: within which distance edges have reverse edges or bonds that a model reads, A; None if none does.
        report_phase: called with ``"partition"`` and ``"plan"`` when these begin.
        reach: cutoff of the models that take edges in blocks, A; None if none does.

    Attributes:
        widest: the larger of both cutoffs.
        width: where atoms are searched that a rank reads, A, skin included.
        chooses: whether a graph has the candidates with r < cutoff only; else it has them all.
        n_builds: how often candidates were found.

    Every rank is given the same positions; the decision to rebuild is made on them, so that all agree without a
    message. Models with smaller cutoffs get theirs of the same partition and halo, by `narrower`.
    """

    def __init__(
        self,
        comm: Communicator,
        partitioner: SpatialPartitioner | IndexPartitioner,
        cutoff: float,
        skin: float,
        search_cutoff: float | None = None,
        bonds: float | None = None,
        report_phase: Callable[[str], None] = lambda phase: None,
        reach: float | None = None,
    ) -> None:
        self.comm, self.partitioner, self.cutoff, self.skin = comm, partitioner, cutoff, skin
        self.reach, self.widest = reach, max(cutoff, reach or 0.0)
        self.width = max(self.widest, search_cutoff or 0.0) + skin
        self.search_cutoff = self.width if reach is None else cutoff + skin
        self.graph_partition = isinstance(partitioner, IndexPartitioner)
        self.reads_all = self.graph_partition and partitioner.reads_all
        self.bonds = bonds
        self.report_phase = report_phase
        self.chooses = True
        self.n_builds = 0
        self._topology: Topology | None = None
        self._narrower: dict[tuple[float, float | None], Topology] = {}
        self._reference: tuple[Tensor, ...] = ()
        self._positions: Tensor | None = None
        self._staging: Tensor | None = None

    def update(self, batch: Batch) -> LocalGraph:
        """The graph of this rank for ``batch``, which is the same on every rank.

        The decision to rebuild is made on the device where the batch is: for one that comes from the CPU it costs no
        synchronisation of a GPU.
        """
        self._positions = self._on_device(batch.positions.detach())
        graph = None
        if self._comparable(batch):
            # a GPU works while the CPU compares positions
            graph = self._of_candidates()
            graph = graph if self._still_valid(batch) else None
        if graph is None:
            self._topology = None  # if building fails, nothing old is used
            self._narrower = {}
            self._topology = self._build(batch)
            self._reference = tuple(t.clone() for t in self._key(batch))
            self.n_builds += 1
            graph = self._of_candidates()
        graph, topology = graph(), self._topology
        if topology.points is None:
            return graph
        x = self._positions.index_select(0, topology.rows)
        return replace(graph, nearby=Nearby(topology.points, x, batch.cell, topology.system))

    def _of_candidates(self) -> Callable[[], LocalGraph]:
        """Gives the graph at the present positions; a GPU is waited for when it is called, if at all."""
        if not self.chooses:
            whole = self._topology.whole(self._positions.index_select(0, self._topology.rows))
            return lambda: whole
        near = _near(self._topology, self._positions, self.cutoff)
        return partial(_chosen, self._topology, *near, self.cutoff, self.bonds)

    def narrower(self, cutoff: float, bonds: float | None = None) -> LocalGraph:
        """The graph of a smaller cutoff, or of fewer bonds, at the positions of the last `update`; every rank calls it at once.

        Its halo is the part of the first one that its own candidates read, so that a short-ranged model beside a
        long-ranged one fetches no more rows than by itself.
        """
        key = (cutoff, bonds)
        if key not in self._narrower:
            made_at = self._reference[0].to(self.comm.device, torch.float64)
            reach = None if bonds is None else bonds + self.skin
            self._narrower[key] = self._topology.within(made_at, cutoff + self.skin, reach, self.reads_all)
        topology = self._narrower[key]
        return _chosen(topology, *_near(topology, self._positions, cutoff), cutoff, bonds)

    def _on_device(self, positions: Tensor) -> Tensor:
        """float64 positions on this rank's device; to a GPU through page-locked memory, without waiting for it."""
        device = self.comm.device
        if device.type != "cuda" or positions.is_cuda:
            return positions.to(device, torch.float64)
        if self._staging is None or self._staging.shape != positions.shape:
            self._staging = torch.empty(positions.shape, dtype=torch.float64, pin_memory=True)
        # filtering synchronises at each step, so the last copy out of this buffer is over
        self._staging.copy_(positions)
        return self._staging.to(device, non_blocking=True)

    @staticmethod
    def _key(batch: Batch) -> tuple[Tensor, ...]:
        return batch.positions.detach(), batch.cell, batch.pbc, batch.atomic_numbers, batch.batch

    def _comparable(self, batch: Batch) -> bool:
        """Whether the topology is of as many atoms and systems, in the same place, as ``batch``."""
        if self._topology is None or self.skin == 0:
            return False
        same = lambda a, b: a.shape == b.shape and a.device == b.device
        return all(same(a, b) for a, b in zip(self._reference, self._key(batch), strict=True))

    def _still_valid(self, batch: Batch) -> bool:
        """Whether the topology holds for a batch that is `_comparable`."""
        old, new = self._reference, self._key(batch)
        if not all(torch.equal(a, b) for a, b in zip(old[1:], new[1:], strict=True)):
            return False
        limit = (0.5 * self.skin) ** 2
        if not new[0].is_cuda:  # numpy: torch would wake its threads for so little work
            off = new[0].numpy() - old[0].numpy()
            return not len(off) or bool(np.einsum("ij,ij->i", off, off).max() <= limit)
        return bool((new[0] - old[0]).square().sum(1).max() <= limit)

    def _build(self, batch: Batch) -> Topology:
        self.report_phase("partition")
        positions = batch.positions.detach().cpu().to(torch.float64).numpy()
        cells, pbc = batch.cell.detach().cpu().numpy(), batch.pbc.cpu().numpy()
        system, numbers = batch.batch.cpu().numpy(), batch.atomic_numbers.cpu().numpy()
        members = [np.flatnonzero(system == k) for k in range(batch.n_systems)]
        owner = self.partitioner.divide(positions, cells, pbc, members)
        self.report_phase("plan")
        receiver, sender, shift, shift_vector = [], [], [], []
        for k, atoms in enumerate(members):
            mine = np.flatnonzero(owner[atoms] == self.comm.rank)
            if not self.cutoff:  # all edges are made in blocks
                mine = mine[:0]
            edges = edges_within(positions[atoms], cells[k], pbc[k], self.search_cutoff, mine)
            receiver.append(atoms[edges.receiver])
            sender.append(atoms[edges.sender])
            shift.append(edges.shift)
            shift_vector.append(edges.shift @ cells[k])
        join = np.concatenate
        edges = join(receiver), join(sender), join(shift), join(shift_vector)
        points = None
        if self.reach is not None:
            mine = np.flatnonzero(owner == self.comm.rank)
            points = points_read(positions, cells, pbc, system, mine, self.width, self.comm.device)
        return self._localise(system, numbers, owner, *edges, positions, points)

    def _localise(self, system, numbers, owner, receiver, sender, shift, shift_vector, positions, points) -> Topology:
        """From global ids to local rows, and the plans."""
        rank, device = self.comm.rank, self.comm.device
        put = lambda array: torch.from_numpy(np.ascontiguousarray(array)).to(device)
        edge_rows = None
        if self.bonds is not None:
            bonded = None
            if self.bonds < self.cutoff:
                vectors = positions[sender] - positions[receiver] + shift_vector
                bonded = np.einsum("ij,ij->i", vectors, vectors) < (self.bonds + self.skin) ** 2
            edge_rows, kept = EdgeRows.build(self.comm, receiver, sender, shift, owner[sender], bonded)
            receiver, sender, shift, shift_vector = (a[kept] for a in (receiver, sender, shift, shift_vector))
        ids = np.flatnonzero(owner == rank)
        row_at_owner = _rows_at_owner(owner, self.comm.size)
        read_atoms = sender if points is None else points[0]
        halo = np.unique(read_atoms[owner[read_atoms] != rank])
        if self.reads_all and len(ids):
            halo = np.flatnonzero(owner != rank)
        halo = halo[np.argsort(owner[halo], kind="stable")]
        n_phantom = int(len(ids) == 0)
        rows = np.concatenate([ids, halo]) if not n_phantom else np.zeros(1, np.int64)
        n_owned = len(ids) + n_phantom
        local = np.full(len(owner), -1, np.int64)
        local[ids] = np.arange(len(ids))
        local[halo] = n_owned + np.arange(len(halo))
        plan = ExchangePlan.build(
            self.comm, n_owned, torch.from_numpy(owner[halo]), torch.from_numpy(row_at_owner[halo]), "atoms"
        )
        if self.graph_partition:
            read = torch.tensor([float(len(halo))], dtype=torch.float64, device=self.comm.message_device)
            self.partitioner.observe(int(self.comm.all_reduce(read, site="rows read in all")))
        return Topology(
            ids=put(ids),
            rows=put(rows),
            n_phantom=n_phantom,
            candidates=put(np.stack([local[receiver], local[sender]])),
            shift=put(shift),
            shift_vector=put(shift_vector.T),
            system=put(system[rows]),
            atomic_numbers=put(numbers[rows]),
            atoms_per_system=put(np.bincount(system)),
            plan=plan,
            edge_rows=edge_rows,
            directory=AtomDirectory(put(owner), put(row_at_owner), put(rows)),
            points=None if points is None else Points(put(local[points[0]]), put(points[1]), len(ids)),
        )


def _near(topology: Topology, positions: Tensor, cutoff: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of the candidates: vectors (3, C), squared lengths (C,), and whether r < ``cutoff`` (C,); a GPU is not waited for."""
    vectors = topology.vectors(positions.index_select(0, topology.rows))
    squared = vectors.square().sum(0)
    return vectors, squared, squared < cutoff**2


def _chosen(
    topology: Topology, vectors: Tensor, squared: Tensor, mask: Tensor, cutoff: float, bonds: float | None
) -> LocalGraph:
    """The graph of the candidates where ``mask`` holds."""
    near = mask.nonzero().squeeze(1)
    edge_rows = rows_within(topology.edge_rows, mask, squared, cutoff, bonds)
    pair = topology.candidates.index_select(1, near)
    return LocalGraph(topology, near, pair, vectors.index_select(1, near).T.contiguous(), edge_rows)


def _rows_at_owner(owner: np.ndarray, n_ranks: int) -> np.ndarray:
    """(N,) the row that each atom has on the rank that owns it, where rows are in the order of global ids."""
    order = np.argsort(owner, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=n_ranks))])
    row = np.empty(len(owner), np.int64)
    row[order] = np.arange(len(owner)) - starts[owner[order]]
    return row
