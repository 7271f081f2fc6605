"""Per-atom tensors side by side: one table a dtype, so that a move of atoms is one message a dtype."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Tables:
    """Tensors (n, ...) by name, packed.

    Attributes:
        columns: (n, k) table of each dtype, by its name.
        layout: for each table the names, dtypes and shapes of rows in it.
    """

    columns: dict[str, Tensor]
    layout: dict[str, list[tuple[str, torch.dtype, tuple[int, ...]]]]

    @classmethod
    def pack(cls, rows: Mapping[str, Tensor]) -> Tables:
        """From tensors with one row for each atom; booleans travel as bytes."""
        layout: dict[str, list[tuple[str, torch.dtype, tuple[int, ...]]]] = {}
        parts: dict[str, list[Tensor]] = {}
        for name, value in rows.items():
            plain = value.to(torch.uint8) if value.dtype is torch.bool else value
            key = str(plain.dtype)
            layout.setdefault(key, []).append((name, value.dtype, tuple(value.shape[1:])))
            parts.setdefault(key, []).append(plain.reshape(len(plain), math.prod(plain.shape[1:])))
        return cls({key: torch.cat(some, 1) for key, some in parts.items()}, layout)

    def unpack(self, columns: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The tensors by name, of these tables or of others with the same layout (of other atoms)."""
        rows = {}
        for key, table in (self.columns if columns is None else columns).items():
            fields = self.layout[key]
            pieces = table.split([math.prod(shape) for _, _, shape in fields], 1)
            for (name, dtype, shape), piece in zip(fields, pieces, strict=True):
                rows[name] = piece.reshape(len(table), *shape).to(dtype)
        return rows
