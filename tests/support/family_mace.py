"""MACE with random weights, and MACE with ZBL repulsion: as in `parity`, and with hydrogen."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from builders import random_mace
from families import Case
from nvdd.models.mace import MACEWrapper

MODELS = {
    "mace": {"elements": (1, 8, 14)},
    "mace-zbl": {"elements": (1, 8, 14), "zbl": True, "n_layers": 3, "hidden": "8x0e+8x1o"},
}


@cache
def calculator(name: str) -> Any:
    from mace.calculators import MACECalculator

    return MACECalculator(models=random_mace(**MODELS[name]), device="cpu", default_dtype="float64")


def make_case(name: str, exchanges: int, layers: int) -> Case:
    def write(folder: Path) -> tuple[str, dict[str, Any]]:
        torch.save(random_mace(**MODELS[name]), folder / "random.model")
        return f"mace:{folder / 'random.model'}", {}

    wrapper = lambda: MACEWrapper(random_mace(**MODELS[name])).requires_grad_(False)
    return Case(wrapper, lambda: calculator(name), write, {"halo": exchanges, "graph": exchanges}, layers)


# features of each layer, the gradients of those that depend on positions, forces; species for ZBL
CASES = {"mace": make_case("mace", 4, 2), "mace-zbl": make_case("mace-zbl", 7, 3)}
