"""An evaluation leaves nothing behind that only Python's search for cycles would free: activations are large."""

from __future__ import annotations

import gc

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
