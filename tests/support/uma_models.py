"""Inference checkpoints of fairchem with random weights, and fairchem's own calculator for them."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from typing import Any

import numpy as np
import torch
from ase import Atoms

TASKS = {"omat": 1.4, "omol": 0.9}  # dataset -> unit of its energies, eV
# A mean of energies goes with direct forces only: fairchem adds it to the stress, which it gives the energy's units.
_BACKBONE = {
    "max_num_elements": 100, "sphere_channels": 16, "hidden_channels": 16, "edge_channels": 16, "lmax": 2, "mmax": 2,
    "num_layers": 2, "cutoff": 4.5, "num_distance_basis": 16, "max_neighbors": 300, "direct_forces": False,
    "regress_forces": True, "regress_stress": True, "ff_type": "spectral", "chg_spin_emb_type": "rand_emb",
    "otf_graph": True, "always_use_pbc": False,
}  # fmt: skip
_MOE = {"num_experts": 4, "use_composition_embedding": True, "moe_layer_type": "pytorch"}
MODELS: dict[str, dict[str, Any]] = {
    "uma": {"backbone": _MOE},
    # UMA-S 1.2's mean of the composition, balanced channels, experts of the head, truncated orders, other norms
    "uma-1.2": {
        "backbone": {**_MOE, "mmax": 1, "charge_balanced_channels": [0, 1], "spin_balanced_channels": [2],
                     "ff_type": "grid", "norm_type": "layer_norm_sh", "chg_spin_emb_type": "pos_emb"},
        "model_id": "UMA-S-1.2", "moe_head": True,
    },
    "uma-3": {"backbone": {**_MOE, "num_layers": 3, "lmax": 3, "mmax": 2, "cutoff": 4.0}},
    "esen": {"backbone": {}},
    "grid": {"backbone": {"act_type": "s2"}},
    "direct": {"backbone": {"direct_forces": True, "regress_stress": False}, "direct": True, "mean": 0.25},
}  # fmt: skip


@cache
def checkpoint(name: str, dtype: str = "float32", tasks: tuple[str, ...] = tuple(TASKS)) -> str:
    """A file as fairchem's training writes it, of a model in `MODELS`; made once in a process."""
    import hydra
    from fairchem.core.units.mlip_unit.api.inference import MLIPInferenceCheckpoint

    config = _model_config(name, tasks)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        weights = hydra.utils.instantiate(config).to(getattr(torch, dtype)).state_dict()
    ema = {"n_averaged": torch.tensor(1), **{f"module.{key}": value for key, value in weights.items()}}
    model = MODELS[name]
    of_tasks = _tasks(tasks, bool(model.get("direct")), model.get("mean", 0.0))
    content = MLIPInferenceCheckpoint(config, weights, ema, of_tasks)
    path = os.path.join(_folder(), f"{'-'.join((name, dtype, *tasks))}.pt")
    torch.save(content, path)
    return path


_folders: list[tempfile.TemporaryDirectory] = []


def _folder() -> str:
    if not _folders:
        _folders.append(tempfile.TemporaryDirectory(prefix="nvdd-uma-"))
    return _folders[0].name


def _model_config(name: str, tasks: tuple[str, ...]) -> dict[str, Any]:
    model = MODELS[name]
    base, escn = "fairchem.core.models", "fairchem.core.models.uma.escn_md"
    experts = "num_experts" in model["backbone"]
    backbone = f"{base}.uma.escn_moe.eSCNMDMoeBackbone" if experts else f"{escn}.eSCNMDBackbone"
    if model.get("direct"):
        heads = {"energy": {"module": f"{escn}.MLP_Energy_Head"}, "forces": {"module": f"{escn}.Linear_Force_Head"}}
        for key in heads:
            heads[key] = {
                "module": f"{base}.uma.escn_moe.DatasetSpecificSingleHeadWrapper", "head_cls": heads[key]["module"],
                "dataset_names": list(tasks), "wrap_property": True,
            }  # fmt: skip
    elif model.get("moe_head"):
        heads = {
            "energyandforcehead": {
                "module": f"{base}.uma.escn_moe.DatasetSpecificMoEWrapper", "head_cls": f"{escn}.MLP_EFS_Head",
                "head_kwargs": {"wrap_property": False}, "dataset_mapping": {task: task for task in tasks},
            }
        }  # fmt: skip
    else:
        heads = {
            "energyandforcehead": {
                "module": f"{base}.uma.escn_moe.DatasetSpecificSingleHeadWrapper", "head_cls": f"{escn}.MLP_EFS_Head",
                "head_kwargs": {"wrap_property": False}, "dataset_names": list(tasks),
            }
        }  # fmt: skip
    return {
        "_target_": f"{base}.base.HydraModel",
        "_recursive_": False,
        "pass_through_head_outputs": True,
        "model_id": model.get("model_id", "UMA-S-1.2.1") if experts else None,
        "backbone": {**_BACKBONE, **model["backbone"], "dataset_mapping": {task: task for task in tasks}, "model": backbone},
        "heads": heads,
    }


def _tasks(names: tuple[str, ...], direct: bool, mean: float) -> list[dict[str, Any]]:
    unit, normal = "fairchem.core.units.mlip_unit.mlip_unit", "fairchem.core.modules.normalization"
    tasks = []
    for dataset in names:
        scale = TASKS[dataset]
        for prop, level, dim in (("energy", "system", [1]), ("forces", "atom", [3])):
            tasks.append(
                {
                    "_target_": f"{unit}.Task", "name": f"{dataset}_{prop}", "level": level, "property": prop,
                    "out_spec": {"_target_": f"{unit}.OutputSpec", "dim": dim, "dtype": "float32"},
                    "normalizer": {
                        "_target_": f"{normal}.normalizer.Normalizer",
                        "mean": mean if prop == "energy" else 0.0,
                        "rmsd": 3 * scale if direct and prop == "forces" else scale,
                    },
                    "datasets": [dataset],
                    "element_references": {
                        "_target_": f"{normal}.element_references.ElementReferences",
                        "element_references": {
                            "_target_": "torch.DoubleTensor", "_args_": [[-0.37 * z * scale for z in range(100)]],
                        },
                    } if prop == "energy" else None,
                }
            )  # fmt: skip
    return tasks


@cache
def calculator(
    name: str, task: str = "omat", dtype: str = "float64", weights: str = "float32", tasks: tuple[str, ...] = tuple(TASKS)
) -> Any:
    """fairchem's own, in one process, set to take any composition; atoms are put where it wants them (`_placed`)."""
    from fairchem.core.calculate.ase_calculator import FAIRChemCalculator
    from fairchem.core.units.mlip_unit import InferenceSettings, MLIPPredictUnit

    settings = InferenceSettings(activation_checkpointing=False, base_precision_dtype=dtype)
    unit = MLIPPredictUnit(checkpoint(name, weights, tasks), device="cpu", inference_settings=settings)
    found = FAIRChemCalculator(unit, task_name=task)
    convert = found.a2g
    found.a2g = lambda atoms: convert(_placed(atoms))
    return found


def _placed(atoms: Atoms) -> Atoms:
    """Inside the cell, and with a cell where any axis is periodic, as fairchem wants both."""
    atoms = atoms.copy()
    atoms.wrap()
    if atoms.pbc.any() and atoms.cell.rank < 3:
        open_axes = ~atoms.cell.mask()
        atoms.set_cell(atoms.cell.complete() * np.where(open_axes, 60.0, 1.0)[:, None])
        atoms.positions[:, open_axes] += 30 - atoms.positions[:, open_axes].mean(0)
    return atoms


def theirs(name: str, atoms: Atoms, task: str = "omat", dtype: str = "float64") -> dict[str, np.ndarray]:
    """Energy eV, forces eV/A, stress (3, 3) eV/A^3 by fairchem."""
    atoms = atoms.copy()
    atoms.calc = calculator(name, task, dtype)
    atoms.calc.reset()  # computed anew, by other random frames
    found = {"energy": np.array(atoms.get_potential_energy()), "forces": atoms.get_forces()}
    if not MODELS[name].get("direct") and atoms.pbc.all():
        found["stress"] = atoms.get_stress(voigt=False)
    return found
