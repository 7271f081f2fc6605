"""Warp kernels of DFT-D3: coordination numbers, pairs, triples. Lengths in A, energies in eV, all in float64.

One thread for an edge; each edge's share goes into a row of its own, so that sums over them are torch's and come in
the same order each time. Nothing else is kept for an edge, so memory does not grow with the terms of the formulas.
"""
# No `from __future__ import annotations` here: Warp reads the annotations of kernels as objects.

from functools import cache
from typing import Any

from nvdd.warp_runtime import warp


@cache
def coordination_kernel() -> Any:
    """``count(r) = 1 / (1 + exp(-16 (R / r - 1)))`` of each edge, and its derivative by r, over r."""
    wp = warp()
    module = wp.get_module(f"{__name__}.coordination")

    @wp.kernel(enable_backward=False, module=module)
    def coordination(
        vectors: wp.array(dtype=wp.vec3d),
        receivers: wp.array(dtype=wp.int64),
        senders: wp.array(dtype=wp.int64),
        numbers: wp.array(dtype=wp.int64),
        radii: wp.array(dtype=wp.float64),
        cutoff: wp.float64,
        counts: wp.array(dtype=wp.float64),
        slopes: wp.array(dtype=wp.float64),
    ):
        edge = wp.tid()
        s = wp.dot(vectors[edge], vectors[edge])
        count = wp.float64(0.0)
        slope = wp.float64(0.0)
        if not (s >= cutoff * cutoff):  # a NaN must come out as a NaN, not as an edge out of reach
            r = wp.sqrt(s)
            reach = radii[numbers[receivers[edge]]] + radii[numbers[senders[edge]]]
            e = wp.exp(wp.float64(-16.0) * (reach / r - wp.float64(1.0)))
            count = wp.float64(1.0) / (wp.float64(1.0) + e)
            slope = wp.float64(-16.0) * count * count * e * reach / (s * r)
        counts[edge] = count
        slopes[edge] = slope

    return coordination


@cache
def pair_kernel() -> Any:
    """Energies of pairs, half of each to the receiver, and their derivatives."""
    wp = warp()
    module = wp.get_module(f"{__name__}.pairs")

    @wp.kernel(enable_backward=False, module=module)
    def pairs(
        vectors: wp.array(dtype=wp.vec3d),
        receivers: wp.array(dtype=wp.int64),
        senders: wp.array(dtype=wp.int64),
        kinds: wp.array(dtype=wp.int64),
        weights: wp.array2d(dtype=wp.float64),
        slopes: wp.array2d(dtype=wp.float64),
        mixed: wp.array3d(dtype=wp.float64),
        mixed_slopes: wp.array3d(dtype=wp.float64),
        n_references: wp.array(dtype=wp.int64),
        c8_over_c6: wp.array2d(dtype=wp.float64),
        radius: wp.array2d(dtype=wp.float64),
        rational: int,
        s6: wp.float64,
        s8: wp.float64,
        rs6: wp.float64,
        rs8: wp.float64,
        alpha: wp.float64,
        beta: wp.float64,
        cutoff: wp.float64,
        energies: wp.array(dtype=wp.float64),
        by_length: wp.array(dtype=wp.float64),
        by_receiver: wp.array(dtype=wp.float64),
        by_sender: wp.array(dtype=wp.float64),
    ):
        edge = wp.tid()
        one = wp.float64(1.0)
        six = wp.float64(6.0)
        d = vectors[edge]
        s = wp.dot(d, d)
        i = receivers[edge]
        j = senders[edge]
        shape = wp.float64(0.0)  # energy / C6
        slope = wp.float64(0.0)  # its derivative by r, over r
        c = wp.float64(0.0)
        ci = wp.float64(0.0)  # derivatives of C6 by the coordination numbers
        cj = wp.float64(0.0)
        if not (s >= cutoff * cutoff):  # a NaN must come out as a NaN, not as an edge out of reach
            ki = kinds[i]
            kj = kinds[j]
            for b in range(int(n_references[kj])):
                c += mixed[i, kj, b] * weights[j, b]
                ci += mixed_slopes[i, kj, b] * weights[j, b]
                cj += mixed[i, kj, b] * slopes[j, b]
            qq = c8_over_c6[ki, kj]
            r0 = radius[ki, kj]
            if rational == 1:
                r2 = r0 * r0
                t6 = one / (s * s * s + r2 * r2 * r2)
                t8 = one / (s * s * s * s + r2 * r2 * r2 * r2)
                shape = -(s6 * t6 + s8 * qq * t8)
                slope = six * s6 * t6 * t6 * s * s + wp.float64(8.0) * s8 * qq * t8 * t8 * s * s * s
            else:
                r = wp.sqrt(s)
                base6 = r / (rs6 * r0) + beta * r0
                base8 = r / (rs8 * r0) + beta * r0
                u6 = six * wp.pow(base6, -alpha)
                u8 = six * wp.pow(base8, -(alpha + wp.float64(2.0)))
                f6 = one / (one + u6)
                f8 = one / (one + u8)
                e6 = s6 * f6 / (s * s * s)
                e8 = s8 * qq * f8 / (s * s * s * s)
                shape = -(e6 + e8)
                g6 = alpha * f6 * u6 / (base6 * rs6 * r0)
                g8 = (alpha + wp.float64(2.0)) * f8 * u8 / (base8 * rs8 * r0)
                slope = -(e6 * (g6 / r - six / s) + e8 * (g8 / r - wp.float64(8.0) / s))
        half = wp.float64(0.5)
        energies[edge] = half * c * shape
        by_length[edge] = half * c * slope
        by_receiver[edge] = half * ci * shape
        by_sender[edge] = half * cj * shape

    return pairs


@cache
def pair_gradient_kernel() -> Any:
    """Gradients of pairs by vectors and by the sender's coordination number, from the derivatives of each edge."""
    wp = warp()
    module = wp.get_module(f"{__name__}.pair_gradient")

    @wp.kernel(enable_backward=False, module=module)
    def pair_gradient(
        vectors: wp.array(dtype=wp.vec3d),
        receivers: wp.array(dtype=wp.int64),
        by_length: wp.array(dtype=wp.float64),
        by_sender: wp.array(dtype=wp.float64),
        upstream: wp.array(dtype=wp.float64),
        by_vector: wp.array(dtype=wp.vec3d),
        by_cn: wp.array(dtype=wp.float64),
    ):
        edge = wp.tid()
        g = upstream[receivers[edge]]
        by_vector[edge] = g * by_length[edge] * vectors[edge]
        by_cn[edge] = g * by_sender[edge]

    return pair_gradient


@cache
def triple_kernel() -> Any:
    """Energies of triples at the receiver of two of their edges, a third of each; or the gradients, as for pairs.

    Edges are sorted by receiver; each thread goes through the other edges of its receiver.
    """
    wp = warp()
    module = wp.get_module(f"{__name__}.triples")

    @wp.func
    def mixed_c6(
        i: wp.int64,
        j: wp.int64,
        kj: wp.int64,
        weights: wp.array2d(dtype=wp.float64),
        slopes: wp.array2d(dtype=wp.float64),
        mixed: wp.array3d(dtype=wp.float64),
        mixed_slopes: wp.array3d(dtype=wp.float64),
        n_references: wp.array(dtype=wp.int64),
    ) -> wp.vec3d:
        """C6 of two rows, and its derivatives by the coordination numbers of both."""
        c = wp.float64(0.0)
        ci = wp.float64(0.0)
        cj = wp.float64(0.0)
        for b in range(int(n_references[kj])):
            c += mixed[i, kj, b] * weights[j, b]
            ci += mixed_slopes[i, kj, b] * weights[j, b]
            cj += mixed[i, kj, b] * slopes[j, b]
        return wp.vec3d(c, ci, cj)

    @wp.kernel(enable_backward=False, module=module)
    def triples(
        order: int,
        vectors: wp.array(dtype=wp.vec3d),
        receivers: wp.array(dtype=wp.int64),
        senders: wp.array(dtype=wp.int64),
        first: wp.array(dtype=wp.int64),
        kinds: wp.array(dtype=wp.int64),
        weights: wp.array2d(dtype=wp.float64),
        slopes: wp.array2d(dtype=wp.float64),
        mixed: wp.array3d(dtype=wp.float64),
        mixed_slopes: wp.array3d(dtype=wp.float64),
        n_references: wp.array(dtype=wp.int64),
        radius: wp.array2d(dtype=wp.float64),
        s9: wp.float64,
        exponent: wp.float64,
        cutoff: wp.float64,
        upstream: wp.array(dtype=wp.float64),
        by_edge: wp.array(dtype=wp.float64),
        by_vector: wp.array(dtype=wp.vec3d),
        by_receiver: wp.array(dtype=wp.float64),
        by_sender: wp.array(dtype=wp.float64),
    ):
        edge = wp.tid()
        i = receivers[edge]
        j = senders[edge]
        d = vectors[edge]
        zero = wp.float64(0.0)
        one = wp.float64(1.0)
        x = wp.dot(d, d)
        ki = kinds[i]
        kj = kinds[j]
        cij = mixed_c6(i, j, kj, weights, slopes, mixed, mixed_slopes, n_references)
        rij = radius[ki, kj]
        energy = zero
        along = zero  # gradient by the vector: along d, and along the third sides
        across = wp.vec3d(zero, zero, zero)
        of_i = zero
        of_j = zero
        for other in range(int(first[i]), int(first[i + wp.int64(1)])):
            if other == edge:
                continue
            k = senders[other]
            side = d - vectors[other]
            z = wp.dot(side, side)
            if z >= cutoff * cutoff:
                continue
            y = wp.dot(vectors[other], vectors[other])
            kk = kinds[k]
            cik = mixed_c6(i, k, kk, weights, slopes, mixed, mixed_slopes, n_references)
            cjk = mixed_c6(j, k, kk, weights, slopes, mixed, mixed_slopes, n_references)
            c9 = s9 * wp.sqrt(wp.abs(cij[0] * cik[0] * cjk[0]))
            r0 = rij * radius[ki, kk] * radius[kj, kk]
            p = x * y * z  # the three sides squared
            u = wp.float64(6.0) * wp.pow(r0 * r0 / p, exponent)
            f = one / (one + u)
            p15 = one / (p * wp.sqrt(p))
            a = x + z - y
            b = x + y - z
            c = y + z - x
            angle = wp.float64(0.375) * a * b * c * p15 / p + p15
            e = c9 * f * angle
            energy += e
            if order == 1:
                by_p = exponent * u * f * f / p * angle  # f' angle + f (angle' at fixed a b c)
                by_p += f * (wp.float64(-0.9375) * a * b * c * p15 / (p * p) - wp.float64(1.5) * p15 / p)
                by_x = by_p * y * z + f * wp.float64(0.375) * p15 / p * (b * c + a * c - a * b)
                by_z = by_p * x * y + f * wp.float64(0.375) * p15 / p * (b * c - a * c + a * b)
                along += wp.float64(2.0) * c9 * by_x
                across += wp.float64(2.0) * c9 * by_z * side
                of_i += wp.float64(0.5) * e * cij[1] / cij[0]
                of_j += wp.float64(0.5) * e * (cij[2] / cij[0] + cjk[1] / cjk[0])
        if order == 0:
            by_edge[edge] = energy / wp.float64(6.0)  # each pair of edges is met twice
        else:
            g = upstream[i] / wp.float64(3.0)
            by_vector[edge] = g * (along * d + across)
            by_receiver[edge] = g * of_i
            by_sender[edge] = g * of_j

    return triples
