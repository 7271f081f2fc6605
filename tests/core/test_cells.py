"""Frames: open axes completed, every handedness, wrapping that loses nothing."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from nvdd.cells import Frame, volume
from nvdd.errors import InputError

CELL = np.array([[4.0, 0.3, -0.2], [1.1, 5.0, 0.4], [-0.7, 0.9, 6.0]])


@pytest.mark.parametrize("pbc", list(product((True, False), repeat=3)))
@pytest.mark.parametrize("order", ((0, 1, 2), (1, 0, 2)))
def test_open_axes_are_completed(pbc, order):
    pbc, cell = np.array(pbc), CELL[list(order)]
    frame = Frame.of(np.where(pbc[:, None], cell, 0.0), pbc)
    np.testing.assert_array_equal(frame.cell[pbc], cell[pbc])
    np.testing.assert_allclose(frame.cell @ frame.inverse, np.eye(3), atol=1e-14)
    np.testing.assert_allclose(np.linalg.norm(frame.cell[~pbc], axis=1), 1.0, atol=1e-14)
    gram = frame.cell[~pbc] @ frame.cell.T
    np.testing.assert_allclose(gram, np.eye(3)[~pbc], atol=1e-13)
    # what the user gave along open axes has no influence
    again = Frame.of(cell, pbc)
    np.testing.assert_array_equal(again.cell, frame.cell)


def test_heights_are_distances_between_faces():
    frame = Frame.of(CELL, np.ones(3, bool))
    for axis in range(3):
        normal = np.cross(*np.delete(CELL, axis, axis=0))
        assert frame.heights[axis] == pytest.approx(abs(CELL[axis] @ normal) / np.linalg.norm(normal), rel=1e-14)


@pytest.mark.parametrize("pbc", ((True, True, True), (True, False, True), (False, False, False)))
def test_wrapping_can_be_undone(pbc):
    pbc = np.array(pbc)
    frame = Frame.of(CELL, pbc)
    rng = np.random.default_rng(0)
    whole = np.array(list(product((-2.0, -1.0, 0.0, 1.0), repeat=3))) @ CELL
    positions = np.concatenate([rng.uniform(-40, 40, (50, 3)), whole, whole - 1e-17])
    scaled, cells = frame.wrap(positions)
    assert (scaled[:, pbc] >= 0).all() and (scaled[:, pbc] <= 1).all()
    assert (cells[:, ~pbc] == 0).all()
    np.testing.assert_array_equal(cells, np.rint(cells))
    np.testing.assert_allclose((scaled + cells) @ frame.cell, positions, atol=1e-12)


@pytest.mark.parametrize(
    "cell,message",
    (
        (np.diag([4, 0, 4]), "axis 1 is periodic but its cell vector is zero"),
        ([[1, 0, 0], [0, 1, 0], [1, 1, 0]], "linearly dependent"),
        (np.full((3, 3), np.nan), "not finite"),
    ),
)
def test_cells_that_are_none(cell, message):
    with pytest.raises(InputError, match=message):
        Frame.of(cell, np.ones(3, bool))


def test_volume():
    assert volume(CELL) == volume(CELL[[1, 0, 2]]) == pytest.approx(abs(np.linalg.det(CELL)), rel=1e-14)
    assert volume(np.diag([1, 2, 0])) == 0
