"""An evaluation leaves nothing behind that only Python's search for cycles would free: activations are large."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import torch

import parity
from nvdd import Batch, DistributedModel, DomainConfig
from nvdd.communicator import Communicator


def left_behind(comm: Communicator, model: str, structure: str) -> list[str]:
    """The tensors in reference cycles after two steps, on each rank."""
    distributed = DistributedModel(parity.wrapper(model), DomainConfig(mesh=comm))
    batch = Batch.from_atoms(parity.structure(structure))
    wanted = {"energy", "energies", "forces", "stress", "stresses"}
    distributed(batch, wanted)  # what is made once and kept
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in range(2):
            distributed(batch, wanted)
        gc.collect()
        return [f"{type(o).__name__} {tuple(o.shape)}" for o in gc.garbage if isinstance(o, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize(("model", "structure"), [("mace", "quartz unit"), ("lj", "triclinic"), ("dftd3", "triclinic")])
@pytest.mark.parametrize("world_size", (1, 2))
def test_no_tensor_waits_for_the_garbage_collector(ranks, world_size, model, structure):
    assert ranks.run(world_size, left_behind, model, structure) == [[]] * world_size


PEAK = """
import resource, sys
import torch
from ase.build import bulk
from nvdd import Batch, DistributedModel, DomainConfig
from nvdd.models.dftd3 import DFTD3ModelWrapper

cutoff, peak = float(sys.argv[1]), lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
run = lambda atoms, cutoff: DistributedModel(
    DFTD3ModelWrapper("pbe", cutoff=cutoff, cutoff_cn=cutoff), DomainConfig(max_edges_per_chunk=50_000)
)(Batch.from_atoms(atoms), {"energy", "forces", "stress"})
argon = bulk("Ar", "fcc", a=5.26, cubic=True)
run(argon, 5.0)  # what is loaded and compiled once
before = peak()
print(run(argon * (4, 4, 4), cutoff).n_edges, peak() - before)
"""


def test_memory_of_dispersion_does_not_grow_with_the_number_of_pairs():
    """Eight times the pairs, whose list would take some 200 MB more, and hardly any more memory."""
    pytest.importorskip("tad_dftd3", reason="DFT-D3 takes its reference data from tad-dftd3; runs where that is installed")
    found = []
    for cutoff in ("15", "30"):
        out = subprocess.run([sys.executable, "-c", PEAK, cutoff], capture_output=True, text=True, check=True, timeout=300).stdout
        found.append([float(word) for word in out.split()])
    (few, less), (many, more) = found
    assert many > 7 * few and many > 700_000
    assert more < less + 60, found  # MB
