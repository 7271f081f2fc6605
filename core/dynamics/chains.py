"""Nose-Hoover chains: the bath of a kinetic energy, integrated by itself.

Martyna, Klein and Tuckerman, J. Chem. Phys. 97, 2635 (1992), doi:10.1063/1.463940; the integrator is that of Martyna,
Tuckerman, Tobias and Klein, Mol. Phys. 87, 1117 (1996), doi:10.1080/00268979600100761, with the three weights of
fourth order of Yoshida, Phys. Lett. A 150, 262 (1990), doi:10.1016/0375-9601(90)90092-3.

A chain is a few numbers, so it is integrated in plain floats on the host: on a GPU its two hundred operations would
cost more than a small model.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

import torch
from torch import Tensor

_CUBE_ROOT = 2.0 ** (1.0 / 3.0)
_WEIGHTS = (1.0 / (2.0 - _CUBE_ROOT), -_CUBE_ROOT / (2.0 - _CUBE_ROOT), 1.0 / (2.0 - _CUBE_ROOT))


@dataclass(frozen=True)
class NoseHooverChain:
    """The links that couple one kinetic energy to a bath of energy k T.

    Link 1 has the mass ``freedom k T tau^2``, the others ``k T tau^2``.

    Attributes:
        tau: relaxation time, in ASE's unit.
        length: number of links.
        substeps: divides each time step of the chain.
    """

    tau: float
    length: int
    substeps: int = 1

    def at_rest(self, n_systems: int) -> Tensor:
        """(n_systems, 2, length) positions (no unit) and momenta (eV time) of the links."""
        return torch.zeros(n_systems, 2, self.length, dtype=torch.float64)

    def propagate(
        self, links: Tensor, double_kinetic: Tensor, freedom: Tensor, thermal: float, dt: float
    ) -> tuple[Tensor, Tensor]:
        """The chain of each system over ``dt``.

        Args:
            links: (n_systems, 2, length), as of `at_rest`; on the CPU.
            double_kinetic: (n_systems,) eV twice the kinetic energy that the chain holds; likewise.
            freedom: (n_systems,) number of its degrees of freedom.
            thermal: k T in eV.
            dt: ASE's unit of time.

        Returns:
            The links after it, and the (n_systems,) factor of the velocities whose kinetic energy it is.
        """
        after, factors = [], []
        for (position, momentum), energy, degrees in zip(
            links.tolist(), double_kinetic.tolist(), freedom.tolist(), strict=True
        ):
            factors.append(self._propagate(position, momentum, energy, degrees, thermal, dt))
            after.append((position, momentum))
        return torch.tensor(after, dtype=torch.float64), torch.tensor(factors, dtype=torch.float64)

    def _propagate(
        self, position: list[float], momentum: list[float], energy: float, degrees: float, thermal: float, dt: float
    ) -> float:
        mass = [degrees * thermal * self.tau**2] + [thermal * self.tau**2] * (self.length - 1)
        last, factor = self.length - 1, 1.0

        def kick(link: int, h: float) -> None:
            damp = exp(-0.25 * h * momentum[link + 1] / mass[link + 1]) if link < last else 1.0
            if link == 0:
                force = factor * factor * energy - degrees * thermal
            else:
                force = momentum[link - 1] ** 2 / mass[link - 1] - thermal
            momentum[link] = (momentum[link] * damp + 0.5 * h * force) * damp

        for weight in _WEIGHTS * self.substeps:
            h = weight * dt / self.substeps
            for link in range(last, -1, -1):
                kick(link, h)
            for link in range(self.length):
                position[link] += h * momentum[link] / mass[link]
            factor *= exp(-h * momentum[0] / mass[0])
            for link in range(self.length):
                kick(link, h)
        return factor

    def energy(self, links: Tensor, freedom: Tensor, thermal: float) -> Tensor:
        """(n_systems,) eV of the links and of what they have taken from the bath."""
        position, momentum = links.unbind(1)
        masses = torch.full_like(momentum, thermal * self.tau**2)
        masses[:, 0] *= freedom
        potential = thermal * (freedom * position[:, 0] + position[:, 1:].sum(1))
        return potential + (0.5 * momentum.square() / masses).sum(1)
