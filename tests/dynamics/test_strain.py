"""Strains, and what their rates do."""

from __future__ import annotations

import numpy as np
import scipy.linalg
import torch

from nvdd.dynamics.strain import CellModes, flow

MATRICES = torch.tensor(
    [[[0.3, 0.1, -0.2], [0.1, -0.4, 0.05], [-0.2, 0.05, 0.2]], [[0.0] * 3] * 3, [[1e-9, 0, 0], [0, 0, 0], [0, 0, -2]]],
    dtype=torch.float64,
)


def test_flow_is_scipy_s():
    found = flow(*torch.linalg.eigh(MATRICES))
    for matrix, exponential, relative in zip(MATRICES, found.growth, found.source, strict=True):
        np.testing.assert_allclose(exponential, scipy.linalg.expm(matrix.numpy()), rtol=0, atol=1e-14)
        # the integral of exp(s x) over s from 0 to 1: a block of a larger exponential
        block = np.zeros((6, 6))
        block[:3, :3], block[:3, 3:] = matrix, np.eye(3)
        np.testing.assert_allclose(relative, scipy.linalg.expm(block)[:3, 3:], rtol=0, atol=1e-14)


def test_projections():
    tensor = torch.arange(9.0, dtype=torch.float64).reshape(1, 3, 3)
    iso, full = CellModes("x", "iso", [True] * 3), CellModes("x", "full", [True] * 3)
    two = CellModes("x", "aniso", (True, False, True))
    assert iso.project(tensor)[0].tolist() == [[4, 0, 0], [0, 4, 0], [0, 0, 4]]
    assert two.project(tensor)[0].tolist() == [[0, 0, 0], [0, 0, 0], [0, 0, 8]]
    assert full.project(tensor)[0].tolist() == [[0, 2, 4], [2, 4, 6], [4, 6, 8]]
    assert (iso.freedom, two.freedom, full.freedom) == (1, 2, 6)
    for modes in (iso, two, full):
        once = modes.project(tensor)
        torch.testing.assert_close(modes.project(once), once)
