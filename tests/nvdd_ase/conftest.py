"""Calculators that the tests of this folder share, since starting ranks takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nvdd_ase import NVDDCalculator


@pytest.fixture(scope="session")
def shared() -> Iterator[Callable[..., NVDDCalculator]]:
    """``shared(model, ranks=2, ...)`` gives the calculator that has these arguments, without results."""
    made: dict[str, NVDDCalculator] = {}

    def get(model: str, **arguments: Any) -> NVDDCalculator:
        key = repr((model, sorted(arguments.items())))
        if key not in made:
            made[key] = NVDDCalculator(model, **arguments)
        made[key].reset()
        return made[key]

    yield get
    for calculator in made.values():
        calculator.close()
