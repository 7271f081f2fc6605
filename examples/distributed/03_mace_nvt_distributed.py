"""Constant temperature with MACE over two ranks: the atoms stay there; log, trajectory, plot.

    python examples/distributed/03_mace_nvt_distributed.py

Runs Langevin dynamics of quartz and draws temperature, energy and pressure from the log. The model has random weights;
give ``mace:your.model`` for one that means something.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch
from ase.spacegroup import crystal

from nvdd_ase import DistributedMD
from nvdd_ase.plots import plot_md_log

sys.path.insert(0, str(Path(__file__).parent.parent))
from random_mace import random_mace

warnings.filterwarnings("ignore")
SHORT = "NVDD_EXAMPLES_SHORT" in os.environ
STEPS, INTERVAL = (10, 5) if SHORT else (500, 10)


def quartz():
    """Alpha-quartz, 72 atoms."""
    cell, sites = [4.9137, 4.9137, 5.4047, 90, 90, 120], [(0.4697, 0, 2 / 3), (0.4133, 0.2672, 0.7856)]
    atoms = crystal(["Si", "O"], sites, spacegroup=154, cellpar=cell)
    atoms = atoms.repeat((2, 2, 2))
    atoms.rattle(0.02, seed=1)
    return atoms


def main() -> None:
    torch.save(random_mace(), "random.model")
    atoms = quartz()
    with DistributedMD(
        atoms, "mace:random.model", ranks=2, ensemble="langevin", temperature=300.0, friction=0.01, timestep=1.0, seed=1,
        log="nvt.csv", trajectory="nvt.extxyz", interval=INTERVAL,
    ) as md:  # fmt: skip
        md.run(
            STEPS, progress=lambda done, now: print(f"step {done:5d}  T {now['temperature_K']:6.1f} K"), every=INTERVAL
        )
        for rank, found in enumerate(md.report()):
            print(
                f"rank {rank}: {found['owned']} atoms, {found['rebuilds']} searches for neighbours, {found['evaluations']} forces"
            )
    print(f"now in `atoms`: T = {atoms.get_temperature():.1f} K, E = {atoms.get_potential_energy():.4f} eV")
    plot_md_log("nvt.csv", "nvt.png", title="quartz, MACE, Langevin")
    print("written: nvt.csv, nvt.extxyz, nvt.png")


if __name__ == "__main__":
    main()
