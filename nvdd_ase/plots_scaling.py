"""The picture of `nvdd scaling`: time of a step and efficiency against ranks, and the load of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nvdd_ase.plots import check_plot, draw_loads

if TYPE_CHECKING:
    from nvdd_ase.scaling import ScalingRow


def plot_scaling(rows: Sequence[ScalingRow], path: str | Path, title: str = "") -> None:
    """Draws what `measure_scaling` gave; loads are those of the most ranks.

    Args:
        rows: at least one.
        path: a .png, .pdf or .svg file.
        title: above the panels.

    Raises:
        InputError: another kind of file.
        MissingDependencyError: matplotlib is not installed.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    rows = sorted(rows, key=lambda row: row.ranks)
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    time, efficiency, loads = figure.subplots(1, 3)
    ranks = [row.ranks for row in rows]
    time.plot(ranks, [1e3 * row.seconds for row in rows], marker="o", label="measured")
    time.plot(ranks, [1e3 * rows[0].seconds * ranks[0] / n for n in ranks], ":", color="0.5", label="ideal")
    time.set(ylabel="ms a step", yscale="log")
    time.legend(frameon=False, fontsize="small")
    efficiency.plot(ranks, [row.efficiency for row in rows], marker="o")
    efficiency.axhline(1.0, color="0.5", linestyle=":")
    efficiency.set(ylabel="speed-up / ranks", ylim=(0, 1.1 * max(1.0, *(row.efficiency for row in rows))))
    for axes in (time, efficiency):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ranks, labels=list(map(str, ranks)))
        axes.set_xlabel("ranks")
        axes.grid(alpha=0.3)
    draw_loads(loads, rows[-1].owned, rows[-1].halo)
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=150)
