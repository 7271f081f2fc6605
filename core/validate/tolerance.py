"""When two evaluations of a model count as equal.

An output passes only if its error is small **absolutely and relatively**:

* absolute: ``max |d| <= atol`` in the unit of the output (eV, eV/A, ...); energy and virial, which grow with the
  system, per atom of the system;
* relative: ``max |d| <= rtol * scale``, where ``scale`` is the largest reference value of that output in the *same
  system*.

One alone is not enough: a force field in small units passes any absolute limit, and an energy of -10^5 eV hides a
lost bond below any relative one. (``|d| <= atol + rtol * |ref|`` passes what either of the two lets through.)
Rows are compared in atom order, never sorted or summed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

EXTENSIVE = ("energy", "virial")
# Forces of a perfect crystal are zero by symmetry and round-off in any evaluation: a scale is at least this part of the
# output's largest value in all geometries.
_FLOOR = 1e-3

# float64: round-off of sums in another order is 1e-13; the limits leave room for stiff models, none for a lost edge.
# float32: permuting the atoms of a large network moves its forces by 1e-5 eV/A.
_DEFAULTS = {torch.float64: (1e-8, 1e-8), torch.float32: (1e-4, 1e-4)}


@dataclass(frozen=True)
class Tolerance:
    """Limits that hold together.

    Attributes:
        atol: largest error in the unit of the output; of energy and virial per atom.
        rtol: largest error in units of the largest reference value of the output in the same system.
    """

    atol: float
    rtol: float

    @classmethod
    def of(cls, dtype: torch.dtype, atol: float | None = None, rtol: float | None = None) -> Tolerance:
        """The given limits, where None those of the model's floating-point type."""
        default = _DEFAULTS.get(dtype, (1e-2, 1e-2))  # half precision
        return cls(default[0] if atol is None else float(atol), default[1] if rtol is None else float(rtol))


@dataclass(frozen=True)
class Comparison:
    """One output in one geometry against the single process.

    Attributes:
        output: its name.
        geometry: case and geometry.
        ok: whether both limits hold.
        max_abs: largest error (of energy and virial per atom).
        max_rel: largest error over the scale of its system.
        where: the atom or system of the largest error over its limit.
        why: in words, if shapes differ or values are not finite.
    """

    output: str
    geometry: str
    ok: bool
    max_abs: float
    max_rel: float
    where: str = ""
    why: str = ""

    def __str__(self) -> str:
        verdict = "ok  " if self.ok else "FAIL"
        detail = self.why or f"abs {self.max_abs:.2e}, rel {self.max_rel:.2e}"
        return f"{verdict} {self.output} [{self.geometry}]: {detail}" + (f", worst at {self.where}" * (not self.ok))


def compare(
    output: str,
    geometry: str,
    found: np.ndarray,
    reference: np.ndarray,
    tolerance: Tolerance,
    system: np.ndarray | None = None,
    atoms_per_system: np.ndarray | None = None,
    largest: float | None = None,
) -> Comparison:
    """Compares ``found`` with ``reference``, both in atom order (or one row a system).

    Args:
        system: (n_rows,) system of each row, for per-atom outputs; None where each row is a system of its own, or
            the output belongs to no system.
        atoms_per_system: (n_systems,), to divide extensive outputs by.
        largest: largest reference value of this output in any geometry, if that is known. Of an output that is nowhere
            above atol (a total charge of zero, but for round-off) the absolute error alone tells anything.
    """
    failed = lambda why: Comparison(output, geometry, False, np.inf, np.inf, "", why)
    if found.shape != reference.shape:
        return failed(f"its shape is {found.shape}, that of the single process {reference.shape}")
    if not np.isfinite(reference).all():
        return failed("the single process's value is not finite")
    if not np.isfinite(found).all():
        return failed(f"{np.count_nonzero(~np.isfinite(found))} values are not finite")
    if reference.size == 0:
        return Comparison(output, geometry, True, 0.0, 0.0)
    rows = len(reference) if reference.ndim else 1
    error = np.abs(found - reference).reshape(rows, -1).max(1)
    size = np.abs(reference).reshape(rows, -1).max(1)
    group = np.arange(rows) if system is None else system
    scale = np.zeros(int(group.max()) + 1)
    np.maximum.at(scale, group, size)
    scale = np.maximum(scale, _FLOOR * (largest or 0.0))[group]
    if output in EXTENSIVE and atoms_per_system is not None:
        absolute = error / np.maximum(atoms_per_system, 1)
    else:
        absolute = error
    relative = np.where(error > 0, error / np.maximum(scale, np.finfo(float).tiny), 0.0)
    if largest is not None and largest <= tolerance.atol:
        relative = np.zeros_like(relative)
    worst = int(np.argmax(np.maximum(absolute / tolerance.atol, relative / tolerance.rtol)))
    ok = bool(absolute.max() <= tolerance.atol and relative.max() <= tolerance.rtol)
    where = f"{'atom' if system is not None else 'system'} {worst}"
    return Comparison(output, geometry, ok, float(absolute.max()), float(relative.max()), where)
