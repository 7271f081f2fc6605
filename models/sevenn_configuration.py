"""What a SevenNet model is made of, as JSON: a model built from it takes the weights of the original."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from nvdd.errors import InputError
from nvdd.models import sevenn_fused
from nvdd.models.building import building
from nvdd.models.sevenn import SevenNetWrapper, _import_sevenn

_REMEDY = "export it with allow_pickle (--allow-pickle), which puts the module itself into the file"


def configuration(wrapper: SevenNetWrapper) -> dict[str, Any]:
    """The checkpoint's configuration without what it says of training and data, and the fidelity.

    Raises:
        InputError: the wrapper was not made from a checkpoint, or its configuration has no form in JSON.
    """
    if wrapper.checkpoint_config is None:
        raise InputError(
            f"this SevenNet model was not read from a checkpoint, so how it was made is unknown; {_REMEDY}"
        )
    import sevenn._const as const

    # SevenNet's own lists of what concerns data and training: paths, optimisers, devices
    elsewhere = {*const.DEFAULT_TRAINING_CONFIG, *const.DEFAULT_DATA_CONFIG, *_FURTHER}
    elsewhere -= const.DEFAULT_E3_EQUIVARIANT_MODEL_CONFIG.keys() | set(_OF_MODEL)
    kept = {key: value for key, value in wrapper.checkpoint_config.items() if key not in elsewhere}
    kept = sevenn_fused.configured(kept, None)  # `kernels` says it, and the machine whether it can be
    kernels = {"kernels": wrapper.kernels} if wrapper.kernels else {}
    return {"config": _to_json(kept, "config"), "modal": wrapper.modal, **kernels}


def rebuild(configuration: dict[str, Any], dtype: torch.dtype) -> SevenNetWrapper:
    """A wrapper of the same make on the CPU; its weights are random until the file's are loaded."""
    _import_sevenn()
    from sevenn.model_build import build_E3_equivariant_model

    kernels = configuration.get("kernels")
    if kernels is not None:
        sevenn_fused.one_of(**{kernels: True})
    config = sevenn_fused.configured(_from_json(configuration["config"]), kernels)
    with building(torch.float32):  # sevenn mixes the default type with float32 otherwise
        model = build_E3_equivariant_model(config)
    wrapper = SevenNetWrapper(model, modal=configuration["modal"]).to(dtype=dtype)
    wrapper.checkpoint_config = config
    wrapper.use(kernels)
    return wrapper


# of a run, but in none of SevenNet's lists
_FURTHER = (
    *("device", "_num_workers", "local_rank", "rank", "world_size", "shift_cp", "scale_cp"),
    *("load_dataset_path", "load_trainset_path", "load_validset_path", "load_testset_path"),
)
# in SevenNet's lists of data, but read when a model is built
_OF_MODEL = (
    *("shift", "scale", "chemical_species", "_chemical_species_by_atomic_number", "_number_of_species", "_type_map"),
    *("use_species_wise_shift_scale", "use_modality", "use_modal_wise_shift", "use_modal_wise_scale"),
    *("_modal_map", "_number_of_modalities", "modal_list", "version"),
)


def _to_json(value: Any, where: str) -> Any:
    """Dictionaries whose keys are numbers become lists of pairs, which JSON can hold."""
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: _to_json(item, f"{where}.{key}") for key, item in value.items()}
        return {_PAIRS: [[key, _to_json(item, f"{where}[{key!r}]")] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return [_to_json(item, f"{where}[...]") for item in value]
    if isinstance(value, (np.ndarray, np.generic, torch.Tensor)):
        return value.tolist()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise InputError(
        f"the SevenNet checkpoint's {where} is a {type(value).__name__}, which has no form in a file; {_REMEDY}"
    )


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_PAIRS}:
        return {key: _from_json(item) for key, item in value[_PAIRS]}
    return {key: _from_json(item) for key, item in value.items()}


_PAIRS = "pairs"
