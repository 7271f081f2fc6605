"""Particle mesh Ewald: Ewald's sum with waves on a mesh, for large systems."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from nvdd import mesh
from nvdd.context import context_of
from nvdd.errors import InputError
from nvdd.exchange import broadcast, sum_over_ranks
from nvdd.models.base import Batch
from nvdd.models.coulomb import CoulombWrapper, Lattice, Reciprocal
from nvdd.models.ewald_parameters import SPLINE_ORDERS, mesh_spacing, number, switch
from nvdd.models.mesh_over_ranks import DividedMesh
from nvdd.models.registry import ModelFamily
from nvdd.roles import Role, ShardMeta
from nvdd.shard_tensor import promote, to_local
from nvdd.specs import SPEC_PME_HALO, MLIPSpec
from nvdd.splines import waves_of_mesh

_MOST_POINTS = 1 << 30
_DIVIDED_POINTS = 1 << 18  # from here on planes of a mesh are divided over ranks


class PMEModelWrapper(CoulombWrapper):
    """Electrostatic energy of point charges by smooth particle mesh Ewald (Essmann et al., J. Chem. Phys. 103 (1995) 8577).

    What is computed, and what is asked of charges and periodicity, is as in `EwaldModelWrapper`; time grows as N log N.
    The default accuracy is lower, 1e-7, since that of a mesh costs more. alpha is ``sqrt(-ln accuracy) / cutoff``, and the
    spacing of the mesh that at which a wave's nearest alias, weighted, is the accuracy
    (`nvdd.models.ewald_parameters.mesh_spacing`). Forces are exact derivatives of the energy; as in any method with a
    mesh, their sum over all atoms is zero only to the accuracy.

    Args:
        cutoff: of pairs in real space, A.
        accuracy: relative, of energies.
        alpha: 1/A, instead of the automatic one.
        mesh_spacing: A, instead of the automatic one; the mesh has at least as many points.
        order: of the splines, 4, 6 or 8: order^3 mesh points take part of each charge.
        slab: as in `EwaldModelWrapper`.
        distributed_fft: whether ranks share the Fourier transform: planes of the mesh are divided over them, instead of a
            sum of the whole mesh on each. None to choose by the size of the mesh (`docs/performance.md`).

    Raises:
        InputError: a value that makes no sense; from ``forward``: no charges, or other periodicity.
    """

    family = "pme"

    def __init__(
        self,
        cutoff: float = 10.0,
        accuracy: float = 1e-7,
        alpha: float | None = None,
        mesh_spacing: float | None = None,
        order: int = 8,
        slab: bool = False,
        distributed_fft: bool | None = None,
    ) -> None:
        super().__init__(cutoff, accuracy, alpha, slab)
        self.distributed_fft = distributed_fft if distributed_fft is None else switch("pme", "distributed_fft", distributed_fft)
        if type(order) is not int or order not in SPLINE_ORDERS:
            raise InputError(f"pme: order={order!r} must be one of {', '.join(map(str, SPLINE_ORDERS))}")
        self.order = order
        self.mesh_spacing = self._spacing(mesh_spacing)
        self.options = {
            "cutoff": self.cutoff,
            "accuracy": self.accuracy,
            "alpha": self.alpha,
            "mesh_spacing": self.mesh_spacing,
            "order": self.order,
            "slab": self.slab,
            "distributed_fft": self.distributed_fft,
        }

    def _spacing(self, given: Any) -> float:
        if given is None:
            return mesh_spacing(self.alpha, self.order, self.accuracy)
        return number("pme", "mesh_spacing", given, 0.0, math.inf, "A")

    def distribution_spec(self, strategy: Any = None) -> MLIPSpec:
        """`SPEC_PME_HALO`, whatever the strategy."""
        return SPEC_PME_HALO

    def reciprocal(self, lattice: Lattice, charges: Tensor, more: Tensor, data: Batch) -> Reciprocal:
        """By charges of this rank's atoms on the mesh."""
        sizes = self._sizes(lattice.cell)
        context = context_of((data.positions,))
        if context is not None and self._divides(sizes, context.world_size):
            return self._over_ranks(lattice, charges, more, data, sizes, context.meta)
        return self._on_each_rank(lattice, charges, more, data, sizes)

    def _divides(self, sizes: list[int], n_ranks: int) -> bool:
        """Whether ranks share the transforms of meshes of these sizes."""
        meshes = [sizes[k : k + 3] for k in range(0, len(sizes), 3)]
        if n_ranks == 1 or any(min(shape[:2]) < n_ranks for shape in meshes):  # a plane for each rank, both ways
            return False
        if self.distributed_fft is not None:
            return self.distributed_fft
        return max(map(math.prod, meshes)) >= _DIVIDED_POINTS

    def _on_each_rank(
        self, lattice: Lattice, charges: Tensor, more: Tensor, data: Batch, sizes: list[int]
    ) -> Reciprocal:
        """The whole mesh on every rank, summed over ranks in one message."""
        total = mesh.spread(lattice.scaled, charges, more, data.batch, sizes, self.order)
        n = mesh.n_points(sizes)
        sums = total[n:].view(data.n_systems, more.shape[1])
        energies, potentials, first = [], [], 0
        for b in range(data.n_systems):
            shape = sizes[3 * b : 3 * b + 3]
            points = total[first : first + math.prod(shape)].view(*shape)
            first += math.prod(shape)
            waves = torch.fft.rfftn(points)
            weighted = self._weights(lattice.reciprocal[b], lattice.volume[b], shape) * waves
            energies.append(_energy(waves, weighted, shape))
            potentials.append(torch.fft.irfftn(weighted, s=shape, norm="forward").reshape(-1))
        potential = mesh.potential(lattice.scaled, torch.cat(potentials), data.batch, sizes, self.order)
        return Reciprocal(torch.stack(energies), potential, sums)

    def _over_ranks(
        self, lattice: Lattice, charges: Tensor, more: Tensor, data: Batch, sizes: list[int], meta: ShardMeta
    ) -> Reciprocal:
        """Planes of the mesh and waves divided over ranks; plain tensors of this rank, and what must be said of them."""
        comm, mine = meta.comm, slice(0, meta.n_counted)
        scaled, q, further, system = (to_local(t)[mine] for t in (lattice.scaled, charges, more, data.batch))
        reciprocal, volume = (broadcast(to_local(t), comm, "cell") for t in (lattice.reciprocal, lattice.volume))
        share = mesh.spread(scaled, q, further, system, sizes, self.order)
        n = mesh.n_points(sizes)
        energies, potentials, first = [], [], 0
        for b in range(data.n_systems):
            shape = sizes[3 * b : 3 * b + 3]
            of_system = scaled if data.n_systems == 1 else scaled[system == b]
            divided = DividedMesh.around(comm, shape, of_system.detach(), self.order)
            waves = divided.transform(share[first : first + math.prod(shape)].view(*shape))
            first += math.prod(shape)
            weighted = self._weights(reciprocal[b], volume[b], shape, *divided.waves) * waves
            energies.append(_energy(waves, weighted, shape))
            potentials.append(divided.inverse(weighted).reshape(-1))
        potential = mesh.potential(scaled, torch.cat(potentials), system, sizes, self.order)
        if meta.n_phantom:
            potential = torch.cat([potential, potential.new_zeros(meta.n_phantom)])
        shares = torch.cat([share[n:], torch.stack(energies)])
        total = promote(sum_over_ranks(shares, comm, "sums over atoms and waves"), Role.SYSTEM, meta)
        n_systems = data.n_systems
        sums, energy = total[:-n_systems].view(n_systems, more.shape[1]), total[-n_systems:]
        return Reciprocal(energy, promote(potential, meta.atom_role, meta), sums)

    def _sizes(self, cell: Tensor) -> list[int]:
        """Mesh points along each axis of each system; all ranks have the same cells, and so the same sizes."""
        lengths = torch.linalg.vector_norm(to_local(cell).detach().cpu(), dim=2)
        sizes = [good_size(max(self.order, math.ceil(n))) for n in (lengths / self.mesh_spacing).reshape(-1).tolist()]
        if (n := mesh.n_points(sizes)) > _MOST_POINTS:
            raise InputError(
                f"pme: a mesh spacing of {self.mesh_spacing:.3g} A means {n} points in cells of this size; use a larger cutoff "
                f"than {self.cutoff:g} A, or a lower accuracy"
            )
        return sizes

    def _weights(self, reciprocal: Tensor, volume: Tensor, shape: list[int], *part: int) -> Tensor:
        return wave_weights(reciprocal, volume, self.alpha, shape, self.order, *part)


def wave_weights(
    reciprocal: Tensor, volume: Tensor, alpha: float, shape: list[int], order: int, first: int = 0, last: int | None = None
) -> Tensor:
    """(n1, last - first, n3 // 2 + 1) ``2 pi / V exp(-k^2 / 4 alpha^2) / k^2 |b|^2`` of each wave of the mesh.

    Args:
        reciprocal: (3, 3) 1/A, without 2 pi.
        volume: A^3.
        first, last: which waves along the second axis; all of them by default.
    """
    device = reciprocal.device
    n1, n2, n3 = shape
    part = slice(first, n2 if last is None else last)
    h = [torch.fft.fftfreq(n1, 1 / n1), torch.fft.fftfreq(n2, 1 / n2)[part], torch.fft.rfftfreq(n3, 1 / n3)]
    h = [x.to(torch.float64).round().to(device) for x in h]
    k = [(2 * math.pi * x[:, None]) @ reciprocal[axis : axis + 1] for axis, x in enumerate(h)]
    k2 = (k[0][:, None, None, :] + k[1][None, :, None, :] + k[2][None, None, :, :]).square().sum(-1)
    nothing = k2 == 0
    k2 = torch.where(nothing, torch.ones_like(k2), k2)
    b1, b2, b3 = (waves_of_mesh(n, order, device) for n in shape)
    splined = b1[:, None, None] * b2[part][None, :, None] * b3[: n3 // 2 + 1]
    weights = torch.exp(k2 * (-0.25 / alpha**2)) / k2 * splined * (2 * math.pi / volume)
    return torch.where(nothing, torch.zeros_like(weights), weights)


def _energy(waves: Tensor, weighted: Tensor, shape: list[int]) -> Tensor:
    """Sum of weight |wave|^2 over the whole mesh, of which a real transform has those with h3 >= 0."""
    product = waves.real * weighted.real + waves.imag * weighted.imag
    last = product.shape[2] - (shape[2] % 2 == 0)  # wave n3 / 2 is its own opposite, as wave 0 is
    return product.sum() + product[:, :, 1:last].sum()


def good_size(n: int) -> int:
    """The next size at which a Fourier transform is fast: a product of 2, 3 and 5."""
    while True:
        rest = n
        for factor in (2, 3, 5):
            while rest % factor == 0:
                rest //= factor
        if rest == 1:
            return n
        n += 1


def build(checkpoint: str | None = None, *, dtype: torch.dtype | None = None, **options: Any) -> PMEModelWrapper:
    """The wrapper from ``"pme"`` and options; the family has no checkpoints, and ``dtype`` is float64 always."""
    if checkpoint:
        raise InputError(f"pme:{checkpoint}: particle mesh Ewald has no checkpoints; write 'pme' and give options, e.g. cutoff=9")
    return PMEModelWrapper(**options)


FAMILY = ModelFamily(
    name="pme",
    description="electrostatics of given charges by particle mesh Ewald",
    build=build,
    options={
        "cutoff": "A, of pairs in real space (default 10)",
        "accuracy": "relative, of energies (default 1e-7)",
        "alpha": "1/A, splitting (default from cutoff and accuracy)",
        "mesh_spacing": "A (default from alpha, order and accuracy)",
        "order": "of the splines: 4, 6 or 8 (default 8)",
        "slab": "true for a surface, pbc (T, T, F) (default false)",
        "distributed_fft": "whether ranks share the transform (default by the size of the mesh)",
    },
    licence="MIT",
    configuration=lambda wrapper: dict(wrapper.options),
    rebuild=lambda configuration, dtype: PMEModelWrapper(**configuration),
)
