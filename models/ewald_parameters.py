"""How sharply Ewald's sum is split, and how far it runs, for a requested accuracy."""

from __future__ import annotations

import math
from typing import Any

from nvdd.errors import InputError

COULOMB_CONSTANT = 14.399645351950548
"""e^2 / (4 pi epsilon_0) in eV A, CODATA 2014, as in ``ase.units`` (Hartree times Bohr)."""

SPLINE_ORDERS = (4, 6, 8)


def splitting(cutoff: float, accuracy: float) -> float:
    """alpha in 1/A: the first term that is left out in real space, ``exp(-alpha^2 cutoff^2)``, is the accuracy.

    Kolafa and Perram, Mol. Simul. 9 (1992) 351.
    """
    return math.sqrt(-math.log(accuracy)) / cutoff


def wave_cutoff(alpha: float, accuracy: float) -> float:
    """Largest wave vector in 1/A: ``exp(-k^2 / (4 alpha^2))`` is the accuracy there. Same source."""
    return 2.0 * alpha * math.sqrt(-math.log(accuracy))


def mesh_spacing(alpha: float, order: int, accuracy: float) -> float:
    """Spacing in A of a mesh on which splines of this order represent the smeared charges.

    A wave k on a mesh of spacing d is mistaken for its nearest alias by about ``2 (k d / 2 pi)^order`` (Essmann et al.,
    J. Chem. Phys. 103 (1995) 8577). Weighted with ``exp(-k^2 / (4 alpha^2))`` that is largest at
    ``k = 2 alpha sqrt(order / 2)``, where it shall be the accuracy.
    """
    worst = math.sqrt(order / 2)
    return math.pi / worst * math.exp(0.5) * (0.5 * accuracy) ** (1.0 / order) / alpha


def number(who: str, name: str, value: Any, low: float, high: float, unit: str = "") -> float:
    """A float between limits (not including them).

    Raises:
        InputError: it is none.
    """
    try:
        result = float(value)
    except (TypeError, ValueError):
        result = math.nan
    if isinstance(value, bool) or not low < result < high:
        below = f" and below {high:g}" if math.isfinite(high) else ""
        raise InputError(f"{who}: {name}={value!r} must be a number above {low:g}{below}{unit and ' ' + unit}")
    return result


def switch(who: str, name: str, value: Any) -> bool:
    """True or False.

    Raises:
        InputError: it is neither.
    """
    if not isinstance(value, bool):
        raise InputError(f"{who}: {name}={value!r} must be True or False")
    return value
