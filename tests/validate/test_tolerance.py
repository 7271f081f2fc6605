"""Absolute and relative limits hold together, by system, in atom order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nvdd.validate import Tolerance
from nvdd.validate.tolerance import compare

LIMITS = Tolerance(1e-6, 1e-6)


def of(found, reference, **more):
    return compare("forces", "", np.asarray(found, float), np.asarray(reference, float), LIMITS, **more)


def test_both_limits():
    system = np.zeros(2, int)
    assert of([[1.0], [2.0]], [[1.0], [2.0 + 9e-7]], system=system).ok
    # small in A of the other limit, not in its own
    assert not of([[1e-8], [0.0]], [[2e-8], [0.0]], system=system).ok  # relative 1
    assert not of([[1e6], [0.0]], [[1e6 + 1e-3], [0.0]], system=system).ok  # relative 1e-9, absolute 1e-3


def test_atom_order_and_not_sorted_rows():
    rows = np.arange(12.0).reshape(4, 3)
    assert not of(rows[::-1], rows, system=np.zeros(4, int)).ok


def test_scale_is_that_of_the_own_system():
    reference = np.array([[1.0], [1e-4]])
    found = reference + np.array([[0.0], [1e-9]])
    assert of(found, reference, system=np.array([0, 0])).ok
    assert not of(found, reference, system=np.array([0, 1])).ok


def test_zero_by_symmetry_takes_the_scale_of_other_geometries():
    found, zero = np.full((2, 3), 1e-12), np.zeros((2, 3))
    assert not of(found, zero, system=np.zeros(2, int)).ok
    assert of(found, zero, system=np.zeros(2, int), largest=0.1).ok


def test_of_round_off_only_the_absolute_error_tells():
    found, noise = np.full((2, 3), 1e-15), np.full((2, 3), -2e-16)
    assert of(found, noise, system=np.zeros(2, int), largest=2e-16).ok
    assert not of(found + 1e-5, noise, system=np.zeros(2, int), largest=2e-16).ok


def test_energies_are_per_atom_in_the_absolute_limit_only():
    counts = np.array([1000])
    energy = lambda d: compare("energy", "", np.array([-1e4 + d]), np.array([-1e4]), LIMITS, None, counts)
    assert energy(5e-4).ok and not energy(5e-3).ok  # of an energy of -1e4 eV: 5e-7 relative
    assert not compare("total", "", np.array([-1e4 + 5e-4]), np.array([-1e4]), LIMITS, None, counts).ok


@pytest.mark.parametrize(
    ("found", "words"),
    [(np.zeros((3, 3)), "shape"), (np.full((2, 3), np.nan), "not finite"), (np.full((2, 3), np.inf), "not finite")],
)
def test_never_passes(found, words):
    result = of(found, np.ones((2, 3)), system=np.zeros(2, int))
    assert not result.ok and words in str(result)


def test_a_reference_that_is_not_finite_passes_nothing():
    nan = np.full((2, 3), np.nan)
    assert not of(nan, nan, system=np.zeros(2, int)).ok


def test_says_where():
    found = np.zeros((5, 3))
    found[3, 1] = 1
    result = of(found, np.zeros((5, 3)), system=np.zeros(5, int), largest=1.0)
    assert not result.ok and result.where == "atom 3"


def test_defaults_by_precision():
    assert Tolerance.of(torch.float64).atol < 1e-7 < Tolerance.of(torch.float32).atol
    assert Tolerance.of(torch.float32, atol=1e-3) == Tolerance(1e-3, Tolerance.of(torch.float32).rtol)
