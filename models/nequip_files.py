"""Files of the nequip framework, its modules made from a configuration, and their conversion to another type."""

from __future__ import annotations

import contextlib
import copy
import importlib
import os
import random
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nvdd.errors import InputError, MissingDependencyError
from nvdd.models.building import building

INSTALL = "pip install 'nequip>=0.19'"
ALLEGRO_INSTALL = "pip install 'nequip-allegro>=0.8'"
_PACKAGE, _CHECKPOINT = ".nequip.zip", ".ckpt"
_COMPILED = (".nequip.pth", ".nequip.pt2", ".pth", ".pt2")
# modules and tensors that are float64 whatever the type of a model
_ALWAYS_DOUBLE = {"PerTypeScaleShift", "EdgeLengthNormalizer", "BesselEdgeLengthEncoding", "PerClassSpline"}
_DOUBLE_NAMES = {"_qqr2exesquare"}
_TYPE_ATTRIBUTES = ("_output_dtype", "model_dtype")


def import_nequip() -> None:
    """Raises MissingDependencyError if nequip is missing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations inside the packages that it needs
            import nequip.model  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(f"NequIP models need nequip ({sys.executable}): {INSTALL} ({error})") from error


@contextlib.contextmanager
def framework() -> Iterator[None]:
    """nequip can build models inside; what it sets for the whole process is as before afterwards.

    That is the default type, random states, e3nn's defaults, how tensors are shared between processes, environment
    variables; TF32 on GPUs stays off, as nequip sets it.
    """
    import_nequip()
    import e3nn
    import torch.multiprocessing as mp
    from nequip.utils.global_state import set_global_state

    environment, sharing = dict(os.environ), mp.get_sharing_strategy()
    states, defaults = (random.getstate(), np.random.get_state()), e3nn.get_optimization_defaults()
    with building(torch.float64):
        try:
            set_global_state()
            e3nn.set_optimization_defaults(jit_mode="eager")  # scripted code would hide operations
            yield
        finally:
            e3nn.set_optimization_defaults(**defaults)
            random.setstate(states[0])
            np.random.set_state(states[1])
            mp.set_sharing_strategy(sharing)
            for name in os.environ.keys() - environment.keys():
                del os.environ[name]


@dataclass(frozen=True)
class ModelFile:
    """What a file holds: the module, of a checkpoint its configuration, of a package its content and the module's name."""

    module: torch.nn.Module
    config: dict[str, Any] | None = None
    package: tuple[bytes, str] | None = None


def load_file(path: str | os.PathLike, model_name: str | None = None) -> ModelFile:
    """The module of a package or a checkpoint.

    Raises:
        InputError: see `NequIPWrapper.from_file`.
    """
    file, text = Path(path).expanduser(), str(path)
    if text.startswith("nequip.net:"):
        raise InputError(f"nvdd downloads nothing: get the package of {text} ({_PACKAGE}) from nequip.net and give its path")
    if not file.is_file():
        raise InputError(f"no nequip model file {text!r} (working directory {os.getcwd()})")
    if text.endswith(_COMPILED):
        raise InputError(
            f"{text} is compiled, which hides the steps at which ranks exchange features; take the package ({_PACKAGE}) or the "
            f"checkpoint ({_CHECKPOINT}) from which it was made"
        )
    if not text.endswith((_PACKAGE, _CHECKPOINT)):
        raise InputError(f"{text}: nequip's models are packages ({_PACKAGE}) and checkpoints ({_CHECKPOINT})")
    try:
        with framework(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if text.endswith(_PACKAGE):
                from nequip.model.saved_models import ModelFromPackage

                models = ModelFromPackage(str(file))
            else:
                from nequip.model.saved_models import ModelFromCheckpoint

                models = ModelFromCheckpoint(str(file))
                stored = torch.load(file, map_location="cpu", weights_only=False)
                config = dict(stored["hyper_parameters"]["model"])
    except Exception as error:  # whatever a file of another kind leads to
        raise InputError(
            f"{text} can't be read as a model of nequip: {type(error).__name__}: {error}; was it written by another version of "
            "nequip, or does it need a package that is not installed?"
        ) from error
    names = list(models)
    if model_name is None and len(names) > 1:
        raise InputError(f"{text} has several models; choose model_name= from {names}")
    if model_name is not None and model_name not in names:
        raise InputError(f"{text} has no model {model_name!r}; it has {names}")
    name = model_name or names[0]
    if text.endswith(_PACKAGE):
        return ModelFile(models[name], package=(file.read_bytes(), name))
    return ModelFile(models[name], config=config if len(names) == 1 else None)


def convert(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """A copy whose features and weights have another type; what nequip keeps in float64 stays so."""
    model = copy.deepcopy(model)
    kept = {id(child) for module in model.modules() if type(module).__name__ in _ALWAYS_DOUBLE for child in module.modules()}
    for module in model.modules():
        for name in _TYPE_ATTRIBUTES:
            if isinstance(getattr(module, name, None), torch.dtype):
                setattr(module, name, dtype)
        if id(module) in kept:
            continue
        for parameter in module._parameters.values():
            if parameter is not None and parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and name not in _DOUBLE_NAMES:
                module._buffers[name] = buffer.to(dtype)
    return model


# what a configuration may name: nothing else of it is imported or called
_BUILDERS = {
    *("nequip.model.NequIPGNNModel", "nequip.model.PresetNequIPGNNModel", "nequip.model.FullNequIPGNNModel"),
    *("allegro.model.AllegroModel", "allegro.model.FullAllegroModel"),
}
_INNER = {
    *("nequip.nn.pair_potential.ZBL", "allegro.nn.TwoBodyBesselScalarEmbed", "allegro.nn.TwoBodySplineScalarEmbed"),
}


def build_model(config: dict[str, Any], dtype: torch.dtype | None = None) -> torch.nn.Module:
    """A ``GraphModel`` with random weights on the CPU.

    Args:
        config: the part ``model`` of a nequip configuration: ``_target_`` and the builder's arguments.
        dtype: torch.float32 or torch.float64; None for the configuration's.

    Raises:
        InputError: it names another builder, class or function than those of NequIP and Allegro.
        MissingDependencyError: nequip or nequip-allegro is missing.
    """
    check_config(config)
    path = config["_target_"]
    arguments = {key: value for key, value in config.items() if key not in ("_target_", "compile_mode")}
    if dtype is not None:
        arguments["model_dtype"] = str(dtype).removeprefix("torch.")
    with framework(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nequip's advice on values that training needs
        module, _, name = path.rpartition(".")
        try:
            builder = getattr(importlib.import_module(module), name)
        except ImportError as error:
            raise MissingDependencyError(f"{path} is not installed ({sys.executable}): {ALLEGRO_INSTALL}") from error
        return builder(**arguments)


def check_config(config: Any) -> None:
    """Raises InputError unless nvdd may build what the configuration describes."""
    target = config.get("_target_") if isinstance(config, dict) else None
    if target not in _BUILDERS:
        raise InputError(f"this model is made by {target}, not by a model builder of nequip or allegro")
    inner = [*config.values()]
    while inner:
        value = inner.pop()
        if isinstance(value, dict):
            if value.get("_target_", "") not in {"", *_INNER}:
                raise InputError(f"this model has a part of its own, {value['_target_']}")
            inner += value.values()
        elif isinstance(value, (list, tuple)):
            inner += value
