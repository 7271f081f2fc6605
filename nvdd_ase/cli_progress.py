"""Progress of a loop over steps: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def step_progress(label: str, total: int, console: Console | None = None) -> Iterator[Callable[[int, str], None]]:
    """Gives ``report(step, text)``; shows the step, steps/s, the time left and the text."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield _line_reporter(label, total, console)
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[text]}"),
        console=console,
    )
    with bar:
        task = bar.add_task(label, total=total, rate="", text="")
        rate = _Rate()

        def report(step: int, text: str) -> None:
            bar.update(task, completed=step, text=text, rate=rate.text(step))

        yield report


def _line_reporter(label: str, total: int, console: Console) -> Callable[[int, str], None]:
    rate = _Rate()
    last = -float("inf")

    def report(step: int, text: str) -> None:
        nonlocal last
        now = time.monotonic()
        if step == total or now - last >= _SECONDS_BETWEEN_LINES:
            last = now
            line = "  ".join(part for part in (f"{label} {step}/{total}", rate.text(step), text) if part)
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    return report


class _Rate:
    """Steps a second since the first report, which stands before the first step."""

    def __init__(self) -> None:
        self._start: float | None = None

    def text(self, step: int) -> str:
        now = time.monotonic()
        if self._start is None:
            self._start = now
        return f"{step / (now - self._start):.2f} steps/s" if step and now > self._start else ""
