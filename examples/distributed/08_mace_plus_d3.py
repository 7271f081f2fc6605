"""MACE with D3 dispersion: the sum of two models over ranks, compared with both by themselves, then dynamics.

    python examples/distributed/08_mace_plus_d3.py

A layer of a silicate-like oxide above another one: the network sees 4.5 A far, dispersion 12 A. The MACE has random weights;
take a trained one by its file, "mace:my.model". The exit code is 1 if a number differs by more than rounding.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
from ase import Atoms, units
from ase.build import bulk
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution
from ase.md.verlet import VelocityVerlet

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from random_mace import random_mace

from nvdd_ase import NVDDCalculator

SHORT = os.environ.get("NVDD_EXAMPLES_SHORT") == "1"
D3 = {"cutoff": 12.0, "cutoff_cn": 8.0}  # A; by default 31.75 and 21.17, as in s-dftd3


def layers() -> Atoms:
    """Two layers of SiO in the structure of rock salt, 3.4 A apart; periodic in the plane."""
    layer = bulk("SiO", "rocksalt", a=4.4, cubic=True).repeat((2, 2, 1))
    upper = layer.copy()
    upper.positions += [1.1, 0.7, 2.2 + 3.4]
    atoms = layer + upper
    atoms.set_cell([*layer.cell.array[:2], [0, 0, 30.0]])
    atoms.pbc = (True, True, False)
    atoms.rattle(0.02, seed=1)
    return atoms


def results(atoms: Atoms, calculator: NVDDCalculator) -> tuple[float, np.ndarray]:
    """Energy (eV) and forces (eV/A)."""
    atoms.calc = calculator
    return atoms.get_potential_energy(), atoms.get_forces()


def main() -> int:
    """Compares, then runs dynamics."""
    warnings.filterwarnings("ignore")  # the model packages warn about what does not matter here
    atoms, steps = layers(), 3 if SHORT else 50
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "random.model")
        torch.save(random_mace(), file)
        alone = [
            results(atoms, NVDDCalculator(f"mace:{file}")),
            results(atoms, NVDDCalculator("dftd3:pbe", model_options=D3)),
        ]
        # a list with options for each block; {"dftd3.cutoff": 12.0, ...} says the same
        with NVDDCalculator(f"mace:{file} + dftd3:pbe", ranks=2, model_options=[None, D3]) as both:
            energy, forces = results(atoms, both)
            agrees = compare(energy, forces, alone)
            MaxwellBoltzmannDistribution(atoms, temperature_K=300, rng=np.random.default_rng(0))
            before = atoms.get_total_energy()
            VelocityVerlet(atoms, 0.5 * units.fs).run(steps)
            drift = atoms.get_total_energy() - before
            print(f"{steps} steps of 0.5 fs: the total energy has changed by {drift:.2e} eV")
            for report in both.report():
                print(f"  process {report['pid']}: {report['owned']} atoms, reads {report['halo']} of the other one")
    return 0 if agrees else 1


def compare(energy: float, forces: np.ndarray, alone: list[tuple[float, np.ndarray]]) -> bool:
    """The sum on two ranks, and the sum of both."""
    (mace, mace_forces), (d3, d3_forces) = alone
    print(f"MACE {mace:.6f} eV, D3 {d3:.6f} eV; both on two ranks {energy:.6f} eV")
    off = np.abs(forces - mace_forces - d3_forces).max() / np.abs(forces).max()
    print(f"forces differ from the sum of both by {off:.1e} of the largest")
    agrees = bool(abs(energy - mace - d3) <= 1e-11 * abs(energy) and off <= 1e-10)
    if not agrees:
        print("NOT THE SAME")
    return agrees


if __name__ == "__main__":
    sys.exit(main())
