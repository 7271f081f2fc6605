"""Strains of a cell: which are allowed, and what a rate of strain does over a time step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nvdd.dynamics.state import DynamicsState
from nvdd.errors import InputError

MODES = ("iso", "aniso", "full")


class CellModes:
    """What a cell may do under a barostat.

    Args:
        who: named in errors.
        mode: ``"iso"``, ``"aniso"`` or ``"full"``.
        axes: which of x, y, z ``"aniso"`` may stretch.

    Attributes:
        freedom: number of independent strains: 1, that of axes, or 6.
    """

    def __init__(self, who: str, mode: str, axes: Sequence[bool]) -> None:
        if mode not in MODES:
            raise InputError(f"{who}: mode must be one of {', '.join(MODES)}, got {mode!r}")
        axes = tuple(bool(a) for a in axes)
        if len(axes) != 3 or not any(axes):
            raise InputError(f"{who}: axes must say for each of x, y, z whether it may stretch, got {axes!r}")
        if mode != "aniso" and not all(axes):
            raise InputError(f"{who}: axes={axes!r} goes with mode='aniso', not with {mode!r}")
        self.who, self.mode, self.axes = who, mode, axes
        self.freedom = {"iso": 1, "aniso": sum(axes), "full": 6}[mode]

    def project(self, tensors: Tensor) -> Tensor:
        """The allowed part of (n_systems, 3, 3) tensors."""
        diagonal = tensors.diagonal(dim1=1, dim2=2)
        if self.mode == "full":
            return 0.5 * (tensors + tensors.mT)
        if self.mode == "iso":
            return torch.diag_embed(diagonal.mean(1, keepdim=True).expand(-1, 3))
        return torch.diag_embed(diagonal * torch.tensor(self.axes))

    def check(self, state: DynamicsState) -> None:
        """Raises InputError where a strain would have no meaning: along an open direction, or without a volume."""
        cells, periodic = state.cell.cpu(), state.pbc.cpu()
        volumes = torch.linalg.det(cells).abs()
        strained = torch.tensor(self.axes, dtype=torch.float64)
        for system in range(state.n_systems):
            along = (cells[system] * strained).norm(dim=1) > 1e-6 * cells[system].norm(dim=1).clamp(min=1e-300)
            if not volumes[system] > 0 or bool((along & ~periodic[system]).any()):
                raise InputError(
                    f"{self.who}: the cell of system {system} (pbc {periodic[system].tolist()}, volume "
                    f"{float(volumes[system]):g} A^3) can't be strained along {self._words()}: that needs three cell "
                    "vectors, periodic where they are strained; take mode='aniso' with axes=, or constant volume"
                )

    def _words(self) -> str:
        return ", ".join(name for name, on in zip("xyz", self.axes, strict=True) if on)


@dataclass(frozen=True, eq=False)
class Flow:
    """What ``y' = y A + b`` does over a time, for a symmetric A: ``y -> y growth + time b source``.

    Attributes:
        growth: (n_systems, 3, 3) exp(time A).
        source: (n_systems, 3, 3) (exp(time A) - 1) / (time A).
    """

    growth: Tensor
    source: Tensor


def flow(exponents: Tensor, axes: Tensor) -> Flow:
    """Of the matrices with eigenvalues ``exponents`` (n_systems, 3), time included, and eigenvectors in the columns of
    ``axes`` (n_systems, 3, 3)."""
    still = exponents == 0
    relative = torch.where(still, 1.0, torch.expm1(exponents) / torch.where(still, 1.0, exponents))
    build = lambda values: (axes * values.unsqueeze(1)) @ axes.mT
    return Flow(build(torch.exp(exponents)), build(relative))
