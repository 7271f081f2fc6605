"""Directed edges within a cutoff, all periodic images included. The search itself is vesin's.

One signature: the edges whose receiver is in a given set of atoms, with senders anywhere. Convention of the
core: ``r = x_sender + shift @ cell - x_receiver``, with the positions as the user gave them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from vesin import NeighborList

from nvdd.cells import Frame
from nvdd.data import Batch
from nvdd.model_config import EdgeLayout

_MANY = 4000  # points from which on it matters that pairs are looked for between receivers and others only


class Edges(NamedTuple):
    """Directed edges, grouped by receiver.

    Attributes:
        receiver: (E,) int64.
        sender: (E,) int64.
        shift: (E, 3) whole cell vectors, float64.
    """

    receiver: np.ndarray
    sender: np.ndarray
    shift: np.ndarray


def edges_within(
    positions: np.ndarray, cell: np.ndarray, pbc: np.ndarray, cutoff: float, receivers: np.ndarray | None = None
) -> Edges:
    """Edges with r < cutoff into the atoms ``receivers`` (indices into ``positions``; None for all of them).

    Args:
        positions: (N, 3) A, wrapped or not.
        cell: (3, 3) A.
        pbc: (3,) bool.
        cutoff: A.
        receivers: sorted indices of the atoms whose neighbours are wanted.
    """
    frame = Frame.of(cell, pbc)
    scaled, cells = frame.wrap(positions)
    if receivers is None or len(receivers) == len(positions):
        i, j, shift = _search(scaled @ frame.cell, frame.cell, frame.pbc, cutoff)
    else:
        if not len(receivers):
            return Edges(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 3)))
        i, j, shift = _search_around(scaled, frame, cutoff, receivers)
    # images relative to the atoms where the user has them, not to their wrapped copies
    return Edges(i, j, shift + cells[i] - cells[j])


def _search(points: np.ndarray, box: np.ndarray, pbc: np.ndarray, cutoff: float) -> tuple[np.ndarray, ...]:
    if not len(points):
        return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 3))
    finder = NeighborList(cutoff=float(cutoff), full_list=True, sorted=True)
    i, j, shift = finder.compute(points=points, box=box, periodic=pbc, quantities="ijS")
    return i.astype(np.int64), j.astype(np.int64), shift.astype(np.float64)


def points_around(
    positions: np.ndarray, cell: np.ndarray, pbc: np.ndarray, reach: float, receivers: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Every atom and image that may be within ``reach`` of a receiver: all that are near the receivers' box.

    Args:
        positions: (N, 3) A, wrapped or not.
        cell: (3, 3) A.
        pbc: (3,) bool.
        reach: A.
        receivers: sorted indices of atoms.

    Returns:
        (P,) indices of atoms, and (P, 3) whole cells from where the user has the atom to the point. The first are the
        receivers, all within one cell.
    """
    frame = Frame.of(cell, pbc)
    scaled, cells = frame.wrap(positions)
    atom, image = _around(scaled, frame, reach, receivers)
    return atom, image - cells[atom]


def _around(scaled: np.ndarray, frame: Frame, cutoff: float, receivers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(P,) atoms and (P, 3) images that come near the receivers' box: the receivers in their order, then the others."""
    if not len(receivers):
        return np.zeros(0, np.int64), np.zeros((0, 3))
    reach = cutoff / frame.heights * (1 + 1e-9) + 1e-12
    low = scaled[receivers].min(0) - reach
    high = scaled[receivers].max(0) + reach
    atom, image = np.arange(len(scaled)), np.zeros((len(scaled), 3))
    for axis in range(3):
        images = np.arange(np.floor(low[axis]), np.ceil(high[axis]) + 1) if frame.pbc[axis] else np.zeros(1)
        found = []
        for n in images:
            coordinate = scaled[atom, axis] + n
            near = np.flatnonzero((coordinate >= low[axis]) & (coordinate <= high[axis]))
            shifted = image[near]
            shifted[:, axis] = n
            found.append((atom[near], shifted))
        atom = np.concatenate([a for a, _ in found])
        image = np.concatenate([s for _, s in found])
    own = np.zeros(len(scaled), bool)
    own[receivers] = True
    other = np.flatnonzero(~(own[atom] & ~image.any(1)))
    atom = np.concatenate([receivers, atom[other]])
    return atom, np.concatenate([np.zeros((len(receivers), 3)), image[other]])


def _search_around(scaled: np.ndarray, frame: Frame, cutoff: float, receivers: np.ndarray) -> tuple[np.ndarray, ...]:
    """Searches among the receivers and every image of every atom that comes near their bounding box."""
    atom, image = _around(scaled, frame, cutoff, receivers)
    points = (scaled[atom] + image) @ frame.cell
    if len(points) > max(_MANY, 4 * len(receivers)):
        i, j = _search_in_blocks(points, len(receivers), cutoff)
        return receivers[i], atom[j], image[j]
    extent = np.diag(np.ptp(points, axis=0) + 2 * cutoff)
    i, j, _ = _search(points, extent, np.zeros(3, bool), cutoff)
    mine = i < len(receivers)
    i, j = i[mine], j[mine]
    return receivers[i], atom[j], image[j]


def _search_in_blocks(points: np.ndarray, n_receivers: int, cutoff: float) -> tuple[np.ndarray, np.ndarray]:
    """(E,) receivers and (E,) senders: pairs of the first points with any other one, grouped by receiver.

    Where a cutoff is as long as a domain, most points are neighbours' surroundings, whose pairs with one another nobody
    wants. Here blocks of receivers that are near each other look at what is near their box.
    """
    along = np.argsort(points[:, 0], kind="stable")  # candidates of a block are a slice of this
    sorted_x = points[along, 0]
    cells = np.floor(points[:n_receivers] / (cutoff / 4)).astype(np.int64)
    order = np.lexsort(cells.T)
    starts = np.flatnonzero(np.r_[True, (np.diff(cells[order], axis=0) != 0).any(1)])
    receivers, senders = [], []
    for block in np.split(order, starts[1:]):
        low, high = points[block].min(0) - cutoff, points[block].max(0) + cutoff
        near = along[np.searchsorted(sorted_x, low[0]) : np.searchsorted(sorted_x, high[0], "right")]
        near = near[((points[near, 1:] >= low[1:]) & (points[near, 1:] <= high[1:])).all(1)]
        squared = np.zeros((len(block), len(near)))
        for axis in range(3):
            squared += np.subtract.outer(points[block, axis], points[near, axis]) ** 2
        i, j = np.nonzero((squared < cutoff**2) & (block[:, None] != near))
        receivers.append(block[i])
        senders.append(near[j])
    return np.concatenate(receivers), np.concatenate(senders)


def is_first_of_pair(receiver: np.ndarray, sender: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """(E,) bool: of an edge and its reverse the one that stands for their bond.

    The one whose receiver has the smaller id; between images of one atom the one whose image is positive in the
    first cell vector that differs.
    """
    s = np.rint(shift).astype(np.int64)
    positive = (s[:, 0] > 0) | ((s[:, 0] == 0) & ((s[:, 1] > 0) | ((s[:, 1] == 0) & (s[:, 2] > 0))))
    return (receiver < sender) | ((receiver == sender) & positive)


def attach_neighbors(
    batch: Batch, cutoff: float, layout: EdgeLayout | None = None, bond_cutoff: float | None = None
) -> Batch:
    """Sets ``neighbor_list`` and ``neighbor_list_shifts`` of a batch of plain tensors, in place; returns it.

    Reverse edges and bonds are set as well (``reverse_edges``, ``bond_of_edge``, ``edge_of_bond``); with ``bond_cutoff`` in
    A, as `NeighborConfig` has it, those of shorter edges alone (``bonded_edges``).
    """
    layout = layout or batch.edge_layout
    system = batch.batch.cpu().numpy()
    positions = batch.positions.detach().cpu().numpy().astype(np.float64)
    cells = batch.cell.detach().cpu().numpy().astype(np.float64)
    columns, shifts, receivers, senders = [], [], [], []
    for k in range(batch.n_systems):
        atoms = np.flatnonzero(system == k)
        found = edges_within(positions[atoms], cells[k], batch.pbc[k].cpu().numpy(), cutoff)
        pair = (found.receiver, found.sender) if layout.sender_column == 1 else (found.sender, found.receiver)
        columns.append(atoms[np.stack(pair, 1)])
        shifts.append(layout.sign * found.shift)
        receivers.append(atoms[found.receiver])
        senders.append(atoms[found.sender])
    batch.neighbor_list = torch.from_numpy(np.concatenate(columns)).to(batch.device)
    batch.neighbor_list_shifts = torch.from_numpy(np.concatenate(shifts)).to(batch.device)
    batch.edge_layout = layout
    batch._edge_vectors = None
    edges = np.concatenate(receivers), np.concatenate(senders), layout.sign * np.concatenate(shifts)
    attach_bonds(batch, *edges, bond_cutoff)
    return batch


def attach_bonds(
    batch: Batch, receiver: np.ndarray, sender: np.ndarray, shift: np.ndarray, bond_cutoff: float | None = None
) -> None:
    """Sets reverse edges and bonds of the batch's edges, (E,), (E,) and their images (E, 3) in the core's convention."""
    put = lambda a: torch.from_numpy(a).to(batch.device)
    batch.bonded_edges = None
    if bond_cutoff is not None:
        squared = batch.edge_vectors.detach().to(torch.float64).square().sum(1).cpu().numpy()
        short = np.flatnonzero(squared < bond_cutoff**2)
        batch.bonded_edges = put(short)
        receiver, sender, shift = receiver[short], sender[short], shift[short]
    forward = np.column_stack([receiver, sender, np.rint(shift).astype(np.int64)])
    backward = np.column_stack([sender, receiver, -np.rint(shift).astype(np.int64)])
    order, back = np.lexsort(forward.T), np.lexsort(backward.T)
    reverse = np.empty(len(order), np.int64)
    reverse[back] = order
    first = is_first_of_pair(receiver, sender, shift)
    number = np.cumsum(first) - 1
    batch.reverse_edges = put(reverse)
    batch.bond_of_edge = put(number[np.where(first, np.arange(len(first)), reverse)])
    batch.edge_of_bond = put(np.flatnonzero(first))
