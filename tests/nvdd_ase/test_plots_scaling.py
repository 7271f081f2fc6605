"""The picture of `nvdd scaling`."""

from __future__ import annotations

import pytest
from PIL import Image

from nvdd.errors import InputError
from nvdd_ase.plots_scaling import plot_scaling
from nvdd_ase.scaling import ScalingRow

ROWS = [
    ScalingRow(2, 0.6, 1.8, 0.9, (30, 34), (10, 12), (300, 340), 1e-14, 1.0, 1e-8),
    ScalingRow(1, 1.1, 1.0, 1.0, (64,), (0,), (640,), 0.0, 1.0, 1e-8),
]


def test_draws(tmp_path):
    plot_scaling(ROWS, tmp_path / "s.png", title="argon")
    with Image.open(tmp_path / "s.png") as picture:
        pixels = picture.convert("RGB")
        assert pixels.size == (1650, 540)
        assert {(0x44, 0x77, 0xAA), (0xCC, 0xBB, 0x44)} <= {colour for _, colour in pixels.getcolors(10**6)}


def test_another_kind_of_file(tmp_path):
    with pytest.raises(InputError, match="must end in one of"):
        plot_scaling(ROWS, tmp_path / "s.txt")
