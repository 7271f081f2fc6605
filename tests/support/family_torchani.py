"""ANI-1x with its parameters, in float64 and in its own float32."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch

from families import Case
from nvdd.models.torchani import TorchANIWrapper, _load

ENVELOPE = (
    "organic slab", "organic wire", "organic tiny", "organic left-handed", "organic unwrapped", "organic gas",
    "organic cluster", "organic pair", "organic atom",
)  # fmt: skip


@cache
def calculator(dtype: torch.dtype, member: int | None = None) -> Any:
    """torchani's own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = _load("ani-1x", member)
        return (model if dtype is torch.float32 else model.to(dtype)).ase()  # a cast to float32 would round energies of lone atoms


def make_case(dtype: torch.dtype, member: int | None, **more: Any) -> Case:
    def write(folder: Path) -> tuple[str, dict[str, Any]]:
        return "torchani:ani-1x", {} if member is None else {"member": member}

    return Case(
        lambda: TorchANIWrapper.from_name("ani-1x", member, dtype), lambda: calculator(dtype, member), write,
        {"halo": 1, "graph": 1}, layers=0, structure="organic", envelope=ENVELOPE, elements="H C N O", atomic=False, dtype=dtype,
        strain=3e-5, **more,  # sharp functions of angles, and a cutoff whose second derivative jumps
    )  # fmt: skip


CASES = {
    "torchani": make_case(torch.float64, None),
    "torchani-member": make_case(torch.float64, 3),
    "torchani-float32": make_case(torch.float32, None, tight=False),
}
