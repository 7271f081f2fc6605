"""Orb with random weights, from the file of weights that orb-models would read."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch

from families import SILICA, Case
from nvdd.models.building import building
from nvdd.models.orb import OrbWrapper
from nvdd.models.orb_files import build_model
from vacuum import with_room

SMALL = {
    "latent_dim": 16, "base_mlp_hidden_dim": 24, "head_mlp_hidden_dim": 12, "num_message_passing_steps": 2,
    "max_num_neighbors": 20,
}  # fmt: skip
CONFIGS = {
    "orb": {"kind": "v3_conservative", **SMALL},
    "orb-inf": {"kind": "v3_conservative", **SMALL, "max_num_neighbors": 500},
    "orb-charged": {"kind": "v3_conservative", **SMALL, "has_charge_spin_cond": True},
    "orb-direct": {"kind": "v3_direct", **SMALL},
    "orb-v2": {"kind": "v2", "max_num_neighbors": 20, "num_message_passing_steps": 2},
    "orb-float32": {"kind": "v3_conservative", **SMALL},
}


def dtype_of(name: str) -> torch.dtype:
    return torch.float32 if name == "orb-float32" else torch.float64


@cache
def model_of(name: str) -> torch.nn.Module:
    """A module as orb-models builds it, not to be changed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = build_model(CONFIGS[name])
    return model.to(dtype_of(name)).eval()


def wrapper(name: str) -> OrbWrapper:
    return OrbWrapper(model_of(name)).requires_grad_(False)


def calculator_of(name: str) -> Any:
    """Orb's own calculator, which takes everything in torch's default type."""
    from orb_models.forcefield.calculator import ORBCalculator

    class InType(ORBCalculator):
        """In a process whose default type is the model's, as orb-models sets it.

        Orb takes periodicity along all axes or none: along open ones the cell gets room instead.
        """

        def get_property(self, prop: str, atoms: Any = None, allow_calculation: bool = True) -> Any:
            with building(dtype_of(name)):
                return super().get_property(prop, with_room(atoms), allow_calculation)

    return InType(model_of(name), device="cpu")


def make_case(name: str, exchanges: int, **more: Any) -> Case:
    def write(folder: Path) -> tuple[str, dict[str, Any]]:
        torch.save(model_of(name).state_dict(), folder / "weights.ckpt")
        return f"orb:{folder / 'weights.ckpt'}", {"architecture": json.dumps(CONFIGS[name])}

    both = {"halo": exchanges, "graph": exchanges}
    return Case(
        lambda: wrapper(name), lambda: calculator_of(name), write, both, 2, atomic=False, dtype=dtype_of(name), **more
    )


# Orb removes the torque of forces from a head by a system of equations that is singular for atoms on a line
OFF_LINE = tuple(name for name in SILICA if name not in ("silica pair", "silica atom"))
# of each layer features of neighbours and sums of messages, and their gradients; elements for the repulsion; forces or, with
# heads for them, positions and the repulsion's forces
CASES = {
    "orb": make_case("orb", 9),
    "orb-inf": make_case("orb-inf", 9),
    "orb-charged": make_case("orb-charged", 9, structure="quartz charged"),
    "orb-direct": make_case("orb-direct", 7, envelope=OFF_LINE),
    "orb-v2": make_case("orb-v2", 5),
    "orb-float32": make_case("orb-float32", 9, tight=False),
}
