"""UMA and eSEN with random weights, from files as fairchem's training writes them."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

from families import SILICA, Case
from nvdd.models.registry import load
from nvdd.models.uma import UMAWrapper
from uma_models import calculator, checkpoint

OPTIONS: dict[str, Any] = {"task": "omat", "charge": 0, "spin": 0}


@cache
def wrapper(model: str) -> UMAWrapper:
    return load(f"uma:{checkpoint(model, 'float64')}", **OPTIONS)


def write(model: str, folder: Path) -> tuple[str, dict[str, Any]]:
    shutil.copy(checkpoint(model, "float64"), folder / "model.pt")
    return f"uma:{folder / 'model.pt'}", OPTIONS


def _case(model: str, layers: int) -> Case:
    return Case(
        wrapper=lambda: wrapper(model),
        calculator=lambda: calculator(model, "omat", weights="float64"),
        write=lambda folder: write(model, folder),
        # features in each layer, their gradients, forces
        exchanges=dict.fromkeys(("halo", "graph"), 2 * layers + 1),
        layers=layers,
        # a lone atom's energy is not the network's: fairchem has a table
        envelope=(*(name for name in SILICA if name != "silica atom"), "silane-like", "quartz unit", "silica bar"),
        atomic=False,
    )


CASES = {"uma": _case("uma", 2), "uma-1.2": _case("uma-1.2", 2), "uma-esen": _case("esen", 2), "uma-3": _case("uma-3", 3)}
