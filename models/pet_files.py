"""PET's checkpoints, and what of a metatrain model PET's energy is made of."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nvdd.errors import InputError, MissingDependencyError
from nvdd.models.building import building

INSTALL = "pip install 'metatrain==2026.4.1'"


@dataclass(frozen=True, eq=False)
class Description:
    """What a PET model is made of.

    Attributes:
        hypers: metatrain's hyperparameters of the architecture.
        atomic_types: atomic numbers, in the model's order.
        target: name of the output that is the energy.
        output_shapes: of all outputs, by name and block.
        scales, shifts: (largest atomic number + 1,) float64 by atomic number: the energy of an atom is the network's times
            scale plus shift, eV.
    """

    hypers: dict[str, Any]
    atomic_types: tuple[int, ...]
    target: str
    output_shapes: dict[str, dict[str, list[int]]]
    scales: Tensor
    shifts: Tensor

    def to_json(self) -> dict[str, Any]:
        """Without scales and shifts, which are among the weights."""
        shapes = {name: {k: list(map(int, v)) for k, v in blocks.items()} for name, blocks in self.output_shapes.items()}
        return {"hypers": self.hypers, "atomic_types": list(self.atomic_types), "target": self.target, "output_shapes": shapes}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Description:
        """What `to_json` gave, with zeros for scales and shifts."""
        zeros = torch.zeros(max(content["atomic_types"]) + 1, dtype=torch.float64)
        return cls(**{**content, "atomic_types": tuple(content["atomic_types"])}, scales=zeros, shifts=zeros)


def import_metatrain() -> None:
    """Raises MissingDependencyError where metatrain is missing, or is not one that nvdd knows."""
    try:
        from metatrain.pet.modules.backend import PETBackend  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(f"PET models need metatrain 2026.4 ({sys.executable}; {error}): {INSTALL}") from error


def build_backend(description: Description) -> torch.nn.Module:
    """A network of that make with random weights."""
    import_metatrain()
    from metatrain.pet.modules.backend import PETBackend

    with building(torch.float32):
        backend = PETBackend(description.hypers, list(description.atomic_types))
        for name, shapes in description.output_shapes.items():
            backend.add_output(name, shapes)
    return backend


def describe(model: Any, target: str | None) -> Description:
    """The description of an eager ``metatrain.pet.PET``; raises InputError for what can't be divided over ranks."""
    import_metatrain()
    from metatrain.pet import PET

    if not isinstance(model, PET):
        name = f"{type(model).__module__}.{type(model).__name__}"
        raise InputError(
            f"nvdd's PET wrapper needs an eager PET of metatrain, not a {name}; an exported model (.pt) is TorchScript, which "
            "hides where ranks exchange messages: take the checkpoint (.ckpt)"
        )
    if model.long_range:
        raise InputError("this PET model has long-range features, a sum over all atoms by metatrain's own code; take one without")
    if len(model.additive_models) > 1:
        raise InputError("this PET model adds a ZBL repulsion that reads positions by itself; take one without (zbl: false)")
    if model.system_conditioning is not None:
        raise InputError("this PET model is conditioned by charge and spin, which nvdd does not pass; take one without")
    energies = [name for name, info in model.dataset_info.targets.items() if info.quantity == "energy"]
    if target is None and len(energies) != 1:
        raise InputError(f"this PET model has the energies {energies}; choose target= from them")
    if target is not None and target not in energies:
        raise InputError(f"this PET model has no energy {target!r}; choose target= from {energies}")
    target = target or energies[0]
    unit = model.dataset_info.targets[target].unit
    if unit.lower() != "ev" or model.dataset_info.length_unit.lower() not in ("angstrom", "a"):
        raise InputError(f"this PET model computes in {unit} and {model.dataset_info.length_unit}; nvdd needs one in eV and Angstrom")
    scales, shifts = _tables(model, target)
    return Description(dict(model.hypers), tuple(model.atomic_types), target, model.output_shapes, scales, shifts)


def _tables(model: Any, target: str) -> tuple[Tensor, Tensor]:
    """What metatrain's scaler and composition model make of an atom's energy, asked for one atom of each element."""
    from metatensor.torch import Labels
    from metatomic.torch import ModelOutput, System

    types = torch.tensor(model.atomic_types)
    n, place = len(types), next(model.parameters())
    nothing = torch.zeros(3, 3, dtype=place.dtype)
    system = System(
        types=types, positions=torch.zeros(n, 3, dtype=place.dtype), cell=nothing, pbc=torch.zeros(3, dtype=torch.bool)
    ).to(place.device)
    labels = Labels(["system", "atom"], torch.stack([torch.zeros(n, dtype=torch.int64), torch.arange(n)], 1).to(place.device))
    outputs = {target: ModelOutput(sample_kind="atom")}
    ones = {target: [torch.ones(n, 1, dtype=place.dtype, device=place.device)]}
    with torch.no_grad():
        unscaled = model._get_output_atomic_predictions(ones, labels, outputs, None)
        scaled = model.scaler.apply_scales(
            [system], unscaled, selected_atoms=None, use_per_target_scales=True, use_per_property_scales=True
        )[target].block()
        added = model.additive_models[0]([system], outputs, None)[target].block()
    tables = []
    for block in (scaled, added):
        if block.values.numel() != n:
            raise InputError(f"the output {target!r} of this PET model is no number for each atom")
        table = torch.zeros(int(types.max()) + 1, dtype=torch.float64)
        table[types[block.samples.column("atom").long().cpu()]] = block.values.reshape(-1).to("cpu", torch.float64)
        tables.append(table)
    return tables[0], tables[1]


def load_file(path: str | os.PathLike) -> torch.nn.Module:
    """The eager model of a checkpoint. Like metatrain itself, this unpickles the file: load only files that you trust.

    Raises:
        InputError: no such file, an exported model, a checkpoint of another architecture.
    """
    import_metatrain()
    from metatrain.utils.io import model_from_checkpoint

    file = Path(path).expanduser()
    if not file.is_file():
        raise InputError(f"no PET checkpoint file {os.fspath(path)!r} (working directory {os.getcwd()}); nvdd downloads nothing")
    try:
        checkpoint = torch.load(file, map_location="cpu", weights_only=False)
        return model_from_checkpoint(checkpoint, context="export")
    except Exception as error:  # whatever a file of another kind leads to
        raise InputError(
            f"{file} can't be read as a checkpoint of metatrain: {type(error).__name__}: {error}. Take the .ckpt file that the "
            "training writes, not an exported model (.pt)"
        ) from error
