"""`calibrate`: two local ranks measure a model on small pieces of a structure."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from nvdd.data import Batch
from nvdd.errors import InputError
from nvdd.planning.calibration import Calibration, Cost, Network, Traffic
from nvdd.planning.counting import Loads
from nvdd.planning.estimate import seconds_of_step, strategy_name
from nvdd.planning.probe import SERVICE
from nvdd.planning.samples import thinner, tile
from nvdd.runtime.local_ranks import LocalRanks
from nvdd.validate.factory import FactoryRef

_FIRST = 60  # atoms of the smallest piece
_GROWTH = 2.5
_STEP = 1.5  # s that the largest step may take
_MOST = {"cpu": 6000, "cuda": 60_000}  # atoms that are enough in any case
_SPEND = 2.0  # s for one timing
_ROWS = (4, 256, 4096, 32768)  # of test messages


def calibrate(
    model_factory: Any,
    atoms: Any,
    device: str = "cpu",
    dtype: str | None = None,
    domain: Mapping[str, Any] | None = None,
    name: str | None = None,
    clock: str = "wall",
) -> Calibration:
    """Measures seconds, bytes and messages of a model on two local ranks.

    Args:
        model_factory: what makes the wrapper, as for `nvdd.trace_and_validate`.
        atoms: an ``ase.Atoms`` of the kind that will be computed.
        device: ``"cpu"``, ``"cuda"`` (ranks take turns where there is one GPU), ``"cuda:k"``.
        dtype: ``"float32"``, ``"float64"``; None for the model's own.
        domain: arguments of `DomainConfig`: skin, strategy, graph_plan.
        name: of the model, for the file; None for the factory's.
        clock: ``"wall"``; ``"cpu"``, for ranks of one thread on a busy machine, leaves out all waiting.

    Raises:
        InputError, RankError: as from a run.
    """
    factory = FactoryRef.of(model_factory)
    domain = dict(domain or {})
    kwargs = {"factory": factory, "dtype": dtype, "clock": clock}
    with LocalRanks(2, SERVICE, kwargs, device=device) as ranks:
        about = ranks.call("describe")[0]
        own = len(set(ranks.devices)) == 2
        together = device == "cpu" or own
        busy, alone, smallest, largest = _steps(ranks, atoms, domain, together, device.partition(":")[0])
        few = ranks.call("trace", {"batch": smallest, "domain": domain})
        pair = ranks.call("trace", {"batch": largest, "domain": domain, "count": 1})
        network = _network(ranks, f"2 ranks over {ranks.backend} on this machine")
    if not any(rows for _, _, rows in pair[0]["exchanges"]):
        raise InputError(
            f"two ranks read no rows of each other in a piece of {largest.n_atoms} atoms, so that nothing is known of messages; "
            "plan for a structure whose atoms have neighbours"
        )
    times = lambda steps: Cost.fit([(s["owned"], s["edges"], s["seconds"]) for s in steps], with_floor=True)
    memory = Cost.fit([(s["owned"], s["edges"], s["bytes"]) for s in alone])
    found = Calibration(
        machine=platform.node(),
        device=about["device"],
        model=name or str(factory),
        dtype=about["dtype"],
        strategy=strategy_name(domain),
        cutoff=float(about["cutoff"]),
        seconds=times(busy),
        alone=times(alone),
        memory=_with_halo(memory, pair),
        exchanges=tuple(
            Traffic(site, width, rows / max(1.0, np.mean([p["halo"] for p in pair])))
            for site, width, rows in pair[0]["exchanges"]
        ),
        reductions=pair[0]["reductions"],
        network=network,
        device_memory=float(about["memory"]),
        samples=tuple((s["owned"], s["edges"], s["seconds"], s["bytes"]) for s in busy),
        far_edges=about["far_edges"],
    )
    return replace(found, network=replace(network, overhead=_overhead(found, few)))


def _overhead(found: Calibration, few: list[dict[str, Any]]) -> float:
    """Seconds that ranks with few atoms take beyond what is expected of them."""
    owned, halo, edges = (np.array([s[name] for s in few]) for name in ("owned", "halo", "edges"))
    expected = sum(seconds_of_step(found, Loads(owned, halo, edges, None, "grid"), len(few)))
    return max(0.0, max(s["seconds"] for s in few) - expected)


def _steps(
    ranks: LocalRanks, atoms: Any, domain: dict[str, Any], together: bool, kind: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], Batch, Batch]:
    """Steps of growing pieces with others beside them and alone, and the smallest and the largest piece."""
    busy, alone, least, last, smallest = [], [], _FIRST, 0, None
    while True:
        piece = tile(atoms, least)
        smallest = smallest or Batch.from_atoms(piece)
        for what in (piece, thinner(piece)):
            task = {"batch": Batch.from_atoms(what), "domain": domain, "seconds": _SPEND}
            first = [s for s in ranks.call("measure", {**task, "together": False}) if s is not None]
            alone += first
            if together:
                found = ranks.call("measure", {**task, "together": True})
                busy.append({**found[0], "seconds": max(s["seconds"] for s in found)})
            else:
                busy += first
        grown = len(piece) > last
        last = len(piece)
        slow = busy[-2]["seconds"] * _GROWTH > _STEP
        if not grown or (slow and len(busy) >= 4) or least * _GROWTH > _MOST[kind] or busy[-2]["seconds"] > 2 * _STEP:
            return busy, alone, smallest, Batch.from_atoms(piece)
        least = math.ceil(max(last, least) * _GROWTH)


def _with_halo(memory: Cost, pair: list[dict[str, Any]]) -> Cost:
    """With what ranks that have halo rows need beyond the fit, over the number of these rows."""
    more = [p["bytes"] - memory.of(p["owned"], p["edges"]) for p in pair if p["halo"]]
    rows = [p["halo"] for p in pair if p["halo"]]
    per_halo = max(0.0, sum(more) / sum(rows)) if rows else 0.0
    return Cost(memory.base, memory.per_atom, memory.per_edge, per_halo)


def _network(ranks: LocalRanks, where: str) -> Network:
    answers = ranks.call("ping", _ROWS)
    sizes = np.array(sorted(answers[0]["exchange"]), float)
    times = np.array([max(a["exchange"][int(s)] for a in answers) for s in sizes])
    fitted = Cost.fit([(int(s), 0, float(t)) for s, t in zip(sizes, times, strict=True)])
    if not fitted.per_atom > 0:
        raise InputError(f"messages of {sizes.astype(int).tolist()} bytes took {times.tolist()} s: no bandwidth; give one")
    return Network(fitted.base, 1.0 / fitted.per_atom, max(a["reduction"] for a in answers), where)
