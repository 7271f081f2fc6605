"""Small models with all that models do with atoms, edges and systems; each is ordinary single-process code.

``TOYS``: those that must give the numbers of one process. ``REFUSED``: those that must be stopped. Beside them
structures, the evaluation in one process, and the one over ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from ase import Atoms
from ase.build import bulk
from torch import Tensor, nn

from nvdd import (
    BaseModelMixin,
    Batch,
    COOPadder,
    DistributedModel,
    DistributedOpError,
    DistributionSpec,
    DomainConfig,
    EdgeLayout,
    ForceStrategy,
    HaloStoragePolicy,
    MLIPSpec,
    ModelConfig,
    ModelOutputs,
    NeighborConfig,
    OutputKind,
    OutputSpec,
    Reduce,
    dispatch_trace,
)
from nvdd.communicator import Communicator
from nvdd.neighbors import attach_neighbors

CUTOFF, WIDTH, N_SPECIES = 4.2, 5, 20
POLICIES = {
    "halo_fetch": HaloStoragePolicy(gather_mode="halo_fetch", scatter_mode="local"),
    "halo_correction": HaloStoragePolicy(gather_mode="halo_read", scatter_mode="halo_correction"),
}
PER_NODE, PER_GRAPH = OutputSpec(OutputKind.PER_NODE), OutputSpec(OutputKind.PER_GRAPH)


class Toy(nn.Module, BaseModelMixin):
    """Base: an embedding of species, a radial basis, a readout; subclasses define ``energies``."""

    strategy = ForceStrategy.EDGE_VECTORS
    outputs: dict[str, OutputSpec] = {"energies": PER_NODE}  # noqa: RUF012

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.options = options
        self.embedding = nn.Embedding(N_SPECIES, WIDTH)
        self.radial = nn.Linear(3, WIDTH, bias=False)
        self.mix = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.readout = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1))
        self.double()
        self.model_config = ModelConfig(neighbor_config=NeighborConfig(CUTOFF), **options.pop("config", {}))

    def vectors(self, data: Batch) -> Tensor:
        return data.edge_vectors

    def waves(self, vectors: Tensor) -> Tensor:
        """(E, WIDTH) functions of the distance, zero at the cutoff."""
        r = vectors.norm(dim=1, keepdim=True)
        envelope = (1 - r / CUTOFF) ** 3
        return self.radial(envelope * torch.cat([r, torch.sin(2 * r), torch.exp(-r)], dim=1))

    def start(self, data: Batch) -> Tensor:
        return self.embedding(data.atomic_numbers)

    def messages(self, data: Batch, h: Tensor, waves: Tensor, layer: int = 0) -> Tensor:
        return F.silu(self.mix[layer](torch.cat([h[data.senders], h[data.receivers]], dim=-1))) * waves

    def summed(self, data: Batch, h: Tensor, waves: Tensor, layer: int = 0) -> Tensor:
        return torch.zeros_like(h).index_add(0, data.receivers, self.messages(data, h, waves, layer))

    def features(self, data: Batch) -> Tensor:
        h, waves = self.start(data), self.waves(self.vectors(data))
        for layer in range(2):
            h = h + self.norm(self.summed(data, h, waves, layer))
        return h

    def energies(self, data: Batch) -> Tensor:
        return self.readout(self.features(data)).squeeze(-1)

    def forward(self, data: Batch) -> ModelOutputs:
        return ModelOutputs(energies=self.energies(data))

    def distribution_spec(self, strategy: Any = None) -> MLIPSpec:
        return MLIPSpec(DistributionSpec(POLICIES["halo_fetch"]), self.outputs, force_strategy=self.strategy)


# --- (a) message passing: every form of a sum over receivers ---------------------------------------------------


class MessagePassing(Toy):
    """Scatters by ``options["scatter"]``; einsum over a species table, LayerNorm, cat."""

    def summed(self, data: Batch, h: Tensor, waves: Tensor, layer: int = 0) -> Tensor:
        m = self.messages(data, h, waves, layer)
        m = torch.einsum("eu,uv->ev", m, self.embedding.weight[:WIDTH]).tanh()
        return SCATTERS[self.options["scatter"]](data.receivers, m, h)


def _wide(index: Tensor, like: Tensor) -> Tensor:
    return index.view(-1, *[1] * (like.dim() - 1)).expand_as(like)


def _dropped(call: Callable[[Tensor, Tensor, Tensor], Any]) -> Callable[..., Tensor]:
    """An in-place form whose return value is dropped, into plain zeros."""

    def scatter(index: Tensor, m: Tensor, h: Tensor) -> Tensor:
        out = torch.zeros(h.shape[0], m.shape[1], dtype=m.dtype)
        call(out, index, m)
        return out

    return scatter


SCATTERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "index_add": lambda i, m, h: torch.zeros_like(h).index_add(0, i, m),
    "index_add_ kept": lambda i, m, h: h.new_zeros(h.shape).index_add_(0, i, m),
    "index_add_ dropped": _dropped(lambda out, i, m: out.index_add_(0, i, m)),
    "scatter_add": lambda i, m, h: torch.zeros_like(h).scatter_add(0, _wide(i, m), m),
    "scatter_add_ dropped": _dropped(lambda out, i, m: out.scatter_add_(0, _wide(i, m), m)),
    "scatter_add of a repeated index": lambda i, m, h: h.scatter_add(0, i.unsqueeze(-1).repeat(1, WIDTH), m) - h,
    "scatter_reduce sum": lambda i, m, h: torch.zeros_like(h).scatter_reduce(0, _wide(i, m), m, reduce="sum"),
    "scatter_reduce mean": lambda i, m, h: h.scatter_reduce(0, _wide(i, m), m, "mean", include_self=False),
    "scatter_reduce amax": lambda i, m, h: torch.zeros_like(h).scatter_reduce(-2, _wide(i, m), m, "amax"),
    "scatter_reduce_ amax dropped": _dropped(
        lambda out, i, m: out.scatter_reduce_(0, _wide(i, m), m, "amax", include_self=False)
    ),
    "index_reduce mean": lambda i, m, h: torch.zeros_like(h).index_reduce(0, i, m, "mean"),
    "index_put": lambda i, m, h: torch.zeros_like(h).index_put((i,), m, accumulate=True),
    "index_put_ dropped": _dropped(lambda out, i, m: out.index_put_((i,), m, accumulate=True)),
}


# --- (b) charge equilibration: a sum over each system in each layer, used nonlinearly --------------------------


class ChargeEquilibration(Toy):
    """``q = f(h) + (Q - sum q) / n``; the charges go into the next layer's messages."""

    def __init__(self) -> None:
        super().__init__(config={"system_inputs": frozenset({"charge"})})
        self.charge_of = nn.Linear(WIDTH, 1).double()

    def features(self, data: Batch) -> Tensor:
        h, waves = self.start(data), self.waves(self.vectors(data))
        for layer in range(2):
            h = h + self.norm(self.summed(data, h, waves, layer))
            q = torch.tanh(self.charge_of(h)).squeeze(-1)
            total = torch.zeros(data.n_systems, dtype=q.dtype).scatter_add(0, data.batch, q)
            q = q + ((data.charge - total) / data.n_atoms_per_system)[data.batch]
            coulomb = torch.zeros_like(q).index_add(0, data.receivers, q[data.senders] * waves[:, 0])
            h = h + (q * coulomb).unsqueeze(-1) + (q**2)[:, None] * self.embedding.weight[0]
        return h


# --- (c) softmax and means over receivers and over senders -----------------------------------------------------


class Attention(Toy):
    """Weights of edges by a softmax over the edges of each receiver or sender."""

    def summed(self, data: Batch, h: Tensor, waves: Tensor, layer: int = 0) -> Tensor:
        m = self.messages(data, h, waves, layer)
        by = getattr(data, self.options["over"])
        logits = 3 * m
        source = logits.detach() if self.options["detached"] else logits
        largest = h.new_full(h.shape, self.options["start"]).scatter_reduce(
            0, _wide(by, m), source, "amax", include_self=False
        )
        weight = torch.exp(logits - largest[by])
        weight = weight / torch.zeros_like(h).index_add(0, by, weight)[by]
        return torch.zeros_like(h).index_add(0, data.receivers, weight * h[data.senders] * waves)


class EdgeAttention(Toy):
    """Features on edges as well, as in ORB: an atom sums its edges as their receiver and as their sender, each time
    weighted by a softmax over those."""

    def features(self, data: Batch) -> Tensor:
        h, waves = self.start(data), self.waves(self.vectors(data))
        edge = waves
        for layer in range(2):
            edge = edge + self.messages(data, h, waves, layer)
            logits = edge.sum(1, keepdim=True)
            sums = []
            for by in (data.senders, data.receivers):
                largest = h.new_full((data.n_atoms, 1), -torch.inf)
                largest = largest.scatter_reduce(0, by[:, None], logits.detach(), "amax", include_self=False)
                weight = torch.exp(logits - largest[by])
                weight = weight / torch.zeros_like(largest).index_add(0, by, weight)[by]
                sums.append(torch.zeros_like(h).index_add(0, by, weight * edge))
            h = h + self.norm(self.mix[layer](torch.cat(sums, 1)))
        return h


class Normalised(Toy):
    """Sums divided by the smooth degree of the sender; means over senders sent back."""

    def summed(self, data: Batch, h: Tensor, waves: Tensor, layer: int = 0) -> Tensor:
        degree = torch.zeros_like(h[:, 0]).index_add(0, data.senders, waves[:, 0] ** 2)
        m = self.messages(data, h, waves, layer) / (1 + degree)[data.senders].sqrt().unsqueeze(1)
        back = torch.zeros_like(h).scatter_reduce(0, _wide(data.senders, m), m, "mean", include_self=False)
        most = torch.zeros_like(h)
        most.scatter_reduce_(0, _wide(data.senders, m), m, "amin")
        return torch.zeros_like(h).index_add(0, data.receivers, m * back[data.senders]) + back * most


class Unguarded(Toy):
    """Divides by degrees and takes square roots of sums that are zero for an isolated atom, then sums over systems.

    Right for atoms with neighbours; a rank without atoms must not spoil it.
    """

    def features(self, data: Batch) -> Tensor:
        vectors = self.vectors(data)
        waves = self.waves(vectors)
        zero = torch.zeros(data.n_atoms, dtype=waves.dtype)
        degree = zero.index_add(0, data.receivers, waves[:, 0].square())
        size = torch.zeros(data.n_atoms, 3, dtype=waves.dtype).index_add(0, data.receivers, vectors / degree.sqrt()[data.receivers, None])
        x = 1 / degree + size.square().sum(1).sqrt()
        mean = torch.zeros(data.n_systems, dtype=waves.dtype).index_add(0, data.batch, x) / data.n_atoms_per_system
        return (x * mean[data.batch] + x.mean()).add(1).log()[:, None] * self.start(data)  # fmt: skip


# --- (d) reductions over all atoms, and over those of each system ----------------------------------------------


class Statistics(Toy):
    """Features that are scaled by ``options["by"]``, with exact ties where there is a choice."""

    def features(self, data: Batch) -> Tensor:
        h = super().features(data)
        return torch.tanh(STATISTICS[self.options["by"]](self, data, h))


def _by_system(how: str, toy: Toy, data: Batch, h: Tensor) -> Tensor:
    start = {"prod": 1.0, "amin": 5.0}.get(how, -5.0)
    target = torch.full((data.n_systems, WIDTH), start, dtype=h.dtype)
    value = target.scatter_reduce(0, _wide(data.batch, h), torch.tanh(h) + 1.2, how, include_self=how == "prod")
    return h * value[data.batch]


STATISTICS: dict[str, Callable[[Toy, Batch, Tensor], Tensor]] = {
    "mean": lambda toy, data, h: h - h.mean(0),
    "mean, dropped": lambda toy, data, h: h - _copy_of(h).mean(0, keepdim=True),
    "std": lambda toy, data, h: h / (h.std(0, keepdim=True) + 0.1),
    "variance over all": lambda toy, data, h: h * h.var(correction=0),
    "norm": lambda toy, data, h: h / (h.norm() + 1) + h / (1 + torch.linalg.vector_norm(h, 3, dim=0)),
    "amax with ties": lambda toy, data, h: h / (1 + torch.cat([h, toy.start(data)], 1).abs().amax(0).sum()),
    "amax of copies": lambda toy, data, h: h - torch.minimum(h, h.new_full((), 0.1)).amax(0) + h.max(),
    "amin": lambda toy, data, h: h + torch.tanh(h.amin((0, 1))),
    "prod": lambda toy, data, h: h + (1 + 0.1 * torch.tanh(h)).prod(0),
    "edges": lambda toy, data, h: h * (1 + toy.waves(toy.vectors(data)).mean(0)),
    "network of means": lambda toy, data, h: h * toy.readout(h.mean(0)),
    **{f"{how} by system": partial(_by_system, how) for how in ("sum", "mean", "amax", "amin", "prod")},
}


def _copy_of(h: Tensor) -> Tensor:
    out = torch.zeros(h.shape, dtype=h.dtype)
    out.add_(h)
    return out


# --- (e) models that compute their edge vectors themselves -----------------------------------------------------


class OwnVectors(Toy):
    """``positions[j] - positions[i] + shifts @ cell`` in the spelling ``options["spelling"]``."""

    def __init__(self, spelling: str, layout: EdgeLayout) -> None:
        super().__init__(spelling=spelling)
        self.edge_layout = layout

    def vectors(self, data: Batch) -> Tensor:
        return SPELLINGS[self.options["spelling"]](data, *self._ends(data))

    def _ends(self, data: Batch) -> tuple[Tensor, Tensor]:
        """Rows from which and to which vectors point."""
        ends = data.receivers, data.senders
        return ends if self.edge_layout.sign > 0 else ends[::-1]


def _cells(data: Batch) -> Tensor:
    return data.cell[data.batch[data.receivers]]


SPELLINGS: dict[str, Callable[[Batch, Tensor, Tensor], Tensor]] = {
    "einsum": lambda d, i, j: (
        d.positions[j] - d.positions[i] + torch.einsum("ni,nij->nj", d.neighbor_list_shifts, _cells(d))
    ),
    "bmm": lambda d, i, j: (
        d.positions.index_select(0, j)
        + torch.bmm(d.neighbor_list_shifts[:, None, :], d.cell.index_select(0, d.batch[i])).squeeze(1)
        - d.positions.index_select(0, i)
    ),
    "matmul": lambda d, i, j: (
        d.positions[j, :] - d.positions[i, :] + (d.neighbor_list_shifts.unsqueeze(-2) @ _cells(d)).view(-1, 3)
    ),
    "column vectors": lambda d, i, j: (
        F.embedding(j, d.positions) - F.embedding(i, d.positions)
        + torch.matmul(_cells(d).transpose(1, 2), d.neighbor_list_shifts.unsqueeze(-1)).squeeze(-1)
    ),
    "sum of products": lambda d, i, j: (
        (d.neighbor_list_shifts[:, :, None] * d.cell.view(-1, 3, 3)[d.batch[j]]).sum(1)
        + (d.positions.gather(0, _wide(j, d.neighbor_list_shifts)) - d.positions.gather(0, i[:, None].repeat(1, 3)))
    ),
    "the pair at once": lambda d, i, j: (
        (d.positions[d.edge_index][1 - d.edge_layout.sender_column] * -d.edge_layout.sign)
        + d.edge_layout.sign * d.positions[d.edge_index][d.edge_layout.sender_column]
        - torch.einsum("ei, eij -> ej", -d.neighbor_list_shifts, _cells(d))
    ),
    "zeros and given vectors": lambda d, i, j: d.zero_positions()[j] - d.zero_positions()[i] + d.edge_vectors,
    "one system": lambda d, i, j: d.positions[j] - d.positions[i] + _of_one_system(d),
}  # fmt: skip
LAYOUTS = {
    "receiver first": EdgeLayout(),
    "sender first": EdgeLayout(sender_column=0, vector="receiver_minus_sender"),
    "sender first, neighbour minus centre": EdgeLayout(sender_column=0),
}


def _of_one_system(data: Batch) -> Tensor:
    if data.n_systems == 1:
        return F.linear(data.neighbor_list_shifts, data.cell[0].T) + 0 * (data.neighbor_list_shifts @ data.cell.squeeze(0))
    return torch.einsum("ei,eij->ej", data.neighbor_list_shifts.to(torch.float64), _cells(data))


# --- (f) functions of positions and cell ------------------------------------------------------------------------


class OfPositions(Toy):
    """Reads absolute positions (an external field) and the volume of the cell, beside the edges."""

    strategy = ForceStrategy.POSITIONS

    def energies(self, data: Batch) -> Tensor:
        volume = torch.linalg.det(data.cell).abs()
        field = torch.sin(0.3 * data.positions[:, 2]) + 0.1 * data.positions[:, 0] * data.atomic_numbers
        centred = data.positions - data.positions.mean(0)
        pressure = (0.01 * (volume + 1).log() / data.n_atoms_per_system)[data.batch]
        return super().energies(data) + 0.2 * field + pressure + 0.01 * centred.square().sum(1)


class OfPositionsOnly(Toy):
    """The same by vectors that it computes itself."""

    strategy = ForceStrategy.POSITIONS

    def vectors(self, data: Batch) -> Tensor:
        ends = (data.receivers, data.senders) if data.edge_layout.sign > 0 else (data.senders, data.receivers)
        return SPELLINGS[self.options["spelling"]](data, *ends)


# --- (g) outputs per system; forces that the model itself returns ----------------------------------------------


class EnergyOnly(Toy):
    """Returns one energy a system: a sum of ``energies`` and, as ``options["of"]`` says, something nonlinear."""

    outputs = {"energy": PER_GRAPH}  # noqa: RUF012

    def forward(self, data: Batch) -> ModelOutputs:
        h = self.features(data)
        total = h.new_zeros(data.n_systems).index_add(0, data.batch, self.readout(h).squeeze(-1))
        if self.options["of"] == "network":  # parameters that act on what all ranks have alike
            pooled = torch.zeros(data.n_systems, WIDTH, dtype=h.dtype).index_add(0, data.batch, h)
            pooled = pooled / data.n_atoms_per_system.unsqueeze(1)
            total = total + self.readout(self.norm(pooled)).squeeze(-1) * self.embedding.weight[1].sum()
        return ModelOutputs(energy=total)


class EnergyShare(Toy):
    """Returns this rank's share of the energy, and says so."""

    outputs = {"energy": OutputSpec(OutputKind.PER_GRAPH, Reduce.ALL_REDUCE)}  # noqa: RUF012

    def forward(self, data: Batch) -> ModelOutputs:
        from nvdd import to_local

        energies, system = to_local(self.energies(data)), to_local(data.batch)
        counted = data.batch.meta.n_counted if hasattr(data.batch, "meta") else len(system)
        out = torch.zeros(data.n_systems, dtype=energies.dtype)
        return ModelOutputs(energy=out.index_add(0, system[:counted], energies[:counted]))


class Direct(Toy):
    """Predicts forces and stress by heads of their own."""

    strategy = ForceStrategy.DIRECT
    outputs = {"energies": PER_NODE, "forces": PER_NODE, "stress": PER_GRAPH, "charges": PER_NODE, "dipole": PER_GRAPH}  # noqa: RUF012

    def __init__(self) -> None:
        names = ("energy", "energies", "forces", "stress", "charges", "dipole")
        super().__init__(config={"outputs": frozenset(names), "active_outputs": {"energy"}})

    def forward(self, data: Batch) -> ModelOutputs:
        vectors, h = data.edge_vectors, self.features(data)
        pair = h[data.senders, :1] * vectors * self.waves(vectors)[:, 1:2]
        forces = torch.zeros(data.n_atoms, 3, dtype=h.dtype).index_add(0, data.receivers, pair)
        forces = forces - forces.mean(0)
        outer = torch.einsum("ni,nj->nij", forces, forces)
        stress = torch.zeros(data.n_systems, 3, 3, dtype=h.dtype).index_add(0, data.batch, outer)
        dipole = torch.zeros(data.n_systems, 3, dtype=h.dtype).index_add(0, data.batch, forces * h[:, 1:2])
        return ModelOutputs(
            energies=self.readout(h).squeeze(-1), forces=forces, stress=stress, charges=h[:, 0], dipole=dipole
        )


class Internal(Toy):
    """Differentiates inside its forward, by positions."""

    strategy = ForceStrategy.MODEL_INTERNAL
    outputs = {"energies": PER_NODE, "forces": PER_NODE}  # noqa: RUF012

    def forward(self, data: Batch) -> ModelOutputs:
        energies = self.energies(data)
        how = self.options["how"]
        if how == "sum":
            found = torch.autograd.grad(energies.sum(), data.positions, create_graph=True)
        elif how == "ones":
            found = torch.autograd.grad([energies], [data.positions], grad_outputs=[torch.ones_like(energies)])
        else:
            by_system = torch.zeros(data.n_systems, dtype=energies.dtype).index_add(0, data.batch, energies)
            found = torch.autograd.grad(by_system, (data.positions,), torch.ones_like(by_system))
        return ModelOutputs(energies=energies, forces=-found[0])


# --- (h) further inputs -----------------------------------------------------------------------------------------


class Fields(Toy):
    """Reads ``info["charge"]``, ``arrays["weight"]`` and ``arrays["moments"]``; changes one of them in place."""

    def __init__(self) -> None:
        inputs = {"node_inputs": frozenset({"weight", "moments"}), "system_inputs": frozenset({"charge"})}
        super().__init__(config=inputs)

    def start(self, data: Batch) -> Tensor:
        h = self.embedding(data.atomic_numbers) * data.weight.unsqueeze(1)
        return h + data.charge[data.batch, None] * data.moments.sum(1, keepdim=True) / data.charge.abs().sum()

    def summed(self, data: Batch, h: Tensor, waves: Tensor, layer: int = 0) -> Tensor:
        weight = data.weight.clone() if layer else data.weight
        m = self.messages(data, h, waves, layer) * (data.weight[data.senders] * weight.mul_(1.1)[data.senders])[:, None]
        weight.div_(1.1)
        spins = (data.moments[data.senders] * data.moments[data.receivers]).sum(1, keepdim=True)
        return torch.zeros_like(h).index_add(0, data.receivers, m * (1 + spins))


class Masked(Toy):
    """Drops edges by a condition of its own, and changes species in place."""

    def features(self, data: Batch) -> Tensor:
        z = data.atomic_numbers
        z -= 1
        vectors = data.edge_vectors
        near = vectors.norm(dim=1) < 3.5
        pair, vectors = data.edge_index[:, near], vectors[near]
        waves = self.waves(vectors * (CUTOFF / 3.5))
        i, j = pair[1 - data.edge_layout.sender_column], pair[data.edge_layout.sender_column]
        h = self.embedding(z + 1)
        m = self.embedding(z)[j] * waves
        z += 1
        return h + torch.zeros_like(h).index_add(0, i, m)


class Chunks(Toy):
    """Loops over edges in chunks, after reading senders once."""

    def summed(self, data: Batch, h: Tensor, waves: Tensor, layer: int = 0) -> Tensor:
        m = self.messages(data, h, waves, layer)
        out = torch.zeros_like(h)
        for k in range(WIDTH):
            out = out + F.pad(torch.zeros_like(h[:, :1]).index_add(0, data.receivers, m[:, k : k + 1]), (k, WIDTH - 1 - k))
        return out


TOYS: dict[str, Callable[[], Toy]] = {
    **{f"messages, {name}": partial(MessagePassing, scatter=name) for name in SCATTERS},
    "charge equilibration": ChargeEquilibration,
    **{
        f"attention over {over}{', detached' if detached else ''}, from {start}": partial(
            Attention, over=over, detached=detached, start=start
        )
        for over in ("receivers", "senders") for detached in (False, True) for start in (0.0, -torch.inf)
    },
    "edges attended by both ends": EdgeAttention,
    "normalised by senders": Normalised,
    **{f"statistics, {name}": partial(Statistics, by=name) for name in STATISTICS},
    **{
        f"own vectors, {spelling}, {layout}": partial(OwnVectors, spelling, LAYOUTS[layout])
        for spelling in SPELLINGS for layout in LAYOUTS
    },
    "positions": OfPositions,
    **{f"positions, {s}": partial(OfPositionsOnly, spelling=s) for s in ("einsum", "bmm", "the pair at once")},
    "energy only, sum": partial(EnergyOnly, of="sum"),
    "energy only, network": partial(EnergyOnly, of="network"),
    "energy share": EnergyShare,
    "direct": Direct,
    **{f"internal, {how}": partial(Internal, how=how) for how in ("sum", "ones", "by system")},
    "fields": Fields,
    "masked": Masked,
    "chunks": Chunks,
}  # fmt: skip
# atoms without neighbours make them NaN in one process
ONLY_WITH_NEIGHBOURS = {"unguarded": Unguarded}


@cache
def toy(name: str) -> Toy:
    """Built once per process."""
    return {**TOYS, **ONLY_WITH_NEIGHBOURS}[name]()


@dataclass
class WidePadder(COOPadder):
    """Edges in larger steps."""

    multiple: int = 512


# --- structures -------------------------------------------------------------------------------------------------


def _with_inputs(atoms: Atoms, charge: float, seed: int) -> Atoms:
    rng = np.random.default_rng(seed)
    atoms.numbers[:] = rng.integers(1, 6, len(atoms))
    atoms.numbers[:2] = 1, 3
    atoms.info["charge"] = charge
    atoms.set_array("weight", rng.uniform(0.5, 1.5, len(atoms)))
    atoms.set_array("moments", rng.normal(size=(len(atoms), 2)))
    return atoms


def _triclinic() -> Atoms:
    atoms = bulk("Ar", "fcc", a=4.4, cubic=True).repeat((2, 2, 1))
    atoms.rattle(0.2, seed=3)
    shear = np.array([[1, 0.1, 0.05], [-0.08, 1, 0.2], [0.3, 0, 1.0]])
    atoms.set_cell(atoms.cell.array @ shear, scale_atoms=True)
    atoms.positions += np.random.default_rng(0).integers(-2, 3, (len(atoms), 3)) @ atoms.cell.array
    return _with_inputs(atoms, 0.7, 0)


def _slab() -> Atoms:
    atoms = bulk("Ar", "fcc", a=4.4, cubic=True).repeat((1, 3, 1))
    atoms.rattle(0.2, seed=4)
    atoms.pbc = (True, True, False)
    atoms.cell[2] = 0
    return _with_inputs(atoms, -0.4, 1)


def _gas() -> Atoms:
    """On 4 ranks one of them owns nothing; an isolated atom."""
    atoms = Atoms("Ar3", [[0, 0, 0], [3.1, 0.4, 0.2], [40, 0.1, 0.3]], cell=[100, 90, 80], pbc=True)
    return _with_inputs(atoms, 0.3, 2)


def _pair() -> Atoms:
    """On 4 ranks two of them own nothing; both atoms have a neighbour."""
    return _with_inputs(Atoms("Ar2", [[0.2, 0, 0], [3.1, 0.3, -0.2]]), 0.5, 6)


def _several() -> list[Atoms]:
    small = Atoms("Ar2", [[0, 0, 0], [1.5, 1.9, 0.3]], cell=[[3.6, 0.2, 0], [0, 3.9, 0], [0.4, 0, 4.1]], pbc=True)
    chain = Atoms("Ar3", [[9, 1, 0], [11.5, 1.2, 0.4], [9.2, 3.9, 0.1]], cell=[0, 0, 6.5], pbc=(False, False, True))
    return [_with_inputs(a, q, 3 + k) for k, (a, q) in enumerate([(_slab(), 0.2), (chain, -1.0), (small, 0.9)])]


STRUCTURES = {"triclinic": _triclinic, "slab": _slab, "gas": _gas, "pair": _pair, "several": _several}


@cache
def structure(name: str) -> Any:
    """An Atoms or a list of them."""
    return STRUCTURES[name]()


def batch_of(name: str) -> Batch:
    """A new Batch of a named structure."""
    return Batch.from_atoms(structure(name))


# --- both evaluations -------------------------------------------------------------------------------------------


def plain(name: str, structure_name: str) -> dict[str, np.ndarray]:
    """One process, plain tensors, plain autograd: energy, forces, virial and what else the toy returns."""
    model, batch = toy(name), batch_of(structure_name)
    positions = batch.positions.clone().requires_grad_(True)
    strain = torch.zeros(batch.n_systems, 3, 3, dtype=torch.float64, requires_grad=True)
    symmetric = 0.5 * (strain + strain.transpose(1, 2))
    attach_neighbors(batch, CUTOFF, model.edge_layout)
    batch.positions = positions + torch.einsum("ni,nij->nj", positions, symmetric[batch.batch])
    batch.cell = batch.cell + batch.cell @ symmetric
    raw = model(batch)
    energy = raw["energy"] if "energy" in raw else torch.zeros(batch.n_systems, dtype=torch.float64).index_add(
        0, batch.batch, raw["energies"]
    )  # fmt: skip
    out = {k: v for k, v in raw.items() if k not in ("energies",)} | {"energy": energy}
    if "forces" not in raw:
        gradient, virial = torch.autograd.grad(energy.sum(), (positions, strain))
        out |= {"forces": -gradient, "virial": virial}
    return {k: v.detach().numpy() for k, v in out.items()}


def on_rank(
    comm: Communicator, names: list[str], structure_name: str, policy: str | None, **domain: Any
) -> dict[str, Any]:
    """Runs on each rank: every toy; of several systems twice, the second time with what was built the first time.

    ``policy`` is one of `POLICIES`, or None for the toy's own spec under the strategy that ``domain`` names.
    """
    out: dict[str, Any] = {}
    for name in names:
        model = toy(name)
        spec = replace_policy(model.distribution_spec(), policy) if policy else model.distribution_spec()
        distributed = DistributedModel(model, DomainConfig(mesh=comm, skin=0.6, **domain), spec=spec)
        wanted = {"energy", "forces"} | (set(spec.outputs) - {"energies"})
        if spec.force_strategy in (ForceStrategy.EDGE_VECTORS, ForceStrategy.POSITIONS):
            wanted |= {"virial"}
        batch = batch_of(structure_name)
        if structure_name == "several":
            distributed(batch, wanted)
        with dispatch_trace() as trace:
            found = distributed(batch, wanted)
        out[name] = {
            "ids": found.ids.numpy(),
            "sites": [e.site for e in trace.exchanges],
            "reductions": dict(trace.reductions),
            **{k: v.numpy() for k, v in found.items()},
        }
    return out


def replace_policy(spec: MLIPSpec, policy: str) -> MLIPSpec:
    """The spec with another storage policy."""
    return MLIPSpec(
        replace(spec.distribution, policy=POLICIES[policy]), spec.outputs, force_strategy=spec.force_strategy
    )


def assert_equal(parts: list[dict[str, Any]], name: str, structure_name: str) -> None:
    """Every number of one process, 1e-12 in energy and 1e-11 in everything else, and the same steps on all ranks."""
    expected = plain(name, structure_name)
    mine = [p[name] for p in parts]
    ids = np.concatenate([p["ids"] for p in mine])
    assert sorted(ids) == list(range(len(ids))), f"{name}: every atom must be owned exactly once"
    assert len(ids) == len(expected["forces"])
    assert len({(tuple(p["sites"]), tuple(sorted(p["reductions"].items()))) for p in mine}) == 1, name
    for key, value in expected.items():
        if value.shape[:1] == ids.shape and key not in ("energy", "virial", "stress", "dipole"):
            found = np.empty_like(value)
            found[ids] = np.concatenate([p[key] for p in mine])
        else:
            found = mine[0][key]
            for p in mine[1:]:
                np.testing.assert_array_equal(p[key], found)
        relative = 1e-12 if key == "energy" else 1e-11
        scale = np.abs(value).max()
        assert np.isfinite(value).all(), f"{name}, {key}: the reference is not finite"
        error = np.abs(found - value).max()
        assert error <= relative * scale + 1e-14, f"{name}, {structure_name}, {key}: differ by {error}, largest {scale}"
    assert np.abs(expected["forces"]).max() > 1e-6, f"{name}: without forces nothing is tested"


# --- (i) models that must be stopped ----------------------------------------------------------------------------


class Refused(Toy):
    """Does ``options["what"]`` with its features."""

    def energies(self, data: Batch) -> Tensor:
        h = self.start(data) + torch.zeros_like(self.start(data)).index_add(
            0, data.receivers, self.waves(data.edge_vectors)
        )
        return REFUSED[self.options["what"]][0](self, data, h)


class ScriptedShare(nn.Module):
    """Sums over systems where dispatch can't see it."""

    def forward(self, h: Tensor, system: Tensor, n: int) -> Tensor:
        return torch.zeros(n, dtype=h.dtype).index_add(0, system, h.sum(1))


class ScriptedMessages(nn.Module):
    """Reads senders where dispatch can't see it."""

    def forward(self, h: Tensor, senders: Tensor) -> Tensor:
        return h[senders]


class ScriptedSum(nn.Module):
    """Sums over rows where dispatch can't see it."""

    def forward(self, h: Tensor) -> Tensor:
        return h.sum()


def _scripted_energy(toy: Toy, data: Batch, h: Tensor) -> Tensor:
    """A partial sum that would pass for an energy."""
    return torch.jit.script(ScriptedSum())(h).reshape(1)


# name -> (what it does with its features, the operation that the error names)
REFUSED: dict[str, tuple[Callable[[Toy, Batch, Tensor], Tensor], str]] = {
    "sort": (lambda toy, data, h: h.sort(0).values.sum(1), "sort"),
    "cumsum": (lambda toy, data, h: h.cumsum(0).sum(1), "cumsum"),
    "softmax over atoms": (lambda toy, data, h: h.softmax(0).sum(1), "softmax"),
    "gram matrix": (lambda toy, data, h: h @ (h.T @ h)[0], "matmul"),
    "all pairs": (lambda toy, data, h: (h[:, None] - h[None]).square().sum((1, 2)), "sub"),
    "cdist": (lambda toy, data, h: torch.cdist(h, h).sum(1), "cdist"),
    "batch norm in training": (lambda toy, data, h: nn.BatchNorm1d(WIDTH).double()(h).sum(1), "batch_norm"),
    "dropout in training": (lambda toy, data, h: F.dropout(h).sum(1), "dropout"),
    "index below the number of atoms": (lambda toy, data, h: h.sum(1) * (data.edge_index < data.n_atoms).all(), "lt"),
    "half of a symmetric list": (lambda toy, data, h: h.sum(1) * (data.senders < data.receivers).sum(), "lt"),
    "first atom": (lambda toy, data, h: h.sum(1) - h[0].sum(), "getitem"),
    "first atoms": (lambda toy, data, h: h.sum(1) - h[-2:].sum(), "getitem"),
    "first edges": (lambda toy, data, h: h.sum(1) + h[data.edge_index[:, :3][0]].sum(), "getitem"),
    "largest row": (lambda toy, data, h: h.new_zeros(int(data.receivers.max()) + 1), "max"),
    "absolute positions": (lambda toy, data, h: h.sum(1) + data.positions[:, 0], "add"),
    "centred positions": (lambda toy, data, h: h.sum(1) * (data.positions - data.positions.mean(0)).sum(1), "mean"),
    "volume": (lambda toy, data, h: h.sum(1) * torch.linalg.det(data.cell).sum(), "linalg_det"),
    "fractional coordinates": (lambda toy, data, h: (data.edge_vectors @ torch.linalg.inv(data.cell)[0]).sum(), "linalg_inv"),
    "vectors times the cell": (lambda toy, data, h: h.sum(1) + torch.einsum("ei,eij->ej", data.edge_vectors, data.cell[data.batch[data.receivers]]).sum(), "einsum"),
    "images": (lambda toy, data, h: h.sum(1) * (data.neighbor_list_shifts != 0).any(), "ne"),
    "shifts as features": (lambda toy, data, h: h.sum(1) + data.neighbor_list_shifts.norm(dim=1).sum(), "norm"),
    "scripted, given senders": (lambda toy, data, h: h.sum(1) + torch.jit.script(ScriptedMessages())(h, data.senders).sum(), "forward"),
    "scripted, given systems": (lambda toy, data, h: h.sum(1) + torch.jit.script(ScriptedShare())(h, data.batch, data.n_systems).sum(), "forward"),
    "random numbers": (lambda toy, data, h: (h + torch.randn_like(h)).sum(1), "randn_like"),
    "a value for each atom of one rank": (lambda toy, data, h: (h + h.mean(0).expand(data.n_atoms, -1)).sum(1), "expand"),
}  # fmt: skip


def refuse_on_rank(comm: Communicator, names: list[str], structure_name: str, policy: str) -> dict[str, Any]:
    """What each toy of ``names`` raises on this rank; nothing may be under way between ranks when it does."""
    out: dict[str, Any] = {}
    for name in names:
        model = Refused(what=name)
        spec = replace_policy(model.distribution_spec(), policy)
        distributed = DistributedModel(model, DomainConfig(mesh=comm), spec=spec)
        try:
            distributed(batch_of(structure_name))
            out[name] = ("accepted", None, "")
        except DistributedOpError as error:
            out[name] = (str(error), error.op, error.site)
        comm.all_gather_object(name, "toys")  # a rank that is elsewhere would fail here
    return out
