"""Draws docs/figures/partition.png: a flat crystal on four ranks, and what one of them holds.

    python docs/figures/partition.py

Owners come from nvdd.partition, edges from nvdd.neighbors, as in a run.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import Polygon

from nvdd.neighbors import edges_within
from nvdd.partition import SpatialPartitioner

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44")
CUTOFF = 4.6  # A
RANK = 0


def crystal() -> tuple[np.ndarray, np.ndarray]:
    """Positions (N, 3) and cell (3, 3) of a triangular lattice with vacancies, periodic in x and y, A."""
    d, columns, rows = 2.9, 10, 10
    grid = np.array([(i + 0.5 * (j % 2), j * np.sqrt(3) / 2, 0) for j in range(rows) for i in range(columns)])
    random = np.random.default_rng(4)
    positions = d * (grid + np.array([0.25, 0.4, 0])) + 0.12 * d * random.uniform(-1, 1, grid.shape) * [1, 1, 0]
    keep = np.ones(len(grid), bool)
    keep[random.choice(len(grid), 7, replace=False)] = False
    return positions[keep], np.diag([columns * d, rows * d * np.sqrt(3) / 2, 0.0])


def main() -> None:
    """Draws both panels."""
    positions, cell = crystal()
    pbc = np.array([True, True, False])
    owner = SpatialPartitioner(len(COLOURS), grid=(2, 2, 1)).assign(positions, cell, pbc)
    figure = Figure(figsize=(10, 5))
    left, right = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.01, right=0.99, bottom=0.01, top=0.93, wspace=0.03)
    draw_owners(left, positions, cell, owner)
    draw_rank(right, positions, cell, pbc, owner)
    for axes in (left, right):
        axes.set_aspect("equal")
        axes.axis("off")
        axes.set_xlim(-4, cell[0, 0] + 4)
        axes.set_ylim(-6, cell[1, 1] + 2)
    figure.savefig(Path(__file__).with_name("partition.png"), dpi=110)


def draw_owners(axes: Axes, positions: np.ndarray, cell: np.ndarray, owner: np.ndarray) -> None:
    """Every atom in the colour of its owner."""
    draw_cell(axes, cell)
    for rank, colour in enumerate(COLOURS):
        mine = positions[owner == rank]
        axes.scatter(*mine[:, :2].T, s=70, color=colour, label=f"rank {rank} ({len(mine)})", zorder=2)
    axes.legend(loc="lower center", ncols=4, frameon=False, fontsize=9, handletextpad=0.1, columnspacing=0.8)
    axes.set_title("owners: one rank for each atom (in brackets: how many)", fontsize=12)


def draw_rank(axes: Axes, positions: np.ndarray, cell: np.ndarray, pbc: np.ndarray, owner: np.ndarray) -> None:
    """The owned atoms of one rank, the edges into them, and where their senders are."""
    edges = edges_within(positions, cell, pbc, CUTOFF, np.flatnonzero(owner == RANK))
    end = positions[edges.receiver]
    start = positions[edges.sender] + edges.shift @ cell
    halo = np.unique(edges.sender[owner[edges.sender] != RANK])

    draw_cell(axes, cell)
    axes.add_collection(
        LineCollection(list(np.stack([start, end], 1)[:, :, :2]), colors="0.75", linewidths=0.7, zorder=1)
    )
    axes.scatter(*positions[:, :2].T, s=10, color="0.8", zorder=1)
    axes.scatter(*positions[owner == RANK][:, :2].T, s=70, color=COLOURS[RANK], zorder=3)
    colours = np.array(COLOURS)[owner[halo]]
    axes.scatter(*positions[halo][:, :2].T, s=70, facecolors="white", edgecolors=colours, linewidths=2, zorder=3)
    outside = edges.shift.any(1)
    places = np.unique(np.column_stack([start[outside].round(6), edges.sender[outside]]), axis=0)
    edge_colours = np.array(COLOURS)[owner[places[:, 3].astype(int)]]
    axes.scatter(*places[:, :2].T, s=26, facecolors="white", edgecolors=edge_colours, linewidths=1, zorder=2)
    axes.set_title(
        f"rank {RANK}: {(owner == RANK).sum()} owned rows, {len(halo)} halo rows, {len(edges.sender)} edges",
        fontsize=12,
    )
    note = "full: owned row;  ring: halo row, in its owner's colour;\nsmall ring: periodic image of one, without a row of its own"
    axes.text(cell[0, 0] / 2, -5.8, note, ha="center", va="bottom", fontsize=9)


def draw_cell(axes: Axes, cell: np.ndarray) -> None:
    """The outline of the cell."""
    a, b = cell[0, :2], cell[1, :2]
    axes.add_patch(Polygon([0 * a, a, a + b, b], fill=False, color="0.4", linewidth=1, linestyle="--"))


if __name__ == "__main__":
    main()
