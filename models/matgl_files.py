"""matgl's potentials: which ones nvdd takes, their files, and networks made again of their arguments."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import Tensor

from nvdd.errors import InputError, MissingDependencyError
from nvdd.models.building import building
from nvdd.models.calculators import is_own_calculator

INSTALL = "pip install 'matgl>=4.1'"
_PICKLE = "export it with allow_pickle (--allow-pickle), which puts the module itself into the file"
_TAKEN = ("TensorNet", "M3GNet", "CHGNet")
_OTHERS = {
    "SO3Net": "nvdd has no wrapper for it",
    "QET": "it equilibrates charges over a whole structure",
    "MEGNet": "its energy is a function of means over a whole structure",
}
_FILES = ("model.pt", "state.pt", "model.json")  # of `Potential.save`


def import_matgl() -> None:
    """Raises MissingDependencyError where matgl is missing."""
    from nvdd.warp_runtime import warp

    warp()  # else its banner comes when matgl's kernels are imported
    try:
        import matgl.apps.pes
        import matgl.models  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(f"matgl's models need matgl ({sys.executable}; {error}): {INSTALL}") from error


def check(potential: Any) -> None:
    """Raises InputError for what is no sum over atoms, or has parts that nvdd does not divide."""
    import_matgl()
    import matgl.models
    from matgl.apps.pes import Potential

    if not isinstance(potential, Potential):
        raise InputError(
            f"nvdd's matgl wrapper needs a matgl.apps.pes.Potential, not a {type(potential).__module__}.{type(potential).__name__}"
        )
    model, name = potential.model, type(potential.model).__name__
    if not any(type(model) is getattr(matgl.models, taken) for taken in _TAKEN):
        why = _OTHERS.get(name, f"nvdd knows {', '.join(_TAKEN)} only; a compiled one must be made without compile_model")
        raise InputError(f"a {name} of matgl can't be divided over ranks by nvdd: {why}")
    state = getattr(model, "include_state", False) or getattr(model, "include_states", False)
    if model.is_intensive or state:
        raise InputError(
            f"this {name} is no potential that is a sum over atoms (is_intensive={model.is_intensive}, "
            f"include_state={state}); make it with is_intensive=False"
        )
    if name == "CHGNet":
        _check_chgnet(model)
    if potential.calc_repuls or potential.calc_charge or bool((potential.data_mean != 0).any()):
        raise InputError(
            f"this matgl potential adds what nvdd does not divide: calc_repuls={potential.calc_repuls}, "
            f"calc_charge={potential.calc_charge}, data_mean={potential.data_mean.tolist()} (a constant for each structure); take "
            "one without"
        )
    if potential.element_refs is not None and potential.element_refs.property_offset.dim() != 1:
        raise InputError("this matgl potential has element offsets for several states; nvdd needs one for each element")


def _check_chgnet(model: Any) -> None:
    if model.readout_field != "atom_feat" or model.readout_operation != "sum":
        raise InputError(
            f"this CHGNet of matgl reads its energy from the {model.readout_operation} of {model.readout_field}; nvdd divides the sum "
            "of atom_feat only"
        )
    if (weights := model._init_args.get("layer_bond_weights")) is not None:
        raise InputError(
            f"this CHGNet of matgl has layer_bond_weights={weights!r}, whose layers cast to float32 by themselves; take one with "
            "shared_bond_weights"
        )


def twin(model: Any) -> torch.nn.Module:
    """A network with the same weights, without Warp kernels: the module of a calculator may be moved, and keeps what it
    computed last."""
    kernels = {"use_warp": False} if hasattr(model, "_use_warp") else {}
    dtype, device = model_dtype(model), next(model.parameters()).device
    with building(dtype):
        made = type(model)(**{**model._init_args, **kernels}).to(dtype)
    state = dict(model.state_dict())
    for part in ("weight", "bias") if getattr(model, "_use_warp", False) else ():  # three layers that the kernels take as one
        together = state.pop(f"tensor_embedding.distance_proj.{part}").chunk(3)
        state |= {f"tensor_embedding.distance_proj{k}.{part}": rows for k, rows in enumerate(together, 1)}
    made.load_state_dict(state)
    return made.to(device).train(model.training)


def model_dtype(model: torch.nn.Module) -> torch.dtype:
    """Type of the weights."""
    return next(p.dtype for p in model.parameters() if p.is_floating_point())


def offsets(potential: Any, numbers: Tensor) -> Tensor:
    """(120,) eV, float64, by atomic number: the potential's energies of elements; ``numbers`` in the model's order."""
    found = torch.zeros(120, dtype=torch.float64)
    if potential.element_refs is not None:
        found[numbers] = potential.element_refs.property_offset.detach().to(torch.float64)[: len(numbers)]
    return found


def load(checkpoint: str | None) -> Any:
    """The potential in a folder that ``Potential.save`` has written."""
    if checkpoint is None:
        raise InputError("'matgl' needs a model: matgl:FOLDER, which Potential.save has written")
    folder = os.path.expanduser(checkpoint)
    missing = [name for name in _FILES if not os.path.isfile(os.path.join(folder, name))]
    if missing:
        raise InputError(
            f"{checkpoint!r} is no folder of a matgl model (working directory {os.getcwd()}; {', '.join(missing)} missing), and "
            "nvdd downloads nothing: take the folder that Potential.save has written, or that matgl.load_model has in its cache"
        )
    import_matgl()
    from matgl.utils.io import load_model

    try:
        with building(torch.float32):
            potential = load_model(folder)
        state = torch.load(os.path.join(folder, "state.pt"), map_location="cpu", weights_only=True)
        potential = potential.to(state["data_std"].dtype)  # matgl makes float32 of all, too early for others
        potential.load_state_dict(state, strict=False)
    except Exception as error:  # whatever a file of another kind leads to
        cause = error.__cause__ or error
        raise InputError(f"{folder} can't be read as a matgl model: {type(cause).__name__}: {cause}") from error
    return potential


def potential_of_calculator(calculator: Any) -> Any:
    """That of a ``matgl.ext.ase.PESCalculator``, or None."""
    if not is_own_calculator(calculator, "matgl.ext.ase", "PESCalculator"):
        return None
    if calculator.conversion_factor == 1.0:
        raise InputError("this PESCalculator gives stress in GPa, nvdd in eV/A^3 as ASE does: make it with stress_unit='eV/A3'")
    return calculator.potential


def configuration(model: Any) -> dict[str, Any]:
    """What `rebuild` makes a network of; raises InputError where its arguments have no form in a file."""
    name = type(model).__name__
    args = {k: v for k, v in model._init_args.items() if k not in ("dtype", "use_warp")}
    for key, value in args.items():
        items = value if isinstance(value, (list, tuple)) else [value]
        if not all(isinstance(item, (bool, int, float, str, type(None))) for item in items):
            raise InputError(f"this {name} was made with {key}, a {type(value).__name__}, which has no form in a file; {_PICKLE}")
    return {"network": name, "args": args}


def rebuild(description: dict[str, Any], dtype: torch.dtype) -> Any:
    """A potential with random weights, of what `configuration` gave (files of nvdd before M3GNet have no ``network``)."""
    import_matgl()
    import matgl.models
    from matgl.apps.pes import Potential

    name = description.get("network", "TensorNet")
    kernels = {"use_warp": False} if name == "TensorNet" else {}
    args = {**description["args"], "element_types": tuple(description["args"]["element_types"])}
    with building(dtype):
        return Potential(getattr(matgl.models, name)(**args, **kernels), calc_magmom=description.get("magmoms", False))
