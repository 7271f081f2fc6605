"""Lennard-Jones by brute force in plain numpy, float64: no neighbour list, no code of nvdd."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

_VOIGT = ((0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1))


def brute_force_lj(
    positions: np.ndarray,
    numbers: np.ndarray,
    cell: np.ndarray,
    pbc: bool | tuple[bool, bool, bool],
    epsilon: float | dict[int, float],
    sigma: float | dict[int, float],
    cutoff: float,
    shift: str = "none",
    onset: float | None = None,
    mixing: str = "geometric",
    pair_coeffs: dict[tuple[int, int], tuple[float, float]] | None = None,
) -> dict[str, Any]:
    """Sums ``4 eps [(sig/r)^12 - (sig/r)^6]`` over all pairs and periodic images with r < cutoff.

    Args:
        positions: (N, 3), A; atoms may be anywhere, also outside the cell.
        numbers: (N,) atomic numbers.
        cell: (3, 3), A, rows are the vectors; any handedness; zero rows where ``pbc`` is False.
        pbc: for each vector, or one for all.
        epsilon: eV, a number or one for each atomic number.
        sigma: A, likewise.
        cutoff: A.
        shift: "none", "energy" (phi(cutoff) taken off) or "smooth" (ASE's switch between onset and cutoff).
        onset: A; default 0.66 cutoff.
        mixing: "geometric" or "arithmetic", for unlike elements.
        pair_coeffs: (epsilon, sigma) of unlike elements, by a pair of atomic numbers.

    Returns:
        energy, eV; energies (N,), eV, half of each pair to each atom; forces (N, 3), eV/A;
        stress (6,), eV/A^3, Voigt order xx yy zz yz xz xy, positive under tension; stresses (N, 6), which
        sum to it, half of each pair to each atom (both None if the cell has no volume);
        n_edges, the number of directed pairs (i, j, image).
    """
    x = np.asarray(positions, dtype=np.float64).reshape(-1, 3)
    cell = np.asarray(cell, dtype=np.float64).reshape(3, 3)
    n = len(x)
    eps, sig = _pair_tables(np.asarray(numbers), epsilon, sigma, mixing, pair_coeffs or {})

    periodic = cell[np.broadcast_to(np.asarray(pbc, dtype=bool), 3)]  # (m, 3)
    if np.linalg.matrix_rank(periodic) < len(periodic):
        raise ValueError(f"periodic cell vectors are zero or linearly dependent: {periodic.tolist()}")
    inverse = np.linalg.pinv(periodic)  # (3, m): x @ inverse are fractional coordinates

    # the image of j nearest to i in fractional coordinates, each within half a cell vector of it
    difference = x[None, :, :] - x[:, None, :]  # x_j - x_i at [i, j]
    nearest = -np.rint(difference @ inverse)  # (N, N, m)
    # a vector shorter than the cutoff is within cutoff * |column k of inverse| in fractional coordinate k
    reach = np.floor(cutoff * np.linalg.norm(inverse, axis=0) + 0.5 + 1e-9).astype(int)

    energies, forces, virials = np.zeros(n), np.zeros((n, 3)), np.zeros((n, 6))
    n_edges = 0
    for extra in product(*(range(-k, k + 1) for k in reach)):
        image = nearest + np.array(extra).reshape(-1)
        vectors = difference + image @ periodic
        squares = np.einsum("ijk,ijk->ij", vectors, vectors)
        itself = np.eye(n, dtype=bool) & ~image.any(axis=2)
        i, j = np.nonzero((squares < cutoff * cutoff) & ~itself)
        r, r2 = vectors[i, j], squares[i, j]
        phi, dphi = _phi(r2, eps[i, j], sig[i, j], cutoff, shift, 0.66 * cutoff if onset is None else onset)
        # every pair comes up twice, as (i, j) and as (j, i): each time one half, all of it to atom i
        energies += np.bincount(i, 0.5 * phi, minlength=n)
        gradient = 2.0 * dphi[:, None] * r  # of phi by r_ij: phi depends on r^2
        for k in range(3):
            forces[:, k] += np.bincount(i, gradient[:, k], minlength=n)
        for k, (a, b) in enumerate(_VOIGT):
            virials[:, k] += np.bincount(i, 0.5 * gradient[:, a] * r[:, b], minlength=n)
        n_edges += len(i)

    volume = abs(np.linalg.det(cell))
    return {
        "energy": energies.sum(),
        "energies": energies,
        "forces": forces,
        "stress": virials.sum(axis=0) / volume if volume > 0 else None,
        "stresses": virials / volume if volume > 0 else None,
        "n_edges": n_edges,
    }


def _phi(r2, eps, sig, cutoff: float, shift: str, onset: float) -> tuple[np.ndarray, np.ndarray]:
    """Pair energies and their derivatives by r^2."""
    six = (sig * sig / r2) ** 3
    phi = 4 * eps * (six**2 - six)
    dphi = -12 * eps * (2 * six**2 - six) / r2
    if shift == "energy":
        at_cutoff = (sig / cutoff) ** 6
        phi = phi - 4 * eps * (at_cutoff**2 - at_cutoff)
    elif shift == "smooth":
        # 1 at the onset and 0 at the cutoff, as a cubic of t: the same polynomial as ASE's
        t = np.clip((r2 - onset**2) / (cutoff**2 - onset**2), 0, 1)
        w, dw = (1 - t) ** 2 * (1 + 2 * t), -6 * t * (1 - t) / (cutoff**2 - onset**2)
        phi, dphi = w * phi, w * dphi + dw * phi
    elif shift != "none":
        raise ValueError(f"unknown shift {shift!r}")
    return phi, dphi


def _pair_tables(numbers, epsilon, sigma, mixing: str, pair_coeffs) -> tuple[np.ndarray, np.ndarray]:
    """Epsilon and sigma of each pair of atoms, (N, N) each."""
    by_element = isinstance(epsilon, dict)
    e = np.array([epsilon[z] if by_element else epsilon for z in numbers.tolist()], dtype=np.float64)
    s = np.array([sigma[z] if by_element else sigma for z in numbers.tolist()], dtype=np.float64)
    alike = numbers[:, None] == numbers[None, :]
    eps = np.where(alike, e[:, None], np.sqrt(np.outer(e, e)))
    mixed = {"geometric": np.sqrt(np.outer(s, s)), "arithmetic": (s[:, None] + s[None, :]) / 2}[mixing]
    sig = np.where(alike, s[:, None], mixed)
    for (a, b), values in pair_coeffs.items():
        these = (numbers[:, None] == a) & (numbers[None, :] == b)
        these |= these.T
        eps[these], sig[these] = values
    return eps, sig
