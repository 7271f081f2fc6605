"""The Lennard-Jones pair terms: a Warp kernel behind torch custom ops, with first and second derivatives.

Everything is a function of s = r^2, so the kernel takes no square root::

    u(s)    = w(s) (4 epsilon [(sigma^2/s)^6 - (sigma^2/s)^3] - offset)          for s < cutoff^2, else 0
    w(s)    = 1 up to onset^2, then (c - s)^2 (c + 2 s - 3 o) / (c - o)^3, with c = cutoff^2, o = onset^2

The switch w is ``cutoff_function`` of ase/calculators/lj.py; ASE took it from JAX-MD, JAX-MD from HOOMD-blue.
A directed edge gives u/2 to its receiver.
"""
# No `from __future__ import annotations` here: Warp reads the annotations of kernels as objects.

from functools import cache

import torch
from torch import Tensor

from nvdd.warp_runtime import launch, warp


@torch.library.custom_op("nvdd::lj_energies", mutates_args=())
def lj_energies(
    vectors: Tensor,
    receivers: Tensor,
    species: Tensor,
    sender_species: Tensor | None,
    epsilon: Tensor,
    sigma: Tensor,
    offset: Tensor,
    cutoff: float,
    onset: float,
) -> Tensor:
    """Per-atom energies of directed edges; differentiable twice by ``vectors``.

    Edges may come in any order. A CPU sums them one after the other; a GPU does so under
    ``torch.use_deterministic_algorithms(True)``, else in an order that varies.

    Args:
        vectors: (E, 3) float32 or float64, A; their sign does not matter.
        receivers: (E,) int64 in [0, n_atoms).
        species: (n_atoms,) int64 in [0, n_species).
        sender_species: (E,) int64, the species of each edge's sender; None if there is one species in all.
        epsilon: (n_species, n_species), eV, in the type of ``vectors``.
        sigma: (n_species, n_species), A.
        offset: (n_species, n_species), eV, taken off each pair's energy before the switch.
        cutoff: A; edges with r >= cutoff count nothing.
        onset: A; where the switch begins. ``onset >= cutoff``: no switch.

    Returns:
        (n_atoms,) energies in eV, in the type of ``vectors``.
    """
    edge_energies = vectors.new_empty(vectors.shape[0])
    pair = (vectors, receivers, species, sender_species, epsilon, sigma, offset, cutoff, onset)
    _launch(0, pair, by_edge=edge_energies)
    return vectors.new_zeros(species.shape[0]).index_add_(0, receivers, edge_energies)


@torch.library.custom_op("nvdd::lj_gradient", mutates_args=())
def lj_gradient(
    weights: Tensor,
    vectors: Tensor,
    receivers: Tensor,
    species: Tensor,
    sender_species: Tensor | None,
    epsilon: Tensor,
    sigma: Tensor,
    offset: Tensor,
    cutoff: float,
    onset: float,
) -> Tensor:
    """(E, 3) gradient of ``sum(weights * lj_energies(...))`` by ``vectors``; ``weights`` are (n_atoms,)."""
    gradient = torch.empty_like(vectors, memory_format=torch.contiguous_format)
    pair = (vectors, receivers, species, sender_species, epsilon, sigma, offset, cutoff, onset)
    _launch(1, pair, weights, by_vector=gradient)
    return gradient


@torch.library.custom_op("nvdd::lj_second", mutates_args=())
def lj_second(
    tangents: Tensor,
    weights: Tensor,
    vectors: Tensor,
    receivers: Tensor,
    species: Tensor,
    sender_species: Tensor | None,
    epsilon: Tensor,
    sigma: Tensor,
    offset: Tensor,
    cutoff: float,
    onset: float,
) -> tuple[Tensor, Tensor]:
    """Gradients of ``sum(tangents * lj_gradient(weights, ...))`` by ``weights`` and by ``vectors``.

    It has no derivative of its own: a third one raises.
    """
    by_edge = vectors.new_empty(vectors.shape[0])
    by_vector = torch.empty_like(vectors, memory_format=torch.contiguous_format)
    pair = (vectors, receivers, species, sender_species, epsilon, sigma, offset, cutoff, onset)
    _launch(2, pair, weights, tangents, by_edge, by_vector)
    return torch.zeros_like(weights).index_add_(0, receivers, by_edge), by_vector


@lj_energies.register_fake
def _(vectors, receivers, species, *rest):
    return vectors.new_empty(species.shape[0])


@lj_gradient.register_fake
def _(weights, vectors, *rest):
    return torch.empty_like(vectors, memory_format=torch.contiguous_format)


@lj_second.register_fake
def _(tangents, weights, vectors, *rest):
    return torch.empty_like(weights), torch.empty_like(vectors, memory_format=torch.contiguous_format)


def _save(ctx, inputs, output) -> None:
    *tensors, cutoff, onset = inputs
    ctx.save_for_backward(*tensors)
    ctx.radii = cutoff, onset
    # a gradient that is left out would read as zero: parameters are constants, or it is an error
    if any(parameter.requires_grad for parameter in tensors[-3:]):
        raise NotImplementedError(
            "nvdd::lj_energies has no gradient by epsilon, sigma or offset; use tensors without requires_grad"
        )


def _energies_backward(ctx, weights):
    return lj_gradient(weights, *ctx.saved_tensors, *ctx.radii), *[None] * 8


def _gradient_backward(ctx, tangents):
    by_weight, by_vector = lj_second(tangents, *ctx.saved_tensors, *ctx.radii)
    return by_weight, by_vector, *[None] * 8


lj_energies.register_autograd(_energies_backward, setup_context=_save)
lj_gradient.register_autograd(_gradient_backward, setup_context=_save)


def _launch(order: int, pair: tuple, weights=None, tangents=None, by_edge=None, by_vector=None) -> None:
    """Runs the kernel over the edges, in torch's current stream; what an order does not use stays None."""
    vectors, receivers, species, sender_species, epsilon, sigma, offset, cutoff, onset = pair
    n_edges, device = vectors.shape[0], vectors.device
    if n_edges == 0:
        return
    wp, real, vec3, kernel = _kernel(vectors.dtype)

    def array(tensor: Tensor | None, dtype):
        if tensor is None:
            tensor = vectors.new_empty((0, 3) if dtype is vec3 else 0)
        elif dtype is vec3:
            tensor = tensor.contiguous()  # all else may be strided
        return wp.from_torch(tensor, dtype=dtype, requires_grad=False, return_ctype=True)

    inputs = [
        order,
        array(vectors, vec3),
        array(receivers, wp.int64),
        array(species, wp.int64),
        array(species[:0] if sender_species is None else sender_species, wp.int64),
        array(epsilon, real),
        array(sigma, real),
        array(offset, real),
        cutoff * cutoff,
        onset * onset,
        array(weights, real),
        array(tangents, vec3),
    ]
    outputs = [array(by_edge, real), array(by_vector, vec3)]
    launch(kernel, n_edges, inputs, outputs, device)


@cache
def _kernel(dtype: torch.dtype) -> tuple:
    """Warp, its scalar and vector types for ``dtype``, and the kernel; its first launch compiles it.

    Each type has a Warp module of its own, so that using the second type does not rebuild the first.
    """
    if dtype not in (torch.float32, torch.float64):
        raise TypeError(f"nvdd::lj_energies takes float32 or float64 vectors, got {dtype}")
    wp = warp()
    real, vec3 = (wp.float32, wp.vec3f) if dtype == torch.float32 else (wp.float64, wp.vec3d)
    module = wp.get_module(f"{__name__}.{str(dtype).removeprefix('torch.')}")

    @wp.kernel(enable_backward=False, module=module)
    def lennard_jones(
        order: int,
        vectors: wp.array(dtype=vec3),
        receivers: wp.array(dtype=wp.int64),
        species: wp.array(dtype=wp.int64),
        sender_species: wp.array(dtype=wp.int64),
        epsilon: wp.array2d(dtype=real),
        sigma: wp.array2d(dtype=real),
        offset: wp.array2d(dtype=real),
        cutoff_sq: real,
        onset_sq: real,
        weights: wp.array(dtype=real),
        tangents: wp.array(dtype=vec3),
        by_edge: wp.array(dtype=real),
        by_vector: wp.array(dtype=vec3),
    ):
        edge = wp.tid()
        d = vectors[edge]
        receiver = receivers[edge]
        s = wp.dot(d, d)
        # u and its derivatives by s
        u = real(0.0)
        du = real(0.0)
        ddu = real(0.0)
        if not (s >= cutoff_sq):  # a NaN must come out as a NaN, not as an edge out of reach
            i = species[receiver]
            j = i  # one species in all: there is no table of senders
            if sender_species.shape[0] > 0:
                j = sender_species[edge]
            inverse = real(1.0) / s
            ratio = sigma[i, j] * sigma[i, j] * inverse
            c6 = ratio * ratio * ratio
            c12 = c6 * c6
            depth = real(4.0) * epsilon[i, j]
            u = depth * (c12 - c6) - offset[i, j]
            du = depth * (real(3.0) * c6 - real(6.0) * c12) * inverse
            ddu = depth * (real(42.0) * c12 - real(12.0) * c6) * inverse * inverse
            if s > onset_sq:
                width = cutoff_sq - onset_sq
                scale = real(1.0) / (width * width * width)
                rest = cutoff_sq - s
                w = rest * rest * (cutoff_sq + real(2.0) * s - real(3.0) * onset_sq) * scale
                dw = real(6.0) * rest * (onset_sq - s) * scale
                ddw = real(6.0) * (real(2.0) * s - cutoff_sq - onset_sq) * scale
                ddu = w * ddu + real(2.0) * dw * du + ddw * u
                du = w * du + dw * u
                u = w * u
        # the edge's energy u/2; its gradient by the vector, u' d; the derivatives of that along a tangent
        if order == 0:
            by_edge[edge] = real(0.5) * u
        elif order == 1:
            by_vector[edge] = weights[receiver] * du * d
        else:
            along = wp.dot(d, tangents[edge])
            by_edge[edge] = du * along
            by_vector[edge] = weights[receiver] * (du * tangents[edge] + real(2.0) * ddu * along * d)

    return wp, real, vec3, lennard_jones
