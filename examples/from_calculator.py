"""Distributes the calculators that a script already has, and compares with what they give by themselves.

    python examples/from_calculator.py

SevenNet, MACE (random weights) and ASE's own Lennard-Jones, each on two ranks. The exit code is 1 if a number
differs by more than rounding.
"""

from __future__ import annotations

import sys
import warnings

import numpy as np
from ase import Atoms
from ase.build import bulk
from ase.calculators.calculator import Calculator
from ase.calculators.lj import LennardJones
from ase.spacegroup import crystal
from mace.calculators import MACECalculator
from random_mace import random_mace
from sevenn.calculator import SevenNetCalculator

from nvdd_ase import NVDDCalculator

# relative, by the type of the weights: of the largest force and stress, and of the energy
TOLERANCE = {"float64": 1e-11, "float32": 5e-6}


def compare(atoms: Atoms, own: Calculator) -> bool:
    """The calculator by itself, then over two ranks."""
    print(f"{type(own).__name__}, {len(atoms)} atoms")
    atoms.calc = own
    expected = results(atoms)
    with NVDDCalculator.from_calculator(own, ranks=2) as distributed:
        atoms.calc = distributed
        found = results(atoms)
        allowed = TOLERANCE[distributed.description["dtype"]]
    agrees = True
    for name, value in expected.items():
        largest = np.abs(value).max()
        error = np.abs(found[name] - value).max() / largest
        agrees &= bool(error <= allowed)
        print(f"  {name:7s} largest {largest:12.6f}  differs by {error:.1e} of it (allowed {allowed:.0e})")
    print("  the same" if agrees else "  NOT THE SAME")
    return agrees


def results(atoms: Atoms) -> dict[str, np.ndarray]:
    """Energy (eV), forces (eV/A), stress (eV/A^3, Voigt order)."""
    return {
        "energy": np.array([atoms.get_potential_energy()]),
        "forces": atoms.get_forces(),
        "stress": atoms.get_stress(),
    }


def quartz() -> Atoms:
    """72 atoms of alpha-quartz."""
    atoms = crystal(
        ["Si", "O"],
        [(0.4697, 0, 2 / 3), (0.4135, 0.2669, 0.7858)],
        spacegroup=154,
        cellpar=[4.913, 4.913, 5.405, 90, 90, 120],
    ).repeat(2)
    atoms.rattle(0.02, seed=1)
    return Atoms(atoms.symbols, atoms.positions, cell=atoms.cell, pbc=True)


def argon() -> Atoms:
    """108 atoms of argon."""
    atoms = bulk("Ar", "fcc", a=5.26, cubic=True).repeat(3)
    atoms.rattle(0.05, seed=1)
    return atoms


def main() -> int:
    """Compares three calculators."""
    warnings.filterwarnings("ignore")  # the model packages warn about what does not matter here
    agree = [
        compare(argon(), LennardJones(epsilon=0.0104, sigma=3.4, rc=7.5)),
        compare(quartz(), MACECalculator(models=random_mace(), device="cpu", default_dtype="float64")),
        compare(quartz(), SevenNetCalculator("7net-0", device="cpu")),
    ]
    return 0 if all(agree) else 1


if __name__ == "__main__":
    sys.exit(main())
