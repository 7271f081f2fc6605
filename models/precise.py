"""Modules that stay in float64 when the model around them is cast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class StaysFloat64(torch.nn.Module):
    """``to`` moves it between devices, never to another type: for tables whose digits float32 would lose."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return super()._apply(lambda t: t.to(fn(t.new_empty(0)).device), recurse)


class Float64Table(StaysFloat64):
    """A value for each atomic number, ``(n_elements,)``."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.register_buffer("values", values.detach().to(torch.float64).clone())

    def forward(self, numbers: Tensor) -> Tensor:
        """(n,) values of atomic numbers (n,)."""
        return self.values[numbers]
