"""SevenNet: its wrapper, where its models come from, and its own ASE calculator."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from nvdd.config import StrategyKind
from nvdd.errors import InputError, MissingDependencyError
from nvdd.models import sevenn_fused
from nvdd.models.base import BaseModelMixin, Batch, ModelConfig, ModelOutputs, NeighborConfig
from nvdd.models.calculators import is_own_calculator
from nvdd.models.registry import ModelFamily
from nvdd.shard_tensor import to_local
from nvdd.specs import SPEC_MPNN_GP, SPEC_MPNN_HALO, EdgeStage, MLIPSpec

_INSTALL = "pip install 'sevenn>=0.11'"
_SHIPPED = ("7net-0", "7net-0_22May2024", "7net-l3i5", "7net-mf-0")


class SevenNetWrapper(torch.nn.Module, BaseModelMixin):
    """An eager SevenNet model (https://doi.org/10.1021/acs.jctc.4c00190) behind edge vectors.

    The blocks of the model run one by one up to the energies of the atoms; those that make a total energy and
    forces don't run. What crosses ranks is one node feature per layer. The model is used as it is: no block
    and no flag of it is changed. Fused convolutions stay fused over ranks.

    Args:
        model: an ``AtomGraphSequential``.
        modal: the fidelity of a multi-fidelity model (``"PBE"``, ``"R2SCAN"`` for 7net-mf-0); only for those.

    Attributes:
        model: the module.
        modal: the fidelity in use, or None.
        checkpoint_config: the configuration from which sevenn builds the model; None if it is not from a checkpoint.
        kernels: ``"enable_cueq"`` or another kind of fused convolutions that was asked for, or None.

    Raises:
        InputError: the module is no eager serial SevenNet model, or needs another modal.
        MissingDependencyError: sevenn is missing.
    """

    def __init__(self, model: torch.nn.Module, modal: str | None = None) -> None:
        _import_sevenn()
        super().__init__()
        self._blocks = _blocks(model)
        self.model = model
        self.checkpoint_config: dict[str, Any] | None = None
        self.kernels: str | None = None
        self._fused = sevenn_fused.is_fused(model)
        self.modal, index = _modal(getattr(model, "modal_map", None) or {}, modal)
        self.model_config = ModelConfig(
            neighbor_config=NeighborConfig(cutoff=float(model.cutoff)),
            elements=frozenset(int(z) for z in model.type_map),
        )
        type_of_element = torch.full((max(120, 1 + max(model.type_map)),), -1)
        for z, kind in model.type_map.items():
            type_of_element[z] = kind
        device = next(model.parameters()).device
        self.register_buffer("_type_of_element", type_of_element.to(device), persistent=False)
        self.register_buffer("_modal_index", torch.tensor([index], device=device), persistent=False)

    @classmethod
    def from_checkpoint(
        cls,
        name_or_path: str | os.PathLike,
        modal: str | None = None,
        dtype: torch.dtype | None = None,
        enable_cueq: bool = False,
        enable_flash: bool = False,
        enable_oeq: bool = False,
    ) -> SevenNetWrapper:
        """Loads a checkpoint file, or a pretrained model by name.

        Args:
            name_or_path: ``"7net-0"``, ``"7net-0_22May2024"``, ``"7net-l3i5"``, ``"7net-mf-0"`` (these come
                with sevenn), another name that sevenn knows and whose file lies in its cache, or a path. Like
                sevenn itself, this unpickles the file: load only files that you trust.
            modal: see the class.
            dtype: type of weights and edge vectors, torch.float32 or torch.float64; None for float32, which
                is what SevenNet's weights are.
            enable_cueq, enable_flash, enable_oeq: convolutions are kernels of cuEquivariance, FlashTP or OpenEquivariance,
                as in ``SevenNetCalculator``; without a GPU they change nothing.

        Returns:
            A wrapper on the CPU, for inference: its parameters need no gradient.

        Raises:
            InputError: no such file or name, weights that are not on this machine (nothing is ever
                downloaded), a file that is no SevenNet checkpoint; and what the class raises.
            MissingDependencyError: the package of such kernels is missing.
        """
        _import_sevenn()
        kernels = sevenn_fused.one_of(enable_cueq=enable_cueq, enable_flash=enable_flash, enable_oeq=enable_oeq)
        model, config = _load(_find(name_or_path), kernels)
        wrapper = cls(model, modal=modal)
        wrapper.checkpoint_config = config
        wrapper.use(kernels)
        return wrapper.to(dtype=dtype or torch.float32).eval().requires_grad_(False)

    def use(self, kernels: str | None) -> None:
        """Notes which convolutions were asked for: a file of the model has weights that any kind takes."""
        self.kernels = kernels
        if kernels is not None:
            sevenn_fused.keep_weights_only(self.model)

    def forward(self, data: Batch) -> ModelOutputs:
        """Energies (n_atoms,) in eV, in the type of the weights."""
        import sevenn._keys as key

        if self._fused:
            sevenn_fused.check_device(self.model, self._modal_index.device)
        values = self.adapt_input(data)
        for name in self._blocks:
            values = self.model._modules[name](values)
            if name == "onehot_idx_to_onehot":  # writes float32 whatever the weights are
                values[key.NODE_FEATURE] = values[key.NODE_ATTR] = values[key.NODE_ATTR].to(self.dtype)
        return ModelOutputs(energies=values[key.ATOMIC_ENERGY].squeeze(-1))

    def adapt_input(self, data: Batch, **kwargs: Any) -> dict[str, Any]:
        """SevenNet's dictionary of inputs. Only the edge index carries the partition."""
        import sevenn._keys as key

        numbers = to_local(data.atomic_numbers)
        return {
            key.NODE_FEATURE: self._type_of_element[numbers],
            key.EDGE_VEC: to_local(data.edge_vectors).to(self.dtype),
            key.EDGE_IDX: data.edge_index,
            # one modal for all systems: blocks read it whether they take their input for a batch or for one
            # system, which is a flag of the model
            key.BATCH: torch.zeros_like(numbers),
            key.MODAL_TYPE: self._modal_index,
            **kwargs,
        }

    def distribution_spec(self, strategy: Any = None) -> MLIPSpec:
        """Owned rows, remote ones fetched where senders are gathered."""
        import sevenn._keys as key

        spec = SPEC_MPNN_GP if strategy is StrategyKind.GRAPH_PARTITION else SPEC_MPNN_HALO
        if self._fused:
            return sevenn_fused.with_adapters(spec)  # its kernels keep no rows of edges
        blocks = (self.model._modules[name] for name in self._blocks)
        convolutions = [block for block in blocks if type(block).__name__ == "IrrepsConvolution"]
        return spec.with_adapters(*EdgeStage.of(convolutions, (key.EDGE_ATTR, key.EDGE_EMBEDDING)))


def _import_sevenn() -> None:
    try:
        import sevenn  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(f"SevenNet models need sevenn ({sys.executable}): {_INSTALL}") from error


def _blocks(model: torch.nn.Module) -> list[str]:
    """Names of the blocks between edge vectors and atomic energies, in order."""
    from sevenn.nn.sequential import AtomGraphSequential

    name = f"{type(model).__module__}.{type(model).__name__}"
    if not isinstance(model, AtomGraphSequential):
        raise InputError(f"nvdd's SevenNet wrapper needs an eager sevenn AtomGraphSequential, not a {name}")
    if model.type_map is None or not model.cutoff > 0:
        raise InputError("this SevenNet model does not say its elements and cutoff (type_map, cutoff)")
    names = list(model._modules)
    if "rescale_atomic_energy" not in names or any(n.startswith("ghost_") for n in names):
        raise InputError(
            "this SevenNet model is a part of one (built for LAMMPS, parallel=True); take the serial model"
        )
    # these two make inputs that the wrapper makes itself: vectors from positions, the number of the modal
    own = ("EdgePreprocess", "_ModalInputPrepare")
    to_energy = names[: names.index("rescale_atomic_energy") + 1]
    return [n for n in to_energy if type(model._modules[n]).__name__ not in own]


def _modal(modals: dict[str, int], modal: str | None) -> tuple[str | None, int]:
    if not modals:
        if modal is not None:
            raise InputError(f"modal={modal!r} was given, but this SevenNet model has one fidelity only")
        return None, 0
    if modal is None:
        raise InputError(f"this SevenNet model has several fidelities; choose modal= from {list(modals)}")
    if modal not in modals:
        raise InputError(f"this SevenNet model has no modal {modal!r}; choose from {list(modals)}")
    return modal, modals[modal]


# --- files --------------------------------------------------------------------------------------------------


def _load(path: Path, kernels: str | None) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The model, with fused convolutions where they can be, and the configuration from which it was built."""
    from sevenn.checkpoint import SevenNetCheckpoint

    try:
        fused = {kernels: True} if sevenn_fused.usable(kernels) else {}
        # sevenn mixes the default type with float32 otherwise, and prints that it converts
        with _default_dtype(torch.float32), contextlib.redirect_stdout(io.StringIO()):
            checkpoint = SevenNetCheckpoint(path)
            return checkpoint.build_model(**fused), checkpoint.config
    except Exception as error:  # whatever a file of another kind leads to
        raise InputError(
            f"{path} can't be read as a SevenNet checkpoint: {type(error).__name__}: {error}. Take the .pth "
            "file that the training writes, not a deployed TorchScript model"
        ) from error


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _find(name_or_path: str | os.PathLike) -> Path:
    path, name = Path(name_or_path).expanduser(), str(name_or_path)
    if path.is_file():
        return path
    import sevenn._const as const

    # sevenn.util.pretrained_name_to_path downloads what it does not find, so the rule stands here again
    known = {
        constant.lower(): value
        for constant, value in vars(const).items()
        if constant.startswith("SEVENNET_") and str(value).endswith(".pth")
    }
    wanted = name.lower().replace("7net", "sevennet", 1).replace("-", "_")
    latest = {"sevennet_0": "sevennet_0_11jul2024", "sevennet_0_11july2024": "sevennet_0_11jul2024"}
    shipped = known.get(latest.get(wanted, wanted))
    if shipped is None:
        names = ", ".join(n.replace("sevennet", "7net", 1).replace("_", "-") for n in known)
        raise InputError(
            f"no SevenNet checkpoint file {name!r} (working directory {os.getcwd()}), and no pretrained "
            f"model of that name; names: {names}"
        )
    cached = shipped.replace(const._prefix, os.path.expanduser("~/.cache/sevennet"))
    for place in (shipped, cached):
        if os.path.isfile(place):
            return Path(place)
    url = getattr(const, "CHECKPOINT_DOWNLOAD_LINKS", {}).get(shipped, "its checkpoint")
    raise InputError(
        f"the weights of {name!r} are not on this machine, and nvdd downloads nothing: get {url} and put it at {cached}"
    )


# --- family -------------------------------------------------------------------------------------------------


def _build(checkpoint: str | None, *, dtype: torch.dtype | None = None, **options: Any) -> SevenNetWrapper:
    if checkpoint is None:
        raise InputError(f"'sevenn' needs a model: sevenn:FILE, or sevenn: and one of {', '.join(_SHIPPED)}")
    return SevenNetWrapper.from_checkpoint(checkpoint, dtype=dtype, **options)


def _from_calculator(calc: Any) -> SevenNetWrapper | None:
    """A wrapper around a copy of the model of a ``sevenn.calculator.SevenNetCalculator``, or None."""
    if not is_own_calculator(calc, "sevenn.calculator", "SevenNetCalculator"):
        return None
    wrapper = SevenNetWrapper(copy.deepcopy(calc.model), modal=calc.modal)
    return wrapper.eval().requires_grad_(False)


def _configuration(wrapper: SevenNetWrapper) -> dict[str, Any]:
    from nvdd.models.sevenn_configuration import configuration

    return configuration(wrapper)


def _rebuild(configuration: dict[str, Any], dtype: torch.dtype) -> SevenNetWrapper:
    from nvdd.models.sevenn_configuration import rebuild

    return rebuild(configuration, dtype)


FAMILY = ModelFamily(
    name="sevenn",
    description="SevenNet, equivariant message passing for 89 elements (weights come with the package)",
    build=_build,
    checkpoints=_SHIPPED,
    options={
        "modal": "fidelity of a multi-fidelity model: PBE or R2SCAN for 7net-mf-0",
        "enable_cueq": "true: cuEquivariance's kernels, several times faster on NVIDIA GPUs",
        "enable_flash": "true: FlashTP's kernels",
        "enable_oeq": "true: OpenEquivariance's kernels",
    },
    package="sevenn",
    install=_INSTALL,
    licence="package MIT; the weights in it carry no statement of their own",
    from_calculator=_from_calculator,
    configuration=_configuration,
    rebuild=_rebuild,
)
