"""Writes a MACE model with random weights to a file, for trials where no trained one is at hand.

    python examples/random_mace.py random.model
    nvdd single quartz.cif --model mace:random.model --ranks 2

Its energies mean nothing, but it computes what any MACE does. The other examples make their MACE with it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import mace  # noqa: F401  before e3nn
import numpy as np
import torch
from e3nn import o3
from mace import modules


def random_mace(
    elements: Sequence[int] = (8, 14), n_layers: int = 2, hidden: str = "16x0e+16x1o", r_max: float = 4.5
) -> torch.nn.Module:
    """A ScaleShiftMACE in float64.

    Args:
        elements: atomic numbers, ascending.
        n_layers: message-passing layers.
        hidden: irreps of the node features.
        r_max: cutoff, A.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    try:
        return modules.ScaleShiftMACE(
            r_max=r_max,
            num_bessel=8,
            num_polynomial_cutoff=5,
            max_ell=2,
            interaction_cls=modules.interaction_classes["RealAgnosticResidualInteractionBlock"],
            interaction_cls_first=modules.interaction_classes["RealAgnosticInteractionBlock"],
            num_interactions=n_layers,
            num_elements=len(elements),
            hidden_irreps=o3.Irreps(hidden),
            MLP_irreps=o3.Irreps("16x0e"),
            atomic_energies=np.zeros(len(elements)),
            avg_num_neighbors=20.0,
            atomic_numbers=list(elements),
            correlation=3,
            gate=torch.nn.functional.silu,
            radial_type="bessel",
            radial_MLP=[16, 16],
            atomic_inter_scale=1.0,
            atomic_inter_shift=0.0,
        ).eval()
    finally:
        torch.set_default_dtype(before)


if __name__ == "__main__":
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "random.model")
    torch.save(random_mace(), path)
    print(f"{path}: MACE for O and Si, 2 layers, cutoff 4.5 A, float64, random weights")
