"""Allegro with random weights, from the checkpoint that nequip's training would write."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from families import Case
from family_nequip import COMMON, CUTOFFS, calculator_of, write_checkpoint
from nvdd.models.nequip import NequIPWrapper
from nvdd.models.nequip_files import build_model

BESSEL = {"_target_": "allegro.nn.TwoBodyBesselScalarEmbed", "num_bessels": 8}
SPLINE = {"_target_": "allegro.nn.TwoBodySplineScalarEmbed", "num_splines": 8, "spline_span": 6}
ALLEGRO = {
    "_target_": "allegro.model.AllegroModel", "num_scalar_features": 16, "num_tensor_features": 4,
    "radial_chemical_embed": BESSEL, **COMMON,
}  # fmt: skip
CONFIGS = {
    "allegro": {**ALLEGRO, "l_max": 2, "num_layers": 2, "per_edge_type_cutoff": CUTOFFS},
    "allegro-spline": {**ALLEGRO, "l_max": 1, "num_layers": 3, "radial_chemical_embed": SPLINE},
}


@cache
def model_of(name: str) -> torch.nn.Module:
    """A module as allegro builds it, not to be changed."""
    return build_model(CONFIGS[name]).eval()


def make_case(name: str) -> Case:
    def write(folder: Path) -> tuple[str, dict[str, Any]]:
        return f"allegro:{write_checkpoint(CONFIGS[name], folder / 'model.ckpt')}", {}

    wrapper = lambda: NequIPWrapper(model_of(name)).requires_grad_(False)
    # nothing but forces
    return Case(wrapper, lambda: calculator_of(model_of(name)), write, {"halo": 1, "graph": 1}, layers=0)


CASES = {name: make_case(name) for name in CONFIGS}
