"""Values that users give to integrators and optimisers, checked before anything moves."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from nvdd.dynamics.state import FS, DynamicsState
from nvdd.errors import InputError


def positive(who: str, name: str, value: Any, unit: str = "") -> float:
    """A finite number above zero."""
    number = _number(value)
    if not (math.isfinite(number) and number > 0):
        raise InputError(f"{who}: {name} must be a positive number{_of(unit)}, got {value!r}")
    return number


def not_negative(who: str, name: str, value: Any, unit: str = "") -> float:
    """A finite number, zero or above."""
    number = _number(value)
    if not (math.isfinite(number) and number >= 0):
        raise InputError(f"{who}: {name} must be a number that is zero or above{_of(unit)}, got {value!r}")
    return number


def finite(who: str, name: str, value: Any, unit: str = "") -> float:
    """A finite number."""
    number = _number(value)
    if not math.isfinite(number):
        raise InputError(f"{who}: {name} must be a finite number{_of(unit)}, got {value!r}")
    return number


def whole(who: str, name: str, value: Any, least: int) -> int:
    """A whole number, ``least`` or above."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{who}: {name} must be a whole number from {least} on, got {value!r}")
    return value


def relaxation_time(who: str, name: str, value: Any, timestep: float) -> float:
    """A relaxation time from fs to ASE's unit; one that the time step can follow."""
    tau = positive(who, name, value, "fs")
    if tau < 2 * timestep:
        raise InputError(
            f"{who}: {name} = {tau:g} fs is too short for a timestep of {timestep:g} fs; 100 time steps are usual for a "
            "thermostat, 1000 for a barostat"
        )
    return tau * FS


def moving(who: str, state: DynamicsState) -> None:
    """Every system has an atom that can move."""
    freedom = 3 * (state.n_atoms - state.n_fixed) - (3 if state.fix_com else 0)
    stuck = (freedom <= 0).nonzero().flatten().tolist()
    if stuck:
        raise InputError(
            f"{who}: no atom of system {stuck[0]} can move, so it has no temperature; free some of its atoms, or leave "
            "out fix_com"
        )


def seed_of(who: str, value: Any) -> int:
    """A seed of random numbers."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**64:
        raise InputError(f"{who}: seed must be a whole number from 0 to 2**64 - 1, got {value!r}")
    return value


def not_at_rest(who: str, kinetic: Tensor) -> None:
    """Every system has a kinetic energy, of (n_systems,) eV, that a factor of velocities can change."""
    still = (kinetic == 0).nonzero().flatten().tolist()
    if still:
        raise InputError(
            f"{who} scales velocities, but those of system {still[0]} are all zero; draw them first (draw_velocities)"
        )


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _of(unit: str) -> str:
    return f" ({unit})" if unit else ""
