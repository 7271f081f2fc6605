"""Sums of models by name, the same evaluation in one process without nvdd's runtime, and the one over ranks.

In one process each block gets neighbours of its own, searched with its own cutoff, and plain autograd differentiates the
sum: nothing of `PipelineModelWrapper` or `DistributedModel` is used.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

import parity
import toys
from nvdd import (
    Batch,
    DistributedModel,
    DistributionSpec,
    DomainConfig,
    ForceStrategy,
    MLIPSpec,
    ModelConfig,
    ModelOutputs,
    NeighborConfig,
    OutputKind,
    OutputSpec,
    PipelineModelWrapper,
    ShardedStoragePolicy,
    dispatch_trace,
)
from nvdd.communicator import Communicator
from nvdd.models.ewald import EwaldModelWrapper
from nvdd.models.lj import LennardJonesModelWrapper
from nvdd.models.pme import PMEModelWrapper
from nvdd.neighbors import attach_neighbors

PER_NODE = OutputSpec(OutputKind.PER_NODE)
_DIFFERENTIATED = (ForceStrategy.EDGE_VECTORS, ForceStrategy.POSITIONS)


class Charges(toys.Toy):
    """No energy: charges that are equilibrated over each system in every layer, through messages of neighbours."""

    outputs = {"charges": PER_NODE}  # noqa: RUF012

    def __init__(self, strategy: ForceStrategy = ForceStrategy.EDGE_VECTORS, policy: str = "halo_fetch") -> None:
        super().__init__(config={"outputs": frozenset({"charges"}), "active_outputs": {"charges"}})
        self.strategy, self.policy = strategy, policy
        self.charge_of = torch.nn.Linear(toys.WIDTH, 1).double()

    def charges(self, data: Batch) -> Tensor:
        h, waves = self.start(data), self.waves(self.vectors(data))
        for layer in range(2):
            h = h + self.norm(self.summed(data, h, waves, layer))
            q = torch.tanh(self.charge_of(h)).squeeze(-1)
            total = torch.zeros(data.n_systems, dtype=q.dtype).scatter_add(0, data.batch, q)
            q = q - (total / data.n_atoms_per_system)[data.batch]
            h = h + q.unsqueeze(-1) * self.embedding.weight[0]
        return q

    def forward(self, data: Batch) -> ModelOutputs:
        return ModelOutputs(charges=self.charges(data))

    def distribution_spec(self, strategy: Any = None) -> MLIPSpec:
        return MLIPSpec(DistributionSpec(toys.POLICIES[self.policy]), self.outputs, force_strategy=self.strategy)


class ChargesWithEnergy(Charges):
    """The same with an energy of its own."""

    outputs = {"charges": PER_NODE, "energies": PER_NODE}  # noqa: RUF012

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.model_config.outputs = frozenset({"charges", "energy", "energies", "forces", "stress", "stresses"})

    def forward(self, data: Batch) -> ModelOutputs:
        q = self.charges(data)
        return ModelOutputs(charges=q, energies=0.7 * q**2 + self.energies(data))


class Totals(Charges):
    """A value of each system."""

    outputs = {"charge": OutputSpec(OutputKind.PER_GRAPH)}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.model_config.outputs = frozenset({"charge"})

    def forward(self, data: Batch) -> ModelOutputs:
        q = self.charges(data).square()
        return ModelOutputs(charge=torch.zeros(data.n_systems, dtype=q.dtype).index_add(0, data.batch, q))


class Coulomb(torch.nn.Module, toys.BaseModelMixin):
    """``sum q_i q_j g(r)`` over neighbours, and a hardness; reads ``charges``."""

    def __init__(self, cutoff: float = 6.1, policy: Any = None, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.register_buffer("hardness", torch.tensor(0.4, dtype=dtype))
        self.cutoff, self.policy = cutoff, policy or toys.POLICIES["halo_fetch"]
        self.model_config = ModelConfig(neighbor_config=NeighborConfig(cutoff), node_inputs=frozenset({"charges"}))

    def forward(self, data: Batch) -> ModelOutputs:
        r, q = data.edge_vectors.norm(dim=1), data.charges
        pair = 0.5 * q[data.senders] * q[data.receivers] * (1 - r / self.cutoff) ** 3 / (0.5 + r)
        return ModelOutputs(energies=torch.zeros_like(q).index_add(0, data.receivers, pair) + self.hardness * q**2)

    def distribution_spec(self, strategy: Any = None) -> MLIPSpec:
        return MLIPSpec(DistributionSpec(self.policy), {"energies": PER_NODE})


class Reciprocal(torch.nn.Module, toys.BaseModelMixin):
    """Ewald-like: structure factors of charges, functions of positions and cell; reads ``charges``."""

    def __init__(self) -> None:
        super().__init__()
        k = torch.cartesian_prod(*[torch.arange(-1, 2)] * 3).double()
        self.register_buffer("k", k[(k != 0).any(1)])
        self.model_config = ModelConfig(
            neighbor_config=NeighborConfig(3.0),
            node_inputs=frozenset({"charges"}),
            outputs=frozenset({"energy", "energies", "forces", "stress"}),
        )

    def forward(self, data: Batch) -> ModelOutputs:
        inverse = torch.linalg.inv(data.cell)
        wave = 2 * torch.pi * torch.einsum("ni,nij->nj", data.positions, inverse[data.batch]) @ self.k.T
        q, phases = data.charges, torch.stack([wave.cos(), wave.sin()], 2)
        zero = torch.zeros(data.n_systems, *phases.shape[1:], dtype=phases.dtype)
        factor = zero.index_add(0, data.batch, q[:, None, None] * phases)
        k = torch.einsum("ka,sia->ski", self.k, inverse.transpose(1, 2).transpose(1, 2))
        weight = torch.exp(-4.0 * k.square().sum(2)) / torch.linalg.det(data.cell).abs()[:, None]
        potential = (phases * (factor * weight[:, :, None])[data.batch]).sum((1, 2))
        return ModelOutputs(energies=3.0 * q * potential)

    def distribution_spec(self, strategy: Any = None) -> MLIPSpec:
        spec = MLIPSpec(DistributionSpec(toys.POLICIES["halo_fetch"]), {"energies": PER_NODE})
        return spec.with_force_strategy(ForceStrategy.POSITIONS)


class OwnPolicy(toys.MessagePassing):
    """Message passing under another storage policy than its neighbours in a sum."""

    def __init__(self, policy: Any) -> None:
        super().__init__(scatter="index_add")
        self.policy = policy

    def distribution_spec(self, strategy: Any = None) -> MLIPSpec:
        return MLIPSpec(DistributionSpec(self.policy), self.outputs)


def lj(cutoff: float, sigma: float = 1.8, **options: Any) -> LennardJonesModelWrapper:
    """Takes any element."""
    return LennardJonesModelWrapper(epsilon=0.02, sigma=sigma, cutoff=cutoff, shift="smooth", **options)


def _shared() -> dict[str, Any]:
    return {"charges": (0, "charges")}


PIPELINES: dict[str, Any] = {
    "lj + lj": lambda: PipelineModelWrapper([lj(4.3, 2.9), lj(8.1, 3.1)]),
    "mace + lj": lambda: PipelineModelWrapper([parity.wrapper("mace"), lj(7.3)]),
    "sevennet + lj": lambda: PipelineModelWrapper([parity.wrapper("7net-0/float64"), lj(3.7)]),
    "three": lambda: PipelineModelWrapper([lj(7.3), parity.wrapper("mace-zbl"), lj(3.6, 1.6)]),
    "mace + positions": lambda: PipelineModelWrapper([parity.wrapper("mace"), toys.OfPositions()]),
    "toy + positions": lambda: PipelineModelWrapper([OwnPolicy(toys.POLICIES["halo_fetch"]), toys.OfPositions(), lj(6.0)]),
    "direct + lj": lambda: PipelineModelWrapper([toys.Direct(), lj(6.0)]),
    "internal + lj": lambda: PipelineModelWrapper([lj(6.0), toys.Internal(how="sum")]),
    "policies": lambda: PipelineModelWrapper(
        [OwnPolicy(toys.POLICIES["halo_correction"]), lj(5.5), OwnPolicy(ShardedStoragePolicy(scatter_mode="local"))]
    ),
    "energy of systems + lj": lambda: PipelineModelWrapper([toys.EnergyOnly(of="network"), lj(6.0)]),
    "wired": lambda: PipelineModelWrapper([Charges(), Coulomb(), lj(5.0)], _shared()),
    "wired, energies of both": lambda: PipelineModelWrapper([ChargesWithEnergy(), Coulomb(3.0)], _shared()),
    "wired backwards": lambda: PipelineModelWrapper([Coulomb(), ChargesWithEnergy()], {"charges": (1, "charges")}),
    "wired to two": lambda: PipelineModelWrapper([ChargesWithEnergy(), Coulomb(), Reciprocal()], _shared()),
    "wired, positions": lambda: PipelineModelWrapper(
        [Charges(strategy=ForceStrategy.POSITIONS), Reciprocal()], _shared()
    ),
    "wired, halo read": lambda: PipelineModelWrapper(
        [Charges(policy="halo_correction"), Coulomb(policy=toys.POLICIES["halo_correction"])], _shared()
    ),
    "wired, of systems": lambda: PipelineModelWrapper(
        [Totals(), toys.ChargeEquilibration()], {"charge": (0, "charge")}
    ),
    "wired, direct": lambda: PipelineModelWrapper([toys.Direct(), Coulomb()], _shared()),
    "mace + ewald": lambda: PipelineModelWrapper([parity.wrapper("mace"), EwaldModelWrapper(cutoff=6.0)]),
    "mace + d3": lambda: PipelineModelWrapper([parity.wrapper("mace"), parity.wrapper("dftd3")]),
    "sevennet + d3": lambda: PipelineModelWrapper([parity.wrapper("7net-0/float64"), parity.wrapper("dftd3-zero")]),
    "aimnet2 + pme": lambda: PipelineModelWrapper([parity.wrapper("aimnet2"), PMEModelWrapper(cutoff=6.0)], _shared()),
    "wired, fixed": lambda: PipelineModelWrapper([Charges(), Coulomb()], {"charges": (0, "charges", "fixed")}),
}  # fmt: skip


@cache
def pipeline(name: str) -> PipelineModelWrapper:
    """A sum of models, made once per process."""
    return PIPELINES[name]()


def wired_to_two() -> PipelineModelWrapper:
    """For the validator, which wants a function that makes the model."""
    return PIPELINES["wired to two"]()


def plain(name: str, atoms: Any) -> dict[str, np.ndarray]:
    """One process, block by block: energy, forces and virial, of one Atoms or a list."""
    model = pipeline(name)
    first = Batch.from_atoms(atoms)
    positions = first.positions.clone().requires_grad_(True)
    strain = torch.zeros(first.n_systems, 3, 3, dtype=torch.float64, requires_grad=True)
    symmetric = 0.5 * (strain + strain.transpose(1, 2))
    volume = torch.linalg.det(first.cell).abs()[:, None, None]
    raws: dict[int, Any] = {}
    todo = list(range(len(model.composed_of)))
    while todo:
        k = next(k for k in todo if all(w.source in raws for w in model.wires if w.target == k))
        todo.remove(k)
        block, batch = model.composed_of[k], Batch.from_atoms(atoms)
        attach_neighbors(batch, block.model_config.neighbor_config.cutoff, block.edge_layout)
        batch.positions = positions + torch.einsum("ni,nij->nj", positions, symmetric[batch.batch])
        batch.cell = batch.cell + batch.cell @ symmetric
        for w in model.wires:
            if w.target == k:
                value = raws[w.source][w.output]
                batch.node_fields[w.input] = value.detach() if w.fixed else value
        raws[k] = block(batch)
    n, system = first.n_systems, first.batch
    total, derived = torch.zeros(n, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    forces, virial = torch.zeros_like(first.positions), torch.zeros(n, 3, 3, dtype=torch.float64)
    for k, raw in raws.items():
        if "energies" in raw:
            energy = torch.zeros(n, dtype=torch.float64).index_add(0, system, raw["energies"].reshape(-1).double())
        else:
            energy = raw.get("energy", torch.zeros(n, dtype=torch.float64))
        total = total + energy
        spec = model.composed_of[k].distribution_spec()
        if spec.force_strategy in _DIFFERENTIATED:
            derived = derived + energy.sum()
        else:
            forces = forces + raw["forces"]
            virial = virial + (raw["stress"] * volume if "stress" in raw else 0)
    g, w = torch.autograd.grad(derived, (positions, strain), materialize_grads=True)
    out = {"energy": total, "forces": forces - g}
    if all(
        "stress" in raws[k] for k, b in enumerate(model.composed_of)
        if b.distribution_spec().force_strategy not in _DIFFERENTIATED
    ):  # fmt: skip
        out["virial"] = virial + w
    return {key: value.detach().numpy() for key, value in out.items()}


def on_rank(comm: Communicator, name: str, atoms: Any, wanted: list[str], options: dict) -> dict[str, Any]:
    """Runs on each rank: twice, the second time without a new plan."""
    distributed = DistributedModel(pipeline(name), DomainConfig(mesh=comm, **options))
    batch = Batch.from_atoms(atoms)
    with dispatch_trace() as first:
        distributed(batch, wanted)
    with dispatch_trace() as trace:
        out = distributed(batch, wanted)
    return {
        "ids": out.ids.numpy(),
        "built": dict(first.setup),
        "setup": dict(trace.setup),
        "builds": distributed.graphs.n_builds,
        "sites": [e.site for e in trace.exchanges],
        "halo": [plan.n_halo for plan in plans(distributed)],
        **{k: v.numpy() for k, v in out.items()},
    }


def plans(distributed: DistributedModel) -> list[Any]:
    """The exchange plans that are kept: of the widest cutoff, then of the narrower ones."""
    return [t.plan for t in (distributed.graphs._topology, *distributed.graphs._narrower.values())]


def assert_equal(parts: list[dict[str, Any]], expected: dict[str, np.ndarray], forces: float = 1e-10) -> None:
    """Of all ranks together: energy to 1e-12, the rest to ``forces`` of the largest; the same steps on every rank."""
    ids = np.concatenate([p["ids"] for p in parts])
    assert sorted(ids) == list(range(len(expected["forces"]))), "every atom must be owned exactly once"
    assert len({tuple(p["sites"]) for p in parts}) == 1, "ranks must take part in the same exchanges"
    for key, value in expected.items():
        if key == "forces":
            found = np.empty_like(value)
            found[ids] = np.concatenate([p[key] for p in parts])
        else:
            found = parts[0][key]
            for p in parts[1:]:
                np.testing.assert_array_equal(p[key], found)
        relative = 1e-12 if key == "energy" else forces
        scale, error = np.abs(value).max(), np.abs(found - value).max()
        assert np.isfinite(value).all() and error <= relative * scale + 1e-14, f"{key}: off by {error}, largest {scale}"
