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

TASK = ("omat",)  # one only, so that it need not be named; without charge and spin, which fairchem then takes for 0


@cache
def wrapper(model: str) -> UMAWrapper:
    return load(f"uma:{checkpoint(model, 'float64', TASK)}")


def write(model: str, folder: Path) -> tuple[str, dict[str, Any]]:
    shutil.copy(checkpoint(model, "float64", TASK), folder / "model.pt")
    return f"uma:{folder / 'model.pt'}", {}


def _case(model: str, layers: int) -> Case:
    return Case(
        wrapper=lambda: wrapper(model),
        calculator=lambda: calculator(model, "omat", weights="float64", tasks=TASK),
        write=lambda folder: write(model, folder),
        # features in each layer, their gradients, forces
        exchanges=dict.fromkeys(("halo", "graph"), 2 * layers + 1),
        layers=layers,
        # a lone atom's energy is not the network's: fairchem has a table
        envelope=(*(name for name in SILICA if name != "silica atom"), "silane-like", "quartz unit", "silica bar"),
        atomic=False,
    )


CASES = {"uma": _case("uma", 2), "uma-1.2": _case("uma-1.2", 2), "uma-esen": _case("esen", 2), "uma-3": _case("uma-3", 3)}
