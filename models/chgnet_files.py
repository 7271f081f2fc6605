"""Where CHGNet models come from: the package, files, CHGNetCalculator, and nvdd's own model files."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import sys
from typing import Any

import torch
from torch import Tensor

from nvdd.errors import InputError, MissingDependencyError
from nvdd.models.building import building
from nvdd.models.calculators import is_own_calculator

INSTALL = "pip install 'chgnet>=0.4'"
SHIPPED = ("0.3.0", "0.2.0", "r2scan")


def import_chgnet() -> None:
    """Raises MissingDependencyError if chgnet can't be imported."""
    try:
        import chgnet.model.model  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(f"CHGNet models need chgnet ({sys.executable}; {error}): {INSTALL}") from error


def check_module(model: Any) -> None:
    """Raises InputError unless this is a CHGNet whose energy is a sum over atoms."""
    import_chgnet()
    from chgnet.model.model import CHGNet

    if not isinstance(model, CHGNet):
        raise InputError(
            f"nvdd's CHGNet wrapper needs a chgnet.model.CHGNet, not a {type(model).__module__}.{type(model).__name__}"
        )
    if not model.mlp_first:
        raise InputError(
            f"this CHGNet reads its energy off a mean over all atoms (read_out={model.read_out_type!r}), so that it is no sum "
            "of energies of atoms; take a model with mlp_first=True, as those that come with chgnet"
        )


def references(model: Any) -> Tensor:
    """(n_elements + 1,) eV by atomic number: energies that the composition model adds for each atom.

    Raises:
        InputError: the composition model is not a fitted sum over atoms.
    """
    from chgnet.model.composition_model import AtomRef

    composition = model.composition_model
    n = model.atom_embedding.embedding.num_embeddings
    if composition is None:
        return torch.zeros(n + 1, dtype=torch.float64)
    if type(composition) is not AtomRef or composition.is_intensive != model.is_intensive or not composition.fitted:
        raise InputError(
            f"the composition model of this CHGNet is a {type(composition).__name__} that is no fitted sum over atoms "
            f"(is_intensive={composition.is_intensive}, of the model {model.is_intensive}); nvdd needs an AtomRef, as in the "
            "models that come with chgnet, or none"
        )
    weights = composition.fc.weight.detach().reshape(-1).to(torch.float64)
    return torch.cat([weights.new_zeros(1), weights])


def load(checkpoint: str | None) -> torch.nn.Module:
    """The module of a name or file, on the CPU, in the type of its weights there.

    Raises:
        InputError: no such name or file, or one that is no CHGNet.
    """
    names = ", ".join(SHIPPED)
    if checkpoint is None:
        raise InputError(f"'chgnet' needs a model: chgnet:FILE, or chgnet: and one of {names}")
    import_chgnet()
    from chgnet.model.model import CHGNet

    path = os.path.expanduser(checkpoint)
    if checkpoint not in SHIPPED and not os.path.isfile(path):
        raise InputError(
            f"no CHGNet file {checkpoint!r} (working directory {os.getcwd()}), and no model of that name; names: {names}"
        )
    try:
        with building(torch.float32), _quiet():
            if checkpoint in SHIPPED:
                return CHGNet.load(model_name=checkpoint, use_device="cpu", verbose=False)
            # like chgnet itself, this unpickles the file
            state = torch.load(path, map_location="cpu", weights_only=False)["model"]
            model = CHGNet(**state["model_args"]).to(state["state_dict"]["site_wise.weight"].dtype)
            model.load_state_dict(state["state_dict"])
            return model
    except Exception as error:  # whatever a file of another kind leads to
        raise InputError(
            f"{path} can't be read as a CHGNet checkpoint: {type(error).__name__}: {error}. Take the .pth.tar file that "
            "chgnet's Trainer writes"
        ) from error


def _quiet() -> contextlib.AbstractContextManager:
    """chgnet prints a line for each model that it makes."""
    return contextlib.redirect_stdout(io.StringIO())


def module_of_calculator(calculator: Any) -> torch.nn.Module | None:
    """A copy of the model of a ``CHGNetCalculator``, or None for any other.

    Raises:
        InputError: its stress is in another unit than eV/A^3.
    """
    if not is_own_calculator(calculator, "chgnet.model.dynamics", "CHGNetCalculator"):
        return None
    from ase.units import GPa

    if calculator.stress_weight != GPa:
        raise InputError(
            f"this CHGNetCalculator gives stress in units of its own (stress_weight={calculator.stress_weight}); nvdd's is in "
            "eV/A^3, which is chgnet's default: leave stress_weight out"
        )
    return copy.deepcopy(calculator.model).cpu()


def configuration(model: Any) -> dict[str, Any]:
    """The arguments from which chgnet builds the model, as JSON can hold them.

    Raises:
        InputError: one of them is an object.
    """
    plain = (bool, int, float, str, type(None))
    for name, value in model.model_args.items():
        if not isinstance(value, plain) and not (isinstance(value, (list, tuple)) and all(isinstance(v, plain) for v in value)):
            raise InputError(
                f"this CHGNet was made with {name}, a {type(value).__name__}, which has no form in a file; export it with "
                "allow_pickle (--allow-pickle), which puts the module itself into the file"
            )
    return {"model_args": dict(model.model_args), "fitted": model.composition_model is not None}


def rebuild(description: dict[str, Any], dtype: torch.dtype) -> torch.nn.Module:
    """A module of the same make on the CPU; its weights are random until the file's are loaded."""
    import_chgnet()
    from chgnet.model.composition_model import AtomRef
    from chgnet.model.model import CHGNet

    args = dict(description["model_args"])
    composition = None
    if description["fitted"]:  # its weights are the file's as well
        composition = AtomRef(is_intensive=args.get("is_intensive", True))
        composition.fitted = True
    with building(dtype), _quiet():
        model = CHGNet(**{**args, "composition_model": composition})
    model.model_args = args
    return model
