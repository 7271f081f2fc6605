"""Message-passing models for LAMMPS, as pickles can hold them: one that reads charges, one that fails on one rank."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import toys
from nvdd.runtime.standstill import PATIENCE

STEP = 2


class Charged(toys.Toy):
    """Reads charges, of halo rows too."""

    def __init__(self) -> None:
        super().__init__(config={"node_inputs": frozenset({"charges"})})

    def summed(self, data: Any, h: Any, waves: Any, layer: int = 0) -> Any:
        return super().summed(data, h, waves * data.charges[data.senders, None], layer)


class Faulty(toys.Toy):
    """Fails at its second step by ``options["how"]`` on MPI rank ``options["rank"]``:

    ``"raise"`` at once; ``"memory"`` as torch does when a GPU is full; ``"later"`` between two exchanges; ``"behind"``
    after the last exchange, when the others are in LAMMPS again; ``"kill"``: its process is gone; ``"skip"``: it leaves
    out the last exchange of the backward and goes on; ``"slow"``: it takes longer than ranks may stand still.
    """

    step = 0

    def forward(self, data: Any) -> Any:
        self.step += 1
        self.due = self.step == STEP and int(os.environ.get("PMI_RANK", 0)) == self.options["rank"]
        if self.due and self.options["how"] in ("raise", "memory", "kill"):
            self.fail()
        if self.due and self.options["how"] == "slow":
            time.sleep(PATIENCE + 3)
        return super().forward(data)

    def waves(self, vectors: Any) -> Any:
        if self.due and self.options["how"] == "behind":
            vectors.register_hook(lambda gradient: self.fail())
        return super().waves(vectors)

    def summed(self, data: Any, h: Any, waves: Any, layer: int = 0) -> Any:
        if self.due and layer == 1 and self.options["how"] == "later":
            self.fail()
        if self.due and layer == 1 and self.options["how"] == "skip":
            h = h.detach()
        return super().summed(data, h, waves, layer)

    def fail(self) -> None:
        print(f"FAULT {time.time()}", file=sys.stderr, flush=True)
        if self.options["how"] == "kill":
            os.kill(os.getpid(), 9)
        if self.options["how"] == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        raise ArithmeticError("this rank has had enough")


def save(folder: Path, how: str, rank: int) -> Path:
    """A pickle for `pair_style mliap unified`."""
    import pickle

    from nvdd_lammps import NVDDUnified

    path = folder / f"{how}{rank}.pkl"
    path.write_bytes(pickle.dumps(NVDDUnified(Faulty(how=how, rank=rank).requires_grad_(False), {"elements": ["Ar"]})))
    return path


DECK = """units metal
atom_style atomic
lattice fcc 4.4
region box block 0 3 0 3 0 3
create_box 1 box
create_atoms 1 box
mass 1 39.9
displace_atoms all random 0.1 0.1 0.1 77 units box
pair_style mliap unified {model}
pair_coeff * * Ar
fix 1 all nve
thermo 1
"""
