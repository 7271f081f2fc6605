"""Source, index and dimension of the operations that read rows by index; no handlers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nvdd.dispatch import Call

READS = ("getitem", "index_select", "gather", "take_along_dim", "embedding")


def parts(call: Call) -> tuple[Any, Any, int | None]:
    """Source, index and dimension."""
    if call.name == "getitem":
        item = call.args[1]
        return call.args[0], item[0] if isinstance(item, tuple) and item else item, 0
    if call.name == "take_along_dim":
        return call.arg(0, "input"), call.arg(1, "indices"), call.arg(2, "dim")
    if call.name == "embedding":  # embedding(input=indices, weight=table)
        return call.arg(1, "weight"), call.arg(0, "input"), 0
    return call.arg(0, "input"), call.arg(2, "index"), call.arg(1, "dim")


def read(call: Call, rows: Tensor, index: Tensor) -> Tensor:
    """The operation with other rows and index, along the first dimension. Takes and gives plain tensors."""
    if call.name == "getitem":
        item = call.args[1]
        if not isinstance(item, tuple) and index.dim() == 1:
            # the same as rows[index]; its backward adds rows, where that of indexing sorts them first (on a GPU)
            return torch.index_select(rows, 0, index)
        return call.run(rows, (index, *item[1:]) if isinstance(item, tuple) else index)
    if call.name == "embedding":
        rest = {k: v for k, v in call.kwargs.items() if k not in ("input", "weight")}
        return call.run(index, rows, *call.args[2:], **rest)
    if call.name == "take_along_dim":
        return call.run(rows, index, 0)
    return call.run(rows, 0, index)
