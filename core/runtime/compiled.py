"""`CompiledBlock`: a block whose forward and derivative run as one graph of torch operations at fixed shapes.

The distributed forward, with all its dispatch, and the derivative are run once under ``make_fx``, which writes down the
operations on this rank's tensors; messages are operators of `nvdd.collective_ops`. What comes out has no Python in it: a
backend compiles it, or a CUDA graph replays it. Everything that changes from step to step is an input: edge vectors,
edges, plans, inputs of atoms. Shapes are capacities that only grow (`nvdd.padding`).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from nvdd.collective_ops import TracedRanks
from nvdd.data import Batch
from nvdd.errors import DistributedOpError, InputError
from nvdd.padding import padder_at
from nvdd.plan import ExchangePlan
from nvdd.policy import ShardedStoragePolicy
from nvdd.roles import ShardMeta
from nvdd.runtime.block import Block, Pass, derives
from nvdd.runtime.capacity import Capacities, FilledTopology
from nvdd.runtime.graph import LocalGraph, Topology
from nvdd.runtime.leaves import Derivatives
from nvdd.runtime.outputs import Energy
from nvdd.runtime.tracing import ChecksLater, Unwritten, traced
from nvdd.shard_tensor import to_local
from nvdd.specs import ForceStrategy, OutputKind


def backend_of(compile: bool | str, device: torch.device, capturable: bool) -> str:
    """The backend that ``compile=`` means on a device.

    Args:
        compile: as `DomainConfig.compile`.
        device: where the model computes.
        capturable: whether the messages of this run can be part of a CUDA graph.

    Raises:
        InputError: CUDA graphs are asked for where there are none.
    """
    graphs = device.type == "cuda" and capturable
    if compile is True:
        return "inductor+cudagraphs" if graphs else "inductor"
    if "cudagraphs" in compile and not graphs:
        why = "messages that go through the host (gloo) cannot be captured" if device.type == "cuda" else f"this is {device}"
        raise InputError(f"compile={compile!r} needs a GPU, and NCCL between several ranks: {why}; take compile='inductor'")
    return compile


def _moved(name: str, values: Tensor) -> Tensor:
    """An input as it might be in another step: displaced by 0.01 A, the cell and further inputs by a per cent."""
    if name in ("vectors", "positions"):
        at = torch.arange(values.numel(), dtype=torch.float64, device=values.device)
        return values + (1e-2 * torch.sin(2.3 * at + 0.7)).reshape(values.shape).to(values.dtype)
    if values.is_floating_point() and (name == "cell" or name.startswith(("node:", "system:"))):
        return values * 1.01
    return values


def _side_by_side(ours: Derivatives, theirs: Derivatives) -> dict[str, tuple[Tensor, Tensor]]:
    """What two derivatives have, by name."""
    found = {name: (value, theirs.padded[name]) for name, value in ours.padded.items()}
    for name in ("pair_forces", "forces", "virial"):
        if (value := getattr(ours, name)) is not None:
            found[name] = value, getattr(theirs, name)
    return found


def _differ(a: Tensor, b: Tensor, tolerance: float) -> Tensor:
    """0-d int64: 1 where two results differ by more than the order of sums makes them."""
    b = b.detach()
    if not a.is_floating_point():
        return (a != b).any().to(torch.int64)
    only_one = a.isfinite() != b.isfinite()
    a, b = (torch.where(t.isfinite(), t, 0.0) for t in (a, b))
    scale = b.abs().amax() if b.numel() else b.new_zeros(())
    return (only_one | ((a - b).abs() > tolerance * (scale + 1e-3))).any().to(torch.int64)


@dataclass(eq=False)
class _Program:
    """What was traced for one set of outputs and shapes.

    Attributes:
        names: of the results.
        module: the graph.
        run: what evaluates it; None until the second call.
        checks: what is wrong where one of the last results, (n,) bool, is False.
        capture: its CUDA graph, or None.
    """

    names: list[str]
    module: fx.GraphModule
    checks: list[Exception]
    run: Callable[..., Any] | None = None
    capture: _Capture | None = None


class _Capture:
    """A CUDA graph of a function of tensors, and the memory that it reads and writes."""

    def __init__(self, function: Callable[..., Any], inputs: list[Tensor]) -> None:
        self.inputs = [t.clone() for t in inputs]
        torch.cuda.synchronize(inputs[0].device)
        self.graph = torch.cuda.CUDAGraph()
        # messages of NCCL have a thread that watches them, which may call CUDA meanwhile
        with torch.no_grad(), torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.outputs = function(*self.inputs)

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        torch._foreach_copy_(self.inputs, list(inputs))
        self.graph.replay()
        return [t.clone() for t in self.outputs]


@dataclass(eq=False)
class CompiledBlock:
    """Evaluates a `Block` without gradients of higher order, feeds of other blocks, bonds or sharded storage.

    Args:
        block: the model.
        backend: as `backend_of` gives it.

    Attributes:
        n_traces: how often a graph was made, and so compiled: once for each set of outputs, and again when a capacity
            grew.
    """

    block: Block
    backend: str
    n_traces: int = 0
    _caps: Capacities = field(default_factory=Capacities)
    _plan: ExchangePlan | None = None
    _filled: FilledTopology | None = None
    _programs: dict[Any, _Program] = field(default_factory=dict)

    def __post_init__(self) -> None:
        block = self.block
        policy = block.spec.compile_policy
        if block.bonds:
            raise InputError(f"{block.name} reads bonds or reverse edges, which have no capacities yet; leave compile out")
        if isinstance(block.spec.distribution.policy, ShardedStoragePolicy):
            raise InputError(f"{block.name} keeps global ids ({ShardedStoragePolicy.__name__}); leave compile out for it")
        if policy is not None and not policy.static_shapes:
            raise InputError(
                f"{block.name}: its CompilePolicy has static_shapes=False, and compiled forwards have fixed shapes; leave "
                "compile out for it"
            )
        released = weakref.WeakMethod(self.release)
        block.comm.before_close.append(lambda: (own := released()) is not None and own())
        self.padder = padder_at(None if policy is None else policy.graph_padder, block.cutoff)
        if policy is not None and policy.force_strategy is not None:
            block.spec = block.spec.with_force_strategy(policy.force_strategy)

    def __call__(self, batch: Batch, graph: LocalGraph, meta: ShardMeta, wanted: set[str]) -> Pass:
        """One step, as `Block.forward` and `Block.derive`; to be called outside of `Block.running`."""
        if batch.n_systems != 1:
            raise InputError(f"compile: one system at a time, got a batch of {batch.n_systems}; leave compile out for it")
        if graph.topology.plan is not self._plan:
            self._caps.reserve(graph.topology, self.block.comm)
            self._filled = FilledTopology.of(graph.topology, self._caps, self.block.comm)
            self._plan = graph.topology.plan
        inputs, fields = self._inputs(batch, graph)
        # ranks trace and capture in the same steps: NCCL may want all of them while one captures its messages
        shapes = (self._caps.key, *((name, tuple(t.shape), t.dtype) for name, t in inputs.items()))
        key = (frozenset(wanted), shapes, self._model_state())
        values = list(inputs.values())
        program = self._programs.get(key)
        if program is None:
            same = {k: p for k, p in self._programs.items() if k[1:] == key[1:]}  # what is smaller does not come back
            program, results = self._trace(inputs, fields, meta, wanted)
            done = self._unpack(dict(zip(program.names, results, strict=True)), program, graph, meta)
            self._compare(done, batch, graph, wanted)
            self._programs = {**same, key: program}
            return done
        else:
            with torch.no_grad():
                results = self._run(program, values)
        return self._unpack(dict(zip(program.names, results, strict=True)), program, graph, meta)

    def release(self) -> None:
        """Lets go of what was compiled and captured; a later step makes it anew."""
        self._programs = {}
        gc.collect()  # graphs of torch.fx are in cycles, and NCCL does not end before the CUDA graphs that use it

    def _model_state(self) -> tuple[Any, ...]:
        """Changes with what a graph of the model holds: its tensors (not their values) and whether it is in training."""
        modules = list(self.block.wrapper.modules())
        tensors = (id(t) for m in modules for table in (m._parameters, m._buffers) for t in table.values())
        return torch.get_default_dtype(), tuple(m.training for m in modules), tuple(tensors)

    # -- inputs

    def _inputs(self, batch: Batch, graph: LocalGraph) -> tuple[dict[str, Tensor], tuple[list[str], list[str]]]:
        """Everything that may change from step to step, at capacity."""
        at, rows, device = self._filled, graph.topology.rows, graph.pair.device
        last = len(at.counts) - 1
        of_positions = self.block.spec.force_strategy is not ForceStrategy.EDGE_VECTORS
        edges = {"pair": at.place[graph.pair], "vectors": graph.vectors.detach(), "shift": graph.shift}
        dtype = self.block.wrapper.dtype
        put = lambda v: v.to(device, dtype if v.is_floating_point() else v.dtype)
        first = graph.topology.plan.n_owned - graph.topology.n_phantom
        if self.block.comm.size > 1:  # by itself a rank would compile while the others wait, or capture without them
            self.padder.reserve(graph.pair.shape[1] + last + 1 - first, self.block.comm)
        inputs = self.padder.pad(edges, first, last)
        take = lambda padded: padded.index_select(0, at.source)
        inputs["atomic_numbers"] = take(graph.topology.atomic_numbers)
        inputs["system"] = take(graph.topology.system)
        inputs["counts"] = at.counts
        inputs["n_atoms"] = graph.topology.atoms_per_system
        inputs["cell"] = batch.cell.detach().to(device)
        inputs["pbc"] = batch.pbc.to(device)
        inputs.update(zip(("send", "boundary", "slot"), at.sent, strict=True))
        if of_positions:
            positions = take(batch.positions.detach().to(device).index_select(0, rows)).clone()
            positions[last - 1] += self.padder.fill_vector(positions)
            inputs["positions"] = positions
        for name, value in batch.node_fields.items():
            inputs["node:" + name] = take(put(value.detach()).index_select(0, rows))
        for name, value in batch.system_fields.items():
            inputs["system:" + name] = put(value.detach())
        return inputs, (list(batch.node_fields), list(batch.system_fields))

    # -- the graph

    def _trace(
        self, inputs: dict[str, Tensor], fields: tuple[list[str], list[str]], meta: ShardMeta, wanted: set[str]
    ) -> tuple[_Program, list[Tensor]]:
        names, ranks = list(inputs), TracedRanks(self.block.comm)
        found: dict[str, Any] = {}

        def forward(*tensors: Tensor) -> list[Tensor]:
            ranks.begin()
            with torch.enable_grad():
                results, errors = self._evaluate(dict(zip(names, tensors, strict=True)), fields, meta, ranks, wanted)
            found.update(names=list(results), errors=errors, values=list(results.values()))
            return found["values"]

        module = traced(forward, list(inputs.values()))
        results = [t.detach() for t in found["values"]]
        self._prove(module, forward, inputs, found["names"])
        self.n_traces += 1
        return _Program(found["names"], module, found["errors"]), results

    def _prove(self, module: fx.GraphModule, forward: Callable, inputs: dict[str, Tensor], names: list[str]) -> None:
        """Raises, on all ranks, where the graph and the model differ on another step than the one that was traced.

        What a model does outside of torch's operations (NumPy, a kernel launched by itself) is not in the graph.
        """
        moved = [_moved(name, t) for name, t in inputs.items()]
        with torch.no_grad():
            found = Unwritten(module).run(*moved)
        expected = forward(*moved)
        if which := self._agreed(dict(zip(names, zip(found, expected, strict=True), strict=True))):
            raise DistributedOpError(
                f"compile: the graph of {self.block.name} gives another {which} than the model when atoms move: the model does "
                "something that is no operation of torch (NumPy, a kernel that it launches itself). Make it an operation with "
                "torch.library, or leave compile out"
            )

    def _compare(self, done: Pass, batch: Batch, graph: LocalGraph, wanted: set[str]) -> None:
        """Raises, on all ranks, where rows and edges that fill up have changed a result of the eager step."""
        block = self.block
        meta = block.meta(graph, batch.n_systems)
        try:
            with block.running(meta), torch.enable_grad():
                eager = block.forward(batch, graph, meta, [])
                if derives(wanted):
                    block.derive(eager, wanted, [], False)
        finally:
            meta.release()
        pairs = {f"derived.{name}": pair for name, pair in _side_by_side(done.derivatives, eager.derivatives).items()}
        if done.energy is not None:
            pairs["energy"] = done.energy.by_system, eager.energy.by_system
        n = graph.topology.plan.n_owned
        for name, mine in done.raw.items():
            theirs = to_local(eager.raw[name])
            pairs[name] = (mine, theirs[:n] if mine.shape[:1] == (n,) else theirs)
        if which := self._agreed(pairs):
            raise DistributedOpError(
                f"compile: {block.name} gives another {which} with rows and edges that are filled up to a capacity: it uses a "
                "number of rows (len(x), x.shape[0]), or sums over plain rows (to_local) by itself. Sum with "
                "scatters by data.batch or reductions over rows, or leave compile out"
            )

    def _agreed(self, pairs: dict[str, tuple[Tensor, Tensor]]) -> str:
        """Names of the pairs whose two differ on any rank; every rank gives the same names."""
        if not pairs:
            return ""
        tolerance = 1e-9 if self.block.wrapper.dtype is torch.float64 else 1e-4
        comm = self.block.comm
        off = torch.stack([_differ(a, b, tolerance) for a, b in pairs.values()])
        worst = comm.all_reduce(off.to(comm.message_device), "max", "graphs beside models").tolist()
        return ", ".join(name.partition(".")[2] or name for name, bad in zip(pairs, worst, strict=True) if bad)

    def _evaluate(
        self,
        inputs: Mapping[str, Tensor],
        fields: tuple[list[str], list[str]],
        meta: ShardMeta,
        ranks: TracedRanks,
        wanted: set[str],
    ) -> tuple[dict[str, Tensor], list[Exception]]:
        """The eager step on filled tensors."""
        block, pair = self.block, inputs["pair"]
        plan = self._filled.plan(ranks, [inputs[k] for k in ("send", "boundary", "slot")])
        rows = torch.arange(plan.n_padded, device=pair.device)
        topology = Topology(
            ids=rows, rows=rows, n_phantom=0, candidates=pair, shift=inputs["shift"],
            shift_vector=inputs["vectors"].T, system=inputs["system"], atomic_numbers=inputs["atomic_numbers"],
            atoms_per_system=inputs["n_atoms"], plan=plan, edge_rows=None,
        )  # fmt: skip
        inner = ShardMeta(
            plan, 1, 0, meta.policy, counts=inputs["counts"],
            edges_count=inputs["counts"].index_select(0, pair[0]),
        )  # fmt: skip
        node, system = fields
        positions = inputs.get("positions")
        if positions is None:
            positions = inputs["vectors"].new_zeros(plan.n_padded, 3)
        batch = Batch(
            positions=positions, atomic_numbers=inputs["atomic_numbers"], cell=inputs["cell"], pbc=inputs["pbc"],
            batch=inputs["system"], n_systems=1,
            node_fields={name: inputs["node:" + name] for name in node},
            system_fields={name: inputs["system:" + name] for name in system},
        )  # fmt: skip
        graph = LocalGraph(topology, None, pair, inputs["vectors"], None)
        with block.running(inner), ChecksLater(inner):
            done = block.forward(batch, graph, inner, [])
            if derives(wanted):
                block.derive(done, wanted, [], False)
        results: dict[str, Tensor] = {}
        if done.energy is not None:
            results["energy.by_system"] = done.energy.by_system
            if done.energy.by_atom is not None:
                results["energy.by_atom"] = done.energy.by_atom
        made = done.derivatives
        for name, value in (("pair_forces", made.pair_forces), ("forces", made.forces), ("virial", made.virial)):
            if value is not None:
                results["derived." + name] = value
        results |= {"padded." + name: value for name, value in made.padded.items()}
        for name, value in done.raw.items():
            if isinstance(value, Tensor) and name not in ("energy", "energies"):
                results["raw." + name] = to_local(value)
        put_off = inner.put_off
        if put_off:
            results["checks"] = torch.stack([condition for condition, _ in put_off])
        results = {name: value.detach() for name, value in results.items()}
        inner.release()
        return results, [error for _, error in put_off]

    # -- runs

    def _run(self, program: _Program, values: list[Tensor]) -> list[Tensor]:
        if program.run is None:
            program.run = self._compile(program.module)
        elif "cudagraphs" in self.backend:  # the calls before have set up what a capture may not
            if program.capture is None:
                program.capture = _Capture(program.run, values)
            return program.capture(*values)
        return list(program.run(*values))

    def _compile(self, module: fx.GraphModule) -> Callable[..., Any]:
        if not self.backend.startswith("inductor"):
            return module
        return torch.compile(module, fullgraph=True, dynamic=False, backend="inductor")

    # -- results

    def _unpack(self, results: dict[str, Tensor], program: _Program, graph: LocalGraph, meta: ShardMeta) -> Pass:
        if (checks := results.get("checks")) is not None and not bool(checks.all()):
            raise next(error for error, held in zip(program.checks, checks.tolist(), strict=True) if not held)
        plan, place = graph.topology.plan, self._filled.place
        n_edges, n_owned = graph.pair.shape[1], plan.n_owned
        energy = None
        if (by_system := results.get("energy.by_system")) is not None:
            by_atom = results.get("energy.by_atom")
            by_atom = None if by_atom is None else by_atom[: n_owned - graph.topology.n_phantom]
            energy = Energy(by_system.sum(), by_system, by_atom)
        part = lambda kind: {k.removeprefix(kind): v for k, v in results.items() if k.startswith(kind)}
        derived = part("derived.")
        pair = derived.get("pair_forces")
        forces = derived.get("forces")
        derivatives = Derivatives(
            None if pair is None else pair[:n_edges],
            {name: value.index_select(0, place) for name, value in part("padded.").items()},
            None if forces is None else forces[:n_owned],
            derived.get("virial"),
        )
        raw = {}
        for name, value in part("raw.").items():
            declared = self.block.spec.outputs.get(name)
            per_atom = declared is not None and declared.kind is OutputKind.PER_NODE
            raw[name] = value[:n_owned] if per_atom else value
        return Pass(graph, meta, None, raw, energy, [], derivatives)


def compiled(block: Block, compile: bool | str) -> CompiledBlock:
    """The block as ``compile=`` says."""
    comm = block.comm
    backend = backend_of(compile, comm.device, comm.size == 1 or comm.backend == "nccl")
    return CompiledBlock(block, backend)
