"""Which rank each atom belongs to, and the move there."""

from __future__ import annotations

import numpy as np
import torch

from nvdd.cells import Frame
from nvdd.communicator import Communicator
from nvdd.dynamics.domains import Domains, balanced_domains, grid_domains, imbalance
from nvdd.dynamics.state import DynamicsState
from nvdd.dynamics.tables import Tables
from nvdd.reshard import reshard_by_destination

_TOLERATED = 1.10  # "auto" keeps the grid, and balancing the planes, while no rank has more than this times the mean


class Migration:
    """Keeps the domains of a run, moves atoms to the ranks that own them, and moves the planes between domains.

    Args:
        comm: the ranks.
        grid: ranks along each cell vector, or None.
        balance: ``"auto"``, ``"grid"`` or ``"rcb"``.
        hysteresis: A by which an atom must be outside of its rank's domain to move to another.
        rebalance_every: least number of steps between two moves of the planes; None for never.

    Attributes:
        domains: one `Domains` for each system.
        n_migrated: atoms that have come to this rank since the start.
        n_rebalanced: how often planes have moved.
        imbalance: largest number of atoms (or load) over the mean, when it was last looked at.
    """

    def __init__(
        self,
        comm: Communicator,
        grid: tuple[int, ...] | None,
        balance: str,
        hysteresis: float,
        rebalance_every: int | None,
    ) -> None:
        self.comm, self.grid, self.balance = comm, grid, balance
        self.hysteresis, self.rebalance_every = hysteresis, rebalance_every
        self.domains: list[Domains] = []
        self.n_migrated = self.n_rebalanced = 0
        self.imbalance = 1.0
        self._balanced_at = 0

    def divide(self, state: DynamicsState) -> None:
        """Makes domains for atoms that may be anywhere, and moves each to its rank; every rank calls it at once."""
        places = _Places(state)
        self.domains = self._made(places, np.ones(len(state.ids)))
        self._balanced_at = state.step
        self._move(state, places, places.owners(self.domains))
        self.n_migrated = 0

    def _made(self, places: _Places, weights: np.ndarray) -> list[Domains]:
        comm, made = self.comm, []
        for points, rows, frame in places:
            domains = None
            if self.balance != "rcb":
                domains = grid_domains(comm, points, frame, self.grid)
                counts = np.bincount(domains.owner(points), minlength=comm.size)
                counts = comm.all_reduce(
                    torch.from_numpy(counts).to(comm.message_device), "sum", "atoms of domains"
                ).tolist()
                mean = sum(counts) / comm.size
                if self.balance == "auto" and self.grid is None and max(counts) > max(_TOLERATED * mean, np.ceil(mean)):
                    domains = None
            made.append(domains or balanced_domains(comm, points, weights[rows], frame))
        return made

    def migrate(self, state: DynamicsState, load: float | None = None) -> None:
        """Moves atoms that have left their domain by more than the hysteresis; every rank calls it at once.

        Args:
            state: the atoms of this rank; gets others.
            load: of this rank, to balance by; None for its number of atoms.
        """
        if self.comm.size == 1:
            return
        places = _Places(state)
        load = float(len(state.ids)) if load is None else load
        if self._look(state.step, load):
            weights = np.full(len(state.ids), load / max(1, len(state.ids)))
            self.domains = [balanced_domains(self.comm, points, weights[rows], frame) for points, rows, frame in places]
            self.n_rebalanced += 1
            self._move(state, places, places.owners(self.domains))
            return
        owner = np.full(len(state.ids), self.comm.rank, np.int64)
        for domains, (points, rows, frame) in zip(self.domains, places, strict=True):
            gone = domains.outside(points, self.comm.rank, frame.pbc, frame.heights) > self.hysteresis
            owner[rows[gone]] = domains.owner(points[gone])
        self._move(state, places, owner)

    def _look(self, step: int, load: float) -> bool:
        """Whether the planes should move; the same on every rank."""
        if self.rebalance_every is None or step - self._balanced_at < self.rebalance_every:
            return False
        self._balanced_at = step
        self.imbalance = imbalance(self.comm, load)
        return self.balance != "grid" and self.grid is None and self.imbalance > _TOLERATED

    def _move(self, state: DynamicsState, places: _Places, owner: np.ndarray) -> None:
        """Rows to their owners; there they stand in the order of their ids, whatever way they have come."""
        destination = torch.from_numpy(owner).to(state.ids.device)
        leaving = torch.tensor(int((owner != self.comm.rank).sum()), device=self.comm.message_device)
        if int(self.comm.all_reduce(leaving, "sum", "atoms that move")) == 0:
            return
        before = state.ids
        tables = Tables.pack(state.per_atom())
        rows = tables.unpack(reshard_by_destination(tables.columns, destination, self.comm))
        order = torch.argsort(rows["ids"])
        state.set_per_atom({name: value.index_select(0, order) for name, value in rows.items()})
        self.n_migrated += int((~torch.isin(state.ids, before)).sum())


class _Places:
    """Atoms of a state by system: coordinates in its `Frame`, rows, and the frame."""

    def __init__(self, state: DynamicsState) -> None:
        positions, system = state.positions.cpu().numpy(), state.system.cpu().numpy()
        self._parts = []
        for k, (cell, pbc) in enumerate(zip(state.cell.cpu().numpy(), state.pbc.cpu().numpy(), strict=True)):
            rows, frame = np.flatnonzero(system == k), Frame.of(cell, pbc)
            self._parts.append((frame.wrap(positions[rows])[0], rows, frame))
        self._n = len(positions)

    def __iter__(self):
        return iter(self._parts)

    def owners(self, domains: list[Domains]) -> np.ndarray:
        owner = np.zeros(self._n, np.int64)
        for domain, (points, rows, _) in zip(domains, self._parts, strict=True):
            owner[rows] = domain.owner(points)
        return owner
