"""A zoo of small models, written against nvdd's public names only; each shows one pattern, right or wrong.

All are single-process code. What the validator must say of each stands in ``test_zoo.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import zoo_helpers
import zoo_replacements
from ase import Atoms
from ase.build import bulk
from torch import Tensor, nn

from nvdd import (
    SPEC_MPNN_HALO,
    BaseModelMixin,
    Batch,
    DistributionSpec,
    ForceStrategy,
    GatherInputs,
    HaloStoragePolicy,
    MLIPSpec,
    ModelConfig,
    ModelOutputs,
    NeighborConfig,
    OpAdapter,
    OutputKind,
    OutputSpec,
    PythonAdapter,
    Reduce,
    Role,
    ScatterOutputs,
    ShardedStoragePolicy,
    SliceOutputsOwned,
    to_local,
)

CUTOFF, WIDTH = 3.4, 6
PER_NODE, PER_GRAPH = OutputSpec(OutputKind.PER_NODE), OutputSpec(OutputKind.PER_GRAPH)
SHARE = OutputSpec(OutputKind.PER_GRAPH, Reduce.ALL_REDUCE)


def sample() -> Atoms:
    """32 atoms of two species in a triclinic cell, with charges; the neighbours of an atom are on both of two ranks."""
    atoms = bulk("Ar", "fcc", a=4.3, cubic=True).repeat(2)
    atoms.rattle(0.15, seed=3)
    atoms.set_cell(atoms.cell.array @ np.array([[1, 0.1, 0.05], [-0.08, 1, 0.1], [0.1, 0, 1.0]]), scale_atoms=True)
    atoms.numbers[::3] = 10
    atoms.info["charge"] = 0.7
    return atoms


class Model(nn.Module, BaseModelMixin):
    """Base: two layers of messages. Subclasses change one thing."""

    spec: MLIPSpec | None = SPEC_MPNN_HALO
    bonds = False
    inputs: frozenset[str] = frozenset()

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.embedding = nn.Embedding(20, WIDTH)
        self.radial = nn.Linear(3, WIDTH, bias=False)
        self.mix = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))
        self.readout = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1))
        self.double()
        self.model_config = ModelConfig(
            neighbor_config=NeighborConfig(CUTOFF, bonds=self.bonds), system_inputs=self.inputs
        )

    def waves(self, data: Batch) -> Tensor:
        """(E, WIDTH) functions of distance that vanish smoothly at the cutoff."""
        r = data.edge_vectors.norm(dim=1, keepdim=True)
        return self.radial((1 - r / CUTOFF) ** 3 * torch.cat([r, torch.sin(2 * r), torch.exp(-r)], dim=1))

    def messages(self, data: Batch, h: Tensor, waves: Tensor, layer: int) -> Tensor:
        """(E, WIDTH)."""
        return F.silu(self.mix[layer](torch.cat([h[data.senders], h[data.receivers]], dim=-1))) * waves

    def collect(self, data: Batch, h: Tensor, m: Tensor) -> Tensor:
        """(n_atoms, WIDTH) sums over neighbours."""
        return torch.zeros_like(h).index_add(0, data.receivers, m)

    def update(self, data: Batch, h: Tensor) -> Tensor:
        """(n_atoms, WIDTH); what a subclass does with features after each layer."""
        return h

    def features(self, data: Batch) -> Tensor:
        """(n_atoms, WIDTH)."""
        h, waves = self.embedding(data.atomic_numbers), self.waves(data)
        for layer in range(2):
            h = self.update(data, h + self.collect(data, h, self.messages(data, h, waves, layer)))
        return h

    def energies(self, data: Batch) -> Tensor:
        """(n_atoms,) eV."""
        return self.readout(self.features(data)).squeeze(-1)

    def forward(self, data: Batch) -> ModelOutputs:
        return ModelOutputs(energies=self.energies(data))

    def distribution_spec(self, strategy: Any = None) -> MLIPSpec | None:
        return self.spec


def by_system(data: Batch, x: Tensor) -> Tensor:
    """(n_systems, ...) sums of (n_atoms, ...)."""
    return torch.zeros(data.n_systems, *x.shape[1:], dtype=x.dtype, device=x.device).index_add(0, data.batch, x)


# --- patterns that work ------------------------------------------------------------------------------------------


class Plain(Model):
    """Message passing."""


class SeedsPolicy(Model):
    """Message passing under a bare HaloStoragePolicy: halo_correction and halo_read."""

    spec = MLIPSpec(DistributionSpec(HaloStoragePolicy()), {"energies": PER_NODE})


class NoSpec(Model):
    """Declares nothing."""

    spec = None


class DroppedRebind(Model):
    """Drops what in-place scatters return."""

    def collect(self, data, h, m):
        out = torch.zeros(h.shape, dtype=h.dtype, device=h.device)
        out.scatter_add_(0, data.receivers.unsqueeze(-1).expand_as(m), m)
        return out

    def forward(self, data):
        total = torch.zeros(data.n_systems, dtype=torch.float64, device=data.device)
        total.scatter_add_(0, data.batch, self.energies(data))
        return ModelOutputs(energy=total)


class ChargeEquilibration(Model):
    """A sum over each system in each layer: charges that add up to the system's charge."""

    inputs = frozenset({"charge"})

    def __init__(self) -> None:
        super().__init__()
        self.charge_of = nn.Linear(WIDTH, 1).double()

    def update(self, data, h):
        q = torch.tanh(self.charge_of(h)).squeeze(-1)
        q = q + ((data.charge - by_system(data, q)) / data.n_atoms_per_system)[data.batch]
        return h + (q**2)[:, None] * self.embedding.weight[0]


class Full(ChargeEquilibration):
    """Charge equilibration that returns charges and a second moment of them too: something of every kind."""

    spec = SPEC_MPNN_HALO.with_outputs(charges=PER_NODE, moment=PER_GRAPH)

    def forward(self, data):
        h = self.features(data)
        q = torch.tanh(h[:, 0])
        return ModelOutputs(energies=self.readout(h).squeeze(-1), charges=q, moment=by_system(data, q[:, None] * h))


class FeatureNorm(Model):
    """LayerNorm over features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH).double()

    def update(self, data, h):
        return self.norm(h)


class BatchNormTraining(Model):
    """BatchNorm over atoms, in training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH).double()

    def update(self, data, h):
        return self.norm(h)


class ReceiverSoftmax(Model):
    """Attention weights by a softmax over the edges of each receiver (of each sender in a subclass)."""

    def ends(self, data: Batch) -> Tensor:
        return data.receivers

    def collect(self, data, h, m):
        by = self.ends(data)
        wide = by.unsqueeze(-1).expand_as(m)
        largest = h.new_full(h.shape, -torch.inf).scatter_reduce(0, wide, m.detach(), "amax", include_self=False)
        weight = torch.exp(m - largest[by])
        weight = weight / torch.zeros_like(h).index_add(0, by, weight)[by]
        return torch.zeros_like(h).index_add(0, data.receivers, weight * m)


class SenderSoftmax(ReceiverSoftmax):
    """The same over the edges of each sender, as ORB has it."""

    def ends(self, data):
        return data.senders


class DegreeNormalised(Model):
    """Messages divided by the square roots of both atoms' smooth degrees."""

    def collect(self, data, h, m):
        weight = self.waves(data)[:, 0] ** 2
        degree = 1 + torch.zeros_like(h[:, 0]).index_add(0, data.receivers, weight)
        scale = (degree[data.receivers] * degree[data.senders]).rsqrt()
        return torch.zeros_like(h).index_add(0, data.receivers, m * scale.unsqueeze(1))


class ReverseEdges(Model):
    """Reads the message of each edge's reverse."""

    bonds = True

    def messages(self, data, h, waves, layer):
        m = super().messages(data, h, waves, layer)
        return torch.tanh(m - 0.3 * m[data.reverse_edges]) * waves


class ReadsPositions(Model):
    """An external field: a function of positions, where the spec says edge vectors."""

    def energies(self, data):
        return super().energies(data) + 0.1 * torch.sin(0.5 * data.positions[:, 2])


class ReturnsForces(Model):
    """Differentiates by positions in its forward and returns forces."""

    spec = MLIPSpec(
        SPEC_MPNN_HALO.distribution,
        {"energies": PER_NODE, "forces": PER_NODE},
        force_strategy=ForceStrategy.MODEL_INTERNAL,
    )

    def forward(self, data):
        energies = self.energies(data)
        (gradient,) = torch.autograd.grad(energies.sum(), data.positions)
        return ModelOutputs(energies=energies, forces=-gradient)


class EnergyOnly(Model):
    """Predicts an energy that nobody can differentiate, and says so."""

    def __init__(self) -> None:
        super().__init__()
        self.model_config = ModelConfig(
            outputs=frozenset({"energy"}), active_outputs={"energy"}, neighbor_config=NeighborConfig(CUTOFF)
        )

    def forward(self, data):
        with torch.no_grad():
            return super().forward(data)


class Float32(Model):
    """The same in single precision."""

    def __init__(self) -> None:
        super().__init__()
        self.float()


# --- specs that are wrong, and that a rule repairs -------------------------------------------------------------


class Undeclared(Model):
    """Returns charges and a dipole that its spec doesn't declare."""

    def forward(self, data):
        h = self.features(data)
        q = torch.tanh(h[:, 0])
        return ModelOutputs(energies=self.readout(h).squeeze(-1), charges=q, moments=by_system(data, q[:, None] * h))


class ExtraAllReduce(Model):
    """Its energy is summed over ranks already, and is declared a share."""

    spec = MLIPSpec(SPEC_MPNN_HALO.distribution, {"energy": SHARE})

    def forward(self, data):
        return ModelOutputs(energy=by_system(data, self.energies(data)))


class LostRole(Model):
    """Sums its energy on plain tensors: each rank has a share, which the spec doesn't say."""

    def forward(self, data):
        # of plain tensors: the rows that count are the first ones
        energies, system = to_local(self.energies(data)), to_local(data.batch)
        meta = getattr(data.batch, "meta", None)
        counted = len(system) if meta is None else meta.n_counted
        total = torch.zeros(data.n_systems, dtype=energies.dtype, device=energies.device)
        return ModelOutputs(energy=total.index_add(0, system[:counted], energies[:counted]))


class WrongKind(Model):
    """Declares a per-system output per atom."""

    spec = MLIPSpec(SPEC_MPNN_HALO.distribution, {"energies": PER_NODE, "total": PER_NODE})

    def forward(self, data):
        energies = self.energies(data)
        return ModelOutputs(energies=energies, total=by_system(data, energies**2))


# --- models that can't be distributed as they are ---------------------------------------------------------------


class SentinelIdiom(Model):
    """Filters padding edges by ``edge_index < n_atoms``."""

    def collect(self, data, h, m):
        valid = (data.senders < data.n_atoms) & (data.receivers < data.n_atoms)
        return torch.zeros_like(h).index_add(0, data.receivers[valid], m[valid])


class HalfList(Model):
    """Counts each pair once, by comparing the ids of its atoms."""

    def energies(self, data):
        i, j = data.receivers, data.senders
        once = torch.where(i < j, 1.0, torch.where(i == j, 0.5, 0.0)).to(torch.float64)
        pair = once * self.waves(data)[:, 0] * 0.5
        energies = super().energies(data)
        return energies + torch.zeros_like(energies).index_add(0, i, pair).index_add(0, j, pair)


class Sharded(HalfList):
    """The same, stored as such a model needs it: owned rows, global ids."""

    spec = SPEC_MPNN_HALO.with_policy(ShardedStoragePolicy())


class ShardedSentinel(SentinelIdiom):
    """The same mask where ids are global: it would drop the atoms of other ranks."""

    spec = SPEC_MPNN_HALO.with_policy(ShardedStoragePolicy())


class GlobalAttention(Model):
    """All pairs of atoms."""

    def update(self, data, h):
        return h + torch.softmax(h @ h.T, dim=1) @ h


class TopK(Model):
    """Keeps each sender's strongest edges by a sort of all edges."""

    def collect(self, data, h, m):
        order = torch.argsort(m.detach().norm(dim=1), descending=True)
        keep = order[: len(order) // 2]
        return torch.zeros_like(h).index_add(0, data.receivers[keep], m[keep])


class SortedAtoms(Model):
    """Sorts features over atoms."""

    def update(self, data, h):
        return h + h.sort(dim=0).values.mean(0)


class CumulativeSum(Model):
    """A running sum over atoms: it depends on their order."""

    def update(self, data, h):
        return h + 0.01 * h.cumsum(0)


class FirstAtom(Model):
    """Energies relative to the first atom's, on plain tensors, where nothing can stop it."""

    def energies(self, data):
        energies = super().energies(data)
        first = to_local(energies)[0].detach()
        return energies - 0.1 * first


class Stateful(Model):
    """Keeps features from call to call."""

    def update(self, data, h):
        plain = to_local(h)
        old = getattr(self, "_kept", None)
        self._kept = plain.detach()
        return h if old is None or old.shape != plain.shape else h + 0.1 * old


class Noisy(Model):
    """Draws random numbers in its forward."""

    def update(self, data, h):
        return h + 0.1 * torch.randn(h.shape, dtype=h.dtype, device=h.device)


class Dropout(Model):
    """Dropout, in training."""

    def update(self, data, h):
        return F.dropout(h, 0.2, self.training)


class Neutral(Model):
    """Returns a total charge that is zero but for round-off: right over ranks, whatever the noise."""

    spec = SPEC_MPNN_HALO.with_outputs(total_charge=PER_GRAPH)

    def forward(self, data):
        h = self.features(data)
        q = torch.tanh(h[:, 0])
        q = q - (by_system(data, q) / data.n_atoms_per_system)[data.batch]
        return ModelOutputs(energies=self.readout(h).squeeze(-1) + q**2, total_charge=by_system(data, q))


class Severed(Model):
    """Passes through NumPy."""

    def waves(self, data):
        return super().waves(data).detach()


class BranchOnEmpty(Model):
    """Skips its layers and a sum over ranks where there are no edges."""

    def features(self, data):
        h = self.embedding(data.atomic_numbers)
        if len(data.senders) == 0:
            return h
        h = super().features(data)
        return h - h.mean(0)


class BranchOnEmptyMean(Model):
    """Skips a mean over all atoms where there are no edges: the other ranks wait for this one."""

    def update(self, data, h):
        return h - 0.5 * h.mean(0) if len(data.senders) else h * 0.5


class LocalGather(Model):
    """Reads neighbours through plain tensors, clamped so that nothing fails: halo rows read the last atom."""

    def messages(self, data, h, waves, layer):
        plain, senders = to_local(h), to_local(data.senders)
        near = plain[senders.clamp(max=len(plain) - 1)]
        return F.silu(self.mix[layer](torch.cat([near, plain[to_local(data.receivers)]], dim=-1))) * waves


class DividesByRows(Model):
    """A mean over all atoms, divided by the number of rows at hand."""

    def update(self, data, h):
        return h - h.sum(0) / h.shape[0]


class LocalMean(Model):
    """A mean over the atoms of one rank: counts and sums on plain tensors."""

    def update(self, data, h):
        return h - to_local(h).mean(0)


@torch.jit.script
def scripted_sum(m: Tensor, receivers: Tensor, n: int) -> Tensor:
    """(n, WIDTH)."""
    return torch.zeros([n, m.shape[1]], dtype=m.dtype, device=m.device).index_add(0, receivers, m)


@torch.jit.script
def scripted_gather(h: Tensor, senders: Tensor) -> Tensor:
    """(E, WIDTH)."""
    return h[senders]


class ScriptedGather(Model):
    """Gathers senders in a scripted function."""

    def messages(self, data, h, waves, layer):
        return torch.tanh(self.mix[layer](torch.cat([scripted_gather(h, data.senders), h[data.receivers]], -1))) * waves


class ScriptedGatherScatter(nn.Module):
    """Both in a scripted module."""

    def forward(self, h: Tensor, waves: Tensor, senders: Tensor, receivers: Tensor) -> Tensor:
        return torch.zeros_like(h).index_add(0, receivers, h[senders] * waves)


class ScriptedModule(Model):
    """Gathers and scatters in a scripted module."""

    def __init__(self) -> None:
        super().__init__()
        self.scripted = torch.jit.script(ScriptedGatherScatter())

    def features(self, data):
        h = self.embedding(data.atomic_numbers)
        return h + self.scripted(h, self.waves(data), data.senders, data.receivers)


class NotFinite(Model):
    """NaN in one process."""

    def energies(self, data):
        return super().energies(data) + torch.log(-(data.edge_vectors.norm(dim=1).mean() ** 2))


class Unseeded(Model):
    """Other weights each time it is made."""

    def __init__(self) -> None:
        super().__init__()
        torch.seed()
        nn.init.normal_(self.embedding.weight)


# --- third-party helpers -----------------------------------------------------------------------------------------


class Helper(Model):
    """Neutralises charges by a third-party helper that finds the number of systems from the last atom."""

    def total(self, data: Batch, q: Tensor) -> Tensor:
        return zoo_helpers.mol_sum(q, data.batch)[data.batch]

    def update(self, data, h):
        q = zoo_helpers.smooth(h[:, 0])
        q = q - self.total(data, q) / data.n_atoms_per_system[data.batch]
        return h + (q**2).unsqueeze(1) * self.embedding.weight[0]


class HelperAdapted(Helper):
    """The same with the helper replaced by the spec."""

    spec = SPEC_MPNN_HALO.with_third_party_helpers(PythonAdapter("zoo_helpers", "mol_sum", zoo_replacements.mol_sum))


class HelperOnPlainTensors(Helper):
    """The same helper on plain tensors: each rank goes on with the sum over its own atoms."""

    def total(self, data, q):
        system = to_local(data.batch)
        return zoo_helpers.mol_sum(to_local(q), system)[system]


# --- a fused kernel, gather-multiply-scatter, as a custom op -------------------------------------------------------


@torch.library.custom_op("zoo::fused", mutates_args=())
def fused(h: Tensor, waves: Tensor, senders: Tensor, receivers: Tensor, n: int) -> Tensor:
    """(n, WIDTH) sums over edges of ``h[senders] * waves`` at receivers."""
    return torch.zeros(n, h.shape[1], dtype=h.dtype, device=h.device).index_add(0, receivers, h[senders] * waves)


@fused.register_fake
def _(h, waves, senders, receivers, n):
    return h.new_empty(n, h.shape[1])


def _fused_backward(ctx, grad):
    h, waves, senders, receivers = ctx.saved_tensors
    to_waves = grad[receivers] * h[senders]
    return fused(grad, waves, receivers, senders, h.shape[0]), to_waves, None, None, None


fused.register_autograd(_fused_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:4]))


class Fused(Model):
    """Messages by the fused op, declared right for owned rows."""

    spec = SPEC_MPNN_HALO.with_custom_ops(
        OpAdapter("zoo::fused", arg_transforms={0: GatherInputs()}, output_transforms={0: SliceOutputsOwned()})
    )

    def rows(self, data: Batch) -> int:
        """Rows that the kernel's result has."""
        return data.n_atoms

    def features(self, data):
        h, waves = self.embedding(data.atomic_numbers), self.waves(data)
        for _ in range(2):
            h = h + torch.tanh(torch.ops.zoo.fused(h, waves, data.senders, data.receivers, self.rows(data)))
        return h


class FusedWithoutAdapter(Fused):
    """Nothing declared."""

    spec = SPEC_MPNN_HALO


class FusedMissingGather(Fused):
    """The kernel reads neighbours, and the adapter doesn't say so."""

    spec = SPEC_MPNN_HALO.with_custom_ops(OpAdapter("zoo::fused", output_transforms={0: SliceOutputsOwned()}))


_HALO_READ = MLIPSpec(DistributionSpec(HaloStoragePolicy()), {"energies": PER_NODE})


class FusedUnderHaloRead(Fused):
    """Declared right for owned and halo rows."""

    spec = _HALO_READ.with_custom_ops(OpAdapter("zoo::fused", output_transforms={0: ScatterOutputs()}))


class FusedMissingScatter(Fused):
    """Declares sums that lack other ranks' shares to be final."""

    spec = _HALO_READ.with_custom_ops(OpAdapter("zoo::fused", output_roles={0: Role.OWNED}))


class FusedMissingOutput(Fused):
    """Declares nothing of the result."""

    spec = _HALO_READ.with_custom_ops(OpAdapter("zoo::fused"))


class FusedDoublePadding(Fused):
    """Pads rows that are padded already."""

    spec = _HALO_READ.with_custom_ops(
        OpAdapter("zoo::fused", arg_transforms={0: GatherInputs()}, output_transforms={0: ScatterOutputs()})
    )


# --- factories: at the top level, where ranks find them ----------------------------------------------------------


def make(name: str, train: bool = False) -> Model:
    """A model by name, in eval mode."""
    return globals()[name]().train(train)
