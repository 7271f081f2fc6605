"""Plots of logs: which panels there are."""

from __future__ import annotations

import csv

import pytest
from PIL import Image

from nvdd_ase.plots import plot_md_log

PANELS = {"imbalance": "1.0", "pressure_GPa": ""}


@pytest.mark.parametrize(("values", "panels"), [
    ({}, 2), ({"pressure_GPa": "0.1"}, 3), ({"imbalance": "1.07"}, 3), ({"pressure_GPa": "0.1", "imbalance": "1.07"}, 4),
])  # fmt: skip
def test_pressure_and_load_have_panels_where_there_are_such(tmp_path, values, panels):
    lines = [
        {"time_fs": str(10 * k), "epot_eV": "-1", "conserved_eV": "-0.5", "temperature_K": "300", **PANELS, **values} for k in range(3)
    ]
    with open(tmp_path / "run.csv", "w", newline="") as file:
        table = csv.DictWriter(file, lines[0])
        table.writeheader()
        table.writerows(lines)
    plot_md_log(tmp_path / "run.csv", tmp_path / "run.png")
    with Image.open(tmp_path / "run.png") as picture:
        assert picture.size == (1050, round(150 * (2.2 * panels + 0.6)))
