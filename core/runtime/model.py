"""`DistributedModel`: a single-process wrapper, evaluated over ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nvdd.adapters import AdapterRegistry
from nvdd.adapters.scripted import ScriptedCalls
from nvdd.cells import volume
from nvdd.config import DomainConfig, StrategyKind
from nvdd.data import Batch
from nvdd.errors import DistributedOpError, InputError
from nvdd.exchange import counted_once
from nvdd.model_config import EdgeLayout, NeighborListFormat
from nvdd.partition import SpatialPartitioner
from nvdd.policy import HaloStoragePolicy, LocalStoragePolicy, ShardedStoragePolicy
from nvdd.roles import ShardMeta
from nvdd.runtime.graph import GraphBuilder, LocalGraph
from nvdd.runtime.leaves import EdgeVectorLeaf, PositionLeaf
from nvdd.runtime.outputs import DistributedOutputs, Energy, check_roles, sum_systems
from nvdd.shard_tensor import to_local
from nvdd.specs import ForceStrategy, MLIPSpec, OutputKind, Reduce

_SPATIAL = (HaloStoragePolicy, ShardedStoragePolicy, LocalStoragePolicy)


class DistributedModel:
    """Evaluates a model wrapper on the ranks of ``config.mesh``.

    Args:
        wrapper: a `BaseModelMixin` module on this rank's device. Its code is single-process code.
        config: how the run is divided.
        spec: how the model is distributed; None for ``wrapper.distribution_spec``.
        report_phase: called with the name of each phase as it begins.

    Attributes:
        adapters: those of the spec, in place while the model runs; ``distributed_setup`` may add to them.

    Example::

        model = DistributedModel(LennardJonesModelWrapper(epsilon=0.0104, sigma=3.4), DomainConfig(mesh=mesh))
        out = model(Batch.from_atoms(atoms))  # the same batch on every rank
        out["energy"], out.ids, out["forces"]  # forces of the atoms that this rank owns
    """

    def __init__(
        self,
        wrapper: Any,
        config: DomainConfig | None = None,
        spec: MLIPSpec | None = None,
        report_phase: Callable[[str], None] | None = None,
    ) -> None:
        self.wrapper, self.config = wrapper, config or DomainConfig()
        self.comm = self.config.communicator()
        self.spec = spec if spec is not None else resolve_spec(wrapper, self.config.strategy)
        self.timings: dict[str, float] = {}
        self._report_phase = report_phase or (lambda phase: None)
        self._check_spec()
        neighbors = wrapper.model_config.neighbor_config
        if neighbors is None:
            raise InputError(f"{type(wrapper).__name__}.model_config has no neighbor_config, so its cutoff is unknown")
        if neighbors.format is not NeighborListFormat.COO:
            raise InputError(
                f"{type(wrapper).__name__} wants neighbours as {neighbors.format.value}; only 'coo' is distributed"
            )
        if self.config.cutoff is not None and self.config.cutoff < neighbors.cutoff:
            raise InputError(
                f"DomainConfig.cutoff {self.config.cutoff} A is less than the model's cutoff {neighbors.cutoff} A; leave it out"
            )
        self.layout: EdgeLayout = getattr(wrapper, "edge_layout", EdgeLayout())
        partitioner = SpatialPartitioner(self.comm.size, self.config.grid_dims, self.config.balance)
        self.graphs = GraphBuilder(
            self.comm, partitioner, neighbors.cutoff, self.config.skin, self.config.cutoff, neighbors.bonds, self._phase
        )
        self.adapters = AdapterRegistry((*self.spec.all_adapters, ScriptedCalls()))
        if hasattr(wrapper, "distributed_setup"):
            wrapper.distributed_setup(self)

    def _check_spec(self) -> None:
        if self.spec is None:
            raise InputError(
                f"{type(self.wrapper).__name__} declares no distribution_spec; return a preset from it (SPEC_MPNN_HALO suits "
                "message-passing models) or pass spec="
            )
        policy = self.spec.distribution.policy
        if not isinstance(policy, _SPATIAL):
            raise InputError(
                f"strategy 'halo' divides atoms in space, and needs a spec whose policy is one of "
                f"{', '.join(p.__name__ for p in _SPATIAL)}; this one has {policy}"
            )

    @property
    def available_outputs(self) -> set[str]:
        """Names that a call can be asked for."""
        names = {"energy", "forces", "stress", "virial"} | set(self.wrapper.model_config.outputs)
        if self.spec.force_strategy is ForceStrategy.EDGE_VECTORS:
            return names | {"stresses"}
        # from a derivative by positions there is no share of each atom
        return names - ({"stresses"} if self.spec.force_strategy is ForceStrategy.POSITIONS else set())

    def _phase(self, name: str | None) -> None:
        now = time.perf_counter()
        if self._current is not None:
            self.timings[self._current] = self.timings.get(self._current, 0.0) + now - self._since
        self._current, self._since = name, now
        if name is not None:
            self._report_phase(name)

    _current: str | None = None
    _since: float = 0.0

    def __call__(
        self, batch: Batch, outputs: Iterable[str] = ("energy", "forces"), create_graph: bool = False
    ) -> DistributedOutputs:
        """Energy and derivatives of ``batch``, which every rank gives alike.

        Args:
            batch: plain tensors; all atoms of all systems.
            outputs: names out of `available_outputs`.
            create_graph: keep the autograd graph, to differentiate the outputs again: by ``batch.positions`` if
                they require a gradient (which comes out complete on every rank), and by the model's parameters
                (each rank gets its share, to be summed over ranks).

        Returns:
            Per-system values, and per-atom values of the atoms that this rank owns.

        Raises:
            DistributedOpError: the model does something whose meaning over ranks is unknown.
        """
        wanted = set(outputs)
        unknown = wanted - self.available_outputs
        if unknown:
            raise InputError(f"outputs {sorted(unknown)} are not among {sorted(self.available_outputs)}")
        self.timings = {}
        with torch.inference_mode(False), torch.enable_grad():
            self._phase("edges")
            needs_volume = bool(wanted & {"stress", "stresses"})
            volumes = [volume(c) for c in batch.cell.detach().cpu().numpy()] if needs_volume else []
            graph = self.graphs.update(batch)
            self._phase("edges")
            if create_graph and batch.positions.requires_grad:
                device = self.comm.device
                graph = graph.differentiable(batch.positions.to(device), batch.cell.to(device))
            with self._partition(graph, batch.n_systems) as meta:
                forward = self._forward(batch, graph, meta, wanted, create_graph)
                self._phase("consolidate")
                values = self._consolidate(volumes, meta, graph.topology.system, forward, wanted)
            if not create_graph:
                values = {name: value.detach() for name, value in values.items()}
            self._phase(None)
            return DistributedOutputs(graph.topology.ids, values, meta.n_halo, graph.receiver.shape[0])

    def shares(self, batch: Batch, graph: LocalGraph, outputs: Iterable[str]) -> dict[str, Tensor]:
        """What this rank contributes, of a graph that was made elsewhere; sums over ranks are left to the caller.

        Args:
            batch: inputs of this rank's rows, ``[owned | halo]``; ``graph.topology.rows`` are their numbers.
            graph: the edges of this rank, and its exchange plan. Every rank calls at once.
            outputs: names of what to compute.

        Returns:
            Of ``energy`` (1,) eV and ``virial`` (1, 3, 3) eV this rank's share; ``energies`` (n_counted,) eV and
            ``forces`` (n_counted, 3) eV/A of owned atoms; ``pair_forces`` (E, 3) eV/A, dE/d(edge vector), from
            models of edge vectors. The energy is always there. All float64.

        Raises:
            DistributedOpError: as from a call.
            InputError: the model has no such output.
        """
        wanted = set(outputs)
        self.timings = {}
        with torch.inference_mode(False), torch.enable_grad(), self._partition(graph, batch.n_systems) as meta:
            forward = self._forward(batch, graph, meta, wanted, create_graph=False)
            self._phase("consolidate")
            values = {"energy": forward.energy.by_system}
            for name in wanted - {"energy"}:
                if name in forward.derived:
                    value = forward.derived[name]
                    values[name] = value[: meta.n_counted] if name == "forces" else value
                elif name == "energies":
                    values[name] = forward.energy.per_atom()
                elif name == "virial":
                    values[name] = self._virial_share(batch, forward.raw, meta)
                else:
                    values[name] = self._as_returned(name, forward.raw, meta)
            self._phase(None)
        return {name: value.detach() for name, value in values.items()}

    def _virial_share(self, batch: Batch, raw: Mapping[str, Tensor], meta: ShardMeta) -> Tensor:
        """Of a model that returns stress itself."""
        stress = self._as_returned("stress", raw, meta).reshape(-1, 3, 3)
        declared = self.spec.outputs.get("stress")
        if declared is None or declared.reduce is not Reduce.ALL_REDUCE:
            stress = counted_once(stress, meta.comm)
        return stress * stress.new_tensor([volume(c) for c in batch.cell.detach().cpu().numpy()])[:, None, None]

    @contextmanager
    def _partition(self, graph: LocalGraph, n_systems: int) -> Iterator[ShardMeta]:
        """The partition behind the tensors of one forward, with the spec's adapters in place."""
        rows = graph.edge_rows
        meta = ShardMeta(
            graph.topology.plan,
            n_systems,
            graph.topology.n_phantom,
            self.spec.distribution.policy,
            {} if rows is None else {"edges": rows.edges, "bonds": rows.bonds},
            directory=graph.topology.directory,
        )
        try:
            # around backward too, in which checkpointed parts of the model run again
            with self.adapters.running(meta, type(self.wrapper).__name__):
                yield meta
        finally:
            meta.release()

    def _forward(
        self, batch: Batch, graph: LocalGraph, meta: ShardMeta, wanted: set[str], create_graph: bool
    ) -> _Forward:
        leaf_type = EdgeVectorLeaf if self.spec.force_strategy is ForceStrategy.EDGE_VECTORS else PositionLeaf
        leaf = leaf_type(batch, graph, meta, self.layout, self.wrapper.dtype)
        self._phase("forward")
        raw = self.wrapper(leaf.batch)
        meta.settle()
        check_roles(raw, self.spec, meta)
        by = self.wrapper.model_config.differentiated
        energy = Energy.of(raw, self.spec, meta, graph.topology.system, by)
        self._phase("backward")
        return _Forward(raw, energy, self._derive(leaf, energy, raw, wanted, create_graph))

    def _derive(self, leaf, energy: Energy, raw, wanted: set[str], create_graph: bool) -> dict[str, Tensor]:
        names = wanted & {"pair_forces"}
        if "forces" in wanted and "forces" not in raw:
            names.add("forces")
        if wanted & {"stress", "virial"} and "stress" not in raw:
            names.add("virial")
        if "stresses" in wanted and "stresses" not in raw:
            names.add("virials")
        if not names:
            return {}
        if self.spec.force_strategy in (ForceStrategy.DIRECT, ForceStrategy.MODEL_INTERNAL):
            raise DistributedOpError(
                f"the spec says that the model itself returns forces ({self.spec.force_strategy.value}), but it returned "
                f"{sorted(raw)}; asked for: {sorted(wanted)}"
            )
        if not energy.differentiated.requires_grad:
            raise DistributedOpError(
                "the energy does not depend on the geometry that the model was given: it was computed under no_grad or "
                "from detached tensors, or not from data.edge_vectors (EDGE_VECTORS) or data.positions (POSITIONS)"
            )
        return leaf.derive(energy.differentiated, names, create_graph)

    def _consolidate(
        self, volumes: list[float], meta: ShardMeta, system: Tensor, forward: _Forward, wanted: set[str]
    ) -> dict[str, Tensor]:
        raw, energy, derived = forward.raw, forward.energy, forward.derived
        shares = {"energy": energy.by_system}
        if "virial" in derived:
            shares["virial"] = derived["virial"]
        for name, spec in self.spec.outputs.items():
            if name in raw and name in wanted and spec.reduce is Reduce.ALL_REDUCE and name != "energy":
                shares[name] = to_local(raw[name]).to(torch.float64)
        values = sum_systems(shares, meta)
        if "virial" in values and "stress" in wanted:
            values["stress"] = _over_volume(values["virial"], volumes)
        if "virial" not in wanted:
            values.pop("virial", None)
        if "energies" in wanted:
            values["energies"] = energy.per_atom()
        if "forces" in derived:
            values["forces"] = derived["forces"][: meta.n_counted]
        if "virials" in derived:
            mine = slice(None, meta.n_counted)
            values["stresses"] = _over_volume(derived["virials"][mine], volumes, system[mine])
        for name in wanted - set(values):
            values[name] = self._as_returned(name, raw, meta)
        return values

    def _as_returned(self, name: str, raw, meta: ShardMeta) -> Tensor:
        if name not in raw:
            raise InputError(f"the model did not return {name!r}; it returned {sorted(raw)}")
        value = to_local(raw[name]).to(torch.float64)
        declared = self.spec.outputs.get(name)
        per_atom = declared is not None and declared.kind is OutputKind.PER_NODE
        return value[: meta.n_counted] if per_atom else value


@dataclass(frozen=True, eq=False)
class _Forward:
    """What the model returned, its energy, and what was derived from that."""

    raw: Mapping[str, Tensor]
    energy: Energy
    derived: dict[str, Tensor]


def _over_volume(virial: Tensor, volumes: list[float], system: Tensor | None = None) -> Tensor:
    if min(volumes) == 0:
        raise InputError("stress needs a cell with three independent vectors; ask for 'virial' instead")
    divisor = virial.new_tensor(volumes)
    return virial / (divisor if system is None else divisor[system])[:, None, None]


def resolve_spec(wrapper: Any, strategy: StrategyKind) -> MLIPSpec | None:
    """The spec of a wrapper: ``distribution_spec`` may be a method, a property or an attribute."""
    declared = getattr(wrapper, "distribution_spec", None)
    return declared(strategy) if callable(declared) else declared
