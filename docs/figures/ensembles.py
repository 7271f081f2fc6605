"""Draws ensembles.png: argon under constant temperature and pressure, from the log of the run.

    python docs/figures/ensembles.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from ase.build import bulk

from nvdd import NPT, Simulation
from nvdd.dynamics.logs import CSVLog
from nvdd.models import load
from nvdd_ase.plots import plot_md_log


def main() -> None:
    model = load("lj", epsilon=0.0104, sigma=3.4, cutoff=8.5, shift="smooth")
    atoms = bulk("Ar", "fcc", a=5.4, cubic=True).repeat(3)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "argon.csv"
        dynamics = NPT(timestep=4.0, temperature=60.0, pressure=0.1, tau=100.0, tau_cell=400.0)
        run = Simulation(atoms, model, dynamics, hooks=[CSVLog(log, every=5)])
        run.draw_velocities(60.0, seed=1)
        run.run(500)
        plot_md_log(log, Path(__file__).with_suffix(".png"), "argon at 60 K and 0.1 GPa")


if __name__ == "__main__":
    main()
