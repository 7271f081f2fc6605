"""Sums over atoms of plane waves, and sums of plane waves at atoms: what Ewald's method does in reciprocal space.

For integers h = (h1, h2, h3) of a box and scaled coordinates s:

* structure factors  ``S[h] = sum_j q_j (cos 2 pi h.s_j, sin 2 pi h.s_j)``,
* potentials  ``phi_j = sum_h C[h] cos 2 pi h.s_j + D[h] sin 2 pi h.s_j``, and their gradients by s_j.

The first two are each other's transpose and the third is made of the second, so each one's derivative is written in the
others and can be differentiated any number of times. A wave is the product of one for each axis, so that sums over atoms
are products of matrices: no array of atoms by waves is made, and no more memory is used than blocks of it.

The boxes are half spaces: h1 from 0, h2 and h3 from both signs. Several systems follow one another in one flat array.

Sources: the factorisation is that of Toukmaji and Board, Comput. Phys. Commun. 95 (1996) 73, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

_BLOCK = 1 << 19  # complex numbers in a block of atoms by waves on a CPU: it stays in the cache
_BLOCK_ON_GPU = 1 << 25


def n_waves(sizes: list[int]) -> int:
    """Waves in all boxes; ``sizes`` are the largest h1, h2, h3 of each system, one after the other."""
    return sum(count for *_, count in _boxes(sizes))


def integers(sizes: list[int], device: torch.device) -> Tensor:
    """(n_waves, 3) float64 h of each wave, in the order of the flat arrays."""
    parts = []
    for h, k, m, _ in _boxes(sizes):
        axes = [_axis(0, h, device), _axis(-k, k, device), _axis(-m, m, device)]
        parts.append(torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 3))
    return torch.cat(parts)


@torch.library.custom_op("nvdd::structure_factors", mutates_args=())
def structure_factors(scaled: Tensor, charges: Tensor, more: Tensor, system: Tensor, sizes: list[int]) -> Tensor:
    """All sums over atoms in one flat array, so that over ranks they are one message.

    Args:
        scaled: (n, 3) coordinates in cell vectors.
        charges: (n,).
        more: (n, m) further per-atom values to be summed into systems.
        system: (n,) system of each atom.
        sizes: largest h1, h2, h3 of each system.

    Returns:
        (2 n_waves + n_systems m,): structure factors as (n_waves, 2), then the further sums as (n_systems, m).
    """
    factors = scaled.new_zeros(n_waves(sizes), 2)
    for rows, first, (h, k, m, count) in _systems(system, sizes):
        out = torch.view_as_complex(factors)[first : first + count].view(h + 1, 2 * k + 1, 2 * m + 1)
        for atoms in _blocks_of_atoms(rows, scaled):
            x, y, z = _phases(scaled[atoms], h, k, m)
            x = (x * charges[atoms, None]).T.contiguous()
            for part in _blocks_of_waves(2 * k + 1, len(z) * (2 * m + 1), scaled):
                yz = (y[:, part, None] * z[:, None, :]).reshape(len(z), -1)
                out[:, part] += (x @ yz).view(h + 1, -1, 2 * m + 1)
    n_systems = len(sizes) // 3
    sums = more.new_zeros(n_systems, more.shape[1]).index_add(0, system, more)
    return torch.cat([factors.reshape(-1), sums.reshape(-1)])


@torch.library.custom_op("nvdd::plane_wave_potential", mutates_args=())
def plane_wave_potential(scaled: Tensor, coefficients: Tensor, system: Tensor, sizes: list[int]) -> Tensor:
    """(n,) potentials, from (n_waves, 2) coefficients C and D."""
    out = scaled.new_zeros(len(scaled))
    for atoms, x, _, (y, z), waves, _ in _evaluations(scaled, coefficients, system, sizes):
        # over h1 by a product of matrices, then over h3 and h2 atom by atom
        value = torch.bmm((x @ waves).view(len(z), -1, z.shape[1]), z.unsqueeze(2)).squeeze(2)
        out[atoms] += (value * y).sum(1).real
    return out


@torch.library.custom_op("nvdd::plane_wave_gradient", mutates_args=())
def plane_wave_gradient(scaled: Tensor, coefficients: Tensor, system: Tensor, sizes: list[int]) -> Tensor:
    """(n, 3) derivatives of the potentials by the scaled coordinates."""
    out = scaled.new_zeros(len(scaled), 3)
    for atoms, x, h, (y, z), waves, (k, m) in _evaluations(scaled, coefficients, system, sizes):
        both = torch.stack([z, z * m], 2)
        value = torch.bmm((x @ waves).view(len(z), -1, z.shape[1]), both)
        along_x = torch.bmm(((x * h) @ waves).view(len(z), -1, z.shape[1]), z.unsqueeze(2)).squeeze(2)
        terms = [along_x * y, value[:, :, 0] * y * k, value[:, :, 1] * y]
        # d/ds of exp(2 pi i h.s), real part
        out[atoms] -= 2 * math.pi * torch.stack([t.sum(1).imag for t in terms], 1)
    return out


# -- derivatives, in terms of the three operations


def _save_sums(ctx, inputs, output) -> None:
    scaled, charges, more, system, sizes = inputs
    ctx.save_for_backward(scaled, charges, system)
    ctx.sizes, ctx.width = sizes, more.shape[1]


def _sums_backward(ctx, grad: Tensor):
    scaled, charges, system = ctx.saved_tensors
    cut = 2 * n_waves(ctx.sizes)
    waves, sums = grad[:cut].view(-1, 2), grad[cut:].view(len(ctx.sizes) // 3, ctx.width)
    by_scaled = by_charges = by_more = None
    if ctx.needs_input_grad[0]:
        by_scaled = charges[:, None] * plane_wave_gradient(scaled, waves, system, ctx.sizes)
    if ctx.needs_input_grad[1]:
        by_charges = plane_wave_potential(scaled, waves, system, ctx.sizes)
    if ctx.needs_input_grad[2]:
        by_more = sums.index_select(0, system)
    return by_scaled, by_charges, by_more, None, None


def _save_waves(ctx, inputs, output) -> None:
    scaled, coefficients, system, sizes = inputs
    ctx.save_for_backward(scaled, coefficients, system)
    ctx.sizes = sizes


def _factors(scaled: Tensor, charges: Tensor, system: Tensor, sizes: list[int]) -> Tensor:
    none = charges.new_zeros(len(charges), 0)
    return structure_factors(scaled, charges, none, system, sizes).view(-1, 2)


def _potential_backward(ctx, grad: Tensor):
    scaled, coefficients, system = ctx.saved_tensors
    by_scaled = by_coefficients = None
    if ctx.needs_input_grad[0]:
        by_scaled = grad[:, None] * plane_wave_gradient(scaled, coefficients, system, ctx.sizes)
    if ctx.needs_input_grad[1]:
        by_coefficients = _factors(scaled, grad, system, ctx.sizes)
    return by_scaled, by_coefficients, None, None


def _gradient_backward(ctx, grad: Tensor):
    scaled, coefficients, system = ctx.saved_tensors
    h = 2 * math.pi * integers(ctx.sizes, scaled.device).to(scaled.dtype)
    by_scaled, by_coefficients = torch.zeros_like(scaled), torch.zeros_like(coefficients)
    turned = torch.stack([coefficients[:, 1], -coefficients[:, 0]], 1)  # d/dtheta of C cos + D sin
    for axis in range(3):
        if ctx.needs_input_grad[0]:
            along = plane_wave_gradient(scaled, turned * h[:, axis, None], system, ctx.sizes)
            by_scaled = by_scaled + grad[:, axis, None] * along
        if ctx.needs_input_grad[1]:
            cosine, sine = _factors(scaled, grad[:, axis].contiguous(), system, ctx.sizes).unbind(1)
            by_coefficients = by_coefficients + torch.stack([-sine, cosine], 1) * h[:, axis, None]
    return by_scaled, by_coefficients, None, None


structure_factors.register_autograd(_sums_backward, setup_context=_save_sums)
plane_wave_potential.register_autograd(_potential_backward, setup_context=_save_waves)
plane_wave_gradient.register_autograd(_gradient_backward, setup_context=_save_waves)


@structure_factors.register_fake
def _(scaled, charges, more, system, sizes):
    return scaled.new_empty(2 * n_waves(sizes) + len(sizes) // 3 * more.shape[1])


@plane_wave_potential.register_fake
def _(scaled, coefficients, system, sizes):
    return scaled.new_empty(len(scaled))


@plane_wave_gradient.register_fake
def _(scaled, coefficients, system, sizes):
    return scaled.new_empty(len(scaled), 3)


# -- blocks


def _boxes(sizes: list[int]) -> Iterator[tuple[int, int, int, int]]:
    for i in range(0, len(sizes), 3):
        h, k, m = sizes[i : i + 3]
        yield h, k, m, (h + 1) * (2 * k + 1) * (2 * m + 1)


def _systems(system: Tensor, sizes: list[int]) -> Iterator[tuple[Tensor | None, int, tuple[int, int, int, int]]]:
    """The atoms of each system (None: all), where its waves begin, its box."""
    first = 0
    for index, box in enumerate(_boxes(sizes)):
        yield (None if len(sizes) == 3 else (system == index).nonzero().squeeze(1)), first, box
        first += box[3]


def _evaluations(scaled: Tensor, coefficients: Tensor, system: Tensor, sizes: list[int]):
    """Blocks of atoms by waves: the atoms, phases along x with their h1, y and z, conjugate coefficients, h2 and h3."""
    coefficients = torch.view_as_complex(coefficients.contiguous()).conj().resolve_conj()
    for rows, first, (h, k, m, count) in _systems(system, sizes):
        box = coefficients[first : first + count].view(h + 1, 2 * k + 1, 2 * m + 1)
        numbers = [_axis(low, high, scaled.device).to(scaled.dtype) for low, high in ((0, h), (-k, k), (-m, m))]
        for atoms in _blocks_of_atoms(rows, scaled):
            x, y, z = _phases(scaled[atoms], h, k, m)
            for part in _blocks_of_waves(2 * k + 1, len(z) * (2 * m + 1), scaled):
                waves = box[:, part].reshape(h + 1, -1)
                yield atoms, x, numbers[0], (y[:, part], z), waves, (numbers[1][part], numbers[2])


def _phases(scaled: Tensor, h: int, k: int, m: int) -> list[Tensor]:
    """(n, h + 1), (n, 2 k + 1), (n, 2 m + 1) complex waves along each axis."""
    angles = 2 * math.pi * (scaled - scaled.floor())  # small arguments: whole cells would cost digits
    out = []
    for axis, (low, high) in enumerate(((0, h), (-k, k), (-m, m))):
        angle = angles[:, axis, None] * _axis(low, high, scaled.device).to(scaled.dtype)
        out.append(torch.complex(angle.cos(), angle.sin()))
    return out


def _axis(low: int, high: int, device: torch.device) -> Tensor:
    return torch.arange(low, high + 1, dtype=torch.float64, device=device)


def _block(tensor: Tensor) -> int:
    return _BLOCK_ON_GPU if tensor.is_cuda else _BLOCK


def _blocks_of_atoms(rows: Tensor | None, scaled: Tensor) -> Iterator[slice | Tensor]:
    step = 2048 if not scaled.is_cuda else 1 << 17
    if rows is not None:
        yield from (part for part in rows.split(step) if len(part))
    else:
        yield from (slice(i, min(i + step, len(scaled))) for i in range(0, len(scaled), step))


def _blocks_of_waves(rows: int, width: int, like: Tensor) -> Iterator[slice]:
    step = max(1, _block(like) // max(width, 1))
    yield from (slice(i, min(i + step, rows)) for i in range(0, rows, step))
