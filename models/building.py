"""Making modules whose weights come afterwards, without a trace in torch's global state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def building(dtype: torch.dtype) -> Iterator[None]:
    """Modules are made in ``dtype``; the default type and the random state are as before afterwards."""
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
