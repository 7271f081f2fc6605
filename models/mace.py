"""MACE: its wrapper, where its models come from, and its own ASE calculator.

``import mace`` stands before every ``e3nn`` import and every ``torch.load`` here, and nothing of MACE is
imported until a model is made: it sets an environment variable without which e3nn 0.4 can't be imported.
"""

from __future__ import annotations

import copy
import importlib.metadata
import os
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from nvdd.config import StrategyKind
from nvdd.errors import InputError, MissingDependencyError
from nvdd.models import mace_cueq
from nvdd.models.base import BaseModelMixin, Batch, EdgeLayout, ModelConfig, ModelOutputs, NeighborConfig
from nvdd.models.calculators import is_own_calculator
from nvdd.models.registry import ModelFamily
from nvdd.shard_tensor import to_local
from nvdd.specs import SPEC_MPNN_GP, SPEC_MPNN_HALO, AtomStage, EdgeStage, MLIPSpec

# First release whose models take edge vectors and whose node energies are right for both classes
# (0.3.13 returns those of MACE without the interaction energy).
_OLDEST = (0, 3, 14)
_INSTALL = "pip install 'mace-torch>=0.3.14'"

_FOR_LAMMPS = "it was converted for LAMMPS; take the .model file from which it was made"
# Classes that are no sum of atomic energies over edges, and why
_REFUSED = {
    "AtomicDipolesMACE": "it predicts dipoles and has no energy",
    "AtomicDielectricMACE": "it predicts dipoles and polarizabilities and has no energy",
    "EnergyDipolesMACE": "its dipoles are made of positions",
    "MACELES": "its long-range energy is made of positions and cell",
    "PolarMACE": "its electrostatic energy is made of positions and cell",
    "LAMMPS_MACE": _FOR_LAMMPS,
    "MACEEdgeForcesWrapper": _FOR_LAMMPS,
    "OptimizedModule": "it is compiled by torch.compile; take the eager module (MACECalculator without compile_mode)",
}
_UNSCRIPTED = (
    "TorchScript hides the steps at which ranks must exchange features. Take the eager model: MACE's "
    "training writes it as <name>.model beside <name>_compiled.model; foundation models are published as "
    ".model files; torch.save(model, path) writes one from Python"
)


class MACEWrapper(torch.nn.Module, BaseModelMixin):
    """An eager MACE or ScaleShiftMACE (https://doi.org/10.48550/arXiv.2206.07697) behind edge vectors.

    The module runs unmodified through its entry for given edge vectors (``lammps_mliap=True`` without a
    LAMMPS object). It gathers no positions then: what crosses ranks is one node feature per layer, and the
    species where ZBL repulsion or a distance transform reads them.

    Args:
        module: the model; it is used as it is and never changed.
        head: name or number of the head of a model with several; None for the only one, or for the one that
            is named "default" (MACECalculator's rule).

    Attributes:
        model: the module.
        head: name of the head in use.

    Raises:
        InputError: the module is scripted, compiled, fused, of a class that reads positions, or has inputs
            per system; the head is missing or unknown.
        MissingDependencyError: mace-torch is missing or older than 0.3.14.
    """

    edge_layout = EdgeLayout(sender_column=0, vector="receiver_minus_sender")

    def __init__(self, module: torch.nn.Module, head: str | int | None = None) -> None:
        _import_mace()
        super().__init__()
        _check(module)
        mace_cueq.keep_weights_only(module)
        if mace_cueq.is_fused(module):
            mace_cueq.restore(module)
        heads = list(getattr(module, "heads", None) or ["Default"])
        index = _head_index(heads, head)
        numbers = [int(z) for z in module.atomic_numbers]
        self.model = module
        self.head = heads[index]
        self.model_config = ModelConfig(
            neighbor_config=NeighborConfig(cutoff=float(module.r_max)), elements=frozenset(numbers)
        )
        row_of_element = torch.full((119,), -1)
        row_of_element[numbers] = torch.arange(len(numbers))
        device = module.atomic_numbers.device
        self.register_buffer("_row_of_element", row_of_element.to(device), persistent=False)
        self.register_buffer("_head_index", torch.tensor([index], device=device), persistent=False)

    @classmethod
    def from_checkpoint(
        cls,
        path_or_name: str | os.PathLike,
        head: str | int | None = None,
        dtype: torch.dtype | None = None,
        enable_cueq: bool = False,
    ) -> MACEWrapper:
        """Loads a ``.model`` file, or a foundation model that lies in MACE's cache.

        Args:
            path_or_name: a file that was written by ``torch.save(model, path)`` (MACE's training writes
                ``<name>.model``), or a name that ``mace_mp`` knows (``"medium-mpa-0"``), or ``"off-small"``,
                ``"off-medium"``, ``"off-large"`` for MACE-OFF. Like MACE itself, this unpickles the file:
                load only files that you trust.
            head: see the class.
            dtype: torch.float32 or torch.float64 for weights and edge vectors; None for the file's own.
            enable_cueq: convert the model to cuEquivariance's kernels, several times faster on NVIDIA GPUs.

        Returns:
            A wrapper on the CPU, for inference: its parameters need no gradient.

        Raises:
            InputError: no such file or name, a foundation model that isn't cached (nothing is ever
                downloaded), a TorchScript file, a file that holds no MACE model; and what the class raises.
        """
        _import_mace()
        module = _load(_find(path_or_name))
        if enable_cueq:
            _check(module)
            module = mace_cueq.convert(module if dtype is None else module.to(dtype))
        wrapper = cls(module, head=head)
        return wrapper.to(dtype=dtype).eval().requires_grad_(False)

    def forward(self, data: Batch) -> ModelOutputs:
        """Energies (n_atoms,) in eV: float64 for ScaleShiftMACE, the weights' type for MACE."""
        raw = self.model(self.adapt_input(data), compute_force=False, lammps_mliap=True)
        return ModelOutputs(energies=raw["node_energy"])

    def adapt_input(self, data: Batch, **kwargs: Any) -> dict[str, Any]:
        """MACE's dictionary of inputs. Only ``edge_index`` carries the partition."""
        vectors = to_local(data.edge_vectors).to(self.dtype)
        if not vectors.requires_grad:
            vectors = vectors.detach()  # MACE sets requires_grad on what it gets, not on the caller's tensor
        numbers = to_local(data.atomic_numbers)
        rows = self._row_of_element[numbers]
        return {
            "node_attrs": F.one_hot(rows, self.model.atomic_numbers.shape[0]).to(vectors.dtype),
            "edge_index": data.edge_index,
            "vectors": vectors,
            # atomic energies don't depend on the system: one for all suits the sums that MACE makes besides
            "batch": torch.zeros_like(numbers),
            "head": self._head_index,
            "natoms": (numbers.shape[0], 0),
            "lammps_class": None,
            **kwargs,
        }

    def distribution_spec(self, strategy: Any = None) -> MLIPSpec:
        """Owned rows, remote ones fetched where senders are gathered."""
        spec = SPEC_MPNN_GP if strategy is StrategyKind.GRAPH_PARTITION else SPEC_MPNN_HALO
        if mace_cueq.is_fused(self.model):
            return mace_cueq.with_adapters(spec)  # its kernels keep no rows of edges
        return spec.with_adapters(
            *EdgeStage.of(self.model.interactions, ("edge_attrs", "edge_feats", "cutoff")),
            *AtomStage.of(self.model.products, ("node_feats", "sc", "node_attrs")),
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if mace_cueq.is_fused(self.model):
            mace_cueq.restore(self.model)

    def __reduce_ex__(self, protocol: int):
        # the first element is called before the state is unpickled: MACE is imported before e3nn
        return _blank, (type(self),), self.__dict__


def _blank(cls: type[MACEWrapper]) -> MACEWrapper:
    _import_mace()
    return cls.__new__(cls)


def _import_mace() -> None:
    try:
        import mace  # noqa: F401  before e3nn and torch.load
    except ImportError as error:
        raise MissingDependencyError(f"MACE models need mace-torch ({sys.executable}): {_INSTALL}") from error
    version = importlib.metadata.version("mace-torch")
    if tuple(int(v) for v in version.split(".")[:3] if v.isdigit()) < _OLDEST:
        raise MissingDependencyError(f"mace-torch {version} is too old for nvdd: {_INSTALL}")


def _check(module: torch.nn.Module) -> None:
    """Raises InputError unless the module is a sum of atomic energies over edge vectors."""
    from mace.modules.models import MACE, ScaleShiftMACE

    cls = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        raise InputError(f"this MACE model is a {cls.__name__}. {_UNSCRIPTED}")
    if getattr(cls, "forward", None) not in (MACE.forward, ScaleShiftMACE.forward):
        why = _REFUSED.get(cls.__name__, "its forward is not that of MACE or ScaleShiftMACE")
        raise InputError(f"nvdd's MACE wrapper can't run a {cls.__module__}.{cls.__name__}: {why}")
    if hasattr(module, "joint_embedding"):
        raise InputError(
            f"this MACE model embeds inputs of the system ({', '.join(module.embedding_specs)}), which "
            "nvdd's MACE wrapper does not pass; take a model without embedding_specs"
        )
    if any(hasattr(block, "conv_fusion") for block in module.interactions) and not mace_cueq.is_fused(module):
        raise InputError(
            "this MACE model uses a fused convolution kernel of OpenEquivariance that reads neighbour rows by itself; "
            "take the e3nn model (MACECalculator without enable_oeq), or cuEquivariance's kernels (enable_cueq)"
        )


def _head_index(heads: list[str], head: str | int | None) -> int:
    if head is None:
        default = [i for i, name in enumerate(heads) if len(heads) == 1 or name.lower() == "default"]
        if default:
            return default[0]
        raise InputError(f"this MACE model has the heads {heads}; choose one with head=")
    if isinstance(head, str) and head in heads:
        return heads.index(head)
    if isinstance(head, int) and not isinstance(head, bool) and 0 <= head < len(heads):
        return head
    raise InputError(f"this MACE model has no head {head!r}; its heads are {heads}, by name or from 0")


# --- files --------------------------------------------------------------------------------------------------


def _load(path: Path) -> torch.nn.Module:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if any(name.endswith("/constants.pkl") for name in archive.namelist()):
                raise InputError(f"{path} is a TorchScript file. {_UNSCRIPTED}")
    try:
        value = torch.load(path, map_location="cpu", weights_only=False)
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"{path} needs the package {error.name!r}, which is not installed here ({sys.executable})"
        ) from error
    except Exception as error:  # unpickling raises whatever it meets
        raise InputError(f"{path} can't be read as a MACE model: {type(error).__name__}: {error}") from error
    if type(value).__name__ == "LAMMPS_MLIAP_MACE":
        raise InputError(f"nvdd's MACE wrapper can't run {path}: {_FOR_LAMMPS}")
    if not isinstance(value, torch.nn.Module):
        raise InputError(
            f"{path} holds a {type(value).__name__}, not a MACE model; a training checkpoint (.pt) has only "
            "the weights, the model is in the .model file that the training writes at its end"
        )
    return value


def _find(path_or_name: str | os.PathLike) -> Path:
    path, name = Path(path_or_name).expanduser(), str(path_or_name)
    if path.is_file():
        return path
    known = _foundation_models()
    if name not in known:
        raise InputError(
            f"no MACE model file {name!r} (working directory {os.getcwd()}), and no foundation model of that "
            f"name; names: {', '.join(known)}"
        )
    url, places = known[name]
    for place in places:
        if place.is_file():
            return place
    raise InputError(
        f"MACE model {name!r} is not on this machine, and nvdd downloads nothing: get {url} and put it at {places[-1]}"
    )


def _foundation_models() -> dict[str, tuple[str, list[Path]]]:
    """Name -> address, and where MACE looks for the file (mace/calculators/foundations_models.py)."""
    from mace.calculators import foundations_models as theirs
    from mace.tools.utils import get_cache_dir

    cache = Path(get_cache_dir())
    models = {}
    for name, url in theirs.mace_mp_urls.items():
        # mace_mp keeps letters, digits and underscores of the file's name
        file = "".join(c for c in os.path.basename(url) if c.isalnum() or c == "_")
        models[name] = url, [cache / file]
    if "medium-mpa-0" in models:
        models["medium-mpa-0"][1].insert(0, Path(theirs.local_model_path))
    for name, url in getattr(theirs, "mace_off_urls", {}).items():
        models[f"off-{name}"] = url, [cache / os.path.basename(url)]
    return models


# --- family -------------------------------------------------------------------------------------------------


def _build(
    checkpoint: str | None,
    *,
    dtype: torch.dtype | None = None,
    head: str | int | None = None,
    enable_cueq: bool = False,
) -> MACEWrapper:
    if checkpoint is None:
        raise InputError("'mace' needs a model: mace:FILE.model, or mace:NAME of a foundation model")
    return MACEWrapper.from_checkpoint(checkpoint, head=head, dtype=dtype, enable_cueq=enable_cueq)


def _from_calculator(calc: Any) -> MACEWrapper | None:
    """A wrapper around a copy of the model of a ``mace.calculators.MACECalculator``; None for another one."""
    if not is_own_calculator(calc, "mace.calculators.mace", "MACECalculator"):
        return None
    if len(calc.models) != 1:
        raise InputError(f"this MACECalculator is a committee of {len(calc.models)} models; nvdd runs one: pass one")
    units = (calc.energy_units_to_eV, calc.length_units_to_A)
    if units != (1, 1):
        raise InputError(
            f"this MACECalculator has energy_units_to_eV={units[0]} and length_units_to_A={units[1]}; nvdd "
            "needs a model in eV and A"
        )
    _import_mace()
    _check(calc.models[0])
    return MACEWrapper(copy.deepcopy(calc.models[0]), head=calc.head).eval().requires_grad_(False)


def _configuration(wrapper: MACEWrapper) -> dict[str, Any]:
    from nvdd.models.mace_configuration import configuration

    return configuration(wrapper)


def _rebuild(configuration: dict[str, Any], dtype: torch.dtype) -> MACEWrapper:
    from nvdd.models.mace_configuration import rebuild

    return rebuild(configuration, dtype)


FAMILY = ModelFamily(
    name="mace",
    description="MACE, equivariant messages of higher order (eager e3nn or cuEquivariance models)",
    build=_build,
    options={
        "head": "name or number of the head, for models with several",
        "enable_cueq": "true: cuEquivariance's kernels, several times faster on NVIDIA GPUs",
    },
    package="mace",
    install=_INSTALL,
    licence="package MIT; weights as their authors state: MACE-MP MIT, MACE-OFF, OMAT and MATPES models ASL",
    from_calculator=_from_calculator,
    configuration=_configuration,
    rebuild=_rebuild,
)
