"""Constant pressure with MACE, and a restart on another number of ranks.

    python examples/distributed/06_mace_npt_distributed.py

The first half runs on two ranks and ends with a checkpoint; the second half goes on from it on one. Energies, pressure
and the shape of the cell are in one log. The model has random weights.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch
from ase.build import bulk

from nvdd_ase import DistributedMD
from nvdd_ase.plots import plot_md_log

sys.path.insert(0, str(Path(__file__).parent.parent))
from random_mace import random_mace

warnings.filterwarnings("ignore")
SHORT = "NVDD_EXAMPLES_SHORT" in os.environ
STEPS, INTERVAL = (10, 5) if SHORT else (500, 10)


def main() -> None:
    torch.save(random_mace(n_layers=1), "random.model")
    atoms = bulk("SiO", "rocksalt", a=4.6, cubic=True).repeat(2)
    atoms.rattle(0.03, seed=2)
    options = {
        "ensemble": "npt", "npt_mode": "full", "temperature": 300.0, "pressure": 0.0, "tau_t": 100.0, "tau_p": 1000.0,
        "timestep": 1.0, "seed": 3, "log": "npt.csv", "trajectory": "npt.extxyz", "interval": INTERVAL,
        "checkpoint": "npt.ckpt",
    }  # fmt: skip
    with DistributedMD(atoms, "mace:random.model", ranks=2, **options) as md:
        md.run(STEPS)
        print(
            f"step {md.step} on 2 ranks: V = {atoms.get_volume():.2f} A^3, conserved {md.record['conserved_eV']:.6f} eV"
        )
    with DistributedMD(atoms, "mace:random.model", ranks=1, restart="npt.ckpt", **options) as md:
        print(f"step {md.step} on 1 rank, from the checkpoint")
        md.run(STEPS)
        print(f"step {md.step}: V = {atoms.get_volume():.2f} A^3, conserved {md.record['conserved_eV']:.6f} eV")
        print("cell lengths and angles:", " ".join(f"{x:.3f}" for x in atoms.cell.cellpar()))
    plot_md_log("npt.csv", "npt.png", title="SiO, MACE, NPT")
    print("written: npt.csv, npt.extxyz, npt.ckpt, npt.png")


if __name__ == "__main__":
    main()
