"""What each rank does for the validator: makes the model, evaluates the cases, sends back what it owns."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nvdd.communicator import Communicator
from nvdd.config import DomainConfig
from nvdd.data import Batch
from nvdd.runtime.model import DistributedModel
from nvdd.shard_tensor import ShardTensor
from nvdd.specs import MLIPSpec
from nvdd.specs.declared import spec_of
from nvdd.trace import dispatch_trace
from nvdd.validate.edges import rank_edges
from nvdd.validate.factory import FactoryRef, checksum
from nvdd.validate.fixes import Fix, apply_fixes
from nvdd.validate.geometries import Case
from nvdd.validate.helpers import HelperOutput, HelperWatch, watch_helpers
from nvdd.validate.layers import LayerOutput, record_layers


@dataclass(frozen=True)
class Request:
    """What ranks are asked to evaluate.

    Attributes:
        factory: makes the model.
        spec: the spec to begin with; None for the wrapper's own.
        fixes: applied to it, in order (a spec with adapters is not sent between processes, its changes are).
        cases, geometries: what to evaluate.
        wanted: outputs to ask for.
        returned: names that the wrapper returns.
        layers: whether to record the outputs of all submodules.
        watch: packages whose helpers are watched.
        scratch: folder for what a rank has recorded when it fails.
    """

    factory: FactoryRef
    spec: MLIPSpec | None
    fixes: tuple[Fix, ...]
    cases: Sequence[Case]
    geometries: Mapping[str, Batch]
    wanted: frozenset[str]
    returned: frozenset[str]
    layers: bool = False
    watch: tuple[str, ...] = ()
    scratch: str = ""


@dataclass
class RankResult:
    """One geometry on one rank.

    Attributes:
        case, geometry, turn: which, and its place in the case.
        ids: (n,) global ids of the rows of per-atom values.
        values: output -> float64 array.
        edges: (E, 5) of `nvdd.validate.edges`.
        n_halo: remote rows that the rank reads.
        fired: (op, handler) -> how often.
        n_exchanges: between ranks.
        builds: how often the partition has been made so far in this case.
        roles: output that the wrapper returned -> name of its role, "" if it has none.
        layers, helpers: records, if they were asked for.
    """

    case: str
    geometry: str
    turn: int
    ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    values: dict[str, np.ndarray] = field(default_factory=dict)
    edges: np.ndarray = field(default_factory=lambda: np.zeros((0, 5), np.int64))
    n_halo: int = 0
    fired: Counter = field(default_factory=Counter)
    n_exchanges: int = 0
    builds: int = 0
    roles: dict[str, str] = field(default_factory=dict)
    layers: list[LayerOutput] = field(default_factory=list)
    helpers: list[HelperOutput] = field(default_factory=list)


class ModelRanks:
    """The service of a validation's `nvdd.runtime.local_ranks.LocalRanks`."""

    def __init__(self, comm: Communicator, arrays: Any, phase: Callable[[str], None]) -> None:
        self.comm, self.phase = comm, phase

    def distribute(self, wrapper: Any, config: DomainConfig, spec: MLIPSpec | None) -> DistributedModel:
        """The model over ranks; a subclass may plant a fault in it."""
        return DistributedModel(wrapper, config, spec, self.phase)

    def run(self, request: Request) -> dict[str, Any]:
        """Evaluates all cases.

        Returns:
            ``weights``, a checksum of the model's weights on this rank, and ``results``, a list of `RankResult`.
        """
        self.phase("model")
        wrapper = request.factory.make(self.comm.device)
        weights = checksum(wrapper)
        done: list[RankResult] = []
        try:
            evaluate_cases(self.comm, self.distribute, wrapper, request, done)
        except BaseException:
            if request.scratch:
                save_record(request.scratch, self.comm.rank, done)
            raise
        return {"weights": weights, "results": done}


def evaluate_cases(
    comm: Communicator, distribute: Callable[..., DistributedModel], wrapper: Any, request: Request, done: list
) -> None:
    """Evaluates the cases of ``request`` on this rank; appends a `RankResult` for each geometry to ``done``."""
    declared = request.spec if request.spec is not None else spec_of(wrapper, DomainConfig().strategy)
    spec = apply_fixes(declared, request.fixes)
    config = copy.copy(wrapper.model_config)  # which may be the class's
    config.outputs = frozenset(config.outputs) | request.returned  # whatever it returns is compared
    with suppress(AttributeError):  # a property: what it leaves out is reported as not compared
        wrapper.model_config = config
    with ExitStack() as stack:
        watch = stack.enter_context(watch_helpers(request.watch)) if request.watch else None
        _evaluate(comm, distribute, wrapper, spec, request, done, watch)


def _evaluate(comm, distribute, wrapper, spec, request: Request, done: list, watch: HelperWatch | None) -> None:
    for case in request.cases:
        domain = dict(case.domain)
        if comm.size == 1:
            domain.pop("grid_dims", None)
        model = distribute(wrapper, DomainConfig(mesh=comm, device=comm.device, **domain), spec)
        for turn, name in enumerate(case.geometries):
            batch = request.geometries[name]
            wanted = set(request.wanted) & model.available_outputs
            if not all(abs(float(v)) > 0 for v in torch.linalg.det(batch.cell)):
                wanted -= {"stresses"}
            result = RankResult(case.name, name, turn)
            done.append(result)  # with what is recorded until then, if the forward fails
            with ExitStack() as stack:
                stack.enter_context(_roles_of_outputs(wrapper, result.roles))
                if request.layers:
                    result.layers = stack.enter_context(record_layers(wrapper))
                trace = stack.enter_context(dispatch_trace())
                try:
                    out = model(batch, wanted)
                finally:
                    result.helpers = watch.take() if watch is not None else []
            result.ids = out.ids.cpu().numpy()
            result.values = {k: v.detach().to(torch.float64).cpu().numpy() for k, v in out.items()}
            graph = model.graphs.update(batch)
            if not model.graphs.chooses:
                graph = graph.within(model.graphs.cutoff, None)
            result.edges = rank_edges(graph, model.graphs.widest)
            result.n_halo, result.builds = out.n_halo, model.graphs.n_builds
            result.fired, result.n_exchanges = trace.fired, trace.n_exchanges


@contextmanager
def _roles_of_outputs(wrapper: torch.nn.Module, into: dict[str, str]) -> Iterator[None]:
    """Notes the roles of what the wrapper returns during the block."""

    def note(module: Any, args: Any, outputs: Any) -> None:
        for name, value in outputs.items():
            into[name] = value._role.name if isinstance(value, ShardTensor) else ""

    # of a sum the runtime calls the blocks, not the sum
    handles = [block.register_forward_hook(note) for block in getattr(wrapper, "composed_of", (wrapper,))]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def save_record(folder: str, rank: int, done: list[RankResult]) -> None:
    """Leaves what a rank has found before it fails, for the diagnosis."""
    (Path(folder) / f"rank{rank}.pickle").write_bytes(pickle.dumps(done, protocol=5))


def load_records(folder: str, n_ranks: int) -> list[list[RankResult]] | None:
    """What the ranks have left behind; None unless all have."""
    files = [Path(folder) / f"rank{rank}.pickle" for rank in range(n_ranks)]
    if not all(f.exists() for f in files):
        return None
    return [pickle.loads(f.read_bytes()) for f in files]
