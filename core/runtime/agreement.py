"""Whether ranks that should have the same values have them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..communicator import Communicator
from ..errors import InputError

_WIDTH = 12  # names compared at once; the same for every call, so that ranks in different calls can compare too


def digest(value: Any) -> int:
    """A number of 63 bits that differs if the value does: numbers, arrays, tensors, containers of them.

    Of other objects it knows the class alone.
    """
    sink = hashlib.blake2b(digest_size=8)
    _feed(sink, value)
    return int.from_bytes(sink.digest(), "little") >> 1


def _feed(sink: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        # bfloat16 and its like have no numpy counterpart
        sink.update(f"{value.dtype} {tuple(value.shape)}".encode())
        sink.update(value.contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, np.ndarray | np.generic):
        sink.update(f"{value.dtype} {value.shape}".encode())
        sink.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            sink.update(f"{key}:".encode())
            _feed(sink, value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            _feed(sink, item)
    elif isinstance(value, set | frozenset):
        sink.update(repr(sorted(value, key=str)).encode())
    elif value is None or isinstance(value, str | int | float | bool | bytes | complex):
        sink.update(repr(value).encode())
    else:
        sink.update(f"{type(value).__module__}.{type(value).__qualname__}".encode())
    sink.update(b";")


def check_alike(comm: Communicator, values: Mapping[str, Any], whose: str) -> None:
    """Compares named values over the ranks, with one message a rank; every rank calls it at once.

    Args:
        comm: the ranks.
        values: at most 12; the first is compared first, and if it differs the others don't count.
        whose: what has diverged if they differ, for the message.

    Raises:
        InputError: on every rank, with the ranks that differ from rank 0 and the names of the values.
    """
    mine = torch.zeros(comm.size, _WIDTH, dtype=torch.int64, device=comm.device if comm.backend == "nccl" else "cpu")
    mine[comm.rank, : len(values)] = torch.tensor([digest(value) for value in values.values()])
    table = comm.all_reduce(mine, "sum", "comparing ranks").cpu()
    differs = (table != table[0]).numpy()
    if not differs.any():
        return
    names = list(values)
    found = []
    for rank in np.flatnonzero(differs.any(1)):
        columns = [0] if differs[rank, 0] else np.flatnonzero(differs[rank])
        found.append((int(rank), ", ".join(names[c] if c < len(names) else "?" for c in columns)))
    groups: dict[str, list[int]] = {}
    for rank, what in found:
        groups.setdefault(what, []).append(rank)
    text = "; ".join(f"rank{'s' * (len(ranks) > 1)} {_list(ranks)} in {what}" for what, ranks in groups.items())
    raise InputError(f"{whose}: compared with rank 0, {text} differ{'s' * (len(found) == 1)}")


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
