"""`Block`: one model of those whose sum a `DistributedModel` evaluates, and its pass on one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from nvdd.adapters import AdapterRegistry
from nvdd.adapters.scripted import ScriptedCalls
from nvdd.adapters.stage import Stage
from nvdd.communicator import Communicator
from nvdd.config import DomainConfig, StrategyKind
from nvdd.data import Batch
from nvdd.deferred import settled
from nvdd.errors import DistributedOpError, InputError
from nvdd.model_config import EdgeLayout, NeighborListFormat
from nvdd.policy import GraphParallelPolicy, HaloStoragePolicy, LocalStoragePolicy, ShardedStoragePolicy
from nvdd.roles import ShardMeta
from nvdd.runtime.block_leaf import BlockLeaf
from nvdd.runtime.graph import LocalGraph
from nvdd.runtime.leaves import Derivatives, EdgeVectorLeaf, PositionLeaf
from nvdd.runtime.outputs import Energy, check_roles
from nvdd.runtime.wiring import Feed
from nvdd.shard_tensor import to_local
from nvdd.specs import ForceStrategy, MLIPSpec
from nvdd.specs.declared import declares_energy, spec_of

_POLICIES = {
    StrategyKind.HALO: (HaloStoragePolicy, ShardedStoragePolicy, LocalStoragePolicy),
    StrategyKind.GRAPH_PARTITION: (GraphParallelPolicy, ShardedStoragePolicy, LocalStoragePolicy),
}
_DIVIDES = {
    StrategyKind.HALO: "divides atoms in space",
    StrategyKind.GRAPH_PARTITION: "keeps computed rows of owned atoms only",
}
_RETURNS_FORCES = (ForceStrategy.DIRECT, ForceStrategy.MODEL_INTERNAL)
# what comes of a derivative -> the output that stands for it where the model itself returns it
_RETURNED_AS = {"forces": "forces", "virial": "stress", "virials": "stresses", "pair_forces": "pair_forces"}


@dataclass(eq=False)
class Pass:
    """One block on one step.

    Attributes:
        graph, meta: its edges, and its partition.
        leaf: what the energy is differentiated by.
        raw: what the wrapper returned.
        energy: None of a model without one.
        feeds: what it read of other blocks.
        derivatives: of its energy, and of what other blocks made of its outputs.
    """

    graph: LocalGraph
    meta: ShardMeta
    leaf: Any
    raw: Mapping[str, Tensor]
    energy: Energy | None
    feeds: list[Feed]
    derivatives: Derivatives = field(default_factory=Derivatives)

    def let_go(self) -> None:
        """Drops the autograd graph, of which nothing is needed any more."""
        self.leaf, self.feeds = None, []
        self.raw = {k: to_local(v).detach() if isinstance(v, Tensor) else v for k, v in self.raw.items()}
        self.energy = self.energy.detached() if self.energy is not None else None


class Block:
    """A wrapper, its spec, and how it is evaluated on a part of the graph.

    Args:
        wrapper: a `BaseModelMixin` module; its ``distributed_setup`` is given this object.
        comm: the ranks.
        config: of the run.
        spec: None for the wrapper's own.
        name: for messages: ``"block 1 (LennardJonesModelWrapper)"``; the class's name for a model by itself.
        energyless: whether it may return no energy, since another block reads its outputs; not if it declares one.
        on_phase: functions that are called with the name of each phase of a step as it begins; more may be added.

    Attributes:
        cutoff: A; it sees the edges with r < cutoff and, unless ``drops_far_edges``, no others.
        bonds: within which distance edges have reverse edges or bonds that it reads, A; None if it reads none.
        drops_far_edges: whether edges with r >= cutoff count nothing in it.
        in_blocks: whether it needs no list of its edges (``NeighborConfig(blocks=True)``, not compiled).
        layout: of its edges.
        adapters: those of the spec, in place while the model runs.
    """

    def __init__(
        self,
        wrapper: Any,
        comm: Communicator,
        config: DomainConfig,
        spec: MLIPSpec | None,
        name: str,
        energyless: bool,
        on_phase: list[Callable[[str], None]],
    ) -> None:
        self.wrapper, self.comm, self.config, self.name = wrapper, comm, config, name
        self.on_phase = on_phase
        self.spec = laid_out(spec if spec is not None else spec_of(wrapper, config.strategy), config.strategy)
        self._check_spec()
        self.energyless = energyless and not declares_energy(wrapper, self.spec)
        neighbors = wrapper.model_config.neighbor_config
        if neighbors is None:
            raise InputError(f"{name}: its model_config has no neighbor_config, so its cutoff is unknown")
        if neighbors.format is not NeighborListFormat.COO:
            raise InputError(f"{name} wants neighbours as {neighbors.format.value}; only 'coo' is distributed")
        if neighbors.blocks and self.spec.force_strategy is not ForceStrategy.EDGE_VECTORS:
            raise InputError(
                f"{name}: NeighborConfig(blocks=True) is for functions of edge vectors, ForceStrategy.EDGE_VECTORS, and the spec "
                f"says {self.spec.force_strategy.value}; leave blocks=True out"
            )
        self.cutoff, self.bonds = neighbors.cutoff, neighbors.bond_reach
        self.drops_far_edges = neighbors.drops_far_edges
        self.in_blocks = neighbors.blocks and not config.compile
        self.layout: EdgeLayout = getattr(wrapper, "edge_layout", EdgeLayout())
        chunked = config.edges_at_once is not None
        adapters = [a for a in self.spec.all_adapters if chunked or not isinstance(a, Stage)]
        self.adapters = AdapterRegistry((*adapters, ScriptedCalls()))
        self._seen = False  # that its energy is a function of the geometry
        if hasattr(wrapper, "distributed_setup"):
            wrapper.distributed_setup(self)

    def _check_spec(self) -> None:
        if self.spec is None:
            raise InputError(
                f"{self.name} declares no distribution_spec; return a preset from it (SPEC_MPNN_HALO suits "
                "message-passing models) or pass spec="
            )
        policy = self.spec.distribution.policy
        strategy = self.config.strategy
        if not isinstance(policy, _POLICIES[strategy]):
            raise InputError(
                f"{self.name}: strategy {strategy.value!r} {_DIVIDES[strategy]}, and needs a spec whose policy is one of "
                f"{', '.join(p.__name__ for p in _POLICIES[strategy])}; this one has {policy}"
            )

    @property
    def outputs(self) -> set[str]:
        """Names that it can be asked for."""
        names = {"energy", "forces", "stress", "virial"} | set(self.wrapper.model_config.outputs)
        if self.spec.force_strategy is ForceStrategy.EDGE_VECTORS:
            return names | {"stresses"}
        # from a derivative by positions there is no share of each atom
        return names - ({"stresses"} if self.spec.force_strategy is ForceStrategy.POSITIONS else set())

    def meta(self, graph: LocalGraph, n_systems: int) -> ShardMeta:
        """The partition behind the tensors of one pass."""
        rows = graph.edge_rows
        return ShardMeta(
            graph.topology.plan,
            n_systems,
            graph.topology.n_phantom,
            self.spec.distribution.policy,
            {} if rows is None else {rows.space: rows.edges, "bonds": rows.bonds},
            directory=graph.topology.directory,
            n_edges=graph.pair.shape[1],
            edges_at_once=self.config.edges_at_once,
        )

    @contextmanager
    def running(self, meta: ShardMeta) -> Iterator[None]:
        """The spec's adapters in place: around a forward, and a backward, in which checkpointed parts run again."""
        with self.adapters.running(meta, type(self.wrapper).__name__):
            yield

    def forward(self, batch: Batch, graph: LocalGraph, meta: ShardMeta, feeds: list[Feed]) -> Pass:
        """Evaluates the wrapper; to be called inside `running`."""
        inputs = batch, graph, meta, self.layout, self.wrapper.dtype
        leaf: Any
        if self.in_blocks and graph.nearby is not None:
            leaf = BlockLeaf(*inputs, self.cutoff)
        else:
            by_edges = self.spec.force_strategy is ForceStrategy.EDGE_VECTORS
            leaf = EdgeVectorLeaf(*inputs) if by_edges else PositionLeaf(*inputs)
        for feed in feeds:
            feed.give(leaf.batch, meta, self.wrapper.dtype)
        raw = {name: settled(value) for name, value in self.wrapper(leaf.batch).items()}
        meta.settle()
        check_roles(raw, self.spec, meta)
        silent = not {"energy", "energies"} & raw.keys()
        if silent and not self.energyless:
            raise DistributedOpError(
                f"{self.name} returned {sorted(raw)}: neither 'energies' nor 'energy', one of which must be there"
            )
        by = self.wrapper.model_config.differentiated
        energy = None if silent else Energy.of(raw, self.spec, meta, graph.topology.system, by)
        return Pass(graph, meta, leaf, raw, energy, feeds)

    def derive(
        self, done: Pass, wanted: set[str], seeds: list[tuple[Tensor, Tensor]], create_graph: bool
    ) -> list[Tensor]:
        """Fills ``done.derivatives``; to be called inside `running`.

        Args:
            done: the pass.
            wanted: outputs of the whole model that are asked for.
            seeds: outputs that other blocks have read, and the gradients of their energies by these.
            create_graph: to differentiate the result again.

        Returns:
            The gradient of the energy by each of ``done.feeds``.
        """
        names = _to_derive(wanted)
        mine = {name for name in names if _RETURNED_AS[name] not in done.raw}
        outputs: list[Tensor] = [tensor for tensor, _ in seeds]
        gradients: list[Tensor | None] = [gradient for _, gradient in seeds]
        if mine and done.energy is not None:
            if self.spec.force_strategy in _RETURNS_FORCES:
                raise DistributedOpError(
                    f"the spec of {self.name} says that the model itself returns forces ({self.spec.force_strategy.value}), "
                    f"but it returned {sorted(done.raw)}; asked for: {sorted(wanted)}"
                )
            outputs.append(self._differentiable(done))
            gradients.append(None)
        if outputs and "pair_forces" in names and self.spec.force_strategy is not ForceStrategy.EDGE_VECTORS:
            raise InputError(
                f"{self.name} gives no pair forces: it is no function of edge vectors ({self.spec.force_strategy.value})"
            )
        inputs = [feed.value for feed in done.feeds if not feed.wire.fixed]
        # what it returns itself has no derivative, but what others read of it has
        returned = Derivatives()
        if seeds and (theirs := names - mine):
            returned, _ = done.leaf.derive(outputs[: len(seeds)], gradients[: len(seeds)], theirs, [], create_graph, True)
        done.derivatives, found = done.leaf.derive(outputs, gradients, mine if outputs else set(), inputs, create_graph)
        done.derivatives = done.derivatives.beside(returned)
        return found

    def _differentiable(self, done: Pass) -> Tensor:
        """The energy as what is differentiated; raises where it is no function of the geometry."""
        seed = done.leaf.anchored(done.energy.differentiated)
        # what a wire brings requires a gradient too, so that it says nothing of the geometry
        wired = any(not feed.wire.fixed for feed in done.feeds)
        if not seed.requires_grad or (wired and not self._seen and not done.leaf.reaches(seed)):
            raise DistributedOpError(
                f"{self.name}: the energy does not depend on the geometry that the model was given: it was computed under "
                "no_grad or from detached tensors, or not from data.edge_vectors (EDGE_VECTORS) or data.positions (POSITIONS)"
            )
        self._seen = True
        return seed


def _to_derive(wanted: set[str]) -> set[str]:
    names = wanted & {"pair_forces", "forces"}
    if wanted & {"stress", "virial"}:
        names.add("virial")
    if "stresses" in wanted:
        names.add("virials")
    return names


def derives(wanted: set[str]) -> bool:
    """Whether anything of what is asked for comes of a derivative."""
    return bool(_to_derive(wanted))


def laid_out(spec: MLIPSpec | None, strategy: Any) -> MLIPSpec | None:
    """A spec under a strategy: one that fetches halo rows where they are read does so whoever owns them."""
    if spec is None or strategy is not StrategyKind.GRAPH_PARTITION:
        return spec
    policy = spec.distribution.policy
    if not (isinstance(policy, HaloStoragePolicy) and policy.fetches):
        return spec
    return spec.with_policy(GraphParallelPolicy(system_reductions=policy.system_reductions))
