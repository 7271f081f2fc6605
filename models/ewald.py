"""Ewald's sum: electrostatics of point charges in a periodic cell, to any accuracy."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from nvdd import plane_waves
from nvdd.errors import InputError
from nvdd.models.base import Batch
from nvdd.models.coulomb import CoulombWrapper, Lattice, Reciprocal
from nvdd.models.ewald_parameters import number, wave_cutoff
from nvdd.models.registry import ModelFamily
from nvdd.shard_tensor import to_local
from nvdd.specs import SPEC_EWALD_HALO, MLIPSpec

_MOST_WAVES = 50_000_000


class EwaldModelWrapper(CoulombWrapper):
    """Electrostatic energy of point charges by Ewald's sum, in a conducting surrounding.

    Charges are an input, ``charges`` (n_atoms,) in units of e: ASE's initial charges, LAMMPS's ``atom->q``, or those that
    another model of a composed one predicts (energies can be differentiated by them). A net charge is neutralised by a
    uniform background, which the log says once. All pairs count: there are no exclusions for bonded atoms.

    With the given ``cutoff`` of pairs, alpha is ``sqrt(-ln accuracy) / cutoff`` and waves run to
    ``2 alpha sqrt(-ln accuracy)``: what is left out of either sum is the accuracy times a typical energy (Kolafa and
    Perram, Mol. Simul. 9 (1992) 351). Time grows as N in real space and, with a fixed cutoff, as N^2 in reciprocal space:
    beyond some thousand atoms `PMEModelWrapper` is faster. Computes in float64 always.

    Args:
        cutoff: of pairs in real space, A.
        accuracy: relative, of energies.
        alpha: 1/A, instead of the automatic one. The sum does not depend on it where both cutoffs are large enough.
        k_cutoff: largest wave vector, 1/A, instead of the automatic one.
        slab: True for a surface: periodicity along the first two cell vectors only, pbc (T, T, F). The third vector is
            replaced by the normal, as long as the accuracy asks for, and the dipole's field between layers taken off (Yeh
            and Berkowitz, J. Chem. Phys. 111 (1999) 3155).

    Raises:
        InputError: a value that makes no sense; from ``forward``: no charges, or other periodicity.
    """

    family = "ewald"

    def __init__(
        self,
        cutoff: float = 10.0,
        accuracy: float = 1e-10,
        alpha: float | None = None,
        k_cutoff: float | None = None,
        slab: bool = False,
    ) -> None:
        super().__init__(cutoff, accuracy, alpha, slab)
        if k_cutoff is None:
            self.k_cutoff = wave_cutoff(self.alpha, self.accuracy)
        else:
            self.k_cutoff = number("ewald", "k_cutoff", k_cutoff, 0.0, math.inf, "1/A")
        self.options = {
            "cutoff": self.cutoff,
            "accuracy": self.accuracy,
            "alpha": self.alpha,
            "k_cutoff": self.k_cutoff,
            "slab": self.slab,
        }

    def distribution_spec(self, strategy: Any = None) -> MLIPSpec:
        """`SPEC_EWALD_HALO`, whatever the strategy."""
        return SPEC_EWALD_HALO

    def reciprocal(self, lattice: Lattice, charges: Tensor, more: Tensor, data: Batch) -> Reciprocal:
        """By structure factors of this rank's atoms, summed over ranks in one message."""
        sizes = self._sizes(lattice.cell)
        total = plane_waves.structure_factors(lattice.scaled, charges, more, data.batch, sizes)
        n = plane_waves.n_waves(sizes)
        factors, sums = total[: 2 * n].view(n, 2), total[2 * n :].view(data.n_systems, more.shape[1])
        weights = self._weights(lattice, sizes)
        boxes = [plane_waves.n_waves(sizes[3 * b : 3 * b + 3]) for b in range(data.n_systems)]
        by_wave = weights * factors.square().sum(1)
        energy = torch.stack([part.sum() for part in by_wave.split(boxes)])
        potential = plane_waves.plane_wave_potential(
            lattice.scaled, weights[:, None] * factors, data.batch, sizes
        )
        return Reciprocal(energy, potential, sums)

    def _sizes(self, cell: Tensor) -> list[int]:
        """Largest h1, h2, h3 of each system: k.a = 2 pi h. All ranks have the same cells, and so the same sizes."""
        lengths = torch.linalg.vector_norm(to_local(cell).detach().cpu(), dim=2)
        sizes = [int(n) for n in (lengths * (self.k_cutoff / (2 * math.pi))).floor().reshape(-1).tolist()]
        if (n := plane_waves.n_waves(sizes)) > _MOST_WAVES:
            raise InputError(
                f"ewald: a wave cutoff of {self.k_cutoff:.3g} 1/A means {n} waves in cells of this size; use pme, or a larger "
                f"cutoff than {self.cutoff:g} A, or a lower accuracy"
            )
        return sizes

    def _weights(self, lattice: Lattice, sizes: list[int]) -> Tensor:
        """(n_waves,) ``2 pi / V exp(-k^2 / 4 alpha^2) / k^2``, twice where a wave stands for its opposite as well."""
        parts = []
        for b in range(len(sizes) // 3):
            h = plane_waves.integers(sizes[3 * b : 3 * b + 3], lattice.cell.device)
            k2 = (2 * math.pi) ** 2 * (h @ lattice.reciprocal[b]).square().sum(1)
            outside = (k2 == 0) | (k2 > self.k_cutoff**2)
            k2 = torch.where(outside, torch.ones_like(k2), k2)
            weights = torch.exp(k2 * (-0.25 / self.alpha**2)) / k2 * (2 * math.pi / lattice.volume[b])
            both = torch.where(h[:, 0] > 0, 2.0, 1.0)
            parts.append(torch.where(outside, torch.zeros_like(weights), both * weights))
        return torch.cat(parts)


def build(checkpoint: str | None = None, *, dtype: torch.dtype | None = None, **options: Any) -> EwaldModelWrapper:
    """The wrapper from ``"ewald"`` and options; the family has no checkpoints, and ``dtype`` is float64 always."""
    if checkpoint:
        raise InputError(f"ewald:{checkpoint}: an Ewald sum has no checkpoints; write 'ewald' and give options, e.g. cutoff=9")
    return EwaldModelWrapper(**options)


FAMILY = ModelFamily(
    name="ewald",
    description="electrostatics of given charges by Ewald's sum",
    build=build,
    options={
        "cutoff": "A, of pairs in real space (default 10)",
        "accuracy": "relative, of energies (default 1e-10)",
        "alpha": "1/A, splitting (default from cutoff and accuracy)",
        "k_cutoff": "1/A, largest wave vector (default from alpha and accuracy)",
        "slab": "true for a surface, pbc (T, T, F) (default false)",
    },
    licence="MIT",
    configuration=lambda wrapper: dict(wrapper.options),
    rebuild=lambda configuration, dtype: EwaldModelWrapper(**configuration),
)
