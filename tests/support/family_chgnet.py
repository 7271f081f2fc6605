"""CHGNet: the weights that come with chgnet, as they ship and cast to float64."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from ase.calculators.calculator import Calculator, all_changes

import chgnet_reference
from families import Case
from nvdd.models import registry


class InDouble(Calculator):
    """chgnet's graph, layers and derivatives in float64, for which CHGNetCalculator has no option."""

    implemented_properties = ("energy", "energies", "forces", "stress", "magmoms")

    def __init__(self, name: str) -> None:
        super().__init__()
        self.model_name = name

    def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes) -> None:
        super().calculate(atoms, properties, system_changes)
        self.results = chgnet_reference.float64(self.model_name, self.atoms)
        self.results["stress"] = self.results["stress"].flat[[0, 4, 8, 5, 2, 1]]


@cache
def wrapper(name: str, dtype: torch.dtype | None = torch.float64) -> Any:
    return registry.load(f"chgnet:{name}", dtype=dtype)


def make_case(name: str, **more: Any) -> Case:
    def write(folder: Path) -> tuple[str, dict[str, Any]]:
        module, path = chgnet_reference.module(name, torch.float64), folder / "chgnet.pth.tar"
        torch.save({"model": module.as_dict()}, path)
        return f"chgnet:{path}", {}

    return Case(lambda: wrapper(name), lambda: InDouble(name), write, layers=4, **more)


CASES = {
    "chgnet": make_case("0.3.0", exchanges={"halo": 24, "graph": 24}),
    "chgnet-0.2.0": make_case("0.2.0", exchanges={"halo": 24, "graph": 24}),
}
