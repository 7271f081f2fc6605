"""SevenNet-0 with the weights that ship with sevenn, in their float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parity
from families import Case
from nvdd.models.sevenn import SevenNetWrapper


def write(folder: Path) -> tuple[str, dict[str, Any]]:
    return "sevenn:7net-0", {}


# features of 5 layers, the gradients of those that depend on positions, forces
EXCHANGES = {"halo": 10, "graph": 10}
CASES = {
    "sevenn": Case(
        lambda: SevenNetWrapper.from_checkpoint("7net-0"), lambda: parity.calculator("7net-0"), write, EXCHANGES, 5, tight=False
    )
}
