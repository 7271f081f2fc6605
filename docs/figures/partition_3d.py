"""Draws docs/figures/partition_3d.png: a crystal in three dimensions on eight ranks, and what one of them holds.

    python docs/figures/partition_3d.py

Owners come from nvdd.partition, edges from nvdd.neighbors, as in a run.
"""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path

import numpy as np
from ase.build import bulk
from matplotlib.figure import Figure
from mpl_toolkits.mplot3d.art3d import Line3DCollection

from nvdd.neighbors import edges_within
from nvdd.partition import SpatialPartitioner

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#ee8866")
CUTOFF = 3.2  # A: nearest neighbours
RANK = 0


def main() -> None:
    """Draws both panels."""
    atoms = bulk("Cu", cubic=True).repeat(4)
    atoms.rattle(0.1, seed=1)
    positions, cell, pbc = atoms.positions, atoms.cell.array, np.array(atoms.pbc)
    owner = SpatialPartitioner(len(COLOURS), grid=(2, 2, 2)).assign(positions, cell, pbc)
    edges = edges_within(positions, cell, pbc, CUTOFF, np.flatnonzero(owner == RANK))
    halo = np.unique(edges.sender[owner[edges.sender] != RANK])

    figure = Figure(figsize=(10, 5))
    left, right = (figure.add_subplot(1, 2, k, projection="3d") for k in (1, 2))
    figure.subplots_adjust(left=0.0, right=1.0, bottom=0.0, top=0.93, wspace=0.0)
    for rank, colour in enumerate(COLOURS):
        left.scatter(*positions[owner == rank].T, s=28, color=colour, depthshade=False, label=f"rank {rank}")
    left.legend(loc="lower center", ncols=4, frameon=False, fontsize=8, handletextpad=0.0, columnspacing=0.8)
    left.set_title(f"owners: {len(atoms)} atoms on {len(COLOURS)} ranks", fontsize=11)

    start = positions[edges.sender] + edges.shift @ cell
    lines = np.stack([start, positions[edges.receiver]], 1)
    right.add_collection3d(Line3DCollection(lines, colors="0.7", linewidths=0.5))
    right.scatter(*positions[owner == RANK].T, s=40, color=COLOURS[RANK], depthshade=False)
    right.scatter(
        *positions[halo].T,
        s=30,
        facecolors="white",
        edgecolors=np.array(COLOURS)[owner[halo]],
        linewidths=1.5,
        depthshade=False,
    )
    numbers = f"{(owner == RANK).sum()} owned rows, {len(halo)} halo rows, {len(edges.sender)} edges"
    right.set_title(f"rank {RANK}: {numbers}", fontsize=11)
    note = "full: owned row;  ring: halo row, where the atom itself is, in its owner's colour;\nlines out of the cell: edges to periodic images"
    right.text2D(0.5, 0.02, note, transform=right.transAxes, ha="center", fontsize=8)
    for axes in (left, right):
        axes.add_collection3d(Line3DCollection(_box(cell), colors="0.4", linewidths=0.8, linestyles="--"))
        axes.set_axis_off()
        axes.set_box_aspect((1, 1, 1), zoom=1.15)
        axes.view_init(elev=18, azim=-62)
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=110)


def _box(cell: np.ndarray) -> list[np.ndarray]:
    """The twelve edges of the cell."""
    corners = [np.array(corner) for corner in product((0, 1), repeat=3)]
    return [np.array([a @ cell, b @ cell]) for a, b in combinations(corners, 2) if abs(a - b).sum() == 1]


if __name__ == "__main__":
    main()
