"""One ASE script for any model: dynamics at constant energy, whatever the model and the strategy.

    python examples/any_model.py lj
    python examples/any_model.py sevenn:7net-0 --ranks 2
    python examples/any_model.py torchani:ani-1x --ranks 2 --strategy graph --steps 20
    python examples/any_model.py nequip:my.nequip.zip --structure ice.xyz

Without --structure: eight molecules of water. Nothing in it depends on the model: its name is all that changes.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
from ase import Atoms, units
from ase.build import molecule
from ase.io import read
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution
from ase.md.verlet import VelocityVerlet

from nvdd_ase import NVDDCalculator


def water() -> Atoms:
    """24 atoms in a periodic cell of 6.2 A."""
    atoms, random = Atoms(cell=[6.2, 6.2, 6.2], pbc=True), np.random.default_rng(6)
    for place in np.ndindex(2, 2, 2):
        one = molecule("H2O")
        one.rotate(random.uniform(0, 360), random.normal(size=3))
        one.positions += 3.1 * np.array(place) + 1.0
        atoms += one
    return atoms


def main() -> int:
    """Runs the dynamics and prints the energy of each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="lj")
    parser.add_argument("--structure", help="a file that ASE reads")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--strategy", default="halo")
    parser.add_argument("--dtype")
    parser.add_argument("--steps", type=int, default=5)
    given = parser.parse_args()

    atoms = read(given.structure) if given.structure else water()
    with NVDDCalculator(given.model, ranks=given.ranks, strategy=given.strategy, dtype=given.dtype) as calculator:
        atoms.calc = calculator
        MaxwellBoltzmannDistribution(atoms, temperature_K=100, rng=np.random.default_rng(0))
        dynamics = VelocityVerlet(atoms, timestep=0.2 * units.fs)
        print(f"{'step':>4}  {'potential, eV':>22}  {'total, eV':>22}")
        for _ in dynamics.irun(given.steps):
            print(f"{dynamics.nsteps:4d}  {atoms.get_potential_energy():22.15g}  {atoms.get_total_energy():22.15g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
