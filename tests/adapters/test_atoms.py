"""AtomStage: a method that works atom by atom runs for some atoms at a time, twice, with the same numbers and less memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import parity
import toys
from memory import SavedBytes
from nvdd import AtomStage, Batch, DistributedModel, DistributedOpError, DomainConfig, MLIPSpec
from nvdd.errors import InputError
from nvdd.shard_tensor import to_local
from nvdd.specs import SPEC_MPNN_HALO


class Updating(toys.MessagePassing):
    """Updates rows of atoms, with their roles, in a method of its own."""

    def __init__(self) -> None:
        super().__init__(scatter="index_add")

    def update(self, h: Tensor, change: Tensor | None = None, scale: float = 1.0) -> Tensor:
        if self.options.get("wrong") == "sums":
            return h.sum(0)
        if self.options.get("wrong") == "changes":
            change.mul_(0.5)
        return (scale * h + (0 if change is None else change)).tanh().pow(2)

    def summed(self, data: Batch, h: Tensor, waves: Tensor, layer: int = 0) -> Tensor:
        return self.update(super().summed(data, h, waves, layer), change=h, scale=0.7)


STAGE = AtomStage(Updating, "update", ("h", "change"))


def evaluated(comm, options: dict, stage: AtomStage = STAGE) -> dict:
    """Runs on each rank."""
    model = Updating()
    out = DistributedModel(model, DomainConfig(mesh=comm, **options), spec=model.distribution_spec().with_adapters(stage))
    found = out(toys.batch_of("several"), ("energy", "forces"))
    return {"ids": found.ids, "energy": found["energy"], "forces": found["forces"]}


@pytest.mark.parametrize("world_size", (1, 2, 3))
@pytest.mark.parametrize("options", ({"max_edges_per_chunk": 20}, {"recompute": True}))
def test_rows_with_roles(ranks, world_size, options):
    whole = ranks.run(world_size, evaluated, {})
    parts = ranks.run(world_size, evaluated, options)
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one["ids"], other["ids"])
        torch.testing.assert_close(other["energy"], one["energy"], rtol=1e-12, atol=0)
        torch.testing.assert_close(other["forces"], one["forces"], rtol=0, atol=1e-13)


def test_memory_of_mace_does_not_grow_with_atoms_either():
    wrapper, batch = parity.wrapper("mace"), Batch.from_atoms(parity.structure("quartz"))
    spec = wrapper.distribution_spec()
    edges_alone = replace(spec, adapters=tuple(a for a in spec.adapters if not isinstance(a, AtomStage)))
    peaks, forces = [], []
    for one, options in ((spec, {}), (edges_alone, {"max_edges_per_chunk": 200}), (spec, {"max_edges_per_chunk": 200})):
        model = DistributedModel(wrapper, DomainConfig(**options), spec=one)
        model(batch)
        with SavedBytes() as saved:
            forces.append(model(batch, ("energy", "forces"))["forces"])
        peaks.append(saved.peak)
    whole, of_edges, of_both = peaks
    assert of_both < 0.6 * of_edges and of_both < whole / 4, peaks
    assert (forces[2] - forces[0]).abs().max() <= 1e-11 * forces[0].abs().max() + 1e-14


def test_gradients_of_forces_by_parameters():
    found = []
    for options in ({}, {"max_edges_per_chunk": 30}):
        model = Updating()
        distributed = DistributedModel(model, DomainConfig(**options), spec=model.distribution_spec().with_adapters(STAGE))
        out = distributed(toys.batch_of("several"), ("energy", "forces"), create_graph=True)
        loss = out["forces"].square().sum() + out["energy"].sum()
        found.append(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))
    for whole, parts in zip(*found, strict=True):
        if whole is not None:
            assert (whole - parts).abs().max() <= 1e-11 * whole.abs().max() + 1e-14


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (AtomStage(Updating, "update", ("features",)), "update has no argument features"),
        (AtomStage(Updating, "update", ("h", "scale")), "got no tensors for the rows of atoms"),
        (AtomStage(Updating, "messages", ("h", "waves")), "are no rows of atoms"),
        (AtomStage(Updating, "energies", ("data",)), "got no tensors for the rows of atoms"),
    ],
)
def test_wrong_names(stage, message):
    evaluated(None, {}, stage)  # without chunks it does nothing
    with pytest.raises(DistributedOpError, match=message):
        evaluated(None, {"recompute": True}, stage)


@pytest.mark.parametrize(
    ("wrong", "message"), [("sums", "it does not work atom by atom"), ("changes", "is changed in place")]
)
def test_what_can_not_be_done_again(wrong, message):
    model = Updating()
    model.options["wrong"] = wrong
    distributed = DistributedModel(
        model, DomainConfig(recompute=True), spec=model.distribution_spec().with_adapters(STAGE)
    )
    with pytest.raises(DistributedOpError, match=message):
        distributed(toys.batch_of("several"))


class Noisy(Updating):
    """Draws random numbers, out of nvdd's sight."""

    def update(self, h: Tensor, change: Tensor | None = None, scale: float = 1.0) -> Tensor:
        return torch.nn.functional.dropout(super().update(h, change, scale), 0.5)

    def summed(self, data: Batch, h: Tensor, waves: Tensor, layer: int = 0) -> Tensor:
        rows = to_local(toys.MessagePassing.summed(self, data, h, waves, layer))
        return self.update(rows, change=to_local(h), scale=0.7) + 0 * h


def test_random_numbers_are_the_same_the_second_time():
    found = []
    for stage in ((), (AtomStage(Noisy, "update", ("h", "change")),)):
        model = Noisy()
        spec = model.distribution_spec().with_adapters(*stage)
        distributed = DistributedModel(model, DomainConfig(recompute=True), spec=spec)
        torch.manual_seed(3)
        found.append(distributed(toys.batch_of("several"), ("energy", "forces"))["forces"])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-13)


def test_values_in_files():
    spec = SPEC_MPNN_HALO.with_adapters(STAGE)
    again = MLIPSpec.from_dict(spec.to_dict())
    assert again == spec and again.adapters[0].names == ("h", "change")
    assert AtomStage.of([Updating(), Updating()], ("h",), "update") == (AtomStage(Updating, "update", "h"),)
    with pytest.raises(InputError, match="are no names of arguments"):
        AtomStage(Updating, "update", ())
