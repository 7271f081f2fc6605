"""Time of a step, load of the ranks and forces of one structure over several numbers of ranks: what `nvdd scaling` prints."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nvdd.errors import InputError
from nvdd.models.composed import parts
from nvdd_ase.calculator import NVDDCalculator

if TYPE_CHECKING:
    from ase import Atoms

_MOVE = 0.01  # A, by which atoms are moved: with the usual skin no step searches neighbours anew
#: largest difference of a force that is rounding, eV/A, where forces are below 1 eV/A; else of the largest force
LIMITS = {"float32": 1e-4, "float64": 1e-8}


@dataclass(frozen=True)
class ScalingRow:
    """One number of ranks.

    Attributes:
        ranks: how many.
        seconds: median of a step: positions in, energy, forces and stress out.
        speedup: beside the first row, times its ranks.
        efficiency: ``speedup / ranks``.
        owned, halo, edges: of each rank, atoms that it owns, remote rows that it reads, edges into its atoms.
        difference: largest difference of a component of a force from the first row's, eV/A.
        largest: largest component of a force, eV/A.
        limit: of ``difference``, eV/A.
    """

    ranks: int
    seconds: float
    speedup: float
    efficiency: float
    owned: tuple[int, ...]
    halo: tuple[int, ...]
    edges: tuple[int, ...]
    difference: float
    largest: float
    limit: float

    @property
    def imbalance(self) -> float:
        """The largest number of owned atoms over the mean."""
        return max(self.owned) * len(self.owned) / sum(self.owned)

    @property
    def agrees(self) -> bool:
        """Whether the forces are those of the first row, up to rounding; never of numbers that are not finite."""
        return self.difference <= self.limit

    def as_dict(self) -> dict[str, Any]:
        """As JSON values, with units in the names."""
        values = {**asdict(self), "imbalance": self.imbalance, "agrees": self.agrees}
        units = {"seconds": "seconds_per_step", "difference": "max_force_difference_eV_per_A"}
        units |= {"largest": "max_force_eV_per_A", "limit": "limit_eV_per_A"}
        return {units.get(name, name): value for name, value in values.items()}


def measure_scaling(
    atoms: Atoms, model: Any, ranks: Sequence[int], steps: int = 10, warm_up: int = 2,
    on_row: Callable[[ScalingRow], None] = lambda row: None, **arguments: Any,
) -> list[ScalingRow]:
    """Times the same steps of a structure over each number of ranks in turn.

    Atoms are moved by some 0.01 A before each step, by the same amounts whatever the ranks; forces are compared at the
    positions of ``atoms``, moved once.

    Args:
        atoms: the structure; it is not changed.
        model: as for `NVDDCalculator`.
        ranks: numbers of ranks; the first is what the others are compared with.
        steps: how many are timed.
        warm_up: steps before them.
        on_row: called with each row when it is there.
        arguments: further ones of `NVDDCalculator`.

    Raises:
        InputError: no or too small a number, or what `NVDDCalculator` refuses.
    """
    if not ranks or min(ranks) < 1 or steps < 1 or warm_up < 0:
        raise InputError(
            f"scaling needs ranks >= 1, steps >= 1 and warm_up >= 0, got ranks {list(ranks)}, steps {steps}, warm_up {warm_up}"
        )
    rows: list[ScalingRow] = []
    expected = np.empty(0)
    several = isinstance(model, str) and len(parts(model)) > 1  # of a sum, dtype is that of its most precise block
    for n in ranks:
        random = np.random.default_rng(1)
        moved = atoms.copy()
        seconds = []
        with NVDDCalculator(model, ranks=n, **arguments) as calculator:
            moved.calc = calculator
            for k in range(1 + warm_up + steps):
                moved.positions = atoms.positions + _MOVE * random.uniform(-1, 1, atoms.positions.shape)
                start = time.perf_counter()
                forces = moved.get_forces()
                seconds.append(time.perf_counter() - start)
                if k == 0:  # the first one builds plans and compiles
                    first = forces
            loads = calculator.report()
            limit = LIMITS["float32" if several else calculator.description["dtype"]]
        expected = expected if rows else first
        median = statistics.median(seconds[1 + warm_up :])
        speedup = rows[0].seconds / median * rows[0].ranks if rows else float(n)
        largest = float(np.abs(expected).max())
        rows.append(ScalingRow(
            n, median, speedup, speedup / n,
            *(tuple(int(load[name]) for load in loads) for name in ("owned", "halo", "edges")),
            difference=float(np.abs(first - expected).max()), largest=largest, limit=limit * max(1.0, largest),
        ))  # fmt: skip
        on_row(rows[-1])
    return rows
