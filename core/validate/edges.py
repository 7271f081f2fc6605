"""Halo completeness: the edges that each rank gave the model, against those of the single process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from nvdd.data import Batch
from nvdd.nearby import EDGES_AT_ONCE
from nvdd.neighbors import edges_within

_ON_THE_SPHERE = 1e-8  # part of the cutoff: an edge of just this length may be rounded in or out
_SHOWN = 5


def reference_edges(batch: Batch, cutoff: float) -> np.ndarray:
    """(E, 5) int64 receiver, sender, image of every edge of the batch, by a search of the whole."""
    system, positions = batch.batch.cpu().numpy(), batch.positions.detach().cpu().numpy().astype(np.float64)
    found = []
    for k in range(batch.n_systems):
        atoms = np.flatnonzero(system == k)
        edges = edges_within(positions[atoms], batch.cell[k].cpu().numpy(), batch.pbc[k].cpu().numpy(), cutoff)
        shift = np.rint(edges.shift).astype(np.int64)
        found.append(np.column_stack([atoms[edges.receiver], atoms[edges.sender], shift]))
    return np.concatenate(found) if found else np.zeros((0, 5), np.int64)


def rank_edges(graph: Any, cutoff: float) -> np.ndarray:
    """(E, 5) the same of one rank's `LocalGraph`, by global ids: of its list, or of its blocks, within ``cutoff`` (A).

    Edges beyond it, which a model is given that drops them, are left out before: its numbers tell whether it does.
    """
    rows, parts = graph.topology.rows, [(graph.receiver, graph.sender, graph.shift)]
    if graph.nearby is not None:
        blocks = graph.nearby.blocks(cutoff, EDGES_AT_ONCE)
        parts = [(*blocks.edges(k)[1:3], blocks.shifts(k)) for k in range(len(blocks.bounds))]
    table = [torch.cat([rows[i][:, None], rows[j][:, None], s.round().long()], 1).cpu().numpy() for i, j, s in parts]
    return np.concatenate(table).astype(np.int64)


def lengths(edges: np.ndarray, batch: Batch) -> np.ndarray:
    """(E,) A."""
    x, system = batch.positions.detach().cpu().numpy(), batch.batch.cpu().numpy()
    cells = batch.cell.cpu().numpy()[system[edges[:, 0]]]
    vectors = x[edges[:, 1]] - x[edges[:, 0]] + np.einsum("ei,eij->ej", edges[:, 2:].astype(float), cells)
    return np.linalg.norm(vectors, axis=1)


@dataclass(frozen=True)
class HaloCompleteness:
    """Whether the ranks together have every edge exactly once, on the rank that owns its receiver.

    Attributes:
        geometry: where.
        matches: the verdict.
        missing: (receiver, sender, image) of edges that no rank has.
        surplus: of edges that are no edges of the single process, or that several ranks have.
        misplaced: of edges on another rank than their receiver's owner.
        by_rank: number of edges of each rank.
    """

    geometry: str
    matches: bool
    missing: list[tuple[int, ...]] = field(default_factory=list)
    surplus: list[tuple[int, ...]] = field(default_factory=list)
    misplaced: list[tuple[int, ...]] = field(default_factory=list)
    by_rank: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.matches:
            return f"halo complete: {sum(self.by_rank)} edges {self.by_rank}"
        parts = [
            f"{len(value)} edges {what} (receiver, sender, image): {', '.join(map(str, value[:_SHOWN]))}"
            for value, what in (
                (self.missing, "missing"),
                (self.surplus, "too many"),
                (self.misplaced, "on the wrong rank"),
            )
            if value
        ]
        return f"halo incomplete in {self.geometry}: " + "; ".join(parts)


def check_edges(
    geometry: str, batch: Batch, cutoff: float, expected: np.ndarray, found: Sequence[np.ndarray], ids: Sequence[Any]
) -> HaloCompleteness:
    """Compares the edges of all ranks with the single process's.

    Args:
        expected: (E, 5) of `reference_edges`.
        found: of each rank, `rank_edges`.
        ids: of each rank, the global ids that it owns.
    """

    def keys(edges: np.ndarray) -> Counter:
        near = np.abs(lengths(edges, batch) - cutoff) > _ON_THE_SPHERE * cutoff
        return Counter(map(tuple, edges[near].tolist()))

    wanted, have = keys(expected), keys(np.concatenate([*found, np.zeros((0, 5), np.int64)]))
    missing, surplus = sorted((wanted - have).elements()), sorted((have - wanted).elements())
    misplaced = []
    for mine, edges in zip(ids, found, strict=True):
        misplaced += [tuple(e) for e in edges[~np.isin(edges[:, 0], np.asarray(mine))].tolist()]
    matches = not (missing or surplus or misplaced)
    return HaloCompleteness(geometry, matches, missing, surplus, misplaced, tuple(len(f) for f in found))
