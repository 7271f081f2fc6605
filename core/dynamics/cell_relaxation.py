"""The cell as further coordinates of a relaxation, as ASE's FrechetCellFilter and UnitCellFilter have it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from nvdd.dynamics.checks import finite, positive
from nvdd.dynamics.host import host, times
from nvdd.dynamics.state import GPA, DynamicsState
from nvdd.errors import InputError

KINDS = ("frechet", "unit")
_UNIT = torch.eye(3, dtype=torch.float64)
_VOIGT = ((0, 5, 4), (5, 1, 3), (4, 3, 2))


class CellRelaxation:
    """How a cell relaxes together with its atoms.

    With the deformation F of the cell since the start, ``cell = cell_0 F^T``, the coordinates are the atoms' positions
    in the undeformed cell, ``x F^-T``, with forces ``f F``, and for the cell:

    * ``"frechet"``: ``n log F``. Its forces are the gradient of the enthalpy, so line searches and L-BFGS work well;
    * ``"unit"``: ``n F`` (Tadmor, Smith, Bernstein and Kaxiras, Phys. Rev. B 59, 235 (1999),
      doi:10.1103/PhysRevB.59.235).

    Args:
        kind: ``"frechet"`` or ``"unit"``.
        pressure: GPa, against which the cell relaxes.
        mask: which strains relax: six for xx, yy, zz, yz, xz, xy, or (3, 3); None for all.
        hydrostatic: the volume alone, at constant shape.
        constant_volume: the shape alone, of what relaxes; with ``"frechet"``, in whose coordinates it is exact.
        factor: n in the coordinates, which brings cell and atoms to one scale; None for the number of atoms.

    Raises:
        InputError: a value that makes no sense; when the relaxation begins, a cell without volume, or one that is open
            along an axis while ``mask`` is left out.
    """

    def __init__(
        self,
        kind: str = "frechet",
        pressure: float = 0.0,
        mask: Sequence[Any] | None = None,
        hydrostatic: bool = False,
        constant_volume: bool = False,
        factor: float | None = None,
    ) -> None:
        if kind not in KINDS:
            raise InputError(f"CellRelaxation: kind must be one of {', '.join(KINDS)}, got {kind!r}")
        self.kind = kind
        self.pressure = finite("CellRelaxation", "pressure", pressure, "GPa")
        self.hydrostatic, self.constant_volume = hydrostatic, constant_volume
        if constant_volume and kind == "unit":
            raise InputError(
                "CellRelaxation: constant_volume needs kind='frechet'; the coordinates of 'unit' keep the volume to first order only"
            )
        if constant_volume and hydrostatic:
            raise InputError("CellRelaxation: hydrostatic and constant_volume together leave nothing of the cell to relax; take one")
        self.factor = None if factor is None else positive("CellRelaxation", "factor", factor)
        self.masked = mask is not None
        self.mask = torch.ones(3, 3, dtype=torch.float64) if mask is None else self._mask(mask)

    @staticmethod
    def _mask(mask: Sequence[Any]) -> Tensor:
        given = torch.as_tensor(mask).to(torch.float64)
        if given.shape == (6,):
            return given[torch.tensor(_VOIGT)]
        if given.shape != (3, 3):
            raise InputError(
                f"CellRelaxation: mask must have six entries (xx, yy, zz, yz, xz, xy) or be 3 x 3, got {mask!r}"
            )
        return given

    def parameters(self) -> dict[str, Any]:
        """What a checkpoint says about it."""
        settings = {
            "kind": self.kind,
            "mask": self.mask.tolist(),
            "hydrostatic": self.hydrostatic,
            "constant_volume": self.constant_volume,
            "factor": self.factor,
        }
        return {"cell": settings, "pressure_GPa": self.pressure}

    def begin(self, who: str, state: DynamicsState) -> None:
        """Takes the present cell of ``state`` as undeformed; ``who`` stands in error messages."""
        volumes, periodic = host(state.volume), state.pbc.cpu()
        for system in range(state.n_systems):
            if not volumes[system] > 0:
                raise InputError(
                    f"{who}: the cell of system {system} has no volume, so it can't relax; relax atoms alone"
                )
            if not self.masked and not periodic[system].all():
                raise InputError(
                    f"{who}: system {system} is open along an axis (pbc {periodic[system].tolist()}), where a relaxing "
                    "cell would lose its vacuum; say which strains relax with CellRelaxation(mask=)"
                )
        start = _UNIT if self.kind == "unit" else torch.zeros_like(_UNIT)
        state.system_state["cell_at_start"] = host(state.cell).clone()
        state.system_state["cell_strain"] = start.expand(state.n_systems, 3, 3).clone()

    def deformation(self, state: DynamicsState) -> Tensor:
        """F of ``state``, (n_systems, 3, 3) on the host."""
        strain = host(state.system_state["cell_strain"])
        return torch.linalg.matrix_exp(strain) if self.kind == "frechet" else strain

    def atom_forces(self, state: DynamicsState) -> Tensor:
        """(n, 3) eV/A, forces on the atoms' coordinates, from those of ``state``."""
        return times(state, state.forces, self.deformation(state))

    def forces(self, state: DynamicsState) -> Tensor:
        """(n_systems, 3, 3) forces on the cell's coordinates, on the host; needs ``state.stress``."""
        virial = -host(state.volume)[:, None, None] * (host(cast(Tensor, state.stress)) + self.pressure * GPA * _UNIT)
        if self.hydrostatic:
            virial = self._trace_part(virial)
        deformation = self.deformation(state)
        if self.kind == "frechet":
            gradient = self._by_logarithm(host(state.system_state["cell_strain"]), virial * self.mask, deformation)
        else:
            gradient = torch.linalg.solve(deformation, virial.mT).mT
        gradient = gradient * self.mask
        if self.constant_volume:
            gradient = gradient - self._volume_part(gradient)
        return gradient / self._factor(state)

    @staticmethod
    def _by_logarithm(logarithm: Tensor, virial: Tensor, deformation: Tensor) -> Tensor:
        """From the gradient by F to that by log F: the adjoint of the derivative of the exponential.

        That derivative is a block of the exponential of a matrix twice as large (Higham, Functions of Matrices, SIAM
        2008, equation 3.16).
        """
        gradient = torch.linalg.solve(deformation, virial.mT).mT
        zero = torch.zeros_like(gradient)
        upper = torch.cat([logarithm.mT, gradient], 2)
        lower = torch.cat([zero, logarithm.mT], 2)
        return torch.linalg.matrix_exp(torch.cat([upper, lower], 1))[:, :3, 3:]

    def move(self, state: DynamicsState, atoms: Tensor, cell: Tensor) -> None:
        """Adds ``atoms`` (n, 3) and ``cell`` (n_systems, 3, 3) to the coordinates of ``state``."""
        before = self.deformation(state)
        strain = state.system_state["cell_strain"]
        state.system_state["cell_strain"] = host(strain) + cell / self._factor(state)
        after = self.deformation(state)
        state.positions = times(state, state.positions, torch.linalg.solve(before, after, left=False).mT) + times(
            state, atoms, after.mT
        )
        state.cell = (host(state.system_state["cell_at_start"]) @ after.mT).to(state.cell.device)

    def _factor(self, state: DynamicsState) -> Tensor:
        if self.factor is not None:
            return torch.tensor(self.factor, dtype=torch.float64)
        return host(state.n_atoms)[:, None, None]

    def _volume_part(self, logarithms: Tensor) -> Tensor:
        """What changes the trace of log F, shared by the strains of x, y and z that relax."""
        relaxing = (self.mask.diagonal() != 0).to(torch.float64)
        mean = (logarithms.diagonal(dim1=1, dim2=2) * relaxing).sum(1) / relaxing.sum().clamp(min=1.0)
        return mean[:, None, None] * torch.diag(relaxing)

    @staticmethod
    def _trace_part(tensors: Tensor) -> Tensor:
        return tensors.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * _UNIT
