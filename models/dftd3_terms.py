"""The terms of DFT-D3 as torch operations with first derivatives, on the edges of a batch or of one rank.

Rows are ``[atoms | halo]``: receivers are among the first ``n_atoms`` rows, senders anywhere. Lengths in A, energies
in eV, float64. The gradients have no derivative of their own: a second one raises.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nvdd.models.dftd3_kernels import coordination_kernel, pair_gradient_kernel, pair_kernel
from nvdd.warp_runtime import Arrays, launch


class Mixing(NamedTuple):
    """What C6 coefficients of pairs are made of: of rows i and j ``sum_b mixed[i, kinds[j], b] weights[j, b]``.

    Attributes:
        kinds: (n_rows,) which of the elements in the batch a row is.
        weights: (n_rows, 7) how much each reference system counts for an atom.
        slopes: (n_rows, 7) their derivatives by the coordination number.
        mixed: (n_rows, n_kinds, 7) eV A^6, with each reference system of each element.
        mixed_slopes: (n_rows, n_kinds, 7) their derivatives by the coordination number.
        n_references: (n_kinds,) reference systems of an element.
        present: (n_kinds,) atomic numbers.
    """

    kinds: Tensor
    weights: Tensor
    slopes: Tensor
    mixed: Tensor
    mixed_slopes: Tensor
    n_references: Tensor
    present: Tensor

    def of_kinds(self, table: Tensor) -> Tensor:
        """(n_kinds, n_kinds) of a table of all elements."""
        return table[self.present][:, self.present].contiguous()


def mixing(cn: Tensor, numbers: Tensor, reference_cn: Tensor, c6: Tensor) -> Mixing:
    """The mixing of these atoms.

    A reference system counts ``exp(-4 (CN - CN_ref)^2)``, normalised. Of an atom far from all of its reference
    systems the nearest counts alone.

    Args:
        cn: (n_rows,) coordination numbers.
        numbers: (n_rows,) atomic numbers.
        reference_cn: (n_elements, 7) of the reference systems; negative where an element has fewer.
        c6: (n_elements, n_elements, 7, 7) eV A^6.
    """
    known = reference_cn[numbers]
    off = cn.unsqueeze(1) - known
    absent = known < 0
    weights = (-4.0 * off.square()).masked_fill(absent, -torch.inf).softmax(1)
    slope = (-8.0 * off).masked_fill(absent, 0.0)
    slopes = weights * (slope - (weights * slope).sum(1, keepdim=True))
    present, kinds = torch.unique(numbers, return_inverse=True)
    both = torch.stack([weights, slopes], 1)  # one element after the other: its table for every row is large
    found = [torch.bmm(both, c6[numbers, z]) for z in present]
    mixed, mixed_slopes = torch.stack(found, 2).unbind(1) if found else both.new_empty(2, 0, 0, 7)
    n_references = (reference_cn[present] >= 0).sum(1)
    return Mixing(kinds, weights, slopes, mixed.contiguous(), mixed_slopes.contiguous(), n_references, present)


# --- coordination numbers -----------------------------------------------------------------------------------------


@torch.library.custom_op("nvdd::d3_coordination", mutates_args=())
def _coordination(
    vectors: Tensor, receivers: Tensor, senders: Tensor, numbers: Tensor, radii: Tensor, cutoff: float, n_atoms: int
) -> tuple[Tensor, Tensor]:
    """Coordination numbers (n_atoms,); of each edge dcount/dr / r (E,)."""
    counts, slopes = (vectors.new_empty(len(vectors)) for _ in range(2))
    if len(vectors):
        arrays = Arrays(vectors)
        launch(
            coordination_kernel(),
            len(vectors),
            [arrays.vectors, *map(arrays.integers, (receivers, senders, numbers)), arrays.reals(radii), cutoff],
            [arrays.reals(counts), arrays.reals(slopes)],
            vectors.device,
        )
    return vectors.new_zeros(n_atoms).index_add_(0, receivers, counts), slopes


@torch.library.custom_op("nvdd::d3_coordination_gradient", mutates_args=())
def _coordination_gradient(upstream: Tensor, vectors: Tensor, receivers: Tensor, slopes: Tensor) -> Tensor:
    return upstream.index_select(0, receivers).mul_(slopes).unsqueeze(1) * vectors


@_coordination.register_fake
def _(vectors, receivers, senders, numbers, radii, cutoff, n_atoms):
    return vectors.new_empty(n_atoms), vectors.new_empty(len(vectors))


@_coordination_gradient.register_fake
def _(upstream, vectors, *rest):
    return torch.empty_like(vectors, memory_format=torch.contiguous_format)


def _save_coordination(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:2], output[1])
    ctx.mark_non_differentiable(output[1])


def _coordination_backward(ctx, upstream, _):
    return _coordination_gradient(upstream.contiguous(), *ctx.saved_tensors), *[None] * 6


_coordination.register_autograd(_coordination_backward, setup_context=_save_coordination)


def coordination_numbers(
    vectors: Tensor, receivers: Tensor, senders: Tensor, numbers: Tensor, radii: Tensor, cutoff: float, n_atoms: int
) -> Tensor:
    """(n_atoms,) coordination numbers, differentiable by ``vectors``.

    Args:
        vectors: (E, 3) A; their sign does not matter.
        receivers, senders: (E,) int64 rows.
        numbers: (n_rows,) int64 atomic numbers.
        radii: (n_elements,) covalent radii, A.
        cutoff: A.
        n_atoms: how many rows receivers may be.
    """
    return _coordination(vectors, receivers, senders, numbers, radii, cutoff, n_atoms)[0]


# --- pairs --------------------------------------------------------------------------------------------------------


@torch.library.custom_op("nvdd::d3_pairs", mutates_args=())
def _pairs(
    vectors: Tensor,
    cn: Tensor,
    receivers: Tensor,
    senders: Tensor,
    numbers: Tensor,
    reference_cn: Tensor,
    c6: Tensor,
    c8_over_c6: Tensor,
    radius: Tensor,
    rational: bool,
    damping: list[float],
    cutoff: float,
    n_atoms: int,
    made: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Energies (n_atoms,); of each edge dE/dr / r (E,) and dE/dCN of the sender (E,); dE/dCN of receivers (n_atoms,)."""
    energies, by_length, by_receiver, by_sender = (vectors.new_empty(len(vectors)) for _ in range(4))
    if len(vectors):
        rows = Mixing(*made) if made else mixing(cn, numbers, reference_cn, c6)
        arrays, tables = Arrays(vectors), [rows.of_kinds(t) for t in (c8_over_c6, radius)]
        launch(
            pair_kernel(),
            len(vectors),
            [arrays.vectors, *map(arrays.integers, (receivers, senders, rows.kinds)), *map(arrays.reals, rows[1:5]),
             arrays.integers(rows.n_references), *map(arrays.reals, tables), int(rational), *damping, cutoff],
            [arrays.reals(out) for out in (energies, by_length, by_receiver, by_sender)],
            vectors.device,
        )  # fmt: skip
    of_atoms = lambda values: vectors.new_zeros(n_atoms).index_add_(0, receivers, values)
    return of_atoms(energies), by_length, by_sender, of_atoms(by_receiver)


@torch.library.custom_op("nvdd::d3_pairs_gradient", mutates_args=())
def _pairs_gradient(
    upstream: Tensor,
    vectors: Tensor,
    cn: Tensor,
    receivers: Tensor,
    senders: Tensor,
    by_length: Tensor,
    by_sender: Tensor,
    by_receiver: Tensor,
) -> tuple[Tensor, Tensor]:
    """(E, 3) and (n_rows,): gradients of ``sum(upstream * energies)`` by vectors and coordination numbers."""
    by_vector = torch.empty_like(vectors, memory_format=torch.contiguous_format)
    by_cn = torch.zeros_like(cn)
    by_cn[: len(upstream)] = upstream * by_receiver
    if len(vectors):
        of_senders = torch.empty_like(by_sender)
        arrays = Arrays(vectors)
        launch(
            pair_gradient_kernel(),
            len(vectors),
            [arrays.vectors, arrays.integers(receivers), *map(arrays.reals, (by_length, by_sender, upstream))],
            [arrays.points(by_vector), arrays.reals(of_senders)],
            vectors.device,
        )
        by_cn.index_add_(0, senders, of_senders)
    return by_vector, by_cn


@_pairs.register_fake
def _(vectors, *rest):
    edges, atoms = vectors.new_empty(len(vectors)), vectors.new_empty(rest[-2])
    return atoms, edges, torch.empty_like(edges), torch.empty_like(atoms)


@_pairs_gradient.register_fake
def _(upstream, vectors, cn, *rest):
    return torch.empty_like(vectors, memory_format=torch.contiguous_format), torch.empty_like(cn)


def _save_pairs(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:4], *output[1:])
    ctx.none_made = [None] * len(inputs[-1])
    ctx.mark_non_differentiable(*output[1:])


def _pairs_backward(ctx, upstream, *rest):
    return *_pairs_gradient(upstream.contiguous(), *ctx.saved_tensors), *[None] * 11, ctx.none_made


_pairs.register_autograd(_pairs_backward, setup_context=_save_pairs)


def pair_energies(
    vectors: Tensor,
    cn: Tensor,
    receivers: Tensor,
    senders: Tensor,
    numbers: Tensor,
    reference_cn: Tensor,
    c6: Tensor,
    c8_over_c6: Tensor,
    radius: Tensor,
    rational: bool,
    damping: list[float],
    cutoff: float,
    n_atoms: int,
    made: list[Tensor],
) -> Tensor:
    """(n_atoms,) energies of pairs in eV, half of each to its receiver; differentiable by ``vectors`` and ``cn``.

    Args:
        vectors: (E, 3) A.
        cn: (n_rows,) coordination numbers.
        receivers, senders: (E,) int64 rows.
        numbers: (n_rows,) int64 atomic numbers.
        reference_cn: (n_elements, 7).
        c6: (n_elements, n_elements, 7, 7) eV A^6, of pairs of reference systems.
        c8_over_c6: (n_elements, n_elements) A^2.
        radius: (n_elements, n_elements) A: the damping radius itself with rational damping, else R0.
        rational: rational (Becke-Johnson) damping, else zero damping.
        damping: s6, s8, and for zero damping rs6, rs8, alpha, beta (1/A).
        cutoff: A.
        n_atoms: how many rows receivers may be.
        made: the tensors of the `Mixing` of these atoms, if it has been made already; else empty.
    """
    return _pairs(
        vectors,
        cn,
        receivers,
        senders,
        numbers,
        reference_cn,
        c6,
        c8_over_c6,
        radius,
        rational,
        damping,
        cutoff,
        n_atoms,
        made,
    )[0]
