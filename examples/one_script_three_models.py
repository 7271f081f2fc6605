"""One ASE script, three models: only the model string changes.

    python examples/one_script_three_models.py

Each model computes the same quartz on two ranks and then runs a few steps of dynamics. As a check, one process
computes the start and the end again. The exit code is 1 if a number is wrong. ``lj`` has its default parameters and
the MACE random weights: this shows how, not what.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
from ase import Atoms, units
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution
from ase.md.verlet import VelocityVerlet
from ase.spacegroup import crystal
from random_mace import random_mace

from nvdd_ase import NVDDCalculator

STEPS = 5
TOLERANCE = {"float64": 1e-11, "float32": 5e-6}  # of the largest force, by the type of the model's weights


def run(model: str, atoms: Atoms, ranks: int) -> tuple[float, float, str]:
    """The user's script: forces, then dynamics. Gives both errors against one process, and the model's type."""
    with NVDDCalculator(model, ranks=ranks) as calculator:
        atoms.calc = calculator
        first = atoms.get_forces()
        start = atoms.copy()
        MaxwellBoltzmannDistribution(atoms, temperature_K=300, rng=np.random.default_rng(0))
        before = atoms.get_total_energy()
        VelocityVerlet(atoms, timestep=1 * units.fs).run(STEPS)
        last, after = atoms.get_forces(), atoms.get_total_energy()
        loads = ", ".join(f"{r['owned']} atoms + {r['halo']} halo rows" for r in calculator.report())
        dtype = calculator.description["dtype"]
    print(f"  {loads}; energy per atom {before / len(atoms):.4f} -> {after / len(atoms):.4f} eV in {STEPS} fs")

    errors = []
    with NVDDCalculator(model, ranks=1) as one_process:
        for structure, forces in ((start, first), (atoms.copy(), last)):
            structure.calc = one_process
            expected = structure.get_forces()
            errors.append(np.abs(forces - expected).max() / np.abs(expected).max())
    return errors[0], errors[1], dtype


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


def main() -> int:
    """Runs the script with each model."""
    warnings.filterwarnings("ignore")  # the model packages warn about what does not matter here
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "random.model"
        torch.save(random_mace(), file)
        for model in ("lj", f"mace:{file}", "sevenn:7net-0"):
            print(model)
            first, last, dtype = run(model, quartz(), ranks=2)
            right = max(first, last) <= TOLERANCE[dtype]
            print(
                f"  2 ranks against 1: forces differ by {first:.1e} at the start, {last:.1e} at the end "
                f"(of the largest; allowed for {dtype}: {TOLERANCE[dtype]:.0e}): {'right' if right else 'WRONG'}"
            )
            if not right:
                wrong.append(model)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
