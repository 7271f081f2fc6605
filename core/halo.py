"""`ParticleHaloConfig`: who owns which atoms and reads which others, without a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nvdd.communicator import Communicator
from nvdd.neighbors import edges_within
from nvdd.partition import SpatialPartitioner
from nvdd.plan import ExchangePlan


@dataclass(frozen=True, eq=False)
class ParticleHalo:
    """Atoms of one rank.

    Attributes:
        rows: (n_owned + n_halo,) global ids, ``[owned | halo]``: owned ones ascending, halo ones by their owners.
        plan: the exchange of such rows.
    """

    rows: Tensor
    plan: ExchangePlan

    @property
    def owned(self) -> Tensor:
        """(n_owned,) global ids of the atoms that this rank owns."""
        return self.rows[: self.plan.n_owned]

    @property
    def neighbor_ranks(self) -> list[int]:
        """Ranks that this one sends rows to or gets rows from."""
        counts = zip(self.plan.send_counts, self.plan.recv_counts, strict=True)
        return [rank for rank, (sent, received) in enumerate(counts) if sent or received]


@dataclass(frozen=True)
class ParticleHaloConfig:
    """A halo of fixed width: for flows of one's own. A `DistributedModel` makes its own exchanges.

    Attributes:
        ghost_width: A; an atom is a halo row of the ranks that own an atom nearer than this to it or to one of its
            images. ``cutoff + skin`` for an interaction.
        partitioner: who owns what.
        mesh: the ranks: a `Communicator`, a ``DeviceMesh`` or a process group; None for one rank.

    Raises:
        ValueError: ``ghost_width`` is not positive.
    """

    ghost_width: float
    partitioner: SpatialPartitioner
    mesh: Any = None

    def __post_init__(self) -> None:
        if not self.ghost_width > 0:
            raise ValueError(f"ParticleHaloConfig: ghost_width must be positive (A), got {self.ghost_width!r}")

    @property
    def communicator(self) -> Communicator:
        """The ranks of ``mesh``."""
        if isinstance(self.mesh, Communicator):
            return self.mesh
        if hasattr(self.mesh, "get_group"):
            return Communicator.from_mesh(self.mesh)
        return Communicator(self.mesh)

    def build(self, positions: Tensor, cell: Tensor, pbc: Tensor) -> ParticleHalo:
        """Divides atoms and makes the exchange; every rank calls it at once with the same arguments.

        Args:
            positions: (n_atoms, 3) A, all atoms.
            cell: (3, 3) A, rows are the cell vectors.
            pbc: (3,) bool.
        """
        comm = self.communicator
        x, vectors = positions.detach().cpu().to(torch.float64).numpy(), cell.detach().cpu().to(torch.float64).numpy()
        periodic = pbc.cpu().numpy()
        owner = np.asarray(self.partitioner.assign(x, vectors, periodic))
        mine = np.flatnonzero(owner == comm.rank)
        read = edges_within(x, vectors, periodic, self.ghost_width, mine).sender if len(mine) else mine
        halo = np.unique(read[owner[read] != comm.rank])
        halo = halo[np.argsort(owner[halo], kind="stable")]
        row = np.empty(len(owner), np.int64)
        for rank in range(comm.size):
            atoms = np.flatnonzero(owner == rank)
            row[atoms] = np.arange(len(atoms))
        plan = ExchangePlan.build(comm, len(mine), torch.from_numpy(owner[halo]), torch.from_numpy(row[halo]))
        return ParticleHalo(torch.from_numpy(np.concatenate([mine, halo])).to(comm.device), plan)
