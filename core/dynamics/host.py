"""What integrators keep of a system is a few numbers: they are computed on the host in float64, and sent to the atoms."""

from __future__ import annotations

import torch
from torch import Tensor

from nvdd.dynamics.state import DynamicsState


def host(values: Tensor) -> Tensor:
    """Float64 on the CPU; from a GPU this waits for the value."""
    return values.detach().to("cpu", torch.float64)


def for_atoms(state: DynamicsState, values: Tensor) -> Tensor:
    """(n_systems,) numbers of the host -> (n, 1), that of each atom's system."""
    return state.of_atoms(values.to(state.positions.device, non_blocking=True).unsqueeze(1))


def times(state: DynamicsState, vectors: Tensor, matrices: Tensor) -> Tensor:
    """(n, 3) row vectors times the (n_systems, 3, 3) matrix of each atom's system."""
    matrices = matrices.to(vectors.device, non_blocking=True)
    if state.n_systems == 1:
        return vectors @ matrices[0]
    return torch.einsum("ni,nij->nj", vectors, state.of_atoms(matrices))


def scale_velocities(state: DynamicsState, factors: Tensor) -> None:
    """Velocities of each system times its (n_systems,) factor."""
    state.velocities = state.velocities * for_atoms(state, factors)
