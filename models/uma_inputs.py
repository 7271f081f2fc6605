"""Charge and spin of systems, which fairchem takes as whole numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nvdd.errors import InputError
from nvdd.models.base import Batch
from nvdd.shard_tensor import to_local

RANGES = {"charge": (-100, 100), "spin": (0, 100)}


def whole_number(name: str, value: Any) -> int | None:
    """As an int; raises InputError for what is none in fairchem's range."""
    if value is None:
        return None
    low, high = RANGES[name]
    try:
        whole = int(value)
        if whole == float(value) and low <= whole <= high:
            return whole
    except (TypeError, ValueError):
        pass
    raise InputError(f"uma: {name}={value!r} is not a whole number from {low} to {high}; write e.g. {name}=1")


def of_systems(data: Batch, name: str, fixed: int | None, usual: int) -> Tensor:
    """(n_systems,) int64: ``fixed`` where that is given, else what the systems have, or ``usual``."""
    low, high = RANGES[name]
    if fixed is not None or name not in data.system_fields:
        return torch.full((data.n_systems,), usual if fixed is None else fixed, device=data.device)
    given = to_local(data.system_fields[name]).to(data.device).reshape(-1)
    whole = given.round().long()
    if len(given) != data.n_systems or not bool(((given == whole) & (whole >= low) & (whole <= high)).all()):
        raise InputError(
            f"uma: {name} is {given.tolist()} for {data.n_systems} systems; give a whole number from {low} to {high} for each, "
            f"atoms.info[{name!r}]"
        )
    return whole
