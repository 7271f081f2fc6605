"""Scripted modules, and whatever else a model must be stopped for: on every rank, by name and line; see `toys`."""

from __future__ import annotations

import pytest
import torch

import toys
from nvdd import DistributedModel, DistributedOpError, DomainConfig, ModelOutputs
from nvdd.neighbors import attach_neighbors

NAMES = tuple(toys.REFUSED)
SETUPS = [(1, "triclinic"), (2, "several"), (3, "slab"), (4, "gas")]
_FOUND: dict = {}


@pytest.mark.parametrize("name", NAMES)
def test_refused(ranks, name):
    """The model runs in one process; over ranks each rank stops where it does what has no meaning there."""
    batch = attach_neighbors(toys.batch_of("triclinic"), toys.CUTOFF)
    toys.Refused(what=name)(batch)
    for world_size, structure in SETUPS:
        for policy in toys.POLICIES:
            key = (world_size, structure, policy)
            if key not in _FOUND:
                _FOUND[key] = ranks.run(world_size, toys.refuse_on_rank, list(NAMES), structure, policy)
            for rank, part in enumerate(_FOUND[key]):
                message, op, site = part[name]
                assert message != "accepted", f"{key}, rank {rank}: accepted"
                assert op == toys.REFUSED[name][1], message
                assert "toys.py" in site and "toys.py" in message and op in message, message


class Scripted(toys.Toy):
    """Its row-wise part is scripted: plain tensors come back, and per-atom energies are all right."""

    def energies(self, data):
        h = self.features(data)
        return torch.jit.script(self.readout)(h).squeeze(-1)


class ScriptedShare(toys.Toy):
    """A scripted sum over this rank's atoms, returned as the energy of all."""

    outputs = {"energy": toys.PER_GRAPH}  # noqa: RUF012

    def forward(self, data):
        h = self.features(data)
        return ModelOutputs(energy=torch.jit.script(toys.ScriptedSum())(h).reshape(1))


class Undeclared(toys.Toy):
    """Returns something of which the spec says nothing."""

    def forward(self, data):
        h = self.features(data)
        return ModelOutputs(energies=h.sum(1), norm=h.norm())


class WrongRows(toys.Toy):
    """Returns edge rows as per-atom energies."""

    def forward(self, data):
        return ModelOutputs(energies=self.waves(data.edge_vectors).sum(1))


class Summed(toys.Toy):
    """Per-system energies declared per-atom."""

    def forward(self, data):
        return ModelOutputs(energies=self.features(data).sum(0))


def _outputs(comm):
    out = {}
    for kind in (Scripted, ScriptedShare, Undeclared, WrongRows, Summed):
        try:
            found = DistributedModel(kind(), DomainConfig(mesh=comm))(toys.batch_of("triclinic"), {"energy"})
            out[kind.__name__] = float(found["energy"][0])
        except DistributedOpError as error:
            out[kind.__name__] = str(error)
        comm.all_gather_object(kind.__name__, "outputs")
    return out


@pytest.mark.parametrize("world_size", (2, 3))
def test_outputs_must_be_what_the_spec_says(ranks, world_size):
    """The second lock: roles that were lost in scripted code are noticed where outputs are combined."""
    batch = attach_neighbors(toys.batch_of("triclinic"), toys.CUTOFF)
    expected = float(Scripted()(batch)["energies"].sum().detach())
    for part in ranks.run(world_size, _outputs):
        assert abs(part["Scripted"] - expected) <= 1e-12 * abs(expected)
        assert "'energy'" in part["ScriptedShare"] and "not known to be summed over ranks" in part["ScriptedShare"]
        assert "'norm'" in part["Undeclared"] and "not declared" in part["Undeclared"]
        assert "PER_NODE" in part["WrongRows"] and "one row for each edge" in part["WrongRows"]
        assert "PER_NODE" in part["Summed"] and "a value for each system" in part["Summed"]
