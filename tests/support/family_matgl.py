"""TensorNet, M3GNet and CHGNet of matgl with random weights, in float64."""

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
from nvdd.models.matgl import wrap

TYPES = ("Si", "O", "H")
CHGNET = {"num_blocks": 3, "cutoff": 4.5, "threebody_cutoff": 3.2, "max_n": 5, "atom_conv_hidden_dims": (8,), "bond_conv_hidden_dims": (8,),
          "final_hidden_dims": (8,), "dim_atom_embedding": 8, "dim_bond_embedding": 7, "dim_angle_embedding": 6}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "matgl": {"nblocks": 2, "units": 16, "num_rbf": 8, "cutoff": 4.5},
    "matgl-SO(3)": {"nblocks": 1, "units": 8, "cutoff": 4.0, "rbf_type": "SphericalBessel", "use_smooth": True,
                    "equivariance_invariance_group": "SO(3)"},
    "matgl-M3GNet": {"network": "M3GNet", "nblocks": 2, "units": 8, "dim_node_embedding": 8, "dim_edge_embedding": 6,
                     "cutoff": 4.5, "threebody_cutoff": 3.5},
    "matgl-M3GNet-smooth": {"network": "M3GNet", "nblocks": 2, "units": 8, "dim_node_embedding": 8, "dim_edge_embedding": 6,
                            "cutoff": 4.5, "threebody_cutoff": 3.5, "use_smooth": True, "use_phi": True},
    "matgl-CHGNet": {**CHGNET, "network": "CHGNet"},
    "matgl-CHGNet-norms": {**CHGNET, "network": "CHGNet", "normalization": "layer", "bond_update_hidden_dims": (6,)},
    "matgl-CHGNet-pairs": {**CHGNET, "network": "CHGNet", "threebody_cutoff": 0.0, "bond_update_hidden_dims": (6,)},
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
    import matgl.models
    from matgl.apps.pes import Potential

    arguments = {"network": "TensorNet", **CONFIGS[name]}
    network = arguments.pop("network")
    kernels = {"use_warp": False} if network == "TensorNet" else {}
    with building(torch.float32):
        torch.manual_seed(3)
        model = getattr(matgl.models, network)(element_types=TYPES, is_intensive=False, **kernels, **arguments)
        more = {"data_std": 700.0, "element_refs": [-3.5, -2.25, -0.5], "calc_magmom": network == "CHGNet"}
        return Potential(model, calc_stresses=True, **more).double().eval()


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
        lambda: wrap(potential(name)).requires_grad_(False), lambda: calculator(name), write,
        {"halo": n_exchanges, "graph": n_exchanges}, layers, atomic=False,
    )  # fmt: skip


# of a TensorNet species, then three parts of the tensors in each layer with their gradients; forces
# M3GNet: features in each block, their gradients; forces. CHGNet: the same, and bonds' features between layers
CASES = {
    "matgl": make_case("matgl", 14, 2),
    "matgl-SO(3)": make_case("matgl-SO(3)", 8, 1),
    "matgl-M3GNet": make_case("matgl-M3GNet", 4, 2),
    "matgl-M3GNet-smooth": make_case("matgl-M3GNet-smooth", 4, 2),
    "matgl-CHGNet": make_case("matgl-CHGNet", 10, 3),
    "matgl-CHGNet-norms": make_case("matgl-CHGNet-norms", 10, 3),
    "matgl-CHGNet-pairs": make_case("matgl-CHGNet-pairs", 6, 3),
}
