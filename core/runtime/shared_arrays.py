"""numpy arrays in memory that the parent and the ranks share and that leave no name behind.

The memory is an unlinked file whose descriptor is sent to the ranks: it goes when the last process that maps it
goes, whatever killed that process. Nothing stands in /dev/shm, so nothing can be left there.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Sequence

import numpy as np

from ..errors import InputError


def create(shape: int | Sequence[int], dtype: object) -> tuple[int, np.ndarray]:
    """Allocates a zeroed shared array.

    Returns:
        A file descriptor to send to the ranks (the caller closes it), and this process's view.
    """
    shape, dtype = normalise(shape, dtype)
    n_bytes = max(1, math.prod(shape) * dtype.itemsize)  # a mapping can't be empty
    fd = _unlinked_file(n_bytes)
    try:
        return fd, attach(fd, shape, dtype)
    except BaseException:
        os.close(fd)
        raise


def attach(fd: int, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """The view of another process's shared array. It owns the mapping; ``fd`` may be closed afterwards."""
    memory = mmap.mmap(fd, max(1, math.prod(shape) * dtype.itemsize))
    return np.ndarray(tuple(shape), dtype, buffer=memory)


def normalise(shape: int | Sequence[int], dtype: object) -> tuple[tuple[int, ...], np.dtype]:
    """Checks shape and dtype of an array to be shared."""
    shape = (shape,) if isinstance(shape, int | np.integer) else shape
    shape = tuple(int(n) for n in shape)
    if any(n < 0 for n in shape):
        raise InputError(f"a shared array can't have the shape {shape}: no dimension may be negative")
    try:
        dtype = np.dtype(dtype)
    except TypeError as error:
        raise InputError(f"a shared array can't have the dtype {dtype!r}: give a numpy dtype") from error
    if dtype.hasobject:
        raise InputError(f"a shared array can't have the dtype {dtype}: it holds Python objects, not numbers")
    return shape, dtype


def _unlinked_file(n_bytes: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("nvdd", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile(prefix="nvdd-") as file:
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, n_bytes)
    except BaseException:
        os.close(fd)
        raise
    return fd
