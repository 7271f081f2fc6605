"""Draws scaling.png from the tables in performance.md, where alone the numbers stand, and load_balance.png from partitions.

python docs/figures/performance.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from ase import Atoms
from ase.build import bulk
from matplotlib.figure import Figure

from nvdd.partition import SpatialPartitioner

HERE = Path(__file__).parent


def table(page: str, first_cell: str, other: str) -> list[list[str]]:
    """The rows of the first table of a page whose header begins with ``first_cell`` and has ``other``."""
    lines = (HERE.parent / page).read_text().splitlines()
    for k, line in enumerate(lines):
        if line.startswith(f"| {first_cell}") and other in line:
            rows = []
            for row in lines[k + 2 :]:
                if not row.startswith("|"):
                    return rows
                rows.append([cell.strip() for cell in row.strip("|").split("|")])
            return rows
    raise SystemExit(f"{page} has no table {first_cell} | ... {other}")


def scaling() -> None:
    """Step time and memory of one and two GPUs, by atoms."""
    rows = table("performance.md", "atoms |", "bare, one GPU")
    compiled = table("performance.md", "atoms |", '`"cudagraphs"`, two GPUs')
    atoms, one, two = ([float(row[k]) for row in rows] for k in range(3))
    memory = [[float(row[k]) for row in rows] for k in (4, 5)]
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    time, speed, bytes_ = figure.subplots(1, 3)
    time.loglog(atoms, one, "o-", label="bare model, one GPU")
    time.loglog(atoms, two, "s-", label="nvdd, two GPUs")
    time.loglog(atoms, [float(row[2]) for row in compiled], "^-", label="nvdd, two GPUs, CUDA graphs")
    time.set_ylabel("ms a step")
    speed.semilogx(atoms, [float(row[3]) for row in rows], "s-", color="C1", label="eager")
    speed.semilogx(atoms, [float(row[3]) for row in compiled], "^-", color="C2", label="CUDA graphs")
    speed.axhline(2.0, color="0.6", linestyle="--", linewidth=1)
    speed.set_ylabel("speed-up by two GPUs")
    speed.set_ylim(0, 2.2)
    bytes_.loglog(atoms, memory[0], "o-", label="bare model, one GPU")
    bytes_.loglog(atoms, memory[1], "s-", label="nvdd, each of two")
    bytes_.set_ylabel("GiB")
    for axes in (time, speed, bytes_):
        axes.set_xlabel("atoms")
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(HERE / "scaling.png", dpi=110)


def structures() -> dict[str, Atoms]:
    """A solid, a slab under vacuum, a cluster in a dilute gas."""
    random = np.random.default_rng(2)
    slab = bulk("Cu", cubic=True).repeat((6, 6, 4))
    slab.cell[2] *= 4
    gas = Atoms("Ar200", random.uniform(0, 60, (200, 3)), cell=[60.0] * 3, pbc=True)
    cluster = bulk("Cu", cubic=True).repeat(5)
    cluster.positions += 6.0
    gas += cluster
    crystal = bulk("Cu", cubic=True).repeat(6)
    for atoms in (crystal, slab):
        atoms.rattle(0.1, seed=1)
    return {"crystal": crystal, "slab and vacuum": slab, "cluster in a gas": gas}


def load_balance() -> None:
    """Largest number of atoms on a rank over the mean, as SpatialPartitioner divides them."""
    rows = []
    for name, atoms in structures().items():
        for ranks in (4, 8):
            parts = {}
            for balance in ("grid", "rcb"):
                owner = SpatialPartitioner(ranks, balance=balance).assign(
                    atoms.positions, atoms.cell.array, np.array(atoms.pbc)
                )
                parts[balance] = np.bincount(owner, minlength=ranks).max() * ranks / len(atoms)
            rows.append((f"{name}, {ranks} ranks", parts))
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axes = figure.subplots()
    for k, (balance, colour) in enumerate((("grid", "C1"), ("rcb", "C0"))):
        places = [row + 0.4 * k - 0.2 for row in range(len(rows))]
        bars = axes.barh(
            places, [parts[balance] for _, parts in rows], 0.36, color=colour, label=f'balance="{balance}"'
        )
        axes.bar_label(bars, fmt="%.2f", fontsize=8, padding=2)
    axes.axvline(1.0, color="0.4", linewidth=1)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("most atoms on a rank / mean")
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(HERE / "load_balance.png", dpi=110)


if __name__ == "__main__":
    scaling()
    load_balance()
