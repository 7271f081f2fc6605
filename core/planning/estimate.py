"""`estimate`: how a structure would distribute over numbers of ranks, before any of them is started."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nvdd.config import StrategyKind
from nvdd.errors import InputError
from nvdd.planning.calibration import Calibration
from nvdd.planning.counting import LoadCounter, Loads
from nvdd.planning.tiles import TiledStructure

MOST_RANKS = 4096
_SURFACE = 2 / 3  # halo rows grow with this power of the owned atoms
_GIB = 2**30


@dataclass(frozen=True, eq=False)
class RankPlan:
    """What is expected of one number of ranks. Seconds and bytes are those of the rank that has most.

    Attributes:
        n_ranks: how many.
        loads: what each of them has.
        compute, exchange: s of a step, without and in messages.
        bytes_per_exchange: (n_exchanges,) that a rank receives.
        memory: bytes.
        speedup, efficiency: against one rank, and that over the number of ranks.
        most_atoms: of a structure of this kind that fits into the memory of so many ranks.
        fits: whether this one does.
    """

    n_ranks: int
    loads: Loads
    compute: float
    exchange: float
    bytes_per_exchange: np.ndarray
    memory: float
    speedup: float
    efficiency: float
    most_atoms: int
    fits: bool

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.compute + self.exchange

    @property
    def bytes_per_step(self) -> float:
        """That the rank with most halo rows receives."""
        return float(self.bytes_per_exchange.sum())

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, each with its unit in the name."""
        loads = self.loads
        spread = lambda values: {"min": int(values.min()), "mean": float(values.mean()), "max": int(values.max())}
        return {
            "ranks": self.n_ranks,
            "division": loads.how,
            "grid": list(loads.grid) if loads.grid else None,
            "owned_atoms": spread(loads.owned),
            "halo_atoms": spread(loads.halo),
            "edges": spread(loads.edges),
            "imbalance": loads.imbalance,
            "exchanges_per_step": len(self.bytes_per_exchange),
            "bytes_per_exchange": self.bytes_per_exchange.tolist(),
            "bytes_per_step": self.bytes_per_step,
            "memory_bytes": self.memory,
            "fits": self.fits,
            "seconds_compute": self.compute,
            "seconds_exchange": self.exchange,
            "seconds_per_step": self.seconds,
            "speedup": self.speedup,
            "efficiency": self.efficiency,
            "most_atoms": self.most_atoms,
        }


@dataclass(frozen=True, eq=False)
class RunEstimate:
    """What `estimate` found.

    Attributes:
        tiled: the structure.
        n_edges: of all ranks.
        skin: A.
        calibration: what the numbers are made of.
        memory_limit: bytes of a rank.
        plans: one for each number of ranks, ascending.
    """

    tiled: TiledStructure
    n_edges: int
    skin: float
    calibration: Calibration
    memory_limit: float
    plans: tuple[RankPlan, ...]

    @property
    def n_atoms(self) -> int:
        """Of all ranks."""
        return self.tiled.n_atoms

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, as JSON can hold them."""
        measured = self.calibration
        return {
            "atoms": self.n_atoms,
            "repeat": list(self.tiled.repeat),
            "edges": self.n_edges,
            "cutoff_A": measured.cutoff,
            "skin_A": self.skin,
            "model": measured.model,
            "dtype": measured.dtype,
            "strategy": measured.strategy,
            "machine": measured.machine,
            "device": measured.device,
            "network": measured.network.measured,
            "latency_s": measured.network.latency,
            "bandwidth_bytes_per_s": measured.network.bandwidth,
            "reduction_s": measured.network.reduction,
            "overhead_s": measured.network.overhead,
            "memory_limit_bytes": self.memory_limit,
            "largest_measured_atoms": measured.largest,
            "exchanges": [{"site": e.site, "bytes_per_row": e.bytes_per_row} for e in measured.exchanges],
            "plans": [plan.as_dict() for plan in self.plans],
        }


def estimate(
    model_factory: Any,
    atoms: Any,
    ranks: Sequence[int] = (1, 2, 4, 8),
    *,
    repeat: Sequence[int] = (1, 1, 1),
    device: str = "cpu",
    dtype: str | None = None,
    skin: float = 0.5,
    strategy: str = "halo",
    graph_plan: str = "curve",
    grid: Sequence[int] | None = None,
    balance: str = "auto",
    memory: float | None = None,
    latency: float | None = None,
    bandwidth: float | None = None,
    calibration: Calibration | None = None,
) -> RunEstimate:
    """Counts what each rank would own and read, and predicts memory and time of a step.

    Counts are exact: the division, the cutoff and the skin are those of a run, and a repeated cell is not built. Bytes and
    messages are those of the model, on a small piece of the structure. Memory and time are fitted to pieces that two
    local ranks measure. Memory is a + b atoms + c edges + d halo rows; time is a + b atoms + c edges, on a GPU at least
    that of launching kernels, plus latency + bytes / bandwidth for each exchange (the model of R. W. Hockney, Parallel
    Computing 20, 389, 1994), plus log2(ranks) times that of two ranks for each sum. The search of neighbours, which one
    step in many needs, is not in it.

    Args:
        model_factory: what makes the wrapper, as for `nvdd.trace_and_validate`.
        atoms: an ``ase.Atoms``.
        ranks: numbers of ranks, up to 4096.
        repeat: cells along each vector of ``atoms``.
        device, dtype: of the measurement: ``"cpu"``, ``"cuda"``, ``"cuda:k"``; None for the model's own type.
        skin, strategy, graph_plan, grid, balance: as in `DomainConfig`; a grid is for one number of ranks.
        memory: bytes that a rank may use; None for the GPU's, or this machine's over its cores.
        latency, bandwidth: s of a message and bytes/s of a rank, of the network of a cluster; None for what the two local
            ranks have.
        calibration: None to measure, which takes about a minute.

    Raises:
        InputError: a value that makes no sense, more ranks than atoms, or what `LoadCounter` refuses.
    """
    tiled = TiledStructure.of(atoms, repeat)
    numbers = checked_ranks(ranks, tiled.n_atoms)
    check_limits(memory, latency, bandwidth)
    domain = {"skin": skin, "strategy": StrategyKind(strategy), "graph_plan": graph_plan}
    if calibration is None:
        from nvdd.planning.measure import calibrate

        calibration = calibrate(model_factory, atoms, device, dtype, domain)
    if calibration.strategy != strategy_name(domain):
        raise InputError(
            f"the calibration is of strategy {calibration.strategy!r}, and {strategy_name(domain)!r} is asked for: measure anew"
        )
    calibration = _with_network(calibration, latency, bandwidth)
    counter = LoadCounter(tiled, calibration.cutoff, skin, calibration.far_edges)
    limit = memory if memory is not None else calibration.device_memory
    one = seconds_of_step(calibration, _alone(counter), 1)[0]
    plans = []
    for n in numbers:
        if n == 1:
            loads = _alone(counter)
        elif domain["strategy"] is StrategyKind.GRAPH_PARTITION:
            loads = counter.parts_of_list(n, graph_plan)
        else:
            loads = counter.domains(n, grid, balance)
        plans.append(_plan(calibration, loads, n, limit, one, tiled.n_atoms))
    return RunEstimate(tiled, counter.n_edges, skin, calibration, limit, tuple(plans))


def strategy_name(domain: Mapping[str, Any]) -> str:
    """``"halo"``, ``"graph curve"`` or ``"graph blocks"``, of arguments of `DomainConfig`."""
    kind = StrategyKind(domain.get("strategy", "halo"))
    return kind.value + (f" {domain.get('graph_plan', 'curve')}" if kind is StrategyKind.GRAPH_PARTITION else "")


def checked_ranks(ranks: Sequence[int], n_atoms: int) -> list[int]:
    """Ascending and each once; raises InputError for numbers of ranks that are none, or more than there are atoms."""
    numbers = sorted(set(ranks))
    wrong = [n for n in numbers if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MOST_RANKS]
    if wrong or not numbers:
        raise InputError(f"ranks must be whole numbers from 1 to {MOST_RANKS}, got {wrong or list(ranks)}")
    if numbers[-1] > n_atoms:
        raise InputError(f"{numbers[-1]} ranks are more than the {n_atoms} atoms; give fewer ranks, or a larger repeat")
    return numbers


def check_limits(memory: float | None, latency: float | None, bandwidth: float | None) -> None:
    """Raises InputError for a value that is given and makes no sense, in whatever unit."""
    for name, value in (("memory", memory), ("bandwidth", bandwidth)):
        if value is not None and not 0 < value < math.inf:
            raise InputError(f"{name} must be positive, got {value!r}")
    if latency is not None and not 0 <= latency < math.inf:
        raise InputError(f"latency must be zero or positive, got {latency!r}")


def _with_network(calibration: Calibration, latency: float | None, bandwidth: float | None) -> Calibration:
    if latency is None and bandwidth is None:
        return calibration
    measured = calibration.network
    given = replace(
        measured,
        latency=measured.latency if latency is None else latency,
        bandwidth=measured.bandwidth if bandwidth is None else bandwidth,
        reduction=measured.reduction if latency is None else latency,
        measured="given: " + ", ".join(n for n, v in (("latency", latency), ("bandwidth", bandwidth)) if v is not None),
    )
    return replace(calibration, network=given)


def _alone(counter: LoadCounter) -> Loads:
    everything = np.array([counter.tiled.n_atoms])
    return Loads(everything, np.zeros(1, np.int64), np.array([counter.n_edges]), (1, 1, 1), "grid")


def seconds_of_step(calibration: Calibration, loads: Loads, n_ranks: int) -> tuple[float, float]:
    """Seconds of the slowest rank: without messages, and in them."""
    cost = calibration.alone if n_ranks == 1 else calibration.seconds
    compute = cost.of(loads.owned, loads.edges)
    if n_ranks == 1:
        return float(compute[0]), 0.0
    network = calibration.network
    sent = sum(e.bytes_per_row * e.share for e in calibration.exchanges) * loads.halo
    messages = network.overhead + len(calibration.exchanges) * network.latency + sent / network.bandwidth
    messages = messages + calibration.reductions * network.reduction * math.log2(n_ranks)
    # ranks wait for the slowest one in every sum
    slowest = int((compute + messages).argmax())
    return float(compute[slowest]), float(messages[slowest])


def _plan(calibration: Calibration, loads: Loads, n_ranks: int, limit: float, one: float, n_atoms: int) -> RankPlan:
    compute, exchange = seconds_of_step(calibration, loads, n_ranks)
    memory = float(calibration.memory.of(loads.owned, loads.edges, loads.halo).max())
    speedup = one / (compute + exchange)
    most = most_atoms(calibration, loads, limit, n_atoms)
    sent = np.array([e.bytes_per_row * e.share for e in calibration.exchanges]) * (loads.halo.max() if n_ranks > 1 else 0)
    return RankPlan(
        n_ranks, loads, compute, exchange, sent if n_ranks > 1 else sent[:0], memory, speedup, speedup / n_ranks, most, memory <= limit
    )  # fmt: skip


def most_atoms(calibration: Calibration, loads: Loads, limit: float, n_atoms: int) -> int:
    """Atoms of a structure of this kind and shape that fill the memory ``limit`` of the fullest rank."""
    all_rows = loads.how == "blocks"

    def needed(scale: float) -> float:
        halo = loads.halo * (scale if all_rows else scale**_SURFACE)
        return float(calibration.memory.of(loads.owned * scale, loads.edges * scale, halo).max())

    if needed(0.0) > limit:
        return 0
    low, high = 0.0, 1.0
    while needed(high) < limit and high < 1e12:
        low, high = high, 2 * high
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if needed(middle) <= limit else (low, middle)
    return int(low * n_atoms)
