"""What a trajectory of numbers says: independent samples, drift, errors of means."""

from __future__ import annotations

import numpy as np


def correlation_length(values: np.ndarray) -> float:
    """Samples from one independent value to the next, twice the integrated autocorrelation time.

    The sum of correlations ends where they are no longer positive in pairs (Geyer, Stat. Sci. 7, 473 (1992)).
    """
    x = np.asarray(values, float) - np.mean(values)
    n = len(x)
    spectrum = np.fft.rfft(x, 2 * n)
    c = np.fft.irfft(spectrum * spectrum.conj())[:n] / np.arange(n, 0, -1)
    if c[0] == 0:
        return 1.0
    c = c / c[0]
    total = 1.0
    for k in range(1, n - 1, 2):
        pair = c[k] + c[k + 1]
        if pair <= 0:
            break
        total += 2 * pair
    return max(1.0, total)


def independent(values: np.ndarray) -> np.ndarray:
    """Values so far apart that they hardly depend on each other."""
    return np.asarray(values)[:: int(np.ceil(2 * correlation_length(values)))]


def mean_and_error(values: np.ndarray) -> tuple[float, float]:
    """Mean, and its standard error from the correlation of the values."""
    n = len(values) / correlation_length(values)
    return float(np.mean(values)), float(np.std(values) / np.sqrt(n))


def drift(values: np.ndarray) -> tuple[float, float]:
    """Change over the whole series by a straight line, and the spread around that."""
    x = np.linspace(0.0, 1.0, len(values))
    slope, offset = np.polyfit(x, values, 1)
    return float(slope), float(np.std(values - slope * x - offset))
