r"""Dynamics on GPUs: the same trajectory as on one, and the speed-up of the whole step.

    torchrun --nproc-per-node 2 benchmarks/dynamics_gpu.py                                   # 11 979 atoms
    torchrun --nproc-per-node 2 benchmarks/dynamics_gpu.py --cells 17x18x18 --hidden 48x0e+48x1o   # 49 572 atoms
    torchrun --nproc-per-node 2 benchmarks/dynamics_gpu.py --device cpu --cells 2x2x1 --hidden 8x0e+8x1o \
        --parity-hidden 8x0e+8x1o --steps 5

Alpha-quartz with the MACE of `mace_scaling.py` (random weights, eager). Each size runs NVE and Langevin on rank 0 by
itself, then on all ranks, from the same atoms. Parity is that of positions and energies after --parity steps in
float64; speed is in float32, the median of blocks of steps, migrations and searches for neighbours included. Exit code
1 if the trajectories differ by more than 1e-8 A.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
sys.path.insert(0, str(Path(__file__).parent))

CELLS = "11x11x11"  # 11 979 atoms; one GPU of 140 GB holds 49 572 with 48 channels, not with 128
BLOCKS = 5


def wrapper(hidden: str, dtype: torch.dtype, device: torch.device):
    """The model, and torch's default type as it was."""
    from mace_scaling import build_model

    from nvdd.models.mace import MACEWrapper

    model = build_model(hidden, dtype)
    torch.set_default_dtype(torch.float32)
    return MACEWrapper(model.to(dtype)).to(device)


def simulation(kind: str, atoms, model, comm):
    """A run that has its atoms and first forces."""
    from nvdd import NVE, Batch, DomainConfig, DomainParallel, Langevin

    dynamics = NVE(0.5) if kind == "NVE" else Langevin(0.5, temperature=300.0, friction=0.01, seed=1)
    run = DomainParallel(dynamics, model, DomainConfig(mesh=comm))
    run.partition(Batch.from_atoms(atoms) if comm.rank == 0 else None)
    run.start()
    return run


def timed(run, steps: int, device: torch.device) -> float:
    """Median seconds of a step, over blocks."""
    sync = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    run.run(3)
    seconds = []
    for _ in range(BLOCKS):
        sync()
        start = time.perf_counter()
        run.run(max(1, steps // BLOCKS))
        sync()
        seconds.append((time.perf_counter() - start) / max(1, steps // BLOCKS))
    return statistics.median(seconds)


def moved(run, steps: int):
    """Positions (N, 3) after some steps, on rank 0, and the energy."""
    run.run(steps)
    rows = run.batch.gather_rows(["positions"])
    return None if rows is None else rows["positions"], float(run.state.energy[0])


def one_size(cells: str, options, comm, alone, device) -> dict | None:
    """Parity and speed of one size; on rank 0 a line of the table."""
    import numpy as np
    from ase.md.velocitydistribution import thermalize_momenta
    from mace_scaling import quartz

    atoms = quartz(tuple(map(int, cells.split("x"))))
    thermalize_momenta(atoms, temperature_K=300.0, rng=np.random.default_rng(0))
    found: dict = {"atoms": len(atoms), "ranks": comm.size}
    for kind in ("NVE", "Langevin"):
        for what, dtype in (("parity", torch.float64), ("speed", torch.float32)):
            model = wrapper(options.hidden if what == "speed" else options.parity_hidden, dtype, device)
            run_one = simulation(kind, atoms, model, alone) if comm.rank == 0 else None
            single = None
            if run_one is not None:
                single = moved(run_one, options.parity) if what == "parity" else timed(run_one, options.steps, device)
            del run_one
            dist.barrier()
            run = simulation(kind, atoms, model, comm)
            together = moved(run, options.parity) if what == "parity" else timed(run, options.steps, device)
            if comm.rank == 0 and what == "parity":
                found[f"{kind} difference (A)"] = float((together[0] - single[0]).abs().max())
                found[f"{kind} moved (A)"] = float((together[0] - torch.as_tensor(atoms.positions)).abs().max())
                found[f"{kind} energy difference"] = abs(together[1] / single[1] - 1)
            elif comm.rank == 0:
                found[f"{kind} ms/step on 1"], found[f"{kind} ms/step on {comm.size}"] = single * 1e3, together * 1e3
                found[f"{kind} speed-up"] = single / together
            del run, model
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return found if comm.rank == 0 else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--cells", default=CELLS)
    parser.add_argument("--hidden", default="128x0e+128x1o")
    parser.add_argument("--parity-hidden", default="32x0e+32x1o", help="for float64, which needs twice the memory")
    parser.add_argument("--steps", type=int, default=50, help="timed steps (%(default)s)")
    parser.add_argument("--parity", type=int, default=20, help="steps after which positions are compared (%(default)s)")
    options = parser.parse_args()

    from nvdd import Communicator

    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    comm, alone = Communicator(dist.group.WORLD, device), Communicator(None, device)
    worst = 0.0
    for cells in options.cells.split(","):
        found = one_size(cells, options, comm, alone, device)
        if found is not None:
            print(json.dumps(found), flush=True)
            worst = max(worst, found["NVE difference (A)"], found["Langevin difference (A)"])
    dist.destroy_process_group()
    return int(worst > 1e-8)


if __name__ == "__main__":
    raise SystemExit(main())
