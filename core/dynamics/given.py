"""The state of a run, from a `Batch` as users give it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from nvdd.data import Batch
from nvdd.dynamics.state import DynamicsState
from nvdd.errors import InputError
from nvdd.model_config import stored_name


def state_of(
    batch: Batch,
    velocities: Tensor | None,
    masses: Tensor | None,
    fixed: Tensor | None,
    fix_com: bool,
    model_config: Any,
) -> DynamicsState:
    """As `DynamicsState.from_batch`, with masses and momenta of ASE's arrays, and with the model's inputs alone.

    Raises:
        InputError: the model reads an input that is not there.
    """
    given = batch.node_fields
    if masses is None:
        masses = given.get("masses")
    if masses is None:
        from ase.data import atomic_masses

        masses = torch.from_numpy(atomic_masses)[batch.atomic_numbers.cpu()]
    if velocities is None and "momenta" in given:
        velocities = given["momenta"] / masses.to(given["momenta"]).unsqueeze(1)
    state = DynamicsState.from_batch(batch, masses, velocities, fixed, fix_com)
    state.node_fields = _read("atoms.arrays", state.node_fields, model_config.node_inputs)
    state.system_fields = _read("atoms.info", state.system_fields, model_config.system_inputs)
    return state


def _read(where: str, values: dict[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """What the model reads, under its own names."""
    stored = {name: stored_name(name, values) for name in sorted(names)}
    missing = [name for name, found in stored.items() if found is None]
    if missing:
        raise InputError(f"the model reads {where}[{missing[0]!r}], which these atoms don't have")
    return {name: values[found] for name, found in stored.items()}
