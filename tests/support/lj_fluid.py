"""The Lennard-Jones fluid in reduced units: pressure by an equation of state, and of the tail beyond a cutoff.

Kolafa and Nezbeda, Fluid Phase Equilib. 100, 1 (1994), doi:10.1016/0378-3812(94)80001-4: hard spheres with the
diameter d(T), a correction of the second virial coefficient, and a sum over powers of density and temperature, fitted
to simulations of the untruncated fluid.
"""

from __future__ import annotations

import math

# table 3 there: Helmholtz energy, coefficient of T^(i/2) rho^j
_SUM = {
    (0, 2): 2.01546797, (0, 3): -28.17881636, (0, 4): 28.28313847, (0, 5): -10.42402873,
    (-1, 2): -19.58371655, (-1, 3): 75.62340289, (-1, 4): -120.70586598, (-1, 5): 93.92740328, (-1, 6): -27.37737354,
    (-2, 2): 29.34470520, (-2, 3): -112.35356937, (-2, 4): 170.64908980, (-2, 5): -123.06669187, (-2, 6): 34.42288969,
    (-4, 2): -13.37031968, (-4, 3): 65.38059570, (-4, 4): -115.09233113, (-4, 5): 88.91973082, (-4, 6): -25.62099890,
}  # fmt: skip
# powers of T^(1/2) in the correction of the second virial coefficient, and in the diameter
_VIRIAL = {
    -7: -0.58544978, -6: 0.43102052, -5: 0.87361369, -4: -4.13749995, -3: 2.90616279, -2: -7.02181962, 0: 0.02459877
}  # fmt: skip
_DIAMETER = {-2: 0.011117524, -1: -0.076383859, 0: 1.080142248, 1: 0.000693129}
_GAMMA = 1.92907278


def pressure(temperature: float, density: float) -> float:
    """Of the whole fluid, epsilon / sigma^3, at k T / epsilon and atoms per sigma^3."""
    root = math.sqrt(temperature)
    series = lambda powers: sum(c * root**i for i, c in powers.items())
    diameter = series(_DIAMETER) - 0.063920968 * math.log(temperature)
    eta = math.pi / 6 * density * diameter**3
    hard = (1 + eta + eta**2 - 2 / 3 * eta**3 * (1 + eta)) / (1 - eta) ** 3
    square = _GAMMA * density**2
    second = density * (1 - 2 * square) * math.exp(-square) * series(_VIRIAL)
    rest = sum(c * root**i * j * density**j for (i, j), c in _SUM.items())
    return density * (temperature * (hard + second) + rest)


def tail_pressure(density: float, cutoff: float) -> float:
    """What pairs beyond the cutoff (sigma) add, if nothing is correlated there."""
    return 16 / 3 * math.pi * density**2 * (2 / 3 * cutoff**-9 - cutoff**-3)
