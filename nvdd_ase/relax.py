"""Relaxation of an ASE structure that has a calculator, as a loop that reports each step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from nvdd.errors import InputError, NvddError
from nvdd_ase.frames import is_bulk

if TYPE_CHECKING:
    from ase import Atoms

OPTIMIZERS = ("fire", "lbfgs", "bfgs")


@dataclass(frozen=True)
class RelaxStep:
    """One step of a relaxation; the largest deviation from the target stress only where the cell relaxes."""

    step: int
    energy_eV: float
    fmax_eV_per_A: float
    smax_GPa: float | None
    converged: bool


def check_relax(atoms: Atoms, *, fmax: float, optimizer: str, cell: bool = False, pressure: float = 0.0) -> None:
    """Raises InputError for what :func:`relax` cannot do."""
    if optimizer not in OPTIMIZERS:
        raise InputError(f"unknown optimizer {optimizer!r}; choose one of {', '.join(OPTIMIZERS)}")
    if not (math.isfinite(fmax) and fmax > 0):
        raise InputError(f"fmax must be positive, but is {fmax:g} eV/A")
    if not math.isfinite(pressure):
        raise InputError(f"pressure must be a number, not {pressure} GPa")
    if pressure and not cell:
        raise InputError(f"pressure {pressure:g} GPa does nothing to a fixed cell; relax the cell too (--cell)")
    if cell and not is_bulk(atoms):
        raise InputError(
            f"relaxing the cell needs a structure that is periodic along all three axes; pbc is {atoms.pbc.tolist()}"
        )


def relax(
    atoms: Atoms,
    *,
    fmax: float = 0.05,
    steps: int = 500,
    optimizer: str = "fire",
    cell: bool = False,
    pressure: float = 0.0,
    on_step: Callable[[RelaxStep], None] | None = None,
) -> list[RelaxStep]:
    """Moves the atoms (and the cell) downhill until no force exceeds fmax, or the steps are used up.

    Args:
        atoms: structure with a calculator; changed in place.
        fmax: eV/A; with ``cell`` also the bound of stress x volume / number of atoms, as ASE has it.
        steps: most steps to take.
        optimizer: ``fire``, ``lbfgs`` or ``bfgs``.
        cell: relax the cell as well (FrechetCellFilter).
        pressure: GPa, against which the cell relaxes.
        on_step: called at the start and after every step.

    Returns:
        All steps; the last one says whether it converged.
    """
    from ase import optimize, units
    from ase.filters import FrechetCellFilter

    check_relax(atoms, fmax=fmax, optimizer=optimizer, cell=cell, pressure=pressure)
    moved = FrechetCellFilter(atoms, scalar_pressure=pressure * units.GPa) if cell else atoms
    steps_of = _quietly if cell else iter
    driver_class = {"fire": optimize.FIRE, "lbfgs": optimize.LBFGS, "bfgs": optimize.BFGS}[optimizer]
    driver = driver_class(moved, logfile=None)
    history: list[RelaxStep] = []
    for converged in steps_of(driver.irun(fmax=fmax, steps=steps)):
        state = RelaxStep(
            step=driver.nsteps,
            energy_eV=float(atoms.get_potential_energy()),
            fmax_eV_per_A=float(np.linalg.norm(atoms.get_forces(), axis=1).max()),
            smax_GPa=_stress_deviation(atoms, pressure) if cell else None,
            converged=bool(converged),
        )
        if not math.isfinite(state.energy_eV):
            raise NvddError(
                f"step {state.step}: the potential energy is {state.energy_eV}; "
                "check the structure's distances and species"
            )
        history.append(state)
        if on_step:
            on_step(state)
    return history


def _quietly(steps: Iterable[bool]) -> Iterator[bool]:
    """The steps without scipy's warning, at each of them, that ASE's logarithm of the cell is right to 1e-10 or better."""
    steps = iter(steps)
    while True:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", r"logm result may be inaccurate, approximate err = \S+e-1\d", RuntimeWarning
            )
            try:
                converged = next(steps)
            except StopIteration:
                return
        yield converged


def _stress_deviation(atoms: Atoms, pressure: float) -> float:
    from ase import units

    stress = atoms.get_stress() / units.GPa + pressure * np.array([1, 1, 1, 0, 0, 0])
    return float(np.abs(stress).max())
