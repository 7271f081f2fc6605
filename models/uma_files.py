"""UMA and eSEN models from inference checkpoints, from fairchem's calculator, with random weights, and from JSON."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch

from nvdd.errors import InputError
from nvdd.models.building import building
from nvdd.models.calculators import is_own_calculator
from nvdd.models.uma import UMAWrapper
from nvdd.models.uma_parts import UMAParts, import_fairchem, parts_of

# The smallest that has all kinds of layers; and UMA-S's (https://arxiv.org/abs/2506.23971): 4 layers, 32 experts.
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"sphere_channels": 16, "hidden_channels": 16, "edge_channels": 16, "num_layers": 2, "cutoff": 4.5,
             "num_distance_basis": 16, "num_experts": 4},
    "small": {"sphere_channels": 128, "hidden_channels": 128, "edge_channels": 128, "num_layers": 4, "cutoff": 6.0,
              "num_distance_basis": 64, "num_experts": 32},
}  # fmt: skip
TASKS = ("oc20", "odac", "omat", "omc", "omol")
_MOE = ("num_experts", "use_composition_embedding")
_OF_DTYPE = "module.backbone.sphere_embedding.weight"  # a weight that every backbone has


def build(family: str, checkpoint: str | None, *, dtype: torch.dtype | None = None, **options: Any) -> UMAWrapper:
    """``"random"`` weights, or a file; options as the family lists them."""
    if checkpoint is None:
        raise InputError(f"{family!r} needs a model: {family}:FILE, an inference checkpoint of fairchem, or {family}:random")
    seed, size = options.pop("seed", None), options.pop("size", None)
    if checkpoint == "random":
        return random_uma(family, size=size or "tiny", seed=int(seed or 0), dtype=dtype, **options)
    if seed is not None or size is not None:
        raise InputError(f"{family}: seed and size are of random weights; {checkpoint!r} has its own")
    return from_file(os.path.expanduser(checkpoint), dtype=dtype, **options)


def from_file(
    path: str,
    task: str | None = None,
    *,
    dtype: torch.dtype | None = None,
    checkpointing: bool | str = False,
    overrides: dict[str, Any] | None = None,
    **options: Any,
) -> UMAWrapper:
    """Loads an inference checkpoint (``.pt``) by fairchem's own loader.

    Args:
        path: the file, as fairchem downloads it once its licence is accepted. Like fairchem itself, this unpickles it: load
            only files that you trust. Nothing is ever downloaded.
        task: which head and units; may be left out where the file has one.
        dtype: torch.float32 or torch.float64; None for that of the file's weights, which is float32 as a rule.
        checkpointing: whether edges are computed again in the derivative instead of kept.
        overrides: of fairchem's configuration, as ``FAIRChemCalculator.from_model_checkpoint`` takes them.
        options: charge and spin, see `UMAWrapper`.

    Raises:
        InputError: no such file, one that is no inference checkpoint, an unknown task; and what `parts_of` raises.
        MissingDependencyError: fairchem-core is missing or another version.
    """
    import_fairchem()
    from fairchem.core.units.mlip_unit import InferenceSettings
    from fairchem.core.units.mlip_unit.utils import get_backbone_class_from_checkpoint, load_inference_model

    if not os.path.isfile(path):
        raise InputError(
            f"no UMA checkpoint file {path!r} (working directory {os.getcwd()}); nvdd downloads none: accept the licence of "
            "facebook/UMA at Hugging Face, and give the file (for example uma-s-1p2.pt)"
        )
    settings = InferenceSettings(activation_checkpointing=_yes(checkpointing), external_graph_gen=True, execution_mode="general")
    with _quiet():
        try:
            checkpoint = torch.load(path, map_location="cpu", weights_only=False)
            weights = checkpoint.ema_state_dict
        except Exception as error:
            raise _unreadable(path, error) from error
    if dtype is None:
        dtype = weights[_OF_DTYPE].dtype if _OF_DTYPE in weights else torch.float32
    with _quiet(), building(dtype):
        try:
            ours = get_backbone_class_from_checkpoint(checkpoint).build_inference_settings(settings)
            if "moe_layer_type" in checkpoint.model_config["backbone"]:
                ours["moe_layer_type"] = "pytorch"  # the other kernel (of the same weights) is in a package of its own
            theirs = dict(overrides or {})
            merged = {**theirs, "backbone": {**theirs.get("backbone", {}), **ours}}
            averaged, checkpoint = load_inference_model(path, merged, use_ema=True, preloaded_checkpoint=checkpoint)
            averaged.module.setup_tasks(checkpoint.tasks_config)
        except Exception as error:  # whatever a file of another kind leads to
            raise _unreadable(path, error) from error
        parts = parts_of(averaged.module, task)
    parts.source = _source(parts, averaged.module, checkpoint.model_config)
    return _finished(parts, dtype, options)


def _unreadable(path: str, error: Exception) -> InputError:
    return InputError(f"{path} can't be read as an inference checkpoint of fairchem: {type(error).__name__}: {error}")


def random_uma(
    family: str = "uma",
    task: str | None = None,
    *,
    size: str = "tiny",
    seed: int = 0,
    dtype: torch.dtype | None = None,
    checkpointing: bool | str = False,
    **options: Any,
) -> UMAWrapper:
    """A model of random weights, for trying things out and for benchmarks; its energies mean nothing.

    Args:
        family: ``"uma"`` with experts, ``"escn"`` without.
        task: one of `TASKS`; None for ``"omat"``.
        size: one of `SIZES`.
        seed: of the weights.
        dtype, checkpointing, options: as of `from_file`.
    """
    if size not in SIZES:
        raise InputError(f"{family}: size={size!r} is none of {', '.join(SIZES)}")
    task = "omat" if task is None else task
    if task not in TASKS:
        raise InputError(f"{family}: a random model has the tasks {', '.join(TASKS)}, and task={task!r} is none of them")
    config = random_config(family, size, checkpointing=_yes(checkpointing))
    with _quiet(), building(dtype or torch.float32):
        torch.manual_seed(seed)
        parts = _made(config, task)
    return _finished(parts, dtype, options)


def random_config(family: str, size: str, checkpointing: bool = False) -> dict[str, Any]:
    """What `configuration` would say of a model like UMA (or, of the family ``"escn"``, like eSEN)."""
    backbone = {
        "max_num_elements": 100, "lmax": 2, "mmax": 2, "max_neighbors": 300, "direct_forces": False,
        "regress_forces": True, "norm_type": "rms_norm_sh", "act_type": "gate", "ff_type": "spectral", "otf_graph": False,
        "chg_spin_emb_type": "rand_emb", "dataset_mapping": {name: name for name in TASKS},
        "activation_checkpointing": checkpointing, "use_composition_embedding": True, **SIZES[size],
    }  # fmt: skip
    if family == "escn":
        backbone = {key: value for key, value in backbone.items() if key not in _MOE}
    return {
        "backbone": backbone,
        "experts": family != "escn",
        "model_id": None,
        "head": "MLP_EFS_Head",
        "datasets": None,
        "direct": False,
    }


def _finished(parts: UMAParts, dtype: torch.dtype | None, options: dict[str, Any]) -> UMAWrapper:
    wrapper = UMAWrapper(parts, **options)
    return wrapper.to(dtype=dtype or torch.float32).eval().requires_grad_(False)


def from_calculator(calculator: Any) -> UMAWrapper | None:
    """The file of a ``FAIRChemCalculator`` again, in its task and type; None for anything else.

    Raises:
        InputError: the calculator has ranks of its own, or no file.
    """
    if not is_own_calculator(calculator, "fairchem.core.calculate.ase_calculator", "FAIRChemCalculator"):
        return None
    path = getattr(calculator.predictor, "_inference_model_path", None)
    if path is None:
        raise InputError(
            f"this FAIRChemCalculator has a {type(calculator.predictor).__name__} that does not say its file; give nvdd the file "
            "itself: NVDDCalculator('uma:FILE', ...)"
        )
    predictor = calculator.predictor
    dtype = predictor.inference_settings.base_precision_dtype
    return from_file(str(path), calculator.task_name, dtype=dtype, overrides=predictor._overrides)


# --- descriptions in JSON -----------------------------------------------------------------------------------------


def _source(parts: UMAParts, model: Any, model_config: Any) -> dict[str, Any] | None:
    """What `_made` needs; None where it has no form in JSON."""
    from omegaconf import OmegaConf

    backbone = model_config.get("backbone")
    if OmegaConf.is_config(backbone):
        backbone = OmegaConf.to_container(backbone, resolve=True)
    source = {
        "backbone": {key: value for key, value in (backbone or {}).items() if key != "model"},
        "experts": type(parts.backbone).__name__ == "eSCNMDMoeBackbone",
        "model_id": parts.backbone.__dict__.get("model_id"),
        "head": type(parts.head).__name__,
        "datasets": parts.datasets,
        "direct": parts.force_head is not None,
    }
    try:
        return json.loads(json.dumps(source))
    except TypeError:
        return None


def configuration(wrapper: UMAWrapper) -> dict[str, Any]:
    """Constructor's arguments and the wrapper's options, as JSON can hold them.

    Raises:
        InputError: the model was not read from a file.
    """
    if wrapper.source is None:
        raise InputError(
            "this UMA model was not read from a checkpoint, or its configuration has no form in JSON; load it by uma:FILE, or "
            "export it with allow_pickle (--allow-pickle), which puts the module itself into the file"
        )
    names = ("task", "scale", "shift", "force_scale", "charge", "spin")
    return {
        **wrapper.source,
        **{name: getattr(wrapper, name) for name in names},
        "n_references": len(wrapper.references.values),
        "single_atoms": wrapper._single_atoms,
    }


def rebuild(description: dict[str, Any], dtype: torch.dtype) -> UMAWrapper:
    """A wrapper of the same make on the CPU; its weights are random until the file's are loaded."""
    with _quiet(), building(dtype):
        parts = _made(description, description["task"])
    for name in ("scale", "shift", "force_scale", "single_atoms"):
        setattr(parts, name, description[name])
    parts.references = torch.zeros(description["n_references"], dtype=torch.float64)
    return UMAWrapper(parts, charge=description["charge"], spin=description["spin"]).to(dtype=dtype)


def _made(source: dict[str, Any], task: str) -> UMAParts:
    """fairchem's modules from the arguments of their constructors; no class but these is ever made."""
    escn_md, escn_moe = import_fairchem()
    backbone = (escn_moe.eSCNMDMoeBackbone if source["experts"] else escn_md.eSCNMDBackbone)(**source["backbone"])
    if source["experts"]:
        backbone.model_id = source["model_id"]
    heads = {name: getattr(escn_md, name) for name in ("MLP_EFS_Head", "MLP_Energy_Head", "Linear_Energy_Head")}
    if source["head"] not in heads:
        raise InputError(f"the file has a head {source['head']!r}, and nvdd knows {', '.join(heads)}; update nvdd")
    datasets, mole = source["datasets"], None
    if datasets is None:
        head = heads[source["head"]](backbone)
    else:
        firsts = {expert: name for name, expert in reversed(datasets.items())}  # one dataset for each expert
        around = escn_moe.DatasetSpecificMoEWrapper(
            backbone, f"fairchem.core.models.uma.escn_md.{source['head']}",
            dataset_mapping={name: firsts[expert] for name, expert in datasets.items()},
        )  # fmt: skip
        head, mole = around.head, around.global_mole_tensors
    force_head = escn_md.Linear_Force_Head(backbone) if source["direct"] else None
    keys = ("backbone", "experts", "model_id", "head", "datasets", "direct")
    kept = {key: source[key] for key in keys}
    return UMAParts(backbone, head, task, datasets, mole, force_head, source=kept)


def _yes(value: bool | str) -> bool:
    if isinstance(value, str):
        words = {"yes": True, "true": True, "no": False, "false": False}
        if value.lower() not in words:
            raise InputError(f"uma: checkpointing={value!r} is neither yes nor no")
        return words[value.lower()]
    return bool(value)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without fairchem's remarks on its own deprecated options, which are made with a stack trace."""
    logger = logging.getLogger()
    hide = lambda record: "fairchem" not in record.pathname
    logger.addFilter(hide)
    try:
        yield
    finally:
        logger.removeFilter(hide)
