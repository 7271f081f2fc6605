"""MatterSim: its wrapper, where its models come from, and its own ASE calculator."""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nvdd.config import StrategyKind
from nvdd.errors import InputError, MissingDependencyError
from nvdd.models.base import BaseModelMixin, Batch, EdgeLayout, ModelConfig, ModelOutputs, NeighborConfig
from nvdd.models.building import building
from nvdd.models.registry import ModelFamily
from nvdd.shard_tensor import to_local
from nvdd.specs import SPEC_MPNN_GP, SPEC_MPNN_HALO, MLIPSpec
from nvdd.verbs import refresh_neighbors

_INSTALL = "pip install --no-deps 'mattersim==1.2.3' and what it imports (docs/models.md), or ./dev family mattersim"
_NAMES = {"1m": "mattersim-v1.0.0-1M", "5m": "mattersim-v1.0.0-5M"}
_URL = "https://raw.githubusercontent.com/microsoft/mattersim/main/pretrained_models"
_TINY = 1e-7  # by which MatterSim keeps cosines off -1 and 1, where the angle has no derivative


class MatterSimWrapper(torch.nn.Module, BaseModelMixin):
    """A MatterSim model (https://arxiv.org/abs/2405.04967), an M3GNet (https://doi.org/10.1038/s43588-022-00349-3).

    Its blocks run as they are. Triples are two edges of one centre, which are on the rank that owns it, so that of the
    others only the features of atoms cross ranks: once in each block.

    Args:
        model: an eager ``M3Gnet`` of mattersim.

    Attributes:
        model: the module.

    Raises:
        InputError: the module is of another class.
        MissingDependencyError: mattersim, or a package that it imports, is missing.
    """

    edge_layout = EdgeLayout(sender_column=1, vector="receiver_minus_sender")

    def __init__(self, model: torch.nn.Module) -> None:
        _check(model)
        super().__init__()
        self.model = model
        self.model_config = ModelConfig(
            neighbor_config=NeighborConfig(cutoff=float(model.model_args["cutoff"])),
            elements=frozenset(range(1, model.max_z + 1)),
        )

    def forward(self, data: Batch) -> ModelOutputs:
        """Energies (n_atoms,) in eV, in the type of the weights."""
        model, n = self.model, data.n_atoms
        numbers, centre, neighbour = map(to_local, (data.atomic_numbers, data.receivers, data.senders))
        vectors = to_local(data.edge_vectors).to(self.dtype)
        length = torch.linalg.vector_norm(vectors, dim=1)
        triples = self._triples(length, centre, n)
        first, second = triples.unbind(1)
        cosine = (vectors[first] * vectors[second]).sum(1) / (length[first] * length[second])
        three_basis = model.sbf(length[second], torch.acos(cosine.clamp(-1 + _TINY, 1 - _TINY)))
        radial = model.rbf(length)
        edges = model.edge_encoder(radial)
        atoms = model.atom_embedding(model.one_hot_atoms(numbers).to(self.dtype))
        per_edge = torch.bincount(first, minlength=len(length))
        index = torch.stack([centre, neighbour])  # of neighbours also rows behind those of owned atoms
        for block in model.graph_conv:
            rows = to_local(refresh_neighbors(atoms, pad=True))
            rows, edges = block(
                rows, edges, radial, index, three_basis, triples, length.unsqueeze(1), None, per_edge, None,
                total_num_atoms=len(rows), total_num_bonds=len(length), three_body_edge_map=first,
            )  # fmt: skip
            atoms = rows[:n]
        return ModelOutputs(energies=model.normalizer(model.final(atoms).view(-1), numbers))

    def _triples(self, length: Tensor, centre: Tensor, n_atoms: int) -> Tensor:
        """(T, 2) edges ij and ik, j other than k, that are no longer than the cutoff of triples."""
        short = (length.detach() <= self.model.model_args["threebody_cutoff"]).nonzero().squeeze(1)
        short = short[centre[short].argsort(stable=True)]
        of = centre[short]
        count = torch.bincount(of, minlength=n_atoms)
        start = count.cumsum(0) - count
        each = count[of]  # partners of each edge, itself among them
        row = torch.arange(len(short), device=short.device).repeat_interleave(each)
        place = torch.arange(len(row), device=short.device) - (each.cumsum(0) - each)[row]
        partner = start[of][row] + place
        other = partner != row
        return torch.stack([short[row[other]], short[partner[other]]], 1)

    def distribution_spec(self, strategy: Any = None) -> MLIPSpec:
        """Owned rows; those of neighbours fetched before each block."""
        return SPEC_MPNN_GP if strategy is StrategyKind.GRAPH_PARTITION else SPEC_MPNN_HALO


def _import_mattersim() -> None:
    try:
        import mattersim.forcefield.potential  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(f"MatterSim models need mattersim ({sys.executable}; {error}): {_INSTALL}") from error


def _check(model: Any) -> None:
    _import_mattersim()
    from mattersim.forcefield.m3gnet.m3gnet import M3Gnet

    if not isinstance(model, M3Gnet):
        name = f"{type(model).__module__}.{type(model).__name__}"
        raise InputError(f"nvdd's MatterSim wrapper needs an eager M3Gnet of mattersim, not a {name}")
    if type(model).forward is not M3Gnet.forward:
        raise InputError(f"{type(model).__name__} has a forward of its own, which nvdd doesn't know; give it an M3Gnet")


# --- family -------------------------------------------------------------------------------------------------


def _model(arguments: dict[str, Any]) -> torch.nn.Module:
    from mattersim.forcefield.m3gnet.m3gnet import M3Gnet

    with building(torch.float32):
        return M3Gnet(device="cpu", **arguments)


def _load(checkpoint: str | None) -> torch.nn.Module:
    _import_mattersim()
    if checkpoint is None:
        raise InputError(f"'mattersim' needs a model: mattersim:FILE, or mattersim: and one of {', '.join(_NAMES.values())}")
    path = Path(checkpoint).expanduser()
    if not path.is_file():
        name = next((n for n in _NAMES.values() if checkpoint.lower().removesuffix(".pth") == n.lower()), None)
        if name is None:
            raise InputError(
                f"no MatterSim checkpoint file {checkpoint!r} (working directory {os.getcwd()}), and no pretrained model of that "
                f"name; names: {', '.join(_NAMES.values())}"
            )
        path = Path("~/.local/mattersim/pretrained_models").expanduser() / f"{name}.pth"
        if not path.is_file():
            raise InputError(
                f"the weights of {name!r} are not on this machine, and nvdd downloads nothing: get {_URL}/{name}.pth and put it "
                f"at {path}"
            )
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        model = _model(content["model_args"])
        model.load_state_dict(content["model"])
    except Exception as error:  # whatever a file of another kind leads to
        raise InputError(f"{path} can't be read as a MatterSim checkpoint: {type(error).__name__}: {error}") from error
    return model


def _build(checkpoint: str | None, *, dtype: torch.dtype | None = None) -> MatterSimWrapper:
    return MatterSimWrapper(_load(checkpoint)).to(dtype).eval().requires_grad_(False)


def _from_calculator(calc: Any) -> MatterSimWrapper | None:
    """A wrapper around a copy of the model of a ``MatterSimCalculator``; None for another one."""
    theirs = sys.modules.get("mattersim.forcefield.potential")  # not imported: then calc is not theirs
    if theirs is None or not isinstance(calc, theirs.MatterSimCalculator):
        return None
    if type(calc).calculate is not theirs.MatterSimCalculator.calculate:
        return None  # a subclass with physics of its own
    from ase.units import GPa

    if calc.stress_weight != GPa:
        raise InputError(f"this MatterSimCalculator has stress_weight={calc.stress_weight}; nvdd's stress is eV/A^3: leave it out")
    return MatterSimWrapper(copy.deepcopy(calc.potential.model)).eval().requires_grad_(False)


def _configuration(wrapper: MatterSimWrapper) -> dict[str, Any]:
    return dict(wrapper.model.model_args)


def _rebuild(configuration: dict[str, Any], dtype: torch.dtype) -> MatterSimWrapper:
    _import_mattersim()
    return MatterSimWrapper(_model(configuration)).to(dtype)


FAMILY = ModelFamily(
    name="mattersim",
    description="MatterSim, M3GNet for 94 elements (weights are downloaded by mattersim)",
    build=_build,
    checkpoints=tuple(_NAMES.values()),
    options={},
    package="mattersim",
    install=_INSTALL,
    licence="package MIT; weights as their authors state",
    from_calculator=_from_calculator,
    configuration=_configuration,
    rebuild=_rebuild,
)
