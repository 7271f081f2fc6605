"""TensorNet of matgl with random weights, in float64 and as matgl makes it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

import chgnet_reference
from families import Case
from nvdd.models.building import building
from nvdd.models.matgl import TensorNetWrapper

TYPES = ("Si", "O", "H")
CONFIGS: dict[str, dict[str, Any]] = {
    "matgl": {"nblocks": 2, "units": 16, "num_rbf": 8, "cutoff": 4.5},
    "matgl-SO(3)": {"nblocks": 1, "units": 8, "cutoff": 4.0, "rbf_type": "SphericalBessel", "use_smooth": True,
                    "equivariance_invariance_group": "SO(3)"},
}  # fmt: skip


@contextlib.contextmanager
def double() -> Iterator[None]:
    """matgl makes graphs in the type that its module has, and with its kernels always in float32: here in float64, without."""
    import matgl
    import matgl.ext.ase as ext

    before, kernels = matgl.float_th, ext._alchmtk_available
    matgl.float_th, ext._alchmtk_available = torch.float64, False
    try:
        yield
    finally:
        matgl.float_th, ext._alchmtk_available = before, kernels


@cache
def potential(name: str) -> torch.nn.Module:
    """Not to be changed. Without Warp kernels, which compute in float32 here and there."""
    from matgl.apps.pes import Potential
    from matgl.models import TensorNet

    with building(torch.float32):
        torch.manual_seed(3)
        model = TensorNet(element_types=TYPES, is_intensive=False, use_warp=False, **CONFIGS[name])
        return Potential(model, data_std=700.0, element_refs=[-3.5, -2.25, -0.5], calc_stresses=True).double().eval()


def calculator(name: str) -> Any:
    from matgl.ext.ase import PESCalculator

    class InDouble(PESCalculator):
        """With open axes in a box in which no image is near: matgl takes what is not periodic along all axes for a molecule."""

        def calculate(self, atoms=None, properties=None, system_changes=None) -> None:
            with double():
                super().calculate(chgnet_reference.boxed(atoms), properties, system_changes)

    return InDouble(potential(name), stress_unit="eV/A3", use_voigt=True)


def make_case(name: str, n_exchanges: int, layers: int) -> Case:
    def write(folder: Path) -> tuple[str, dict[str, Any]]:
        potential(name).save(folder / "potential")
        return f"matgl:{folder / 'potential'}", {}

    return Case(
        lambda: TensorNetWrapper(potential(name)).requires_grad_(False), lambda: calculator(name), write,
        {"halo": n_exchanges, "graph": n_exchanges}, layers, atomic=False,
    )  # fmt: skip


# species, then three parts of the tensors in each layer with their gradients; forces
CASES = {"matgl": make_case("matgl", 14, 2), "matgl-SO(3)": make_case("matgl-SO(3)", 8, 1)}
