"""Dynamics of solid argon: one script for plain Python and for launchers.

    python examples/spmd_md.py
    torchrun --nproc-per-node 2 examples/spmd_md.py
    mpirun -n 2 python examples/spmd_md.py

Under a launcher each of its processes is a rank. All of them begin with the first line; from the calculator on the
script runs on rank 0 alone, so that the trajectory is written once. The numbers are the same up to rounding.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import numpy as np
from ase import units
from ase.build import bulk
from ase.io import Trajectory
from ase.md.verlet import VelocityVerlet

from nvdd_ase import NVDDCalculator

ARGON = {"epsilon": 0.0104, "sigma": 3.4, "cutoff": 8.5, "shift": "energy"}


def main() -> None:
    """Runs the dynamics and writes ``spmd_md.traj`` to the output folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="steps of 4 fs (%(default)s)")
    parser.add_argument("--cells", type=int, default=4, help="unit cells along each axis (%(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda: a GPU for each rank of a host (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("."), help="folder of the trajectory (%(default)s)")
    options = parser.parse_args()
    logging.basicConfig(level="INFO", format="%(message)s")  # shows which rank is where

    atoms = bulk("Ar", "fcc", a=5.3, cubic=True).repeat(options.cells)
    atoms.set_momenta(np.random.default_rng(1).normal(scale=0.4, size=(len(atoms), 3)))
    atoms.calc = NVDDCalculator("lj", model_options=ARGON, device=options.device)
    # From here on, only rank 0.
    options.output.mkdir(parents=True, exist_ok=True)
    print(f"{len(atoms)} atoms on {atoms.calc.ranks} rank(s)")
    dynamics = VelocityVerlet(atoms, timestep=4 * units.fs)
    with Trajectory(options.output / "spmd_md.traj", "w", atoms) as trajectory:
        dynamics.attach(trajectory.write, interval=5)
        dynamics.attach(lambda: report(dynamics.nsteps, atoms), interval=5)
        dynamics.run(options.steps)
    for rank, load in enumerate(atoms.calc.report()):
        print(f"rank {rank}: {load['owned']} atoms, {load['halo']} more that it reads, {load['edges']} edges")


def report(step: int, atoms) -> None:
    """One line: step, energies (eV), temperature (K)."""
    potential, kinetic = atoms.get_potential_energy(), atoms.get_kinetic_energy()
    print(
        f"step {step:4d}  E {potential + kinetic:.6f} eV  E pot {potential:.6f} eV  T {atoms.get_temperature():.1f} K"
    )


if __name__ == "__main__":
    main()
