"""L-BFGS: relaxation by a quasi-Newton method of limited memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nvdd.dynamics.base import Evaluator
from nvdd.dynamics.cell_relaxation import CellRelaxation
from nvdd.dynamics.checks import positive, whole
from nvdd.dynamics.host import for_atoms, host
from nvdd.dynamics.relaxation import Relaxation, bounded, longest_row
from nvdd.dynamics.scalars import longest
from nvdd.dynamics.state import DynamicsState
from nvdd.errors import InputError


class LBFGS(Relaxation):
    """Step for step ``ase.optimize.LBFGS``, whose names and defaults these are: no line search, steps are bounded.

    The direction is that of Nocedal's two loops in the compact form of Byrd, Nocedal and Schnabel, Math. Program. 63,
    129 (1994), doi:10.1007/BF01582063, equation 3.13: it needs the products of steps s, changes of the gradient y and
    the gradient g with each other, and no more. Those with the newest pair are computed in each step, in one message
    whatever the memory; all else is a problem of the size of the memory that every rank solves alike.

    Args:
        fmax: eV/A, largest force that an atom may have at the end; with a cell also a row of the cell's forces, the virial
            over the number of atoms.
        cell: None for a fixed cell; ``"frechet"``, ``"unit"`` or a `CellRelaxation`.
        maxstep: A, furthest that an atom may move in a step.
        memory: pairs (s, y) that are kept; each takes 48 bytes an atom.
        damping: factor of every step.
        alpha: eV/A^2, curvature that is assumed before there are pairs.

    Raises:
        InputError: ``maxstep`` above 1 A.
    """

    must_agree = (*Relaxation.must_agree, "memory")

    def __init__(
        self,
        fmax: float = 0.05,
        cell: CellRelaxation | str | None = None,
        *,
        maxstep: float = 0.2,
        memory: int = 100,
        damping: float = 1.0,
        alpha: float = 70.0,
    ) -> None:
        super().__init__(fmax, cell)
        self._maxstep = positive("LBFGS", "maxstep", maxstep, "A")
        if self._maxstep > 1.0:
            raise InputError(
                f"LBFGS: maxstep = {maxstep} A is more than atoms may move at once; 0.2 is usual, 1 the most"
            )
        self._memory = whole("LBFGS", "memory", memory, 1)
        self._damping = positive("LBFGS", "damping", damping)
        self._inverse = 1.0 / positive("LBFGS", "alpha", alpha, "eV/A^2")
        self.scalars = {"products": self._products}
        self.maxima = {**self.maxima, "longest_step": _longest_step}

    def initialise(self, state: DynamicsState, evaluate: Evaluator) -> None:
        """Begins without memory."""
        super().initialise(state, evaluate)
        m, k, rows = self._memory, self.cell_forces(state).shape[1], state.positions.shape[0]
        zeros = lambda *shape: torch.zeros(*shape, dtype=torch.float64)
        # s in the first m columns, y in the others; the oldest pair is overwritten
        state.node_state["lbfgs_pairs"] = state.positions.new_zeros(rows, 3, 2 * m)
        state.node_state["lbfgs_step"] = torch.zeros_like(state.positions)
        state.node_state["lbfgs_forces"] = self.atom_forces(state)
        state.system_state |= {
            "lbfgs_pairs": zeros(state.n_systems, 3 * k, 2 * m),
            "lbfgs_cell_step": zeros(state.n_systems, k, 3),
            "lbfgs_cell_forces": self.cell_forces(state),
            "lbfgs_with_y": zeros(state.n_systems, 2 * m, m),
            "lbfgs_with_g": zeros(state.n_systems, 2 * m),
            "lbfgs_steps": zeros(state.n_systems),
        }
        self.note_fmax(state, evaluate.reduce(state, "atom_fmax")["atom_fmax"])

    def step(self, state: DynamicsState, evaluate: Evaluator) -> None:
        weights = self._weights(state)  # of s and y, (n_systems, 2 m)
        device = state.positions.device
        pairs = state.node_state["lbfgs_pairs"]
        if state.n_systems == 1:
            remembered = pairs @ weights[0].to(device)
        else:
            remembered = torch.einsum("nkm,nm->nk", pairs, state.of_atoms(weights.to(device)))
        state.node_state["lbfgs_step"] = self._inverse * self.atom_forces(state) + remembered
        cell = self._inverse * self.cell_forces(state)
        cell = cell + (host(state.system_state["lbfgs_pairs"]) @ weights.unsqueeze(2)).reshape(cell.shape)
        furthest = host(evaluate.reduce(state, "longest_step")["longest_step"])
        factor = bounded(torch.maximum(furthest, longest_row(cell)), self._maxstep) * self._damping
        factor = torch.where(self.active(state), factor, 0.0)
        state.node_state["lbfgs_step"] = state.node_state["lbfgs_step"] * for_atoms(state, factor)
        state.system_state["lbfgs_cell_step"] = cell * factor[:, None, None]
        self.move(state, state.node_state["lbfgs_step"], state.system_state["lbfgs_cell_step"])
        evaluate(state)
        self._remember(state, evaluate)

    def _slot(self, state: DynamicsState) -> int:
        """Column of the newest pair."""
        return (int(state.system_state["lbfgs_steps"][0]) - 1) % self._memory

    def _remember(self, state: DynamicsState, evaluate: Evaluator) -> None:
        """Takes the last step and the change of the gradient along it into memory, with their products."""
        inner, node, m = state.system_state, state.node_state, self._memory
        inner["lbfgs_steps"] = host(inner["lbfgs_steps"]) + 1.0
        new = self._slot(state)
        forces, cell_forces = self.atom_forces(state), self.cell_forces(state)
        node["lbfgs_pairs"][:, :, new] = node["lbfgs_step"]
        node["lbfgs_pairs"][:, :, m + new] = node["lbfgs_forces"] - forces
        node["lbfgs_forces"] = forces.clone()
        cell_pairs = host(inner["lbfgs_pairs"]).clone()
        cell_pairs[:, :, new] = host(inner["lbfgs_cell_step"]).flatten(1)
        cell_pairs[:, :, m + new] = (host(inner["lbfgs_cell_forces"]) - cell_forces).flatten(1)
        inner["lbfgs_pairs"], inner["lbfgs_cell_forces"] = cell_pairs, cell_forces
        totals = evaluate.reduce(state, "products", "atom_fmax")
        newest = torch.stack([cell_pairs[:, :, new], cell_pairs[:, :, m + new], -cell_forces.flatten(1)], 2)
        with_s, with_y, with_g = (host(totals["products"]) + cell_pairs.mT @ newest).unbind(2)
        known = host(inner["lbfgs_with_y"]).clone()
        known[:, :, new] = with_y
        known[:, new, :] = with_s[:, m:]
        known[:, m + new, :] = with_y[:, m:]
        inner["lbfgs_with_y"], inner["lbfgs_with_g"] = known, with_g
        self.note_fmax(state, totals["atom_fmax"])

    def _products(self, state: DynamicsState) -> Tensor:
        """(n_systems, 2 m, 3) of atoms: every s and y with the newest s, the newest y, and g."""
        pairs, new = state.node_state["lbfgs_pairs"], self._slot(state)
        newest = torch.stack([pairs[:, :, new], pairs[:, :, self._memory + new], -state.node_state["lbfgs_forces"]], 2)
        if state.n_systems == 1:
            return (pairs.flatten(0, 1).T @ newest.flatten(0, 1)).unsqueeze(0)
        return state.sum_systems(pairs.mT @ newest)

    def _weights(self, state: DynamicsState) -> Tensor:
        """(n_systems, 2 m) of s and y in the direction; the gradient's is the inverse curvature."""
        inner, m = state.system_state, self._memory
        weights = torch.zeros(state.n_systems, 2 * m, dtype=torch.float64)
        steps = int(inner["lbfgs_steps"][0])
        if steps == 0:
            return weights
        order = torch.arange(max(0, steps - m), steps) % m  # the oldest pair first
        with_y, with_g = host(inner["lbfgs_with_y"]), host(inner["lbfgs_with_g"])
        s_y, y_y = with_y[:, order][:, :, order], with_y[:, m + order][:, :, order]
        s_g, y_g = with_g[:, order], with_g[:, m + order]
        curvature = s_y.diagonal(dim1=1, dim2=2)
        # a pair without curvature (a system that stood still) is all zeros, and its 1 here keeps it out
        upper = s_y.triu() + torch.diag_embed((curvature == 0).to(torch.float64))
        a = torch.linalg.solve_triangular(upper, s_g.unsqueeze(2), upper=True)
        right = curvature.unsqueeze(2) * a - self._inverse * (y_g.unsqueeze(2) - y_y @ a)
        c = torch.linalg.solve_triangular(upper.mT, right, upper=False)
        weights[:, order], weights[:, m + order] = -c.squeeze(2), self._inverse * a.squeeze(2)
        return weights

    def parameters(self) -> dict[str, Any]:
        return super().parameters() | {"maxstep_A": self._maxstep, "memory": self._memory}


def _longest_step(state: DynamicsState) -> Tensor:
    return longest(state, state.node_state["lbfgs_step"])
