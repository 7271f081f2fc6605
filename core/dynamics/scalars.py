"""Per-system sums that several integrators and hooks declare: this rank's share, of a `DynamicsState`."""

from __future__ import annotations

from torch import Tensor

from nvdd.dynamics.state import DynamicsState


def kinetic_energy(state: DynamicsState) -> Tensor:
    """(n_systems,) eV."""
    return 0.5 * state.sum_systems(state.masses * state.velocities.square().sum(1))


def kinetic_tensor(state: DynamicsState) -> Tensor:
    """(n_systems, 3, 3) eV: sum of m v v; its trace is twice the kinetic energy."""
    v = state.velocities
    return state.sum_systems(state.masses[:, None, None] * v.unsqueeze(2) * v.unsqueeze(1))


def power(state: DynamicsState) -> Tensor:
    """(n_systems,) F . v."""
    return state.sum_systems((state.forces * state.velocities).sum(1))


def total_momentum(state: DynamicsState) -> Tensor:
    """(n_systems, 3) amu A/time."""
    return state.sum_systems(state.masses.unsqueeze(1) * state.velocities)


def longest(state: DynamicsState, vectors: Tensor) -> Tensor:
    """(n_systems,) length of the longest of the (n, 3) vectors at hand; a maximum, not a sum."""
    squares = vectors.square().sum(1)
    return squares.new_zeros(state.n_systems).scatter_reduce(0, state.system, squares, "amax").sqrt()
