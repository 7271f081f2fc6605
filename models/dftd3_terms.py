"""The terms of DFT-D3 as torch operations with first derivatives, on the edges of a batch or of one rank.

Rows are ``[atoms | halo]``: receivers are among the first ``n_atoms`` rows, senders anywhere. Lengths in A, energies
in eV, float64. The gradients have no derivative of their own: a second one raises.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvdd.models.dftd3_kernels import coordination_kernel, pair_kernel
from nvdd.models.warp_runtime import Arrays, launch


def reference_weights(cn: Tensor, numbers: Tensor, reference_cn: Tensor) -> tuple[Tensor, Tensor]:
    """How much each reference system counts for an atom, ``exp(-4 (CN - CN_ref)^2)`` normalised.

    Args:
        cn: (n,) coordination numbers.
        numbers: (n,) atomic numbers.
        reference_cn: (n_elements, 7) of the reference systems; negative where an element has fewer.

    Returns:
        (n, 7) weights and their derivatives by the coordination number. Of an atom far from all of its reference
        systems the nearest counts alone.
    """
    known = reference_cn[numbers]
    off = cn.unsqueeze(1) - known
    absent = known < 0
    weights = (-4.0 * off.square()).masked_fill(absent, -torch.inf).softmax(1)
    slope = (-8.0 * off).masked_fill(absent, 0.0)
    return weights, weights * (slope - (weights * slope).sum(1, keepdim=True))


# --- coordination numbers -----------------------------------------------------------------------------------------


@torch.library.custom_op("nvdd::d3_coordination", mutates_args=())
def coordination_numbers(
    vectors: Tensor, receivers: Tensor, senders: Tensor, numbers: Tensor, radii: Tensor, cutoff: float, n_atoms: int
) -> Tensor:
    """(n_atoms,) coordination numbers.

    Args:
        vectors: (E, 3) A; their sign does not matter.
        receivers, senders: (E,) int64 rows.
        numbers: (n_rows,) int64 atomic numbers.
        radii: (n_elements,) covalent radii, A.
        cutoff: A.
        n_atoms: how many rows receivers may be.
    """
    counts = vectors.new_empty(len(vectors))
    _coordination(0, (vectors, receivers, senders, numbers, radii, cutoff), by_edge=counts)
    return vectors.new_zeros(n_atoms).index_add_(0, receivers, counts)


@torch.library.custom_op("nvdd::d3_coordination_gradient", mutates_args=())
def _coordination_gradient(
    upstream: Tensor,
    vectors: Tensor,
    receivers: Tensor,
    senders: Tensor,
    numbers: Tensor,
    radii: Tensor,
    cutoff: float,
) -> Tensor:
    out = torch.empty_like(vectors, memory_format=torch.contiguous_format)
    _coordination(1, (vectors, receivers, senders, numbers, radii, cutoff), upstream, by_vector=out)
    return out


@coordination_numbers.register_fake
def _(vectors, receivers, senders, numbers, radii, cutoff, n_atoms):
    return vectors.new_empty(n_atoms)


@_coordination_gradient.register_fake
def _(upstream, vectors, *rest):
    return torch.empty_like(vectors, memory_format=torch.contiguous_format)


def _save_coordination(ctx, inputs, output) -> None:
    *tensors, ctx.cutoff, _ = inputs
    ctx.save_for_backward(*tensors)


def _coordination_backward(ctx, upstream):
    return _coordination_gradient(upstream.contiguous(), *ctx.saved_tensors, ctx.cutoff), *[None] * 6


coordination_numbers.register_autograd(_coordination_backward, setup_context=_save_coordination)


def _coordination(order: int, inputs: tuple, upstream=None, by_edge=None, by_vector=None) -> None:
    vectors, receivers, senders, numbers, radii, cutoff = inputs
    if not len(vectors):
        return
    arrays = Arrays(vectors)
    launch(
        coordination_kernel(),
        len(vectors),
        [order, arrays.vectors, *map(arrays.integers, (receivers, senders, numbers)), arrays.reals(radii), cutoff,
         arrays.reals(upstream)],
        [arrays.reals(by_edge), arrays.points(by_vector)],
        vectors.device,
    )  # fmt: skip


# --- pairs --------------------------------------------------------------------------------------------------------


@torch.library.custom_op("nvdd::d3_pairs", mutates_args=())
def pair_energies(
    vectors: Tensor,
    cn: Tensor,
    receivers: Tensor,
    senders: Tensor,
    numbers: Tensor,
    reference_cn: Tensor,
    n_references: Tensor,
    c6: Tensor,
    c8_over_c6: Tensor,
    radius: Tensor,
    rational: bool,
    damping: list[float],
    cutoff: float,
    n_atoms: int,
) -> Tensor:
    """(n_atoms,) energies of pairs in eV, half of each to its receiver; differentiable by ``vectors`` and ``cn``.

    Args:
        vectors: (E, 3) A.
        cn: (n_rows,) coordination numbers.
        receivers, senders: (E,) int64 rows.
        numbers: (n_rows,) int64 atomic numbers.
        reference_cn: (n_elements, 7).
        n_references: (n_elements,) int32, how many of these an element has.
        c6: (n_elements, n_elements, 7, 7) eV A^6, of pairs of reference systems.
        c8_over_c6: (n_elements, n_elements) A^2.
        radius: (n_elements, n_elements) A: the damping radius itself with rational damping, else R0.
        rational: rational (Becke-Johnson) damping, else zero damping.
        damping: s6, s8, and for zero damping rs6, rs8, alpha, beta (1/A).
        cutoff: A.
        n_atoms: how many rows receivers may be.
    """
    weights, slopes = reference_weights(cn, numbers, reference_cn)
    edge_energies = vectors.new_empty(len(vectors))
    tables = (n_references, c6, c8_over_c6, radius)
    _pairs(0, vectors, (receivers, senders, numbers), (weights, slopes), tables, rational, damping, cutoff,
           by_edge=edge_energies)  # fmt: skip
    return vectors.new_zeros(n_atoms).index_add_(0, receivers, edge_energies)


@torch.library.custom_op("nvdd::d3_pairs_gradient", mutates_args=())
def _pairs_gradient(
    upstream: Tensor,
    vectors: Tensor,
    cn: Tensor,
    receivers: Tensor,
    senders: Tensor,
    numbers: Tensor,
    reference_cn: Tensor,
    n_references: Tensor,
    c6: Tensor,
    c8_over_c6: Tensor,
    radius: Tensor,
    rational: bool,
    damping: list[float],
    cutoff: float,
) -> tuple[Tensor, Tensor]:
    """(E, 3) and (n_rows,): gradients of ``sum(upstream * pair_energies(...))`` by vectors and coordination numbers."""
    weights, slopes = reference_weights(cn, numbers, reference_cn)
    by_vector = torch.empty_like(vectors, memory_format=torch.contiguous_format)
    by_receiver, by_sender = vectors.new_empty(2, len(vectors)).unbind()
    tables = (n_references, c6, c8_over_c6, radius)
    _pairs(1, vectors, (receivers, senders, numbers), (weights, slopes), tables, rational, damping, cutoff, upstream,
           by_vector=by_vector, by_receiver=by_receiver, by_sender=by_sender)  # fmt: skip
    by_cn = torch.zeros_like(cn).index_add_(0, receivers, by_receiver).index_add_(0, senders, by_sender)
    return by_vector, by_cn


@pair_energies.register_fake
def _(vectors, *rest):
    return vectors.new_empty(rest[-1])


@_pairs_gradient.register_fake
def _(upstream, vectors, cn, *rest):
    return torch.empty_like(vectors, memory_format=torch.contiguous_format), torch.empty_like(cn)


def _save_pairs(ctx, inputs, output) -> None:
    *tensors, ctx.rational, ctx.damping, ctx.cutoff, _ = inputs
    ctx.save_for_backward(*tensors)


def _pairs_backward(ctx, upstream):
    found = _pairs_gradient(upstream.contiguous(), *ctx.saved_tensors, ctx.rational, ctx.damping, ctx.cutoff)
    return *found, *[None] * 12


pair_energies.register_autograd(_pairs_backward, setup_context=_save_pairs)


def _pairs(
    order: int, vectors, indices, weighting, tables, rational, damping, cutoff,
    upstream=None, by_edge=None, by_vector=None, by_receiver=None, by_sender=None,
) -> None:  # fmt: skip
    if not len(vectors):
        return
    arrays = Arrays(vectors)
    n_references, c6, c8_over_c6, radius = tables
    launch(
        pair_kernel(),
        len(vectors),
        [order, arrays.vectors, *map(arrays.integers, indices), *map(arrays.reals, weighting),
         arrays.small_integers(n_references), *map(arrays.reals, (c6, c8_over_c6, radius)), int(rational), *damping, cutoff,
         arrays.reals(upstream)],
        [arrays.reals(by_edge), arrays.points(by_vector), arrays.reals(by_receiver), arrays.reals(by_sender)],
        vectors.device,
    )  # fmt: skip
