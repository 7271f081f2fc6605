"""Hooks that write down what a run does, and that watch over it."""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch

from nvdd.dynamics.checkpoint import check_folder, write_whole
from nvdd.dynamics.hooks import Hook, HookScope, Observation
from nvdd.dynamics.state import GPA
from nvdd.errors import InputError, NvddError

if TYPE_CHECKING:
    from nvdd.dynamics.domain_parallel import DomainParallel

COLUMNS = (
    "step", "time_fs", "epot_eV", "ekin_eV", "etot_eV", "conserved_eV", "temperature_K", "pressure_GPa", "volume_A3",
    "density_g_cm3", "fmax_eV_per_A", "steps_per_s", "ns_per_day", "imbalance",
)  # fmt: skip


class Speed:
    """Steps a second since the last look."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._time = 0.0

    def look(self, step: int) -> float | None:
        """None at the first look."""
        now = time.perf_counter()
        before, since, self._step, self._time = self._step, self._time, step, now
        return None if before is None or step == before or now == since else (step - before) / (now - since)


def record(seen: Observation, timestep: float, speed: float | None) -> list[dict[str, Any]]:
    """One dictionary of `COLUMNS` for each system; None where a value is not known. ``timestep`` (fs) is 0 in a relaxation."""
    records = []
    for k in range(len(seen.energy)):
        epot, ekin = float(seen.energy[k]), float(seen.kinetic[k])
        volume = float(seen.volume[k])
        values = (
            seen.step, seen.time, epot, ekin, epot + ekin, float(seen.conserved[k]), float(seen.temperature[k]),
            None if seen.pressure is None else float(seen.pressure[k]) / GPA, volume or None,
            float(seen.density[k]) if volume else None, float(seen.fmax[k]), speed,
            speed * timestep * 1e-6 * 86400 if speed and timestep else None, seen.imbalance,
        )  # fmt: skip
        records.append(dict(zip(COLUMNS, values, strict=True)))
    return records


class CSVLog(Hook):
    """A line in a CSV file for each call, with `COLUMNS` (and ``system`` if there are several), flushed at once.

    A run that goes on from a checkpoint keeps the lines up to its step and appends.

    Args:
        path: of the file.
        every: steps.
        pressure: whether to compute the stress for it.
    """

    scope = HookScope.RANK_ZERO

    def __init__(self, path: str | Path, every: int = 100, pressure: bool = True) -> None:
        super().__init__(every)
        self.path, self.needs_stress = Path(path), pressure
        self._file: TextIO | None = None
        self._speed = Speed()

    def open(self, run: DomainParallel) -> None:
        """Opens the file on rank 0."""
        if run.comm.rank:
            return
        check_folder(self.path)
        several = run.state.n_systems > 1
        self._names = (*COLUMNS, "system") if several else COLUMNS
        kept = _lines_until(self.path, run.state.step) if run.restarted else []
        write_whole(self.path, lambda part: _write_table(part, [self._names, *kept]))
        self._file = self.path.open("a", newline="")
        self._table = csv.writer(self._file)

    def __call__(self, run: DomainParallel, seen: Observation) -> None:
        for k, values in enumerate(
            record(seen, run.dynamics.timestep * run.dynamics.kinetic, self._speed.look(seen.step))
        ):
            values["system"] = k
            self._table.writerow(["" if values[name] is None else values[name] for name in self._names])
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()


def _write_table(path: Path, lines: Iterable[Sequence[str]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(lines)


def _lines_until(path: Path, step: int) -> list[list[str]]:
    """Complete lines of a log up to a step; of the last run, that ended after its last checkpoint."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        lines = [line for line in csv.reader(file) if line and line[0].isdigit()]
    return [line for line in lines if int(line[0]) <= step and len(line) >= len(COLUMNS)]


class TableLog(Hook):
    """Prints a line for each call, in columns, on rank 0.

    Args:
        every: steps.
        pressure: whether to compute the stress for it.
        console: a ``rich.console.Console``; None for one on standard output.
    """

    scope = HookScope.RANK_ZERO
    _FORMATS = (
        ("step", "{:d}", 9), ("epot_eV", "{:.6f}", 16), ("ekin_eV", "{:.6f}", 14), ("temperature_K", "{:.1f}", 8),
        ("pressure_GPa", "{:.4f}", 10), ("density_g_cm3", "{:.4f}", 9), ("steps_per_s", "{:.2f}", 9),
        ("ns_per_day", "{:.3g}", 9), ("imbalance", "{:.2f}", 6),
    )  # fmt: skip
    _HEADS = ("step", "E_pot eV", "E_kin eV", "T K", "p GPa", "g/cm3", "steps/s", "ns/day", "imb")

    def __init__(self, every: int = 100, pressure: bool = True, console: Any = None) -> None:
        super().__init__(every)
        self.needs_stress, self._console = pressure, console
        self._speed = Speed()
        self._begun = False

    def __call__(self, run: DomainParallel, seen: Observation) -> None:
        from rich.console import Console

        self._console = self._console or Console()
        say = lambda line, **style: self._console.print(line, markup=False, highlight=False, soft_wrap=True, **style)
        if not self._begun:
            self._begun = True
            say(" ".join(h.rjust(w) for h, (_, _, w) in zip(self._HEADS, self._FORMATS, strict=True)), style="bold")
        for values in record(seen, run.dynamics.timestep * run.dynamics.kinetic, self._speed.look(seen.step)):
            cells = ("-" if values[n] is None else f.format(values[n]) for n, f, _ in self._FORMATS)
            say(" ".join(cell.rjust(w) for cell, (_, _, w) in zip(cells, self._FORMATS, strict=True)))


class ProgressBar(Hook):
    """A bar with steps a second and the time left, on rank 0; nothing where standard error is no terminal.

    Args:
        steps: of the run.
        every: steps between updates.
    """

    scope = HookScope.RANK_ZERO
    observes = False

    def __init__(self, steps: int, every: int = 10) -> None:
        super().__init__(every)
        self.steps = steps
        self._bar: Any = None

    def open(self, run: DomainParallel) -> None:
        """Shows the bar on rank 0."""
        if run.comm.rank:
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=Console(stderr=True))
        self._first, self._speed = run.state.step, Speed()
        self._task = self._bar.add_task("", total=self.steps, rate="")
        self._bar.start()

    def __call__(self, run: DomainParallel, seen: Observation | None) -> None:
        speed = self._speed.look(run.state.step)
        rate = {} if speed is None else {"rate": f"{speed:.2f} steps/s"}
        self._bar.update(self._task, completed=run.state.step - self._first, **rate)

    def close(self) -> None:
        """Leaves the bar as it is."""
        if self._bar is not None:
            self._bar.stop()


class Guard(Hook):
    """Ends a run that has gone wrong: energies that are not numbers, temperatures and drifts out of bounds.

    Args:
        every: steps.
        max_drift: eV an atom by which the conserved quantity may have changed since the first look; None for any.
        max_temperature: K; None for any.

    Raises:
        NvddError: on every rank, after the step at which it is seen.
    """

    scope = HookScope.GLOBAL

    def __init__(self, every: int = 10, max_drift: float | None = None, max_temperature: float | None = None) -> None:
        super().__init__(every)
        for name, value in (("max_drift", max_drift), ("max_temperature", max_temperature)):
            if value is not None and not value > 0:
                raise InputError(f"Guard: {name} must be positive or None, got {value!r}")
        self.max_drift, self.max_temperature = max_drift, max_temperature
        self._first: torch.Tensor | None = None

    def __call__(self, run: DomainParallel, seen: Observation) -> None:
        advice = f"; use a timestep below {run.dynamics.timestep:g} fs, or relax the structure first"
        if not all(map(math.isfinite, (seen.energy + seen.kinetic).tolist())):
            raise NvddError(
                f"step {seen.step}: potential energy {seen.energy.tolist()} eV, kinetic energy {seen.kinetic.tolist()} eV{advice}"
            )
        hottest = float(seen.temperature.max())
        if self.max_temperature is not None and hottest > self.max_temperature:
            raise NvddError(
                f"step {seen.step}: {hottest:.0f} K, above max_temperature {self.max_temperature:g} K{advice}"
            )
        if self._first is None:
            self._first = seen.conserved
        drift = float(((seen.conserved - self._first) / run.state.n_atoms.cpu()).abs().max())
        if self.max_drift is not None and drift > self.max_drift:
            raise NvddError(
                f"step {seen.step}: the conserved quantity has changed by {drift:.3g} eV an atom, more than max_drift "
                f"{self.max_drift:g}{advice}"
            )


class StopWhen(Hook):
    """Ends a run, in good order, when a condition holds; on any of the ranks, if they don't agree.

    Args:
        condition: function of the `Observation`, for example ``lambda seen: seen.fmax.max() < 0.01``.
        every: steps.
        needs_stress: whether it reads ``seen.stress`` or ``seen.pressure``.
    """

    scope = HookScope.GLOBAL

    def __init__(self, condition: Callable[[Observation], bool], every: int = 1, needs_stress: bool = False) -> None:
        super().__init__(every)
        self.condition, self.needs_stress = condition, needs_stress

    def __call__(self, run: DomainParallel, seen: Observation) -> None:
        self.stops = bool(self.condition(seen))
