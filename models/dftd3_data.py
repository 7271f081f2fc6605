"""Reference data and damping parameters of DFT-D3, as the package tad-dftd3 (Apache-2.0) ships them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nvdd.errors import InputError, MissingDependencyError

INSTALL = "pip install 'tad-dftd3>=0.7'"
DAMPINGS = {"bj": True, "bjm": True, "zero": False, "zerom": False}  # name -> whether it is the rational function
_NAMES = ("s6", "s8", "s9", "a1", "a2", "rs6", "rs8", "alp", "bet")
_NEEDED = {True: ("s8", "a1", "a2"), False: ("s8", "rs6")}
_DEFAULTS = {"s6": 1.0, "s9": 1.0, "rs8": 1.0, "alp": 14.0, "bet": 0.0, "a1": 0.0, "a2": 0.0, "rs6": 1.0}


@dataclass(frozen=True, eq=False)
class References:
    """What D3 knows of elements, in atomic units; the first axes are atomic numbers, 0 to 103.

    Attributes:
        c6: (104, 104, 7, 7) of pairs of reference systems.
        cn: (104, 7) coordination numbers of the reference systems; negative where an element has fewer than 7.
        covalent: (104,) covalent radii, times 4/3 as D3 counts with them.
        r4r2: (104,) ``sqrt(0.5 sqrt(Z) <r^4>/<r^2>)``.
        vdw: (104, 104) cut-off radii R0 of zero damping.
    """

    c6: Tensor
    cn: Tensor
    covalent: Tensor
    r4r2: Tensor
    vdw: Tensor


def references() -> References:
    """The data in float64.

    Raises:
        MissingDependencyError: tad-dftd3 is missing.
    """
    _import_tad()
    from tad_dftd3.data import R4R2
    from tad_dftd3.reference import Reference
    from tad_mctc.data import radii
    from tad_mctc.units.length import AA2AU

    like = {"dtype": torch.float64, "device": torch.device("cpu")}
    systems = Reference(**like)
    n = len(systems.cn)
    # published with four decimals in A; the package's file has been through float32
    vdw = (radii.VDW_PAIRWISE(**like) / AA2AU).round(decimals=4) * AA2AU
    return References(systems.c6, systems.cn, radii.COV_D3(**like)[:n], R4R2(**like)[:n], vdw)


def damping_parameters(functional: str, damping: str) -> dict[str, float]:
    """The published parameters of a functional: s6, s8, s9, and a1, a2 or rs6, rs8, bet; alp. a2 in Bohr, bet in 1/Bohr.

    Raises:
        InputError: the functional is unknown, or has no parameters for this damping.
        MissingDependencyError: tad-dftd3 is missing.
    """
    _import_tad()
    from tad_dftd3.param import get_functional_params

    try:
        found = get_functional_params(functional, damping, dtype=torch.float64, device=torch.device("cpu"))
    except KeyError:
        raise InputError(
            f"dftd3: no parameters for a functional {functional!r}; known are pbe, pbesol, rpbe, revpbe, scan, r2scan, blyp, "
            "b3lyp, pbe0, hse06, tpss, wb97m and many others, by s-dftd3's names; or give your own as parameters="
        ) from None
    except ValueError:
        others = [name for name in DAMPINGS if name != damping and _has(functional, name)]
        instead = f"use damping={' or '.join(map(repr, others))}" if others else "give your own as parameters="
        raise InputError(f"dftd3: {functional!r} has no parameters for damping={damping!r}; {instead}") from None
    return complete({name: float(value) for name, value in found.items()}, damping)


def complete(parameters: Mapping[str, Any], damping: str) -> dict[str, float]:
    """All parameters of a damping, from those given and the usual values of the rest.

    Raises:
        InputError: an unknown name, a value that is no number, or one that has no usual value is missing.
    """
    unknown = sorted(set(parameters) - set(_NAMES))
    if unknown:
        raise InputError(f"dftd3: no parameter {', '.join(unknown)}; there are {', '.join(_NAMES)}")
    missing = [name for name in _NEEDED[DAMPINGS[damping]] if name not in parameters]
    if missing:
        raise InputError(
            f"dftd3: damping={damping!r} needs {', '.join(missing)} among the parameters, got {dict(parameters)}"
        )
    try:
        return {name: float(parameters.get(name, _DEFAULTS.get(name))) for name in _NAMES}
    except (TypeError, ValueError):
        raise InputError(f"dftd3: parameters={dict(parameters)!r} are not all numbers; write e.g. s8=0.7875") from None


def _has(functional: str, damping: str) -> bool:
    from tad_dftd3.param import get_functional_params

    try:
        get_functional_params(functional, damping)
    except (KeyError, ValueError):
        return False
    return True


def _import_tad() -> None:
    try:
        import tad_dftd3  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            f"dftd3 takes its reference data from tad-dftd3, which can't be imported ({sys.executable}: {error}): {INSTALL}"
        ) from error
