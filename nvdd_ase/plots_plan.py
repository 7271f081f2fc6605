"""The picture of `nvdd plan`: domains, the halo of one rank, loads, and how time, efficiency and memory go with ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nvdd.index_partition import IndexPartitioner
from nvdd.neighbors import edges_within
from nvdd.partition import SpatialPartitioner
from nvdd.planning.tiles import TiledStructure
from nvdd_ase.plots import check_plot, draw_loads

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from nvdd.planning.estimate import RankPlan, RunEstimate

_MOST_DRAWN = 40_000  # atoms
_MOST_DOMAINS = 64


def plot_plan(found: RunEstimate, path: str | Path, title: str = "") -> None:
    """Draws a slice through the domains with the halo of one, the loads of the ranks, and the predictions against their number.

    Where the structure is large, the domains are those of fewer repeats of its cell, which the panel says. Loads are those
    of the whole.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7), layout="constrained")
    (domains, loads, imbalance), (time, efficiency, memory) = figure.subplots(2, 3)
    shown = _draw_domains(domains, found)
    draw_loads(loads, shown.loads.owned.tolist(), shown.loads.halo.tolist())
    ranks = [plan.n_ranks for plan in found.plans]
    time.plot(ranks, [1e3 * plan.seconds for plan in found.plans], marker="o", label="a step")
    time.plot(ranks, [1e3 * plan.compute for plan in found.plans], "--", linewidth=1, label="without messages")
    time.plot(ranks, [1e3 * found.plans[0].seconds * ranks[0] / n for n in ranks], ":", color="0.5", label="ideal")
    time.set(ylabel="predicted time (ms)", yscale="log")
    time.legend(frameon=False, fontsize="small")
    efficiency.plot(ranks, [plan.efficiency for plan in found.plans], marker="o")
    efficiency.set(ylabel="predicted efficiency", ylim=(0, 1.1))
    memory.plot(ranks, [plan.memory / 2**30 for plan in found.plans], marker="o", label="fullest rank")
    memory.axhline(found.memory_limit / 2**30, color="tab:red", linewidth=1, linestyle="--", label="there is")
    memory.set(ylabel="memory (GiB)", yscale="log")
    memory.legend(frameon=False, fontsize="small")
    imbalance.plot(ranks, [plan.loads.imbalance for plan in found.plans], marker="o")
    imbalance.axhline(1.0, color="0.5", linestyle=":")
    imbalance.set(ylabel="most atoms on a rank / mean")
    imbalance.set_ylim(0.9, max(1.2, imbalance.get_ylim()[1]))
    for axes in (imbalance, time, efficiency, memory):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ranks, labels=list(map(str, ranks)))
        axes.set_xlabel("ranks")
        axes.grid(alpha=0.3)
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=150)


def drawn(found: RunEstimate) -> tuple[RankPlan, TiledStructure]:
    """The number of ranks whose domains are drawn, and the structure that is drawn: as much of it as can be seen."""
    plan = max((p for p in found.plans if p.n_ranks <= _MOST_DOMAINS), key=lambda p: p.n_ranks, default=found.plans[0])
    repeat = list(found.tiled.repeat)
    while len(found.tiled.positions) * np.prod(repeat) > _MOST_DRAWN and max(repeat) > 1:
        longest = int(np.argmax(repeat))
        repeat[longest] = (repeat[longest] + 1) // 2
    tiled = found.tiled
    return plan, TiledStructure(tiled.positions, tiled.cell, tiled.pbc, tuple(repeat))


def _draw_domains(axes: Axes, found: RunEstimate) -> RankPlan:
    """Gives the plan that it has drawn."""
    plan, tiled = drawn(found)
    positions, cell = tiled.build(), tiled.whole_cell
    owner = _owners(plan, tiled, positions)
    rank = int(np.bincount(owner, minlength=plan.n_ranks).argmax())
    reach = found.calibration.cutoff + found.skin
    read = edges_within(positions, cell, tiled.pbc, reach, np.flatnonzero(owner == rank)).sender
    halo = np.zeros(len(owner), bool)
    halo[read] = True
    halo &= owner != rank
    across, seen = _slice(positions, tiled, owner == rank)
    x, y = (a for a in range(3) if a != across)
    size = float(np.clip(9000 / max(1, seen.sum()), 1, 40))
    colours = [_COLOURS[o % len(_COLOURS)] for o in owner[seen]]
    axes.scatter(positions[seen, x], positions[seen, y], s=size, c=colours, linewidths=0)
    ring = seen & halo
    axes.scatter(positions[ring, x], positions[ring, y], s=1.5 * size, facecolors="none", edgecolors="black", linewidths=0.6)
    axes.set_aspect("equal")
    axes.set(xlabel=f"{'xyz'[x]} (A)", ylabel=f"{'xyz'[y]} (A)")
    part = "" if tiled.repeat == found.tiled.repeat else f", of {' x '.join(map(str, tiled.repeat))} cells only"
    axes.set_title(f"owners on {plan.n_ranks} ranks{part}; rings: halo of rank {rank}", fontsize="small")
    return plan


_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")


def _owners(plan: RankPlan, tiled: TiledStructure, positions: np.ndarray) -> np.ndarray:
    if plan.loads.how in ("curve", "blocks"):
        pbc, cells = tiled.pbc[None], tiled.whole_cell[None]
        return IndexPartitioner(plan.n_ranks, plan.loads.how).divide(positions, cells, pbc, [np.arange(len(positions))])
    how: dict[str, Any] = {"grid": plan.loads.grid} if plan.loads.grid else {"balance": "rcb"}
    return SpatialPartitioner(plan.n_ranks, **how).assign(positions, tiled.whole_cell, tiled.pbc)


def _slice(positions: np.ndarray, tiled: TiledStructure, mine: np.ndarray) -> tuple[int, np.ndarray]:
    """The Cartesian axis that is looked along, the shortest, and the atoms of a layer through the middle of one rank's."""
    across = int(np.ptp(positions, axis=0).argmin())
    height = positions[:, across]
    middle = np.median(height[mine]) if mine.any() else np.median(height)
    thickness = max(3.0, 0.02 * np.ptp(height))
    return across, np.abs(height - middle) <= thickness
