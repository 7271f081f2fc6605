"""SevenNet with fused convolutions: cuEquivariance, FlashTP, OpenEquivariance, as SevenNet itself builds them.

Such a convolution is one kernel that gathers senders, multiplies and sums over receivers. It stays whole over ranks: halo rows
of the features are fetched before it, and the edges of owned receivers are all here, so that its sums are complete.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

from nvdd.context import current_dd_context
from nvdd.errors import InputError, MissingDependencyError
from nvdd.shard_tensor import promote, to_local
from nvdd.specs import MLIPSpec
from nvdd.verbs import distributed_method, refresh_neighbors, scatter_to_owners

_FUSED = "IrrepsScatterGatterFusedConvolution"
_KERNELS = {  # option of SevenNet's `build_model` -> SevenNet's name of the kind, the package, how it is installed
    "enable_cueq": (
        "cue",
        "cuequivariance_torch",
        "pip install cuequivariance-torch cuequivariance-ops-torch-cu12 (or -cu13, as torch's CUDA is)",
    ),
    "enable_flash": ("flash", "flashTP_e3nn", "see https://github.com/SNU-ARC/flashTP"),
    "enable_oeq": ("oeq", "openequivariance", "pip install openequivariance"),
}


def one_of(**wished: bool) -> str | None:
    """The option that is True, or None.

    Raises:
        InputError: several are, or one is not known.
        MissingDependencyError: its package is missing.
    """
    given = [name for name, value in wished.items() if value]
    if not given:
        return None
    if unknown := sorted(wished.keys() - _KERNELS.keys()):
        raise InputError(f"{', '.join(unknown)}: SevenNet has no such convolutions for nvdd; there are {', '.join(_KERNELS)}")
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)}: a SevenNet model has one kind of convolution; give one of them")
    _, package, install = _KERNELS[given[0]]
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise MissingDependencyError(f"{given[0]} needs {package}: {install}") from error
    return given[0]


def usable(kernels: str | None) -> bool:
    """Whether SevenNet builds these convolutions on this machine; where there is no GPU it takes e3nn's."""
    if kernels is None:
        return False
    kind = _KERNELS[kernels][0]
    return getattr(importlib.import_module(f"sevenn.nn.{kind}_helper"), f"is_{kind}_available")()


def configured(config: dict[str, Any], kernels: str | None) -> dict[str, Any]:
    """A model's configuration with these convolutions, or e3nn's where they can't be."""
    has = {name: usable(kernels) and kernels == name for name in _KERNELS}
    cueq = {"use": has["enable_cueq"]}
    return {**config, "cuequivariance_config": cueq, "use_flash_tp": has["enable_flash"], "use_oeq": has["enable_oeq"]}


def is_fused(model: torch.nn.Module) -> bool:
    """Whether convolutions of a SevenNet model are fused kernels."""
    return any(type(block).__name__ == _FUSED for block in model.children())


def keep_weights_only(model: torch.nn.Module) -> None:
    """Leaves tables of convolutions out of ``state_dict``: which there are depends on the kernel, and they follow from the
    configuration."""
    for block in _convolutions(model):
        for inner in block.convolution.modules():
            inner._non_persistent_buffers_set.update(inner._buffers)


def _convolutions(model: torch.nn.Module) -> Iterable[torch.nn.Module]:
    return [block for block in model.children() if type(block).__name__ in (_FUSED, "IrrepsConvolution")]


def check_device(model: torch.nn.Module, device: torch.device) -> None:
    """Raises InputError where kernels for GPUs would run on another device."""
    plain = lambda block: type(getattr(getattr(block.convolution, "f", None), "m", None)).__name__ == "SegmentedPolynomialNaive"
    if device.type != "cuda" and any(type(b).__name__ == _FUSED and not plain(b) for b in _convolutions(model)):
        raise InputError(
            f"this SevenNet model has fused convolutions, which run on NVIDIA GPUs, and it is on {device}; give device='cuda', "
            "or take the e3nn model (without enable_cueq, enable_flash, enable_oeq)"
        )


def with_adapters(spec: MLIPSpec) -> MLIPSpec:
    """The spec of a model with fused convolutions."""
    from nvdd.adapters import MethodAdapter

    return spec.with_adapters(
        MethodAdapter(module_path="sevenn.nn.convolution", class_name=_FUSED, method_name="forward", replacement=convolve)
    )


@distributed_method
def convolve(original: Callable, block: torch.nn.Module, data: dict[str, Any]) -> dict[str, Any]:
    """The block on rows ``[owned | halo]`` of its features; rows of owned atoms come out complete."""
    meta, rows = current_dd_context().meta, dict(data)
    rows[block.key_x] = to_local(refresh_neighbors(data[block.key_x], pad=True))
    for key in (block.key_filter, block.key_weight_input, block.key_edge_idx):
        rows[key] = to_local(data[key])
    sums = original(block, rows)[block.key_x]
    whole = promote(sums[: meta.n_owned], meta.atom_role, meta) if meta.fetches else scatter_to_owners(sums)
    return {**data, block.key_x: whole}
