"""What a model of fairchem is taken apart into, and which versions of fairchem-core this is written for."""

from __future__ import annotations

import copy
import dataclasses
import re
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from nvdd.errors import InputError, MissingDependencyError

SUPPORTED = "2.24"  # methods of its classes are adapted, whose arguments change from one minor version to the next
INSTALL = f"pip install 'fairchem-core=={SUPPORTED}.*'"
_BACKBONES = ("eSCNMDBackbone", "eSCNMDMoeBackbone")
_ENERGY_HEADS = ("MLP_EFS_Head", "MLP_Energy_Head", "Linear_Energy_Head")
_BY_DATASET = ("DatasetSpecificMoEWrapper", "DatasetSpecificSingleHeadWrapper")


def import_fairchem() -> Any:
    """fairchem's modules ``escn_md`` and ``escn_moe``.

    Raises:
        MissingDependencyError: fairchem-core is missing, or another version than this is written for.
    """
    from nvdd.warp_runtime import warp

    warp()  # else its banner comes when fairchem's neighbour lists are imported
    try:
        found = version("fairchem-core")
        if not re.match(rf"{re.escape(SUPPORTED)}(\.|$)", found):
            raise MissingDependencyError(
                f"nvdd's UMA wrapper supports fairchem-core {SUPPORTED}.*, and {found} is installed ({sys.executable}): {INSTALL}"
            )
        from fairchem.core.models.uma import escn_md, escn_moe
    except (PackageNotFoundError, ImportError) as error:
        raise MissingDependencyError(f"UMA models need fairchem-core ({sys.executable}, {error}): {INSTALL}") from error
    return escn_md, escn_moe


@dataclass(eq=False)
class UMAParts:
    """A backbone, and one task's head and units.

    Attributes:
        backbone: an ``eSCNMDBackbone`` or ``eSCNMDMoeBackbone``.
        head: gives energies: ``MLP_EFS_Head``, ``MLP_Energy_Head`` or ``Linear_Energy_Head``.
        task: name of the dataset whose units these are.
        datasets: dataset -> expert of the head, where that is a mixture of them; else None.
        mole: fairchem's object that tells the head's experts which of them is meant; None without.
        force_head: ``Linear_Force_Head`` of a model with direct forces; else None.
        scale, shift: energy in eV = scale * (sum of the head's numbers) + shift.
        force_scale: forces in eV/A = force_scale * the force head's.
        references: (n_elements,) eV, energies of elements that are added.
        single_atoms: whether the model was made for lone atoms; for others fairchem has a table.
        source: arguments of the constructors, as JSON can hold them; None where they are not known.
    """

    backbone: torch.nn.Module
    head: torch.nn.Module
    task: str
    datasets: dict[str, int] | None = None
    mole: Any = None
    force_head: torch.nn.Module | None = None
    scale: float = 1.0
    shift: float = 0.0
    force_scale: float = 1.0
    references: Tensor = dataclasses.field(default_factory=lambda: torch.zeros(119, dtype=torch.float64))
    single_atoms: bool = False
    source: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        check_backbone(self.backbone)

    def as_handed_edges(self) -> torch.nn.Module:
        """The backbone, with the same weights, as it takes edges from outside and leaves derivatives to others."""
        backbone = copy.copy(self.backbone)
        # settings and tables of its own; the modules in it are shared
        backbone._parameters, backbone._buffers = dict(backbone._parameters), dict(backbone._buffers)
        backbone._modules = dict(backbone._modules)
        backbone.otf_graph = False
        backbone.regress_config = dataclasses.replace(
            backbone.regress_config, forces=False, stress=False, hessian=False
        )
        return backbone


def check_backbone(backbone: Any) -> None:
    """Raises InputError for one that is not distributed."""
    escn_md, escn_moe = import_fairchem()
    if type(backbone) not in (escn_md.eSCNMDBackbone, escn_moe.eSCNMDMoeBackbone):
        raise InputError(
            f"nvdd distributes fairchem's {' and '.join(_BACKBONES)} (UMA, eSEN), and this model has a "
            f"{type(backbone).__module__}.{type(backbone).__name__}"
        )
    if getattr(backbone, "_merged_composition", None) is not None:
        raise InputError(
            "the experts of this UMA model are merged for one composition (merge_mole); load it from its file"
        )
    if type(backbone.backend).__name__ != "ExecutionBackend":
        raise InputError(
            f"this UMA model runs by {type(backbone.backend).__name__}; nvdd runs execution_mode='general': load it from its file"
        )
    if not backbone.use_quaternion_wigner:
        raise InputError(
            "this UMA model makes rotations from Euler angles (use_quaternion_wigner=False); nvdd runs fairchem's default, by "
            "quaternions: load it from its file"
        )


def parts_of(model: Any, task: str | None = None) -> UMAParts:
    """Takes a ``HydraModel`` apart, on which ``setup_tasks`` has been called.

    Args:
        model: fairchem's model.
        task: a name out of ``model.dataset_to_tasks``; None if there is only one.

    Raises:
        InputError: no such task, a head that gives no sum over atoms, units of energy and forces that don't belong
            together, a backbone of another kind.
        MissingDependencyError: as `import_fairchem`.
    """
    import_fairchem()
    check_backbone(model.backbone)
    known = model.dataset_to_tasks
    if task is None and len(known) == 1:
        task = next(iter(known))
    if task not in known:
        raise InputError(f"this model has the tasks {', '.join(sorted(known))}, and task={task!r} is none of them; give one")
    by_property = {each.property: each for each in known[task]}
    if "energy" not in by_property:
        raise InputError(f"the task {task!r} has no energy, but {', '.join(sorted(by_property))}; nvdd needs one")
    energy = by_property["energy"]
    head, around = _energy_head(model, task, energy.name)
    direct = model.backbone.regress_config.direct_forces
    scale, shift = float(energy.normalizer.rmsd), float(energy.normalizer.mean)
    force_scale = scale
    for name in ("forces", "stress"):
        if name not in by_property:
            continue
        unit, mean = float(by_property[name].normalizer.rmsd), float(by_property[name].normalizer.mean)
        if mean or (not direct and abs(unit / scale - 1) > 1e-6):
            raise InputError(
                f"the task {task!r} has energies in units of {scale} eV and {name} in units of {unit} with a mean of {mean}, so that "
                f"{name} are no derivative of the energy; nvdd does not run such a model"
            )
        force_scale = unit if name == "forces" else force_scale
    mole, datasets = None, None
    if type(around).__name__ == "DatasetSpecificMoEWrapper":
        mole, datasets = around.global_mole_tensors, dict(around.dataset_name_to_exp)
    parts = UMAParts(
        model.backbone, head, task, datasets, mole, _force_head(model) if direct else None, scale, shift, force_scale,
        single_atoms=bool(getattr(model, "supports_single_atoms", False)),
    )  # fmt: skip
    if energy.element_references is not None:
        parts.references = energy.element_references.element_references.detach().reshape(-1).to(torch.float64).cpu()
    return parts


def _energy_head(model: Any, task: str, name: str) -> tuple[Any, Any]:
    """The head that gives the task's energy, and what chooses it by dataset, or None."""
    found = []
    for key, head in model.output_heads.items():
        around = head if type(head).__name__ in _BY_DATASET else None
        inner = head.head if around is not None else head
        if not hasattr(inner, "energy_block") or (around is not None and task not in around.dataset_names):
            continue
        names = {key, f"{prefix}_energy" if (prefix := getattr(inner, "prefix", None)) else "energy", f"{task}_energy"}
        if around is not None or name in names or len(model.output_heads) == 1:
            found.append((inner, around))
    kinds = ", ".join(f"{key} ({type(head).__name__})" for key, head in model.output_heads.items())
    if len(found) != 1:
        raise InputError(f"which head gives the energy {name!r} of this model is not clear; its heads are {kinds}")
    inner, around = found[0]
    if type(inner).__name__ not in _ENERGY_HEADS or inner.reduce != "sum":
        raise InputError(
            f"the energy of this model comes from a {type(inner).__name__} that takes the {inner.reduce} over atoms; nvdd "
            f"distributes sums, by {', '.join(_ENERGY_HEADS)}"
        )
    if around is not None and around.merged_on_dataset is not None:
        raise InputError("the head of this UMA model is merged for one dataset (merge_mole); load it from its file")
    return inner, around


def _force_head(model: Any) -> Any:
    heads = [getattr(head, "head", head) for head in model.output_heads.values()]
    found = [head for head in heads if type(head).__name__ == "Linear_Force_Head"]
    if len(found) != 1:
        kinds = ", ".join(sorted(type(head).__name__ for head in heads))
        raise InputError(f"this model's forces are not derivatives of its energy, and nvdd needs a Linear_Force_Head, not {kinds}")
    return found[0]
