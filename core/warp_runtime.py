"""Warp as the kernels of this package use it: quiet, in torch's current stream, on torch's memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def warp() -> Any:
    """The module ``warp``, initialised without its banner, and without complaints where there is no GPU."""
    import warp as wp

    with quiet():
        if torch.cuda.is_available():
            wp.init()
            return wp
        # Warp's C++ writes about it to file descriptor 2: hold back what comes there, pass on all else
        with tempfile.TemporaryFile() as held:
            stderr = os.dup(2)
            os.dup2(held.fileno(), 2)
            try:
                wp.init()
            finally:
                os.dup2(stderr, 2)
                os.close(stderr)
                held.seek(0)
                for line in held:
                    if not line.startswith(b"Warp CUDA "):
                        os.write(2, line)
    return wp


@contextmanager
def quiet() -> Iterator[None]:
    """Warp without its notices ("module loaded in ..."); the user's setting is back afterwards."""
    import warp.config as config

    # newer Warp has log_level in place of quiet
    name, value = ("log_level", 30) if hasattr(config, "log_level") else ("quiet", True)
    before = getattr(config, name)
    setattr(config, name, value)
    try:
        yield
    finally:
        setattr(config, name, before)


def launch(kernel: Any, n_threads: int | tuple[int, ...], inputs: Sequence[Any], outputs: Sequence[Any], device: torch.device) -> None:
    """Runs a kernel in torch's current stream of ``device``; its first launch there compiles it."""
    wp = warp()
    stream = wp.stream_from_torch(torch.cuda.current_stream(device)) if device.type == "cuda" else None
    with quiet():
        wp.launch(kernel, n_threads, list(inputs), list(outputs), device=wp.device_from_torch(device), stream=stream)


class Arrays:
    """Tensors as Warp takes them, without a copy. What a launch does not use is None here and an empty array there.

    Args:
        vectors: (E, 3) float64 of the launch.
    """

    def __init__(self, vectors: Tensor) -> None:
        if vectors.dtype is not torch.float64:
            raise TypeError(f"this kernel takes float64 vectors, got {vectors.dtype}")
        self._kept = vectors.contiguous()  # Warp gets its address only
        self._empty = vectors.new_empty(0, 3)
        self.vectors = self.points(self._kept)

    def points(self, tensor: Tensor | None) -> Any:
        """(E, 3) float64, contiguous."""
        return self.of(self._empty if tensor is None else tensor, warp().vec3d)

    def reals(self, tensor: Tensor | None) -> Any:
        """float64 of any shape."""
        return self.of(self._empty[:, 0] if tensor is None else tensor, warp().float64)

    def integers(self, tensor: Tensor) -> Any:
        """int64."""
        return self.of(tensor, warp().int64)

    @staticmethod
    def of(tensor: Tensor, dtype: Any) -> Any:
        """A contiguous tensor, by its address alone: it must outlive the launch."""
        return warp().from_torch(tensor, dtype=dtype, requires_grad=False, return_ctype=True)
