"""What optimisers have in common: coordinates with or without the cell, convergence, systems that are done."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from nvdd.dynamics.base import BaseDynamics, Evaluator
from nvdd.dynamics.cell_relaxation import CellRelaxation
from nvdd.dynamics.checks import positive
from nvdd.dynamics.host import host
from nvdd.dynamics.scalars import longest
from nvdd.dynamics.state import GPA, DynamicsState
from nvdd.errors import InputError


class Relaxation(BaseDynamics):
    """Moves atoms, and the cell if it is to relax, until no force exceeds ``fmax``.

    Several systems relax side by side, each with parameters of its own; one that has converged is left as it is.

    Args:
        fmax: eV/A, bound of the force on every atom; with a cell also of the rows of its forces, which are the
            virial over the number of atoms, as ASE has it.
        cell: None for a fixed cell; ``"frechet"``, ``"unit"`` or a `CellRelaxation`.
    """

    kinetic = False
    must_agree: ClassVar[tuple[str, ...]] = ("cell", "pressure_GPa")  # coordinates and forces that are in the state

    def __init__(self, fmax: float = 0.05, cell: CellRelaxation | str | None = None) -> None:
        who = type(self).__name__
        self.fmax = positive(who, "fmax", fmax, "eV/A")
        if not isinstance(cell, (CellRelaxation, str, type(None))):
            raise InputError(f"{who}: cell must be None, 'frechet', 'unit' or a CellRelaxation, got {cell!r}")
        self.cell = CellRelaxation(cell) if isinstance(cell, str) else cell
        self.needs_stress = self.cell is not None
        self.timestep = self.dt = 0.0  # steps of a relaxation take no time
        self.maxima = {"atom_fmax": self._atom_fmax}

    def initialise(self, state: DynamicsState, evaluate: Evaluator) -> None:
        if self.cell is not None:
            self.cell.begin(type(self).__name__, state)

    # -- coordinates ----------------------------------------------------------------------------------------------

    def atom_forces(self, state: DynamicsState) -> Tensor:
        """(n, 3) forces on the atoms' coordinates, eV/A."""
        return state.forces if self.cell is None else self.cell.atom_forces(state)

    def cell_forces(self, state: DynamicsState) -> Tensor:
        """(n_systems, k, 3) forces on the cell's coordinates, on the host; k is 3, or 0 for a fixed cell."""
        if self.cell is None:
            return torch.zeros(state.n_systems, 0, 3, dtype=torch.float64)
        return self.cell.forces(state)

    def move(self, state: DynamicsState, atoms: Tensor, cell: Tensor) -> None:
        """Adds ``atoms`` (n, 3) and ``cell`` (n_systems, k, 3) to the coordinates."""
        if self.cell is None:
            state.positions = state.positions + atoms
        else:
            self.cell.move(state, atoms, cell)

    # -- convergence ----------------------------------------------------------------------------------------------

    def _atom_fmax(self, state: DynamicsState) -> Tensor:
        return longest(state, self.atom_forces(state))

    def note_fmax(self, state: DynamicsState, of_atoms: Tensor) -> None:
        """Keeps the largest force of each system, from that of its atoms (n_systems,)."""
        state.system_state["fmax"] = torch.maximum(host(of_atoms), longest_row(self.cell_forces(state)))

    def active(self, state: DynamicsState) -> Tensor:
        """(n_systems,) bool on the host: systems that have not converged."""
        # written so that forces that are no numbers count as not converged
        return ~(host(state.system_state["fmax"]) < self.fmax)

    def is_converged(self, state: DynamicsState) -> bool:
        """Whether every system has converged."""
        return not bool(self.active(state).any())

    def conserved(self, state: DynamicsState, kinetic: Tensor) -> Tensor:
        """(n_systems,) eV that goes down: the potential energy, with a cell the enthalpy."""
        return state.energy if self.cell is None else state.energy + self.cell.pressure * GPA * state.volume

    def parameters(self) -> dict[str, Any]:
        out: dict[str, Any] = {"dynamics": type(self).__name__, "fmax_eV_per_A": self.fmax}
        return out | ({} if self.cell is None else self.cell.parameters())


def longest_row(cell: Tensor) -> Tensor:
    """(n_systems,) length of the longest row of (n_systems, k, 3); 0 without rows."""
    if cell.shape[1] == 0:
        return torch.zeros(cell.shape[0], dtype=torch.float64)
    return cell.norm(dim=2).amax(1)


def bounded(length: Tensor, most: float) -> Tensor:
    """(n_systems,) factor that makes ``length`` no more than ``most``."""
    return torch.where(length > most, most / length, 1.0)
