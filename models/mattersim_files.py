"""MatterSim's checkpoints, and the modules and calculators of mattersim that nvdd takes."""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Any

import torch

from nvdd.errors import InputError, MissingDependencyError
from nvdd.models.building import building
from nvdd.models.calculators import is_own_calculator

INSTALL = "pip install --no-deps 'mattersim==1.2.3' and what it imports (docs/models.md), or ./dev family mattersim"
NAMES = {"1m": "mattersim-v1.0.0-1M", "5m": "mattersim-v1.0.0-5M"}
_URL = "https://raw.githubusercontent.com/microsoft/mattersim/main/pretrained_models"


def import_mattersim() -> None:
    """Raises MissingDependencyError where mattersim, or a package that it imports, is missing."""
    try:
        import mattersim.forcefield.potential  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(f"MatterSim models need mattersim ({sys.executable}; {error}): {INSTALL}") from error


def check(model: Any) -> None:
    """Raises InputError for all but an eager M3Gnet."""
    import_mattersim()
    from mattersim.forcefield.m3gnet.m3gnet import M3Gnet

    if not isinstance(model, M3Gnet):
        name = f"{type(model).__module__}.{type(model).__name__}"
        raise InputError(f"nvdd's MatterSim wrapper needs an eager M3Gnet of mattersim, not a {name}")
    if type(model).forward is not M3Gnet.forward:
        raise InputError(f"{type(model).__name__} has a forward of its own, which nvdd doesn't know; give it an M3Gnet")


def build_model(arguments: dict[str, Any]) -> torch.nn.Module:
    """A module with random weights, of its ``model_args``."""
    from mattersim.forcefield.m3gnet.m3gnet import M3Gnet

    with building(torch.float32):
        return M3Gnet(device="cpu", **arguments)


def load(checkpoint: str | None) -> torch.nn.Module:
    """The module in a checkpoint, by its path or name."""
    import_mattersim()
    if checkpoint is None:
        raise InputError(f"'mattersim' needs a model: mattersim:FILE, or mattersim: and one of {', '.join(NAMES.values())}")
    path = Path(checkpoint).expanduser()
    if not path.is_file():
        name = next((n for n in NAMES.values() if checkpoint.lower().removesuffix(".pth") == n.lower()), None)
        if name is None:
            raise InputError(
                f"no MatterSim checkpoint file {checkpoint!r} (working directory {os.getcwd()}), and no pretrained model of that "
                f"name; names: {', '.join(NAMES.values())}"
            )
        path = Path("~/.local/mattersim/pretrained_models").expanduser() / f"{name}.pth"
        if not path.is_file():
            raise InputError(
                f"the weights of {name!r} are not on this machine, and nvdd downloads nothing: get {_URL}/{name}.pth and put it "
                f"at {path}"
            )
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        model = build_model(content["model_args"])
        model.load_state_dict(content["model"])
    except Exception as error:  # whatever a file of another kind leads to
        raise InputError(f"{path} can't be read as a MatterSim checkpoint: {type(error).__name__}: {error}") from error
    return model


def module_of_calculator(calc: Any) -> torch.nn.Module | None:
    """A copy of the model of a ``MatterSimCalculator``; None for another one."""
    if not is_own_calculator(calc, "mattersim.forcefield.potential", "MatterSimCalculator"):
        return None
    from ase.units import GPa

    if calc.stress_weight != GPa:
        raise InputError(f"this MatterSimCalculator has stress_weight={calc.stress_weight}; nvdd's stress is eV/A^3: leave it out")
    return copy.deepcopy(calc.potential.model)
