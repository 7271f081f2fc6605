"""Plots of runs. Matplotlib is loaded when one is drawn, on no display."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvdd.errors import InputError, MissingDependencyError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from nvdd_ase.md import MDStep
    from nvdd_ase.relax import RelaxStep

PLOT_SUFFIXES = (".png", ".pdf", ".svg")


def check_plot(path: str | Path) -> None:
    """Raises, before anything runs, if the plot could not be drawn afterwards."""
    if Path(path).suffix not in PLOT_SUFFIXES:
        raise InputError(f"plot {str(path)!r}: the name must end in one of {', '.join(PLOT_SUFFIXES)}")
    if find_spec("matplotlib") is None:
        raise MissingDependencyError(
            "a plot needs matplotlib, which is not installed; install it with: pip install matplotlib"
        )


def plot_md(records: Sequence[MDStep], path: str | Path, title: str = "") -> None:
    """Draws energy, temperature and, where there is one, pressure against time."""
    time = [record.time_fs / 1000 for record in records]
    panels = [
        ("energy (eV)", {"potential": [r.epot_eV for r in records], "total": [r.etot_eV for r in records]}),
        ("temperature (K)", {"": [r.temperature_K for r in records]}),
    ]
    if records and all(record.pressure_GPa is not None for record in records):
        panels.append(("pressure (GPa)", {"": [r.pressure_GPa for r in records]}))
    _draw(path, title, "time (ps)", time, panels)


def plot_md_log(log: str | Path, path: str | Path, title: str = "") -> None:
    """Draws energy, temperature and, where there are such, pressure and load of the busiest rank against time, of a log that
    `CSVLog` wrote."""
    with open(log, newline="") as file:
        lines = list(csv.DictReader(file))
    number = lambda name: [float(line[name]) for line in lines]
    panels = [
        ("energy (eV)", {"potential": number("epot_eV"), "conserved": number("conserved_eV")}),
        ("temperature (K)", {"": number("temperature_K")}),
    ]
    if lines and all(line["pressure_GPa"] for line in lines):
        panels.append(("pressure (GPa)", {"": number("pressure_GPa")}))
    if any(load > 1.0 for load in number("imbalance")):  # 1 on one rank, and of ranks with equally many atoms
        panels.append(("most atoms / mean", {"": number("imbalance")}))
    _draw(path, title, "time (ps)", [time / 1000 for time in number("time_fs")], panels)


def plot_relax(history: Sequence[RelaxStep], path: str | Path, title: str = "") -> None:
    """Draws energy, largest force and, where the cell relaxed, largest stress against the step."""
    panels = [
        ("energy (eV)", {"": [state.energy_eV for state in history]}),
        ("largest force (eV/A)", {"": [state.fmax_eV_per_A for state in history]}),
    ]
    if history and all(state.smax_GPa is not None for state in history):
        panels.append(("largest stress (GPa)", {"": [state.smax_GPa for state in history]}))
    _draw(path, title, "step", [state.step for state in history], panels, logarithmic=slice(1, None))


def draw_loads(axes: Axes, owned: Sequence[int], halo: Sequence[int]) -> None:
    """Atoms that each rank owns and, on top of them, rows that it reads of others; the mean of the first as a line."""
    ranks = range(len(owned))
    axes.bar(ranks, owned, color="#4477aa", label="owned")
    axes.bar(ranks, halo, bottom=owned, color="#ccbb44", label="read of others")
    mean = sum(owned) / len(owned)
    axes.axhline(mean, color="black", linewidth=1, linestyle="--", label=f"mean owned, most is {max(owned) / mean:.2f} times that")
    axes.set(xlabel=f"rank, of {len(owned)}", ylabel="atoms", ylim=(0, 1.35 * max(a + b for a, b in zip(owned, halo, strict=True))))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, fontsize="small", loc="upper center")


def _draw(
    path: str | Path,
    title: str,
    x_label: str,
    x: Sequence[float],
    panels: Sequence[tuple[str, dict[str, Any]]],
    logarithmic: slice = slice(0, 0),
) -> None:
    """One panel above the other, each with its curves by name."""
    check_plot(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 2.2 * len(panels) + 0.6), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (y_label, curves) in zip(axes, panels, strict=True):
        for name, values in curves.items():
            axis.plot(x, values, label=name, linewidth=1.2, marker="." if len(x) < 60 else "")
        axis.set_ylabel(y_label)
        axis.ticklabel_format(axis="y", useOffset=False)
        axis.grid(alpha=0.3)
        if len(curves) > 1:
            axis.legend(frameon=False, fontsize="small")
    for axis in axes[logarithmic]:
        axis.set_yscale("log")
    axes[-1].set_xlabel(x_label)
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=150)
