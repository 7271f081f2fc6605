"""Molten sodium chloride over two ranks: charges by Ewald's sum, what keeps ions apart by Lennard-Jones.

    python 09_charged_melt_ewald.py

Charges are ASE's initial charges. The parameters are those of Joung and Cheatham (J. Phys. Chem. B 112 (2008) 9020, for
SPC/E). "lj + ewald" is the sum of two models, which share one partition. First some Langevin dynamics at 1 300 K, then
NVE dynamics, whose total energy must stay; at the end, the same forces from one rank. For more than some thousand ions
write "lj + pme". The exit code is 1 if energy drifts or ranks do not agree.
"""

from __future__ import annotations

import os
import sys

import numpy as np
from ase import Atoms, units
from ase.build import bulk
from ase.md.langevin import Langevin
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution
from ase.md.verlet import VelocityVerlet

from nvdd_ase import NVDDCalculator

SHORT = "NVDD_EXAMPLES_SHORT" in os.environ
REPEAT, EQUILIBRATION, STEPS = (2, 10, 10) if SHORT else (3, 500, 1000)
IONS = {
    "epsilon": {"Na": 0.015292, "Cl": 0.000554},  # eV
    "sigma": {"Na": 2.160, "Cl": 4.830},  # A
    "mixing": "arithmetic",
    "cutoff": 9.0,
    "shift": "smooth",
}


def salt() -> Atoms:
    """Rock salt at the density of the melt, with charges."""
    atoms = bulk("NaCl", "rocksalt", a=6.2, cubic=True).repeat(REPEAT)
    atoms.set_initial_charges([1.0 if symbol == "Na" else -1.0 for symbol in atoms.symbols])
    return atoms


def calculator(ranks: int) -> NVDDCalculator:
    return NVDDCalculator(
        "lj + ewald", ranks=ranks, device="cpu", model_options=[IONS, {"cutoff": 9.0, "accuracy": 1e-8}]
    )


def main() -> int:
    atoms, random = salt(), np.random.default_rng(1)
    with calculator(ranks=2) as atoms.calc:
        MaxwellBoltzmannDistribution(atoms, temperature_K=2600, rng=random)  # half of it goes into the crystal
        Langevin(atoms, 1.0 * units.fs, temperature_K=1300, friction=0.01 / units.fs, fixcm=False, rng=random).run(EQUILIBRATION)
        print(f"{len(atoms)} ions, {atoms.get_temperature():.0f} K")
        dynamics, energies = VelocityVerlet(atoms, 1.0 * units.fs), []
        dynamics.attach(lambda: energies.append(atoms.get_total_energy() / len(atoms)))
        dynamics.run(STEPS)
        drift = abs(energies[-1] - energies[0])
        print(f"after {STEPS} fs: total energy {energies[-1]:.6f} eV an ion, {1e3 * drift:.4f} meV from the first")
        print(f"pressure {-atoms.get_stress()[:3].mean() / units.GPa:.2f} GPa")
        forces = atoms.get_forces()
    atoms.calc = calculator(ranks=1)
    difference = np.abs(atoms.get_forces() - forces).max()
    print(f"forces from one rank differ by {difference:.1e} eV/A")
    return int(drift > 2e-3 or difference > 1e-10)


if __name__ == "__main__":
    sys.exit(main())
