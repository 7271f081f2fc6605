"""NequIP with random weights, from the checkpoint that its training would write."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from families import Case
from nvdd.models.building import building
from nvdd.models.nequip import NequIPWrapper
from nvdd.models.nequip_files import build_model

TYPES = ["H", "O", "Si"]
COMMON = {
    "seed": 4, "model_dtype": "float64", "r_max": 4.5, "type_names": TYPES, "avg_num_neighbors": 20.0,
    "per_type_energy_scales": 0.7, "per_type_energy_shifts": {"H": -0.5, "O": -2.0, "Si": -1.0},
}  # fmt: skip
NEQUIP = {"_target_": "nequip.model.NequIPGNNModel", "l_max": 1, "num_features": 8, "radial_mlp_width": 16, **COMMON}
ZBL = {"_target_": "nequip.nn.pair_potential.ZBL", "chemical_species": TYPES, "units": "metal"}
CUTOFFS = {"O": {"O": 3.1, "Si": 3.9}, "Si": 4.2}  # the cutoff of a pair depends on which of the two is the centre
CONFIGS = {
    "nequip": {**NEQUIP, "num_layers": 3},
    "nequip-zbl": {
        **NEQUIP, "num_layers": 2, "l_max": 2, "parity": False, "pair_potential": ZBL, "per_edge_type_cutoff": CUTOFFS,
        "avg_num_neighbors": {"H": 15.0, "O": 18.0, "Si": 25.0},
    },
    "nequip-float32": {**NEQUIP, "num_layers": 2, "model_dtype": "float32"},
}  # fmt: skip


@cache
def model_of(name: str) -> torch.nn.Module:
    """A module as nequip builds it, not to be changed."""
    return build_model(CONFIGS[name]).eval()


def wrapper(name: str) -> NequIPWrapper:
    return NequIPWrapper(model_of(name)).requires_grad_(False)


def calculator_of(model: torch.nn.Module, types: list[str] = TYPES) -> Any:
    """nequip's own calculator of a module, which it else makes of a file."""
    from nequip.integrations.ase import NequIPCalculator
    from nequip.integrations.utils import basic_transforms

    class InDouble(NequIPCalculator):
        """In a process whose default type is float64, as nequip sets it."""

        def calculate(self, *args: Any, **kwargs: Any) -> None:
            with building(torch.float64):
                super().calculate(*args, **kwargs)

    metadata = model.metadata
    transforms = basic_transforms(metadata, float(metadata["r_max"]), types, {name: name for name in types})
    return InDouble(model, device="cpu", transforms=transforms)


def write_checkpoint(config: dict[str, Any], path: Path) -> Path:
    """What nequip's training writes, with random weights."""
    from nequip.train import NequIPLightningModule
    from nequip.utils import get_current_code_versions

    from nvdd.models.nequip_files import framework

    info = {
        "versions": get_current_code_versions(verbose=False),
        "training_module": {"_target_": "nequip.train.NequIPLightningModule"},
    }
    with framework():
        module = NequIPLightningModule(model=config, num_datasets={"train": 1, "val": 0, "test": 0, "predict": 0}, info_dict=info)
    torch.save(
        {"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams), "pytorch-lightning_version": "2.6.0"}, path
    )
    return path


def make_case(name: str, exchanges: dict[str, int], layers: int, **more: Any) -> Case:
    def write(folder: Path) -> tuple[str, dict[str, Any]]:
        return f"nequip:{write_checkpoint(CONFIGS[name], folder / 'model.ckpt')}", {}

    return Case(lambda: wrapper(name), lambda: calculator_of(model_of(name)), write, exchanges, layers, **more)


# features of each layer, the gradients of those that depend on positions, forces
CASES = {
    "nequip": make_case("nequip", {"halo": 6, "graph": 6}, 3),
    "nequip-zbl": make_case("nequip-zbl", {"halo": 4, "graph": 4}, 2),
    "nequip-float32": make_case("nequip-float32", {"halo": 4, "graph": 4}, 2, tight=False),
}


def write_package(config: dict[str, Any], path: Path) -> Path:
    """What `nequip-package` writes of a checkpoint, without the example data for compilation."""
    import yaml
    from nequip.scripts import package as theirs
    from nequip.train.lightning import _SOLE_MODEL_KEY

    models = torch.nn.ModuleDict({_SOLE_MODEL_KEY: build_model(config).eval()})
    metadata = {"package_version_id": 2, "available_models": ["eager"], "atom_types": dict(enumerate(TYPES)), "versions": {}}
    with torch.package.PackageExporter(str(path)) as exporter:
        exporter.mock([f"{name}.**" for name in theirs._MOCK_MODULES])
        exporter.extern([f"{name}.**" for name in theirs._EXTERNAL_MODULES])
        exporter.intern([f"{name}.**" for name in theirs._INTERNAL_MODULES])
        exporter.save_text("model", "package_metadata.txt", yaml.dump(metadata))
        exporter.save_pickle("model", "eager_model.pkl", models, dependencies=True)
    return path
