"""Numbers on GPUs: the calculator on 1 and N ranks, on one GPU and several, against references on the CPU.

    python benchmarks/gpu_parity.py [--models lj,mace,...]

Lennard-Jones (Warp kernel, float64) against a brute-force sum; MACE with random weights (float64) against its own
calculator on the CPU; SevenNet-0 (float32) on one rank to 1e-6 of the largest force, since a CPU rounds otherwise, and on
several against one rank on the GPU to its own noise; DFT-D3 against its wrapper on plain tensors on the CPU; Ewald, PME
and lj + ewald against one process on the CPU, whose tests compare them with sums written out. Exits with 1 if a number
is off.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

CASES = {
    "lj": ("triclinic", "slab", "tiny cell", "gas"),
    "mace-zbl": ("quartz",),
    "mace": ("quartz slab",),
    "dftd3": ("quartz", "quartz slab"),
    "ewald": ("triclinic", "slab"),
    "pme": ("triclinic",),
    "lj + ewald": ("triclinic",),
    "7net-0": ("quartz",),
}


def case(model: str, structure: str):
    """The wrapper, the atoms, the energy (eV), the forces (N, 3) eV/A, and how far forces may be off, absolutely."""
    import coulomb
    import parity
    from nvdd import Batch, DistributedModel, PipelineModelWrapper

    if model in coulomb.WRAPPERS or "+" in model:
        atoms = coulomb.charged(structure)
        if model in coulomb.WRAPPERS:
            wrapper = coulomb.WRAPPERS[model](cutoff=6.0, accuracy=1e-7, slab=structure == "slab")
        else:
            wrapper = PipelineModelWrapper([parity.wrapper("lj"), coulomb.WRAPPERS["ewald"](cutoff=6.0, accuracy=1e-7)])
        out = DistributedModel(wrapper)(Batch.from_atoms(atoms))
        return wrapper, atoms, float(out["energy"][0]), out["forces"].numpy(), 1e-13
    exact = parity.reference(model, structure)
    limit = max(3 * exact.noise, 2e-6) if model in parity.SEVENN else 1e-13
    return parity.wrapper(model), parity.structure(structure).copy(), exact.energy, exact.forces, limit


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(CASES))
    options = parser.parse_args()

    from nvdd_ase import NVDDCalculator

    failures = 0
    n_gpus = torch.cuda.device_count()
    places = dict.fromkeys([("cuda", 1), ("cuda", n_gpus), ("cuda:0", 2), ("cuda:0", 4)])
    print(f"{n_gpus} GPUs, torch {torch.__version__}")
    for model in options.models.split(","):
        for structure in CASES[model]:
            wrapper, atoms, energy, expected, limit = case(model, structure)
            single = wrapper.dtype == torch.float32
            for device, ranks in places:
                start = time.perf_counter()
                with NVDDCalculator(wrapper, ranks=ranks, device=device) as calculator:
                    atoms.calc = calculator
                    found, forces = atoms.get_potential_energy(), atoms.get_forces()
                    where = {r["device"] for r in calculator.report()}
                error, largest = np.abs(forces - expected).max(), np.abs(expected).max()
                off, relative = abs(found - energy), 1e-6 if single else 1e-11
                of_another_device = single and ranks == 1
                ok = error <= (relative * largest if of_another_device else limit + 1e-11 * largest)
                ok = ok and off <= relative * abs(energy)
                if of_another_device:
                    expected = forces
                failures += not ok
                print(f"{'ok ' if ok else 'BAD'} {model:10s} {structure:12s} {ranks} ranks on {sorted(where)}: "
                      f"|dE| {off:.1e} eV, max |dF| {error:.1e} of {largest:.2f} eV/A, "
                      f"{time.perf_counter() - start:.1f} s", flush=True)  # fmt: skip
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
