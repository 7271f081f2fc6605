"""Cardinal B-splines: how a charge is spread on the points of a mesh around it, and what the mesh makes of a wave.

Source: Essmann et al., J. Chem. Phys. 103 (1995) 8577, equations 3.5, 4.1 and 4.4 (smooth particle mesh Ewald).
"""

from __future__ import annotations

import torch
from torch import Tensor


def weights(fraction: Tensor, order: int, derivative: int = 0) -> Tensor:
    """(...) -> (..., order): M_order, or one of its derivatives, at the mesh points at and below a place.

    Args:
        fraction: of the way from the point below to the next, in [0, 1).
        order: of the spline.
        derivative: how often to differentiate by ``fraction``.

    Returns:
        Element t belongs to the point t below: M_order(fraction + t).
    """
    if derivative >= order:
        return fraction.new_zeros(*fraction.shape, order)
    if derivative:
        lower = weights(fraction, order - 1, derivative - 1)
        none = torch.zeros_like(lower[..., :1])
        return torch.cat([lower, none], -1) - torch.cat([none, lower], -1)
    values = [torch.ones_like(fraction)]  # M_1
    for n in range(2, order + 1):
        none = torch.zeros_like(fraction)
        here, next_below = [*values, none], [none, *values]
        values = [((fraction + t) * here[t] + (n - fraction - t) * next_below[t]) / (n - 1) for t in range(n)]
    return torch.stack(values, -1)


def waves_of_mesh(n: int, order: int, device: torch.device) -> Tensor:
    """(n,) float64 ``|b(m)|^2`` of each wave of a mesh of n points: undoes what spreading by splines does to a wave."""
    points = weights(torch.zeros((), dtype=torch.float64, device=device), order)[1:]  # M_order(1) ... M_order(order - 1)
    values = torch.zeros(n, dtype=torch.float64, device=device)
    places = torch.arange(order - 1, device=device) % n
    return 1.0 / torch.fft.fft(values.index_add(0, places, points)).abs().square()
