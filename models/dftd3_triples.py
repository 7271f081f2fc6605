"""The three-body (Axilrod-Teller-Muto) term of DFT-D3 as a torch operation with first derivatives.

Rows and units are those of `nvdd.models.dftd3_terms`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvdd.models.dftd3_kernels import triple_kernel
from nvdd.models.dftd3_terms import Mixing, mixing
from nvdd.warp_runtime import Arrays, launch


@torch.library.custom_op("nvdd::d3_triples", mutates_args=())
def triple_energies(
    vectors: Tensor,
    cn: Tensor,
    receivers: Tensor,
    senders: Tensor,
    numbers: Tensor,
    reference_cn: Tensor,
    c6: Tensor,
    radius: Tensor,
    s9: float,
    exponent: float,
    cutoff: float,
    n_atoms: int,
    made: list[Tensor],
) -> Tensor:
    """(n_atoms,) Axilrod-Teller-Muto energies in eV, a third of each triple to each of its atoms.

    Args:
        vectors: (E, 3) A from receiver to sender (or all the other way); all shorter than ``cutoff``, sorted by receiver.
        radius: (n_elements, n_elements) A: ``4/3 R0``.
        s9: scale of the term.
        exponent: of ``(R^2 / r^2)`` over the three sides, ``(alpha + 2) / 6``.
        cutoff: A, also of the third side.

    The others are those of `pair_energies`.
    """
    edge_energies = vectors.new_empty(len(vectors))
    indices = (receivers, senders, _first_edges(receivers, n_atoms))
    atoms = (Mixing(*made) if made else mixing(cn, numbers, reference_cn, c6), radius)
    _triples(0, vectors, indices, atoms, (s9, exponent, cutoff), by_edge=edge_energies)
    return vectors.new_zeros(n_atoms).index_add_(0, receivers, edge_energies)


@torch.library.custom_op("nvdd::d3_triples_gradient", mutates_args=())
def _triples_gradient(
    upstream: Tensor,
    vectors: Tensor,
    cn: Tensor,
    receivers: Tensor,
    senders: Tensor,
    numbers: Tensor,
    reference_cn: Tensor,
    c6: Tensor,
    radius: Tensor,
    s9: float,
    exponent: float,
    cutoff: float,
    made: list[Tensor],
) -> tuple[Tensor, Tensor]:
    by_vector = torch.empty_like(vectors, memory_format=torch.contiguous_format)
    by_receiver, by_sender = vectors.new_empty(2, len(vectors)).unbind()
    indices = (receivers, senders, _first_edges(receivers, len(upstream)))
    atoms = (Mixing(*made) if made else mixing(cn, numbers, reference_cn, c6), radius)
    _triples(1, vectors, indices, atoms, (s9, exponent, cutoff), upstream,
             by_vector=by_vector, by_receiver=by_receiver, by_sender=by_sender)  # fmt: skip
    by_cn = torch.zeros_like(cn).index_add_(0, receivers, by_receiver).index_add_(0, senders, by_sender)
    return by_vector, by_cn


@triple_energies.register_fake
def _(vectors, *rest):
    return vectors.new_empty(rest[-2])


@_triples_gradient.register_fake
def _(upstream, vectors, cn, *rest):
    return torch.empty_like(vectors, memory_format=torch.contiguous_format), torch.empty_like(cn)


def _save_triples(ctx, inputs, output) -> None:
    *tensors, s9, exponent, cutoff, _, made = inputs
    ctx.save_for_backward(*tensors, *made)
    ctx.constants = s9, exponent, cutoff


def _triples_backward(ctx, upstream):
    saved = ctx.saved_tensors
    tensors, made = saved[:8], list(saved[8:])
    return *_triples_gradient(upstream.contiguous(), *tensors, *ctx.constants, made), *[None] * 10, [None] * len(made)


triple_energies.register_autograd(_triples_backward, setup_context=_save_triples)


def _first_edges(receivers: Tensor, n_atoms: int) -> Tensor:
    """(n_atoms + 1,) where each atom's edges begin, of sorted receivers."""
    return torch.searchsorted(receivers, torch.arange(n_atoms + 1, device=receivers.device))


def _triples(
    order: int, vectors, indices, atoms, constants,
    upstream=None, by_edge=None, by_vector=None, by_receiver=None, by_sender=None,
) -> None:  # fmt: skip
    if not len(vectors):
        return
    rows, radius = atoms
    arrays, radii = Arrays(vectors), rows.of_kinds(radius)
    launch(
        triple_kernel(),
        len(vectors),
        [order, arrays.vectors, *map(arrays.integers, (*indices, rows.kinds)), *map(arrays.reals, rows[1:5]),
         arrays.integers(rows.n_references), arrays.reals(radii), *constants, arrays.reals(upstream)],
        [arrays.reals(by_edge), arrays.points(by_vector), arrays.reals(by_receiver), arrays.reals(by_sender)],
        vectors.device,
    )  # fmt: skip
