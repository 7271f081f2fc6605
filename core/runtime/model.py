"""`DistributedModel`: a single-process wrapper, or a sum of several, evaluated over ranks."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor

from nvdd.adapters import AdapterRegistry
from nvdd.communicator import Communicator
from nvdd.config import DomainConfig, StrategyKind
from nvdd.data import Batch
from nvdd.errors import InputError
from nvdd.index_partition import IndexPartitioner
from nvdd.partition import SpatialPartitioner
from nvdd.runtime.block import Block, Pass, derives, laid_out
from nvdd.runtime.graph import GraphBuilder, LocalGraph
from nvdd.runtime.out_of_memory import advised
from nvdd.runtime.outputs import DistributedOutputs
from nvdd.runtime.total import Total, over_volume, times_volume, volumes_of
from nvdd.runtime.wiring import Feed
from nvdd.specs import MLIPSpec
from nvdd.specs.declared import ADDITIVE, block_name, spec_of
from nvdd.wires import Wire, in_order


class DistributedModel:
    """Evaluates a model wrapper on the ranks of ``config.mesh``.

    Args:
        wrapper: a `BaseModelMixin` module on this rank's device. Its code is single-process code. One that is a sum of
            others (`PipelineModelWrapper`) names them in ``composed_of``, and what they read of each other in ``wires``.
        config: how the run is divided.
        spec: how the model is distributed; None for ``wrapper.distribution_spec``.
        report_phase: called with the name of each phase as it begins.

    Attributes:
        blocks: the `Block` of the wrapper, or those of a sum: one partition and one halo serve all, and each sees the
            edges within its own cutoff.

    Example::

        model = DistributedModel(LennardJonesModelWrapper(epsilon=0.0104, sigma=3.4), DomainConfig(mesh=mesh))
        out = model(Batch.from_atoms(atoms))  # the same batch on every rank
        out["energy"], out.ids, out["forces"]  # forces of the atoms that this rank owns

    Raises:
        InputError: a cutoff below the model's, a model on another device than its ranks, or a ``spec`` for a
            sum of models; from a call: an output that the model does not have, or what its options refuse.
        DistributedOpError: from a call, what the model does has no known meaning over ranks.
    """

    def __init__(
        self,
        wrapper: Any,
        config: DomainConfig | None = None,
        spec: MLIPSpec | None = None,
        report_phase: Callable[[str], None] | None = None,
    ) -> None:
        self.wrapper, self.config = wrapper, config or DomainConfig()
        self.comm = self._ranks()
        self.timings: dict[str, float] = {}
        self._on_phase = [report_phase] if report_phase is not None else []
        self.wires: tuple[Wire, ...] = tuple(getattr(wrapper, "wires", ()))
        self.blocks = self._make_blocks(spec)
        strategy = self.config.strategy
        self.spec = laid_out(spec if spec is not None else spec_of(wrapper, strategy), strategy)
        self._order = in_order(len(self.blocks), self.wires)
        listed = max((block.cutoff for block in self.blocks if not block.in_blocks), default=0.0)
        reach = max((block.cutoff for block in self.blocks if block.in_blocks), default=None)
        widest = max(listed, reach or 0.0)
        if self.config.cutoff is not None and self.config.cutoff < widest:
            raise InputError(
                f"DomainConfig.cutoff {self.config.cutoff} A is less than the model's cutoff {widest} A; leave it out"
            )
        partitioner: IndexPartitioner | SpatialPartitioner
        if self.config.strategy is StrategyKind.GRAPH_PARTITION:
            partitioner = IndexPartitioner(self.comm.size, self.config.graph_plan)
        else:
            partitioner = SpatialPartitioner(self.comm.size, self.config.grid_dims, self.config.balance)
        self._compiled = self._compile()
        bonds = max((block.bonds for block in self.blocks if block.bonds is not None), default=None)
        self.graphs = GraphBuilder(
            self.comm, partitioner, listed, self.config.skin, self.config.cutoff, bonds, self._phase, reach
        )
        # bonds, and edges of narrower blocks beside those in blocks, are found among edges that were chosen
        self.graphs.chooses = bonds is not None or reach is not None or not all(
            block.drops_far_edges for block in self.blocks if self._sees_all(block, listed)
        )

    def _ranks(self) -> Communicator:
        tensors = itertools.chain(*(getattr(self.wrapper, name, list)() for name in ("parameters", "buffers")))
        place = next((tensor.device for tensor in tensors), None)
        comm = self.config.communicator("cpu" if place is None else place)
        if place is not None and place.type != comm.device.type:
            raise InputError(
                f"DistributedModel: the model is on {place} and its ranks compute on {comm.device}; move the model, "
                f"wrapper.to({str(comm.device)!r}), or give DomainConfig a mesh or device of {place.type}"
            )
        return comm

    def _make_blocks(self, spec: MLIPSpec | None) -> list[Block]:
        wrappers = getattr(self.wrapper, "composed_of", None)
        if wrappers is None:
            name = type(self.wrapper).__name__
            return [Block(self.wrapper, self.comm, self.config, spec, name, False, self._on_phase)]
        own = spec_of(self.wrapper, self.config.strategy)
        if spec is not None and spec != own:
            raise InputError(
                "a sum of models takes no spec: each of its blocks has one; give it to the block, as its distribution_spec"
            )
        feeding = {wire.source for wire in self.wires}
        return [
            Block(w, self.comm, self.config, None, block_name(k, w), k in feeding, self._on_phase)
            for k, w in enumerate(wrappers)
        ]

    def _compile(self) -> list[Any]:
        """A `CompiledBlock` for each block, if the run is compiled."""
        if not self.config.compile:
            return []
        if self.wires:
            raise InputError("compile: blocks that read each other's outputs are not compiled; leave compile out for them")
        from nvdd.runtime.compiled import compiled  # torch.fx takes its time to import

        return [compiled(block, self.config.compile) for block in self.blocks]

    @property
    def adapters(self) -> AdapterRegistry:
        """Those of the model, in place while it runs; ``distributed_setup`` may add to them.

        Raises:
            InputError: the model is a sum, each block of which has its own.
        """
        if len(self.blocks) > 1:
            raise InputError("each block of a sum of models has adapters of its own: blocks[k].adapters")
        return self.blocks[0].adapters

    @property
    def available_outputs(self) -> set[str]:
        """Names that a call can be asked for: sums that all blocks give, and further outputs of one."""
        if len(self.blocks) == 1:
            return self.blocks[0].outputs
        names = {"energy", "forces"} | set(self.wrapper.model_config.outputs)
        return names | ({"virial"} if "stress" in names else set())

    def _phase(self, name: str | None) -> None:
        now = time.perf_counter()
        if self._current is not None:
            self.timings[self._current] = self.timings.get(self._current, 0.0) + now - self._since
        self._current, self._since = name, now
        if name is not None:
            for listener in self._on_phase:
                listener(name)

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
        seen: list[LocalGraph] = []
        with torch.inference_mode(False), torch.enable_grad(), advised(self.comm, lambda: seen[0].load if seen else None):
            self._phase("edges")
            needs_volume = bool(wanted & {"stress", "stresses", "virial"})
            volumes = volumes_of(batch) if needs_volume else []
            graph = self.graphs.update(batch)
            seen.append(graph)
            self._phase("edges")
            graphs = [self._graph_of(block, graph) for block in self.blocks]
            if create_graph and batch.positions.requires_grad:
                x, cell = batch.positions.to(self.comm.device), batch.cell.to(self.comm.device)
                made = {id(g): g.differentiable(x, cell) for g in graphs}
                graph, graphs = made.get(id(graph), graph), [made[id(g)] for g in graphs]
            passes = self._evaluate(batch, graphs, wanted, create_graph)
            try:
                self._check_chunks(passes)
                self._phase("consolidate")
                values = self._consolidate(Total(self.blocks, passes, graph, batch.n_systems), volumes, wanted)
            finally:
                _release(passes)
            if not create_graph:
                values = {name: value.detach() for name, value in values.items()}
            self._phase(None)
            return DistributedOutputs(graph.topology.ids, values, graph.topology.plan.n_halo, graph.n_edges)

    def shares(
        self, batch: Batch, graph: LocalGraph, outputs: Iterable[str], reach: float | None = None
    ) -> dict[str, Tensor]:
        """What this rank contributes, of a graph that was made elsewhere; sums over ranks are left to the caller.

        Args:
            batch: inputs of this rank's rows, ``[owned | halo]``; ``graph.topology.rows`` are their numbers.
            graph: the edges of this rank, and its exchange plan. Every rank calls at once.
            outputs: names of what to compute.
            reach: how long its edges are, A, where that is more than the model's cutoff.

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
        with torch.inference_mode(False), torch.enable_grad(), advised(self.comm, lambda: graph.load):
            within: dict[tuple[float, float | None], LocalGraph] = {}
            graphs = []
            for block in self.blocks:
                if block.in_blocks and graph.nearby is not None:
                    graphs.append(graph)
                    continue
                key = (block.cutoff, block.bonds)
                if key not in within:
                    cutoff = self.graphs.cutoff if graph.nearby is not None else self.graphs.widest
                    right = reach in (None, block.cutoff) or block.drops_far_edges
                    whole = self._sees_all(block, cutoff) and right
                    within[key] = graph if whole else graph.within(*key)
                graphs.append(within[key])
            passes = self._evaluate(batch, graphs, wanted, create_graph=False)
            try:
                self._check_chunks(passes)
                self._phase("consolidate")
                total = Total(self.blocks, passes, graph, batch.n_systems)
                values = {"energy": total.energy()}
                sums = total.fold() if "forces" in wanted else {}
                for name in wanted - {"energy"}:
                    values[name] = self._share(name, total, sums, batch)
            finally:
                _release(passes)
            self._phase(None)
        return {name: value.detach() for name, value in values.items()}

    @staticmethod
    def _share(name: str, total: Total, sums: dict[str, Tensor], batch: Batch) -> Tensor:
        if name in sums:
            return sums[name]
        if name == "pair_forces":
            return total.pair_forces()
        if name == "energies":
            return total.energies()
        if name == "virial":
            returned = total.returned_stress()
            return _plus(total.virial(), None if returned is None else times_volume(returned, volumes_of(batch)))
        return total.as_returned(name)

    def close(self) -> None:
        """Lets go of compiled graphs. Call it before the ranks' process group is destroyed; what follows compiles anew."""
        for block in self._compiled:
            block.release()

    def _graph_of(self, block: Block, graph: LocalGraph) -> LocalGraph:
        """The edges that a block sees, of the graph with the widest cutoff."""
        if block.in_blocks or (graph.nearby is None and self._sees_all(block, self.graphs.cutoff)):
            return graph
        return self.graphs.narrower(block.cutoff, block.bonds)

    def _sees_all(self, block: Block, cutoff: float) -> bool:
        """Whether a list of edges within ``cutoff`` is the block's own."""
        return block.cutoff == cutoff and block.bonds in (None, self.graphs.bonds)

    def _evaluate(self, batch: Batch, graphs: list[LocalGraph], wanted: set[str], create_graph: bool) -> list[Pass]:
        """Every block forward and backward, each inside its own adapters.

        A block is differentiated right after its forward, so that its memory is free for the next one; one that others
        read from waits for their gradients.
        """
        if self._compiled:
            return self._run_compiled(batch, graphs, wanted, create_graph)
        if self.config.edges_at_once is not None and any(torch.is_autocast_enabled(d) for d in ("cpu", "cuda")):
            raise InputError(
                "max_edges_per_chunk or recompute under autocast, which the backward, where rows of edges are computed again, "
                "would not be under; leave one of them out"
            )
        passes: list[Any] = [None] * len(self.blocks)  # a Pass of each block that has run
        seeds: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.blocks]
        differentiated = derives(wanted)
        feeding = {wire.source for wire in self.wires if not wire.fixed}

        def derive(k: int) -> None:
            self._phase("backward")
            done = passes[k]
            if differentiated:
                found = self.blocks[k].derive(done, wanted, seeds[k], create_graph)
                free = [feed for feed in done.feeds if not feed.wire.fixed]
                for feed, gradient in zip(free, found, strict=True):
                    seeds[feed.wire.source].append((feed.origin, gradient))
            if not create_graph:
                done.let_go()

        try:
            for k in self._order:
                block, meta = self.blocks[k], self.blocks[k].meta(graphs[k], batch.n_systems)
                feeds = [self._feed(w, passes[w.source], differentiated) for w in self.wires if w.target == k]
                try:
                    with block.running(meta):
                        self._phase("forward")
                        passes[k] = block.forward(batch, graphs[k], meta, feeds)
                        if k not in feeding:
                            derive(k)
                except BaseException:
                    meta.release()
                    raise
            for k in reversed(self._order):
                if k in feeding:
                    with self.blocks[k].running(passes[k].meta):
                        derive(k)
        except BaseException:
            _release([done for done in passes if done is not None])
            raise
        return passes

    def _check_chunks(self, passes: list[Pass]) -> None:
        """Refuses a wish for less memory that comes to nothing."""
        if self.config.edges_at_once is None or any(done.meta.sums_in_chunks for done in passes):
            return
        if not any(done.meta.n_edges for done in passes):
            return  # a rank without edges sums none, whatever the model
        given = self.config.max_edges_per_chunk
        raise InputError(
            f"{'recompute=True' if given is None else f'max_edges_per_chunk={given}'}: {type(self.wrapper).__name__} sums no rows of "
            "edges where nvdd sees it (in a custom operation, in scripted code, by global ids of sharded storage, or after "
            "to_local), so no memory would be saved; leave it out, or declare the rows with an EdgeStage in the model's spec"
        )

    def _feed(self, wire: Wire, done: Pass, differentiated: bool) -> Feed:
        """What the block before gives to the one that ``wire`` leads to."""
        block = self.blocks[wire.source]
        return Feed(wire, done.raw, done.meta, cast(MLIPSpec, block.spec), block.name, differentiated, done.leaf)

    def _run_compiled(self, batch: Batch, graphs: list[LocalGraph], wanted: set[str], create_graph: bool) -> list[Pass]:
        """Every block's compiled forward and derivative."""
        if create_graph:
            raise InputError("compile: a compiled forward is differentiated once; leave compile out, or create_graph")
        passes: list[Pass] = []
        try:
            for block, run, graph in zip(self.blocks, self._compiled, graphs, strict=True):
                self._phase("forward")
                passes.append(run(batch, graph, block.meta(graph, batch.n_systems), wanted))
        except BaseException:
            _release(passes)
            raise
        return passes

    @staticmethod
    def _consolidate(total: Total, volumes: list[float], wanted: set[str]) -> dict[str, Tensor]:
        shares = {"energy": total.energy()}
        derived = total.virial()
        if derived is not None:
            shares["virial"] = derived
        if wanted & {"stress", "virial"} and (returned := total.returned_stress()) is not None:
            shares["stress"] = returned
        for name in sorted(wanted - ADDITIVE):
            if (share := total.share(name)) is not None:
                shares[name] = share
        found = total.sum_systems(shares)
        virial, stress = found.pop("virial", None), found.pop("stress", None)
        values = found
        if "stress" in wanted:
            values["stress"] = _plus(stress, None if virial is None else over_volume(virial, volumes))
        if "virial" in wanted:
            values["virial"] = _plus(virial, None if stress is None else times_volume(stress, volumes))
        if "energies" in wanted:
            values["energies"] = total.energies()
        rows = total.fold() if wanted & {"forces", "stresses"} else {}
        if "forces" in wanted:
            values["forces"] = rows["forces"] if "forces" in rows else total.as_returned("forces")
        if "stresses" in wanted:
            values["stresses"] = total.stresses(rows.get("virials"), volumes)
        for name in sorted(wanted - set(values)):
            values[name] = total.as_returned(name)
        return values


def _release(passes: list[Pass]) -> None:
    for done in passes:
        done.meta.release()


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor:
    """The sum of those that are there; one is."""
    return cast(Tensor, b if a is None else a if b is None else a + b)
