"""AIMNet2 models from files, from aimnet's calculators, and from a description in JSON."""

from __future__ import annotations

import copy
import os
import sys
from typing import Any

import torch

from nvdd.errors import InputError
from nvdd.models.aimnet2 import SCRIPTED, AIMNet2Wrapper, import_aimnet
from nvdd.models.building import building

# what a file says of its model, as far as nvdd needs it again
_METADATA = ("cutoff", "needs_coulomb", "needs_dispersion", "implemented_species", "supports_charged_systems")


def from_file(path: str, *, dtype: torch.dtype | None = None, **options: Any) -> AIMNet2Wrapper:
    """Loads a file of aimnet's format 2 (``.pt``), without unpickling code.

    Args:
        path: the file.
        dtype: type of the weights; None for float32, which is what they are.
        options: those of `AIMNet2Wrapper`.

    Raises:
        InputError: no such file, one of another kind (TorchScript ``.jpt`` among them); and what the class raises.
    """
    import_aimnet()
    from aimnet.models import load_model

    if not os.path.isfile(path):
        raise InputError(f"no AIMNet2 file {path!r} (working directory {os.getcwd()}); nvdd downloads none")
    if path.lower().endswith(".jpt"):
        raise InputError(SCRIPTED)
    try:
        model, metadata = load_model(path)
        description = torch.load(path, map_location="cpu", weights_only=True)["model_yaml"]
    except Exception as error:  # whatever a file of another kind leads to
        raise InputError(
            f"{path} can't be read as an AIMNet2 model: {type(error).__name__}: {error}. Take a .pt file of format 2, as "
            "`aimnet export` writes it"
        ) from error
    wrapper = AIMNet2Wrapper(model, **options)
    wrapper.source = {"model_yaml": description, "metadata": {key: metadata.get(key) for key in _METADATA}}
    return wrapper.to(dtype=dtype or torch.float32).eval().requires_grad_(False)


def from_calculator(calculator: Any) -> AIMNet2Wrapper | None:
    """A wrapper around a copy of the model of an ``AIMNet2Calculator`` or ``AIMNet2ASE``; None for anything else.

    Raises:
        InputError: the calculator adds Coulomb energy or dispersion, which come from other blocks here.
    """
    theirs = sys.modules.get("aimnet.calculators.calculator")  # not imported: then it is not theirs
    if theirs is None:
        return None
    base = calculator if isinstance(calculator, theirs.AIMNet2Calculator) else getattr(calculator, "base_calc", None)
    if not isinstance(base, theirs.AIMNet2Calculator):
        return None
    added = [name for name in ("external_coulomb", "external_dftd3") if getattr(base, name, None) is not None]
    if added:
        raise InputError(
            f"this AIMNet2 calculator adds {' and '.join(added)} to its model; take the model's file and compose it with "
            "pme or dftd3 (long_range='separate')"
        )
    if calculator is not base and (calculator.charge != 0 or calculator.mult != 1):
        raise InputError(
            f"this AIMNet2ASE has charge={calculator.charge}, mult={calculator.mult} of its own; set atoms.info['charge'] and "
            "['mult'], which nvdd reads at each call"
        )
    return AIMNet2Wrapper(copy.deepcopy(base.model).cpu()).eval().requires_grad_(False)


def configuration(wrapper: AIMNet2Wrapper) -> dict[str, Any]:
    """The file's description of the model and the wrapper's options, as JSON can hold them.

    Raises:
        InputError: the model does not come from a file.
    """
    if wrapper.source is None:
        raise InputError(
            "this AIMNet2 model does not come from a file, so how it was made is unknown; load it from the .pt file, or "
            "export it with allow_pickle (--allow-pickle), which puts the module itself into the file"
        )
    options = {"charge": wrapper.charge, "mult": wrapper.mult, "long_range": wrapper.long_range}
    return {**wrapper.source, "options": options}


def rebuild(description: dict[str, Any], dtype: torch.dtype) -> AIMNet2Wrapper:
    """A wrapper of the same make on the CPU; its weights are random until the file's are loaded."""
    import_aimnet()
    from aimnet.config import build_module
    from aimnet.models.artifact_validation import REGISTRY_IMPORT_POLICY, validate_model_yaml

    layers = validate_model_yaml(description["model_yaml"])  # refuses classes that are not aimnet's or torch's
    with building(dtype):
        model = build_module(
            layers, allow_file_references=False, import_authorizer=REGISTRY_IMPORT_POLICY.require_allowed
        )
    model.__dict__["_metadata"] = description["metadata"]
    return AIMNet2Wrapper(model, **description["options"])
