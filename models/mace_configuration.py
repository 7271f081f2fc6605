"""What a MACE module is made of, as JSON: a module built from it takes the weights of the original."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nvdd.errors import InputError
from nvdd.models import mace_cueq
from nvdd.models.building import building
from nvdd.models.mace import MACEWrapper, _check, _import_mace

_REMEDY = "export it with allow_pickle (--allow-pickle), which puts the module itself into the file"
# arguments of MACE's constructor that are given as classes, functions or e3nn irreps
_CLASSES = ("interaction_cls", "interaction_cls_first", "readout_cls")
_IRREPS = ("hidden_irreps", "MLP_irreps", "edge_irreps")


def configuration(wrapper: MACEWrapper) -> dict[str, Any]:
    """Class, arguments of its constructor, and head, as JSON can hold them.

    Raises:
        InputError: the module is of a kind that MACE's own `extract_config_mace_model` can't describe.
    """
    from mace.tools.scripts_utils import extract_config_mace_model

    module = wrapper.model
    _refuse_patched(module)
    try:
        arguments = extract_config_mace_model(_with_scale_shift(module))
    except (AttributeError, IndexError, TypeError) as error:
        raise InputError(
            f"MACE can't tell how this model was made ({type(error).__name__}: {error}); {_REMEDY}"
        ) from error
    if "error" in arguments:
        raise InputError(f"MACE can't tell how this model was made ({arguments['error']}); {_REMEDY}")
    enable_cueq = mace_cueq.has_parts(module)
    if enable_cueq:
        arguments["cueq_config"] = None  # `enable_cueq` says it
    described = {key: _plain(key, value) for key, value in arguments.items()}
    if type(module).__name__ == "MACE":
        del described["atomic_inter_scale"], described["atomic_inter_shift"]
    made = {"class": type(module).__name__, "arguments": described, "head": wrapper.head}
    return made | {"enable_cueq": True} if enable_cueq else made


def rebuild(configuration: dict[str, Any], dtype: torch.dtype) -> MACEWrapper:
    """A wrapper of the same make on the CPU; its weights are random until the file's are loaded."""
    _import_mace()
    from e3nn import o3
    from mace import modules

    classes = {"ScaleShiftMACE": modules.ScaleShiftMACE, "MACE": modules.MACE}
    arguments = dict(configuration["arguments"])
    for key in _IRREPS:
        if arguments.get(key) is not None:
            arguments[key] = o3.Irreps(arguments[key])
    for key in _CLASSES:
        if key in arguments:
            arguments[key] = _classes()[arguments[key]]
    arguments["gate"] = _gates()[arguments["gate"]]
    # None stands for the constructor's default, which is the text "None"
    if arguments.get("distance_transform") is None:
        arguments.pop("distance_transform", None)
    if configuration.get("enable_cueq"):
        arguments["cueq_config"] = mace_cueq.configuration()
    with building(dtype):
        module = classes[configuration["class"]](**arguments)
    _check(module)
    return MACEWrapper(module, head=configuration["head"])


def _refuse_patched(module: torch.nn.Module) -> None:
    """A forward that was set on an instance is not in its class, and would be lost."""
    fused = mace_cueq.is_fused(module)
    for name, part in module.named_modules():
        # a scripted part, as e3nn's constructors make, has its forward in the instance; so has MACE's fused convolution
        of_mace = isinstance(part, torch.jit.ScriptModule) or (fused and name.endswith(".conv_tp"))
        if "forward" in vars(part) and not of_mace:
            raise InputError(f"the forward of this MACE model's {name or 'module'} was replaced; {_REMEDY}")


def _with_scale_shift(module: torch.nn.Module) -> torch.nn.Module:
    """A stand-in of the class that MACE describes, with the parts of ``module``, which stays as it is."""
    from mace.modules import MACE, ScaleShiftMACE
    from mace.modules.blocks import ScaleShiftBlock

    if type(module) is not MACE:
        return module
    stand_in = ScaleShiftMACE.__new__(ScaleShiftMACE)
    vars(stand_in).update(vars(module))
    vars(stand_in)["_modules"] = {**module._modules, "scale_shift": ScaleShiftBlock(scale=1.0, shift=0.0)}
    return stand_in


def _classes() -> dict[str, type]:
    from mace import modules

    known = [*modules.interaction_classes.values(), *modules.readout_classes.values()]
    return {cls.__name__: cls for cls in known}


def _gates() -> dict[str, Callable | None]:
    from mace.modules import gate_dict

    return dict(gate_dict)


def _plain(key: str, value: Any) -> Any:
    """A value of MACE's description as JSON has it."""
    if key in _CLASSES:
        if _classes().get(value.__name__) is not value:
            raise InputError(f"this MACE model has a {key} of its own, {value.__name__}; {_REMEDY}")
        return value.__name__
    if key == "gate":
        names = [name for name, gate in _gates().items() if gate is value]
        if not names:
            raise InputError(f"this MACE model has a gate of its own, {value!r}; {_REMEDY}")
        return names[0]
    if key in _IRREPS:
        return None if value is None else str(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain("", item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise InputError(f"this MACE model was made with {key}={value!r}, which has no form in a file; {_REMEDY}")
