"""Candidate edges of atoms that ranks own: which atoms of others are near, and the search among them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from nvdd.cells import Frame
from nvdd.communicator import Communicator
from nvdd.neighbors import edges_within

_WIDTH = 11  # numbers of a record


@dataclass(frozen=True, eq=False)
class Records:
    """Atoms, or images of atoms, that may be senders, as they travel: (n, 11) float64."""

    table: np.ndarray

    @classmethod
    def of(cls, home: np.ndarray, images: np.ndarray, ids, numbers, system, rank: int) -> Records:
        """Scaled coordinates (n, 3), the whole cells that brought atoms there (n, 3), and who they are."""
        n = len(home)
        return cls(np.column_stack([home, images, np.arange(n), ids, numbers, system, np.full(n, rank)]).astype(float))

    def _whole(self, column: int) -> np.ndarray:
        return self.table[:, column].astype(np.int64)

    row = property(lambda self: self._whole(6))
    id = property(lambda self: self._whole(7))
    number = property(lambda self: self._whole(8))
    system = property(lambda self: self._whole(9))
    rank = property(lambda self: self._whole(10))

    @property
    def key(self) -> np.ndarray:
        """(n,) int64: of atoms of different ranks different, and in the order of ranks, then rows."""
        return (self.rank << 40) + self.row


def gather_near(
    comm: Communicator, records: np.ndarray, members: list[np.ndarray], frames: list[Frame], width: float
) -> list[np.ndarray]:
    """For each system the records of atoms and images, of all ranks, that are near this rank's box of atoms.

    Every rank calls it at once.

    Args:
        comm: the ranks.
        records: (n, 11) of this rank's atoms.
        members: rows of the atoms of each system.
        frames: of each system.
        width: A; how near.
    """
    mine = np.full((len(members), 2, 3), np.inf)
    mine[:, 1] = -np.inf
    for box, rows in zip(mine, members, strict=True):
        if len(rows):
            box[0], box[1] = records[rows, :3].min(0), records[rows, :3].max(0)
    boxes = comm.all_gather(torch.from_numpy(mine).to(comm.message_device), "boxes of atoms").cpu().numpy()
    parcels: list[list[np.ndarray]] = [[] for _ in range(comm.size)]
    for k, (frame, rows) in enumerate(zip(frames, members, strict=True)):
        if not len(rows):
            continue
        reach = width / frame.heights * (1 + 1e-9) + 1e-12
        for rank in range(comm.size):
            low, high = boxes[rank, k, 0] - reach, boxes[rank, k, 1] + reach
            for found in _images_within(records[rows], mine[k], low, high, frame.pbc):
                if rank == comm.rank:  # the atoms themselves are there already
                    found = found[(found[:, 3:6] != records[found[:, 6].astype(np.int64), 3:6]).any(1)]
                parcels[rank].append(found)
    empty = np.zeros((0, _WIDTH))
    full = [np.concatenate([empty, *parcel]) for parcel in parcels]
    own, full[comm.rank] = full[comm.rank], empty
    send = [len(parcel) for parcel in full]
    message = torch.from_numpy(np.concatenate(full)).to(comm.message_device)
    receive = comm.transpose_counts(send, "candidates")
    arrived = comm.exchange(message, send, receive, "candidates", setup=True).cpu().numpy()
    everything = np.concatenate([own, arrived])
    return [everything[everything[:, 9] == k] for k in range(len(members))]


def search(
    table: np.ndarray, rows: np.ndarray, others: np.ndarray, frame: Frame, width: float
) -> tuple[np.ndarray, ...]:
    """Edges into the atoms of one system with r < width.

    Args:
        table: records of this rank's atoms; ``rows`` of it are those of the system.
        others: records of atoms and images nearby.

    Returns:
        Receivers (E,), whole cell vectors (E, 3), and records of senders (E, 11).
    """
    if not len(rows):
        return np.zeros(0), np.zeros((0, 3)), np.zeros((0, _WIDTH))
    own = table[rows]
    everything = np.concatenate([own, others])
    points = everything[:, :3] @ frame.cell
    # an open box: images are points of their own
    edges = edges_within(points, np.zeros((3, 3)), np.zeros(3, bool), width)
    mine = edges.receiver < len(own)
    i, j = edges.receiver[mine], edges.sender[mine]
    return rows[i], everything[j, 3:6] - own[i, 3:6], everything[j]


def _images_within(
    records: np.ndarray, box: np.ndarray, low: np.ndarray, high: np.ndarray, pbc: np.ndarray
) -> Iterator:
    """Copies of records, moved by each image that brings some of their ``box`` (2, 3) between ``low`` and ``high``."""
    if not np.isfinite(low).all():  # that rank has no atoms
        return
    first = np.where(pbc, np.ceil(low - box[1]), 0).astype(int)
    last = np.where(pbc, np.floor(high - box[0]), 0).astype(int)
    for image in itertools.product(*(range(a, b + 1) for a, b in zip(first, last, strict=True))):
        scaled = records[:, :3] + image
        found = records[((scaled >= low) & (scaled <= high)).all(1)]
        found[:, :6] += (*image, *image)
        yield found
