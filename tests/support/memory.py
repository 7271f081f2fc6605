"""What autograd keeps: bytes of saved tensors that are alive at one time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class SavedBytes:
    """Counts the memory of tensors that autograd saves within a block, forward and backward::

        with SavedBytes() as saved:
            model(batch)
        saved.peak

    Each memory counts once, however many nodes of the graph keep it. Works where backward runs on the thread that
    called it, as on a CPU.
    """

    def __init__(self) -> None:
        self.peak = self._now = 0
        self._kept: dict[int, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: _Kept(self, t), lambda kept: kept.tensor)

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def change(self, storage: torch.UntypedStorage, by: int) -> None:
        """One node more or less keeps this memory."""
        at, before = storage.data_ptr(), self._kept.get(storage.data_ptr(), 0)
        self._kept[at] = before + by
        if before == 0 or before + by == 0:
            self._now += by * storage.nbytes()
            self.peak = max(self.peak, self._now)


class _Kept:
    def __init__(self, owner: SavedBytes, tensor: Tensor) -> None:
        self.owner, self.tensor, self.storage = owner, tensor, tensor.untyped_storage()
        owner.change(self.storage, 1)

    def __del__(self) -> None:
        self.owner.change(self.storage, -1)
