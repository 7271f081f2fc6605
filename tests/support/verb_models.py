"""Models that say what they mean about ranks with verbs and adapters, because dispatch can't see all that they do."""

from __future__ import annotations

from typing import Any

import torch
from ase import Atoms
from ase.build import bulk
from torch import Tensor, nn

import custom_ops  # noqa: F401  (registers operations)
from nvdd import (
    BaseModelMixin,
    Batch,
    DistributedModel,
    DistributionSpec,
    DomainConfig,
    ForceStrategy,
    GatherInputsFull,
    HaloStoragePolicy,
    MethodAdapter,
    MLIPSpec,
    ModelConfig,
    ModelOutputs,
    NeighborConfig,
    OpAdapter,
    OutputKind,
    OutputSpec,
    Reduce,
    Scope,
    ShardedStoragePolicy,
    SliceOutputsOwned,
    autograd_target,
    current_dd_context,
    distributed_method,
    localize,
    neighbor_refresh_adapters,
    refresh_neighbors,
    scatter_to_owners,
    system_sum,
    to_local,
)
from nvdd.communicator import Communicator
from nvdd.neighbors import attach_neighbors

CUTOFF, WIDTH = 4.0, 4
POLICIES = {
    "halo_fetch": HaloStoragePolicy("local", "halo_fetch"),
    "halo_correction": HaloStoragePolicy(),
    "sharded": ShardedStoragePolicy(),
}


def structure() -> list[Atoms]:
    """Two systems: a rattled crystal with an odd cell, and a cluster."""
    crystal = bulk("Cu", cubic=True).repeat((3, 2, 1))
    crystal.rattle(0.12, seed=3)
    crystal.set_cell(crystal.cell.array @ [[1, 0.05, 0], [0, 1.02, 0], [0.03, 0, 0.97]], scale_atoms=True)
    cluster = Atoms("Au5", [[0, 0, 0], [2.5, 0.1, 0], [0.2, 2.6, 0], [0, 0.3, 2.4], [9.0, 0, 0]])
    return [crystal, cluster]


class Opaque(nn.Module):
    """A block that works on plain tensors: dispatch sees neither its gather nor its sum."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, w: Tensor, senders: Tensor, receivers: Tensor) -> Tensor:
        plain = localize({"h": h, "w": w, "senders": senders, "receivers": receivers})
        message = torch.tanh(self.mix(plain["h"]))[plain["senders"]] * plain["w"]
        return torch.zeros(plain["h"].shape, dtype=message.dtype).index_add(0, plain["receivers"], message)


class SubOpaque(Opaque):
    """Inherits its ``forward``."""


@distributed_method
def pad_and_recombine(original, self, h, w, senders, receivers):
    """Body of the adapter of `Opaque.forward`."""
    return scatter_to_owners(original(self, refresh_neighbors(h, pad=True), w, senders, receivers))


@distributed_method
def pad_only(original, self, h, w, senders, receivers):
    """The first half of it."""
    return original(self, refresh_neighbors(h, pad=True), w, senders, receivers)


class Base(nn.Module, BaseModelMixin):
    """Species, distances, a readout."""

    strategy = ForceStrategy.EDGE_VECTORS
    outputs: dict[str, OutputSpec] = {"energies": OutputSpec(OutputKind.PER_NODE)}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.species = nn.Embedding(100, WIDTH)
        self.blocks = nn.ModuleList([Opaque(), SubOpaque()])
        self.radial = nn.Linear(2, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, 1)
        self.double()
        self.model_config = ModelConfig(
            outputs=frozenset({"energy", "energies", "forces", "stress", "charge", "charges"}),
            neighbor_config=NeighborConfig(CUTOFF),
        )

    adapters: tuple[Any, ...] = ()
    custom_ops: tuple[Any, ...] = ()
    policy = POLICIES["halo_fetch"]

    def distribution_spec(self, strategy: Any = None) -> MLIPSpec:
        return MLIPSpec(
            DistributionSpec(self.policy, self.custom_ops),
            self.outputs,
            force_strategy=self.strategy,
            adapters=self.adapters,
        )

    def waves(self, data: Batch) -> Tensor:
        r = data.edge_vectors.norm(dim=1, keepdim=True)
        return self.radial(torch.cat([r, torch.sin(r)], 1)) * (1 - r / CUTOFF) ** 2

    def readout(self, h: Tensor) -> Tensor:
        return self.out(torch.tanh(h)).squeeze(-1)

    def forward(self, data: Batch) -> ModelOutputs:
        return ModelOutputs(energies=self.readout(self.features(data)))

    def features(self, data: Batch) -> Tensor:
        raise TypeError("a model defines its features")


class OpaqueBlocks(Base):
    """Blocks that dispatch can't see into, with adapters of their methods."""

    adapters = (MethodAdapter(Opaque, "forward", pad_and_recombine),)

    def features(self, data: Batch) -> Tensor:
        h, w = self.species(data.atomic_numbers), self.waves(data)
        for block in self.blocks:
            h = h + block(h, w, data.senders, data.receivers)
        return h


class PaddedOutside(OpaqueBlocks):
    """The wrapper pads, `neighbor_refresh_adapters` recombine."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = neighbor_refresh_adapters(self.blocks)

    def features(self, data: Batch) -> Tensor:
        h, w = self.species(data.atomic_numbers), self.waves(data)
        for block in self.blocks:
            h = h + block(refresh_neighbors(h, pad=True), w, data.senders, data.receivers)
        return h


class SystemCharges(Base):
    """Charges that sum to zero in each system, by `system_sum` of plain tensors."""

    def features(self, data: Batch) -> Tensor:
        h = self.species(data.atomic_numbers)
        h = h + torch.zeros_like(h).index_add(0, data.receivers, self.waves(data))
        charge = torch.tanh(h[:, 0])
        mean = system_sum(charge, data.batch, data.n_systems) / system_sum(
            torch.ones_like(charge), data.batch, data.n_systems
        )
        by_edge = system_sum(self.waves(data), data.batch[data.receivers], data.n_systems)
        return h * (charge - mean[data.batch]).unsqueeze(1) + torch.tanh(by_edge)[data.batch]


class Shares(Base):
    """Each rank's share of energy and of another per-system value, summed by the framework."""

    outputs = {  # noqa: RUF012
        "energy": OutputSpec(OutputKind.PER_GRAPH, Reduce.ALL_REDUCE),
        "charge": OutputSpec(OutputKind.PER_GRAPH, Reduce.ALL_REDUCE),
    }

    def forward(self, data: Batch) -> ModelOutputs:
        h = self.species(data.atomic_numbers)
        h = h + torch.zeros_like(h).index_add(0, data.receivers, self.waves(data))
        share = lambda v: system_sum(v, data.batch, data.n_systems, Scope.LOCAL)
        return ModelOutputs(energy=share(self.readout(h)), charge=share(h[:, 1]))


class OwnedCharges(Base):
    """Gives charges of owned atoms only, whatever rows the policy has."""

    outputs = {  # noqa: RUF012
        "energies": OutputSpec(OutputKind.PER_NODE),
        "charges": OutputSpec(OutputKind.PER_NODE, Reduce.OWNED_ONLY),
    }

    def forward(self, data: Batch) -> ModelOutputs:
        h = self.species(data.atomic_numbers)
        h = h + torch.zeros_like(h).index_add(0, data.receivers, self.waves(data))
        context = current_dd_context()
        n_owned = context.n_owned if context else len(h)
        return ModelOutputs(energies=self.readout(h), charges=to_local(h)[:n_owned, 0])


class WholeTable(Base):
    """A kernel that reads rows of all atoms by their global ids."""

    custom_ops = (OpAdapter("nvddtest::pair_table", {0: GatherInputsFull()}, {0: SliceOutputsOwned()}),)

    def features(self, data: Batch) -> Tensor:
        h, w = self.species(data.atomic_numbers), self.waves(data)
        for _ in range(2):
            h = torch.tanh(h + torch.ops.nvddtest.pair_table(h, w, data.senders, data.receivers))
        return h


class OwnForces(Base):
    """Differentiates inside: forces by positions, stress by a strain, of which each rank has a share."""

    strategy = ForceStrategy.MODEL_INTERNAL
    outputs = {  # noqa: RUF012
        "energies": OutputSpec(OutputKind.PER_NODE),
        "forces": OutputSpec(OutputKind.PER_NODE),
        "stress": OutputSpec(OutputKind.PER_GRAPH, Reduce.ALL_REDUCE),
    }

    def forward(self, data: Batch) -> ModelOutputs:
        with torch.enable_grad():
            positions = data.positions if data.positions.requires_grad else data.positions.requires_grad_(True)
            strain = torch.zeros(data.n_systems, 3, 3, dtype=torch.float64, requires_grad=True)
            by_atom = (strain + strain.transpose(1, 2))[data.batch] / 2
            x = positions + torch.einsum("ni,nij->nj", positions, by_atom)
            cell = data.cell + torch.einsum("sij,sjk->sik", data.cell, (strain + strain.transpose(1, 2)) / 2)
            shift = torch.einsum("ei,eij->ej", data.neighbor_list_shifts, cell[data.batch[data.receivers]])
            r = (x[data.senders] - x[data.receivers] + shift).norm(dim=1, keepdim=True)
            w = self.radial(torch.cat([r, torch.sin(r)], 1)) * (1 - r / CUTOFF) ** 2
            h = self.species(data.atomic_numbers)
            h = torch.zeros_like(h).index_add(0, data.receivers, h[data.senders].tanh() * w)
            energies = self.readout(h)
            total = energies.sum()
            force, virial = torch.autograd.grad(total, [autograd_target(positions), strain])
        return ModelOutputs(energies=energies.detach(), forces=-force, stress=virial / 100.0)


MODELS = {
    c.__name__: c for c in (OpaqueBlocks, PaddedOutside, SystemCharges, Shares, OwnedCharges, WholeTable, OwnForces)
}


def in_one_process(name: str) -> dict[str, Tensor]:
    """The model's own forward on plain tensors."""
    assert current_dd_context() is None
    batch = Batch.from_atoms(structure())
    batch.positions.requires_grad_(True)
    attach_neighbors(batch, CUTOFF)
    wrapper = MODELS[name]()
    out = dict(wrapper(batch))
    if "energy" not in out:
        out["energy"] = torch.zeros(2, dtype=torch.float64).index_add(0, batch.batch, out["energies"])
    if "forces" not in out:
        out["forces"] = -torch.autograd.grad(out["energy"].sum(), batch.positions)[0]
    return {k: v.detach() for k, v in out.items()}


def on_rank(comm: Communicator, policy: str, names: list[str]) -> dict[str, Any]:
    """Each model over ranks: its outputs here, or the message of its error; and the status of its adapters."""
    found = {}
    for name in names:
        wrapper = MODELS[name]()
        wrapper.policy = POLICIES[policy]
        model = DistributedModel(wrapper, DomainConfig(mesh=comm, skin=0.4))
        wanted = {"energy", "forces"} | ({"charge"} if name == "Shares" else set())
        wanted |= {"stress"} if name == "OwnForces" else set()
        wanted |= {"charges"} if name == "OwnedCharges" else set()
        out = model(Batch.from_atoms(structure()), wanted)
        found[name] = {
            "ids": out.ids,
            "values": {k: v.clone() for k, v in out.items()},
            "calls": {s.target: s.calls for s in model.adapters.statuses()},
            "after": current_dd_context() is None and not model.adapters.list_active(),
        }
    return found
