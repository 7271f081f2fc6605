"""Numbers on GPUs: the calculator on 1 and N ranks, on one GPU and several, against references on the CPU.

    python benchmarks/gpu_parity.py

Lennard-Jones (Warp kernel, float64) against a brute-force sum; MACE with random weights (float64) against
MACECalculator on the CPU. Exits with 1 if a number is off.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))


def main() -> int:
    import parity
    from nvdd_ase import NVDDCalculator

    failures = 0
    n_gpus = torch.cuda.device_count()
    places = [("cuda", 1), ("cuda", n_gpus), ("cuda:0", 2), ("cuda:0", 4)]
    cases = [("lj", s) for s in ("triclinic", "slab", "tiny cell", "gas")] + [
        ("mace-zbl", "quartz"),
        ("mace", "quartz slab"),
    ]
    print(f"{n_gpus} GPUs, torch {torch.__version__}")
    for device, ranks in places:
        for model, structure in cases:
            atoms, expected = parity.structure(structure).copy(), parity.reference(model, structure)
            start = time.perf_counter()
            with NVDDCalculator(parity.wrapper(model), ranks=ranks, device=device) as calculator:
                atoms.calc = calculator
                energy, forces = atoms.get_potential_energy(), atoms.get_forces()
                where = {r["device"] for r in calculator.report()}
            error, largest = np.abs(forces - expected.forces).max(), np.abs(expected.forces).max()
            ok = error <= 1e-11 * largest + 1e-13 and abs(energy - expected.energy) <= 1e-11 * abs(expected.energy)
            failures += not ok
            print(f"{'ok ' if ok else 'BAD'} {model:9s} {structure:12s} {ranks} ranks on {sorted(where)}: "
                  f"|dE| {abs(energy - expected.energy):.1e} eV, max |dF| {error:.1e} of {largest:.2f} eV/A, "
                  f"{time.perf_counter() - start:.1f} s", flush=True)  # fmt: skip
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
