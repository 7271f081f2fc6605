"""Potentials of matgl: TensorNet."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from nvdd.adapters import JitAdapter
from nvdd.config import StrategyKind
from nvdd.errors import InputError, MissingDependencyError
from nvdd.models.base import BaseModelMixin, Batch, ModelConfig, ModelOutputs, NeighborConfig
from nvdd.models.building import building
from nvdd.models.precise import Float64Table
from nvdd.models.registry import ModelFamily
from nvdd.shard_tensor import to_local
from nvdd.specs import SPEC_MPNN_GP, SPEC_MPNN_HALO, MLIPSpec

_INSTALL = "pip install 'matgl>=4.1'"
_PICKLE = "export it with allow_pickle (--allow-pickle), which puts the module itself into the file"
_OTHERS = {
    "M3GNet": "its three-body terms are built from matgl's own line graph of a whole structure",
    "CHGNet": "its bond graph is built by matgl for a whole structure; the CHGNet that chgnet ships is the family 'chgnet'",
    "SO3Net": "nvdd has no wrapper for it",
    "QET": "it equilibrates charges over a whole structure",
}


class TensorNetWrapper(torch.nn.Module, BaseModelMixin):
    """A TensorNet (https://arxiv.org/abs/2306.06482) of matgl behind edge vectors, with the offsets of its potential.

    matgl's layers run as they are, without its Warp kernels, which gather rows by themselves: the model is made again without,
    with copies of the weights. What crosses ranks are the three parts of the tensors of each layer.

    Args:
        potential: a ``matgl.apps.pes.Potential`` of an extensive TensorNet.

    Attributes:
        model: the network.
        scale: factor of its energies.
        references: energies of the potential's element offsets by atomic number, eV, in float64.

    Raises:
        InputError: another model, or a potential whose energy is no sum over atoms or has further terms.
        MissingDependencyError: matgl is missing.
    """

    def __init__(self, potential: torch.nn.Module) -> None:
        super().__init__()
        _check(potential)
        from ase.data import atomic_numbers

        self.model = _without_kernels(potential.model)
        self.register_buffer("scale", potential.data_std.detach().clone())
        numbers = torch.tensor([atomic_numbers[symbol] for symbol in self.model.element_types])
        kinds = torch.full((120,), -1)
        kinds[numbers] = torch.arange(len(numbers))
        self.register_buffer("_kinds", kinds, persistent=False)
        offsets = torch.zeros(120, dtype=torch.float64)
        if potential.element_refs is not None:
            offsets[numbers] = potential.element_refs.property_offset.detach().to(torch.float64)[: len(numbers)]
        self.references = Float64Table(offsets)
        self.model_config = ModelConfig(
            neighbor_config=NeighborConfig(float(self.model.cutoff)), elements=frozenset(numbers.tolist())
        )

    def forward(self, data: Batch) -> ModelOutputs:
        """``energies`` (n_atoms,) eV in float64."""
        numbers = to_local(data.atomic_numbers)
        graph = SimpleNamespace(
            node_type=self._kinds[numbers],
            pos=_Origin(),
            edge_index=data.edge_index,
            pbc_offshift=to_local(data.edge_vectors).to(self.dtype),
        )
        features = self.model.forward_features(graph)["readout"]
        energies = self.scale * self.model.final_layer(features).squeeze(-1)
        return ModelOutputs(energies=energies.to(torch.float64) + self.references(numbers))

    def distribution_spec(self, strategy: Any = None) -> MLIPSpec:
        """Owned rows, remote ones fetched where senders are gathered; matgl's scripted sum runs as Python."""
        base = SPEC_MPNN_GP if strategy is StrategyKind.GRAPH_PARTITION else SPEC_MPNN_HALO
        return base.with_third_party_helpers(JitAdapter("matgl.utils.maths", "_scatter_add"))


class _Origin:
    """Where all atoms are, for code that adds the edge vectors: ``positions[index]`` is 0."""

    def __getitem__(self, index: Tensor) -> float:
        return 0.0


def _import_matgl() -> None:
    from nvdd.models.warp_runtime import warp

    warp()  # else its banner comes when matgl's kernels are imported
    try:
        import matgl.apps.pes
        import matgl.models  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(f"matgl's models need matgl ({sys.executable}; {error}): {_INSTALL}") from error


def _check(potential: Any) -> None:
    _import_matgl()
    from matgl.apps.pes import Potential
    from matgl.models import TensorNet

    if not isinstance(potential, Potential):
        raise InputError(
            f"nvdd's matgl wrapper needs a matgl.apps.pes.Potential, not a {type(potential).__module__}.{type(potential).__name__}"
        )
    model = potential.model
    if type(model) is not TensorNet:
        name = type(model).__name__
        why = _OTHERS.get(name, "nvdd knows matgl's TensorNet only; a compiled one must be made without compile_model")
        raise InputError(f"a {name} of matgl can't be divided over ranks by nvdd: {why}")
    if model.is_intensive or model.include_state:
        raise InputError(
            f"this TensorNet is no potential that is a sum over atoms (is_intensive={model.is_intensive}, "
            f"include_state={model.include_state}); make it with is_intensive=False"
        )
    if potential.calc_repuls or potential.calc_charge or bool((potential.data_mean != 0).any()):
        raise InputError(
            f"this matgl potential adds what nvdd does not divide: calc_repuls={potential.calc_repuls}, "
            f"calc_charge={potential.calc_charge}, data_mean={potential.data_mean.tolist()} (a constant for each structure); take "
            "one without"
        )
    if potential.element_refs is not None and potential.element_refs.property_offset.dim() != 1:
        raise InputError("this matgl potential has element offsets for several states; nvdd needs one for each element")


def _without_kernels(model: Any) -> torch.nn.Module:
    """A network with the same weights and without Warp kernels; a copy, since matgl's own keeps what it computed last."""
    from matgl.models import TensorNet

    with building(model.linear.weight.dtype):
        twin = TensorNet(**{**model._init_args, "use_warp": False}).to(model.linear.weight.dtype)
    state = dict(model.state_dict())
    for part in ("weight", "bias") if model._use_warp else ():  # three layers that the kernels take as one
        together = state.pop(f"tensor_embedding.distance_proj.{part}").chunk(3)
        state |= {f"tensor_embedding.distance_proj{k}.{part}": rows for k, rows in enumerate(together, 1)}
    twin.load_state_dict(state)
    return twin.to(model.linear.weight.device).train(model.training)


# --- family -------------------------------------------------------------------------------------------------------


def _build(checkpoint: str | None, *, dtype: torch.dtype | None = None) -> TensorNetWrapper:
    if checkpoint is None:
        raise InputError("'matgl' needs a model: matgl:FOLDER, which Potential.save has written")
    folder = os.path.expanduser(checkpoint)
    missing = [name for name in ("model.pt", "state.pt", "model.json") if not os.path.isfile(os.path.join(folder, name))]
    if missing:
        raise InputError(
            f"{checkpoint!r} is no folder of a matgl model (working directory {os.getcwd()}; {', '.join(missing)} missing), and "
            "nvdd downloads nothing: take the folder that Potential.save has written, or that matgl.load_model has in its cache"
        )
    _import_matgl()
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
    wrapper = TensorNetWrapper(potential)
    return wrapper.to(dtype=dtype or wrapper.dtype).eval().requires_grad_(False)


def _from_calculator(calculator: Any) -> TensorNetWrapper | None:
    """A wrapper around a copy of the model of a ``matgl.ext.ase.PESCalculator``, or None."""
    theirs = sys.modules.get("matgl.ext.ase")  # not imported: then it is not theirs
    if theirs is None or not isinstance(calculator, theirs.PESCalculator):
        return None
    if type(calculator).calculate is not theirs.PESCalculator.calculate:
        return None  # a subclass with physics of its own
    if calculator.conversion_factor == 1.0:
        raise InputError("this PESCalculator gives stress in GPa, nvdd in eV/A^3 as ASE does: make it with stress_unit='eV/A3'")
    return TensorNetWrapper(calculator.potential).cpu().eval().requires_grad_(False)


def _configuration(wrapper: TensorNetWrapper) -> dict[str, Any]:
    args = {k: v for k, v in wrapper.model._init_args.items() if k not in ("dtype", "use_warp")}
    for name, value in args.items():
        items = value if isinstance(value, (list, tuple)) else [value]
        if not all(isinstance(item, (bool, int, float, str, type(None))) for item in items):
            raise InputError(f"this TensorNet was made with {name}, a {type(value).__name__}, which has no form in a file; {_PICKLE}")
    return {"args": args}


def _rebuild(description: dict[str, Any], dtype: torch.dtype) -> TensorNetWrapper:
    _import_matgl()
    from matgl.apps.pes import Potential
    from matgl.models import TensorNet

    args = dict(description["args"])
    with building(dtype):
        return TensorNetWrapper(Potential(TensorNet(**{**args, "element_types": tuple(args["element_types"]), "use_warp": False})))


FAMILY = ModelFamily(
    name="matgl",
    description="TensorNet of matgl, Cartesian tensors",
    build=_build,
    options={},
    package="matgl",
    install=_INSTALL,
    licence="package BSD-3; weights as their authors state",
    from_calculator=_from_calculator,
    configuration=_configuration,
    rebuild=_rebuild,
)
