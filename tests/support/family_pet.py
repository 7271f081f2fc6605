"""PET with random weights, from a checkpoint as metatrain writes it."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import torch

from families import Case
from nvdd.models.building import building
from nvdd.models.pet import PETWrapper
from vacuum import with_room

SMALL = {
    "cutoff": 4.5, "d_pet": 8, "d_node": 12, "d_head": 8, "d_feedforward": 16, "num_heads": 2, "num_gnn_layers": 2,
    "num_attention_layers": 1,
}  # fmt: skip
CONFIGS = {
    "pet": SMALL,
    "pet-residual": {**SMALL, "featurizer_type": "residual", "num_gnn_layers": 3, "cutoff_function": "Cosine", "transformer_type": "PostLN"},
    "pet-adaptive": {**SMALL, "num_neighbors_adaptive": 9},
    "pet-float32": SMALL,
}
SHIFTS, SCALE = [-3.0, -7.5], 1.7  # eV of O and Si; eV


def dtype_of(name: str) -> torch.dtype:
    return torch.float32 if name == "pet-float32" else torch.float64


def make_model(**hypers: Any) -> torch.nn.Module:
    """A module as metatrain builds it, with energies of elements and a scale as after a training."""
    from metatrain.pet import PET
    from metatrain.utils.architectures import get_default_hypers
    from metatrain.utils.data import DatasetInfo
    from metatrain.utils.data.target_info import get_energy_target_info

    quantity = {"quantity": "energy", "unit": "eV"}
    target = get_energy_target_info("energy", quantity, add_position_gradients=True)
    info = DatasetInfo(length_unit="angstrom", atomic_types=[8, 14], targets={"energy": target})
    with building(torch.float32):
        torch.manual_seed(6)
        model = PET({**get_default_hypers("pet")["model"], **hypers}, info)
    set_tables(model)
    return model.eval()


def set_tables(model: torch.nn.Module) -> None:
    import metatensor.torch as mts

    for module, name, values in (
        (model.additive_models[0], "energy_composition_buffer", torch.tensor(SHIFTS)),
        (model.scaler, "energy_scaler_buffer", torch.tensor([SCALE])),
    ):
        tensors = mts.load_buffer(getattr(module, name))
        for block in tensors.blocks():
            block.values[...] = values.to(block.values).reshape(-1, 1)
        setattr(module, name, mts.save_buffer(tensors))
        module.sync_tensor_maps()


@cache
def model_of(name: str) -> torch.nn.Module:
    """Not to be changed."""
    return make_model(**CONFIGS[name]).to(dtype_of(name))


def calculator_of(name: str) -> Any:
    """metatomic's calculator of the exported model. Along open axes the cell gets room, for its neighbour lists."""
    from metatomic_ase import MetatomicCalculator

    class WithRoom(MetatomicCalculator):
        def get_property(self, prop: str, atoms: Any = None, allow_calculation: bool = True) -> Any:
            return super().get_property(prop, with_room(atoms), allow_calculation)

    return WithRoom(copy.deepcopy(model_of(name)).export(), device="cpu")


def make_case(name: str, exchanges: int, layers: int, **more: Any) -> Case:
    def write(folder: Path) -> tuple[str, dict[str, Any]]:
        torch.save(make_model(**CONFIGS[name]).get_checkpoint(), folder / "model.ckpt")
        return f"pet:{folder / 'model.ckpt'}", {}

    both = {"halo": exchanges, "graph": exchanges}
    return Case(
        lambda: PETWrapper.from_model(model_of(name)).requires_grad_(False), lambda: calculator_of(name), write, both, layers,
        dtype=dtype_of(name), atomic=False, **more,
    )  # fmt: skip


# messages of reverse edges of each layer that reads them, their gradients, forces; adaptive cutoffs and their gradients
CASES = {
    "pet": make_case("pet", 5, 2),
    "pet-residual": make_case("pet-residual", 5, 3),
    "pet-adaptive": make_case("pet-adaptive", 7, 2),
    "pet-float32": make_case("pet-float32", 5, 2, tight=False),
}
