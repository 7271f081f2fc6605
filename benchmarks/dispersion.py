"""DFT-D3 of nvdd beside s-dftd3: processor time and memory of a step against the number of atoms, and bytes sent.

    OMP_NUM_THREADS=1 python benchmarks/dispersion.py --atoms 1000
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/dispersion.py --atoms 10000

A jittered lattice of water's density (0.1 atoms/A^3), PBE-D3(BJ), energy, forces and stress, pairs and coordination
numbers within 40 Bohr. s-dftd3 (the package dftd3) runs afterwards on rank 0 in the same process. Times are processor time
of one thread, which other work on the machine disturbs less than time by the clock; the larger of the ranks. Memory is the
largest so far of the process, so give one size a run.
"""

from __future__ import annotations

import argparse
import os
import resource
import time

import numpy as np
import torch
import torch.distributed as dist
from ase import Atoms
from ase.units import Bohr, Hartree

from nvdd import Batch, Communicator, DistributedModel, DomainConfig, dispatch_trace
from nvdd.models.dftd3 import DFTD3ModelWrapper

CUTOFF = 40 * Bohr


def water_like(n: int) -> Atoms:
    """About ``n`` atoms, a third of them oxygen, 0.1 atoms/A^3."""
    m = round(n ** (1 / 3))
    grid = np.stack(np.meshgrid(*[np.arange(m)] * 3, indexing="ij"), -1).reshape(-1, 3)
    a = 10 ** (1 / 3)
    positions = grid * a + np.random.default_rng(0).normal(scale=0.15, size=grid.shape)
    return Atoms(np.where(np.arange(len(grid)) % 3, 1, 8), positions, cell=[m * a] * 3, pbc=True)


def by_s_dftd3(atoms: Atoms) -> tuple[float, np.ndarray, float]:
    """Energy in eV, forces in eV/A, seconds."""
    from dftd3.interface import DispersionModel, RationalDampingParam

    start = time.process_time()
    model = DispersionModel(atoms.numbers, atoms.positions / Bohr, atoms.cell.array / Bohr, atoms.pbc)
    model.set_realspace_cutoff(disp2=CUTOFF / Bohr, disp3=CUTOFF / Bohr, cn=CUTOFF / Bohr)
    found = model.get_dispersion(RationalDampingParam(method="pbe"), grad=True)
    return float(found["energy"]) * Hartree, -found["gradient"] * Hartree / Bohr, time.process_time() - start


def peak() -> float:
    """GiB of memory that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measure(comm: Communicator, n: int, steps: int, compare: bool, at_once: int | None) -> None:
    """Prints one row of the table."""
    atoms = water_like(n)
    config = DomainConfig(mesh=comm, max_edges_per_chunk=at_once)
    model = DistributedModel(DFTD3ModelWrapper("pbe", cutoff=CUTOFF, cutoff_cn=CUTOFF), config)
    batch = Batch.from_atoms(atoms)
    start = time.process_time()
    model(batch, {"energy", "forces", "stress"})
    first, times = time.process_time() - start, []
    for _ in range(steps):
        start = time.process_time()
        with dispatch_trace() as trace:
            out = model(batch, {"energy", "forces", "stress"})
        times.append(time.process_time() - start)
    mine = torch.tensor(
        [
            min(times),
            first,
            peak(),
            trace.bytes_sent / 1e6,
            out.n_edges,
        ]
    )
    worst = comm.all_reduce(mine, "max", "timings")
    row = [
        f"{len(atoms)}",
        f"{worst[4] / 1e6:.1f}",
        f"{worst[0]:.2f}",
        f"{worst[1]:.2f}",
        f"{worst[2]:.2f}",
        f"{worst[3]:.2f}",
    ]
    if comm.rank == 0:
        if compare:
            energy, forces, seconds = by_s_dftd3(atoms)
            difference = np.abs(out["forces"].cpu().numpy() - forces[out.ids.cpu().numpy()]).max()
            row += [f"{seconds:.2f}", f"{peak():.2f}", f"{abs(out['energy'].item() / energy - 1):.0e}", f"{difference:.0e}"]
        print("| " + " | ".join(row) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--atoms", type=int, nargs="+", default=[1000, 2000])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--max-edges-per-chunk", type=int, default=None, help="default 4 million")
    parser.add_argument("--no-comparison", action="store_true", help="leave s-dftd3 out")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    comm = Communicator(dist.group.WORLD if dist.is_initialized() else None)
    if comm.rank == 0:
        head = ["atoms", "million edges a rank", "step (s)", "the first (s)", "peak GiB a rank", "MB sent a rank"]
        head += [] if arguments.no_comparison else ["s-dftd3 (s)", "peak GiB with it", "energy off by", "forces off by (eV/A)"]
        print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for n in arguments.atoms:
        measure(comm, n, arguments.steps, not arguments.no_comparison, arguments.max_edges_per_chunk)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
