"""The picture of `nvdd plan`: what is drawn, and that it is."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ase.build import bulk
from PIL import Image

from known_calibration import KNOWN
from nvdd.planning.estimate import estimate
from nvdd_ase.plots_plan import drawn, plot_plan

CELL = bulk("Ar", "fcc", a=5.26, cubic=True)


@pytest.mark.parametrize("arguments", ({}, {"balance": "rcb"}, {"strategy": "graph"}))
def test_draws(tmp_path, arguments):
    calibration = replace(KNOWN, strategy="graph curve" if "strategy" in arguments else "halo")
    found = estimate(None, CELL, (1, 2, 5), repeat=(8, 8, 4), calibration=calibration, **arguments)
    plot_plan(found, tmp_path / "plan.png", title="argon")
    with Image.open(tmp_path / "plan.png") as picture:
        pixels = picture.convert("RGB")
        assert pixels.size == (1950, 1050)
        assert {(0x44, 0x77, 0xAA), (0xEE, 0x66, 0x77)} <= {colour for _, colour in pixels.getcolors(10**6)}


def test_of_a_large_structure_a_part_is_drawn():
    found = estimate(None, CELL, (2, 8, 4096), repeat=(100, 100, 100), calibration=KNOWN, balance="grid")
    plan, tiled = drawn(found)
    assert plan.n_ranks == 8
    assert tiled.n_atoms <= 40_000 and tiled.repeat == (13, 25, 25)
