"""NequIP and Allegro: the wrapper of models of the `nequip` framework, and the family of NequIP itself."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nvdd.config import StrategyKind
from nvdd.errors import InputError
from nvdd.models.base import BaseModelMixin, Batch, ModelConfig, ModelOutputs, NeighborConfig
from nvdd.models.calculators import is_own_calculator
from nvdd.models.nequip_files import INSTALL, build_model, check_config, convert, load_file
from nvdd.models.nequip_parts import PAIR_POTENTIALS, Parts, pair_energies, parts_of
from nvdd.models.registry import ModelFamily
from nvdd.shard_tensor import to_local
from nvdd.specs import SPEC_MPNN_GP, SPEC_MPNN_HALO, MLIPSpec


class NequIPWrapper(torch.nn.Module, BaseModelMixin):
    """An eager model of the nequip framework behind edge vectors: NequIP (https://doi.org/10.1038/s41467-022-29939-5) or
    Allegro (https://doi.org/10.1038/s41467-023-36329-y).

    The modules run one by one, as they are, up to the energies of the atoms. Of NequIP one node feature per layer crosses
    ranks; Allegro is strictly local and reads nothing of other atoms but their types.

    Args:
        model: a ``GraphModel``, as nequip's model builders make it.
        species: chemical symbol -> name of the model's atom type, as ``chemical_species_to_atom_type_map`` of
            NequIPCalculator; None if the names of the types are chemical symbols.

    Attributes:
        model: the module.
        species: the map in use.
        checkpoint_config: what nequip builds the model from; None if it is not from a checkpoint.
        package: content of the package from which it is, and the model's name in it; or None.

    Raises:
        InputError: the module is compiled or scripted, of another framework, or has inputs or modules that can't be
            distributed; a map of species that does not fit the types.
        MissingDependencyError: nequip is missing.
    """

    def __init__(self, model: torch.nn.Module, species: dict[str, str] | None = None) -> None:
        super().__init__()
        self._parts: Parts = parts_of(model)
        self.model = model
        self.species, types = self._parts.types(species)
        self.checkpoint_config: dict[str, Any] | None = None
        self.package: tuple[bytes, str] | None = None
        self.model_config = ModelConfig(
            neighbor_config=NeighborConfig(cutoff=self._parts.cutoff), elements=frozenset(types)
        )
        type_of_number = torch.full((119,), -1)
        type_of_number[list(types)] = torch.tensor(list(types.values()))
        device = next(model.parameters()).device
        self.register_buffer("_type_of_number", type_of_number.to(device), persistent=False)
        # shorter cutoffs of some pairs of types: such edges are left out, as nequip's neighbour list leaves them out
        self.register_buffer("_pair_cutoffs", self._parts.pair_cutoffs(device), persistent=False)

    @classmethod
    def from_file(
        cls, path: Any, species: dict[str, str] | str | None = None, model_name: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> NequIPWrapper:  # fmt: skip
        """Loads a package (``.nequip.zip``, of `nequip-package` or nequip.net) or a checkpoint (``.ckpt``) of the training.

        Args:
            path: the file. Like nequip itself, this executes code of the file: load only files that you trust.
            species: see the class; as a text ``"Si:silicon,O:oxygen"``.
            model_name: of the model, in a file with several; None for the only one.
            dtype: torch.float32 or torch.float64; None for the model's own.

        Raises:
            InputError: no such file, a compiled model, another kind of file, an unknown ``model_name``; and what the class
                raises.
        """
        file = load_file(path, model_name)
        wrapper = cls(file.module, species=_species(species))
        wrapper.checkpoint_config, wrapper.package = file.config, file.package
        return wrapper.to(dtype=dtype).eval().requires_grad_(False)

    @property
    def dtype(self) -> torch.dtype:
        """Type of features and weights. Edge vectors and some constants are float64 in any case."""
        return self._parts.dtype

    @property
    def strictly_local(self) -> bool:
        """Whether no feature of another atom is read, as in Allegro."""
        return self._parts.strictly_local

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """What ``to``, ``float`` and ``cpu`` call. A type converts features and weights; what nequip keeps in float64 stays."""
        dtype = fn(next(self.model.parameters()).new_empty(0, dtype=self.dtype)).dtype
        if dtype != self.dtype:
            if dtype not in (torch.float32, torch.float64):
                raise InputError(f"nequip models run in float32 or float64, not in {dtype}")
            self.model = convert(self.model, dtype)
            self._parts = parts_of(self.model)
        return super()._apply(lambda tensor: tensor.to(fn(tensor.new_empty(0)).device), recurse)

    def forward(self, data: Batch) -> ModelOutputs:
        """Energies (n_atoms,) in eV, float64."""
        values = self.adapt_input(data)
        for module in self._parts.modules:
            if type(module).__name__ in PAIR_POTENTIALS:
                energies = values["atomic_energy"]
                of_atoms = torch.zeros_like(energies).index_add(0, values["edge_index"][0], pair_energies(module, values))
                values["atomic_energy"] = energies + of_atoms
            else:
                values = module(values)
        return ModelOutputs(energies=values["atomic_energy"].reshape(-1))

    def adapt_input(self, data: Batch, **kwargs: Any) -> dict[str, Any]:
        """nequip's dictionary of inputs. Only the edge index carries the partition."""
        numbers, edge_index, vectors = data.atomic_numbers, data.edge_index, data.edge_vectors
        types = self._type_of_number[to_local(numbers)]
        inputs = {"atom_types": types, "edge_index": edge_index, "edge_vectors": to_local(vectors).double(), **kwargs}
        if self._parts.reads_edge_types:
            # by the index as given: over several ranks it reads remote senders, too
            of_senders = self._type_of_number[to_local(numbers[data.senders])]
            of_receivers = types[to_local(data.receivers)]
            pair = torch.stack([of_receivers, of_senders])  # nequip has the centre first
            if self._pair_cutoffs is not None:
                near = vectors.detach().norm(dim=1) < self._pair_cutoffs[pair[0], pair[1]].to(vectors.dtype)
                pair = pair[:, to_local(near)]
                inputs |= {"edge_index": edge_index[:, near], "edge_vectors": to_local(vectors[near]).double()}
            inputs["edge_type_flat"] = pair
        return inputs

    def distribution_spec(self, strategy: Any = None) -> MLIPSpec:
        """Owned rows, remote ones fetched where senders are gathered."""
        return SPEC_MPNN_GP if strategy is StrategyKind.GRAPH_PARTITION else SPEC_MPNN_HALO

    def __reduce_ex__(self, protocol: int) -> Any:
        if self.package is None:
            return super().__reduce_ex__(protocol)
        # classes that came with a package can't be pickled: the package travels, and the weights as they are now
        state = (self.species, self.dtype, self.state_dict())
        return _from_package, (type(self), *self.package, *state)


def _from_package(
    cls: type[NequIPWrapper], content: bytes, model_name: str, species: dict[str, str], dtype: torch.dtype, weights: dict[str, Tensor]
) -> NequIPWrapper:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.nequip.zip")
        path.write_bytes(content)
        wrapper = cls.from_file(path, species=species, model_name=model_name, dtype=dtype)
    wrapper.load_state_dict(weights)
    return wrapper


def _species(given: Any) -> dict[str, str] | None:
    """A map of species from an option: a map, or ``"Si:silicon,O:oxygen"``."""
    if not isinstance(given, str):
        return given
    pairs = [item.split(":") for item in given.split(",")]
    if any(len(pair) != 2 for pair in pairs):
        raise InputError(f"species={given!r} can't be read; write e.g. species=Si:silicon,O:oxygen")
    return {symbol.strip(): name.strip() for symbol, name in pairs}


# --- family -------------------------------------------------------------------------------------------------

OPTIONS = {
    "species": "chemical symbol -> the model's atom type, where types are no symbols: Si:silicon,O:oxygen",
    "model_name": "of the model, in a file with several",
}


def build(checkpoint: str | None, *, dtype: torch.dtype | None = None, **options: Any) -> NequIPWrapper:
    """The wrapper of a file, ``nequip:FILE`` or ``allegro:FILE``."""
    if checkpoint is None:
        raise InputError("'nequip' and 'allegro' need a model: nequip:FILE.nequip.zip, or nequip:FILE.ckpt of a training")
    return NequIPWrapper.from_file(checkpoint, dtype=dtype, **options)


def from_calculator(calc: Any) -> NequIPWrapper | None:
    """A wrapper around a copy of the model of a ``nequip.integrations.ase.NequIPCalculator``; None for another one."""
    methods = ("atoms_to_data", "call_model", "save_extra_outputs")
    if not is_own_calculator(calc, "nequip.integrations.ase", "NequIPCalculator", methods):
        return None
    units = (calc.energy_units_to_eV, calc.length_units_to_A)
    if units != (1, 1):
        raise InputError(
            f"this NequIPCalculator has energy_units_to_eV={units[0]} and length_units_to_A={units[1]}; nvdd needs a model in eV "
            "and A"
        )
    parts_of(calc.model)
    mappers = [t for t in calc.transforms if type(t).__name__ == "ChemicalSpeciesToAtomTypeMapper"]
    if len(mappers) != 1:
        raise InputError("this NequIPCalculator has no ChemicalSpeciesToAtomTypeMapper among its transforms; give it one")
    from ase.data import chemical_symbols

    types = mappers[0].lookup_table.tolist()
    species = {chemical_symbols[z]: mappers[0].model_type_names[t] for z, t in enumerate(types) if t >= 0}
    return NequIPWrapper(copy.deepcopy(calc.model), species=species).eval().requires_grad_(False)


def configuration(wrapper: NequIPWrapper) -> dict[str, Any]:
    """What a wrapper of a checkpoint is made of, as JSON can hold it.

    Raises:
        InputError: it is not from a checkpoint, or its configuration names classes that nvdd does not make.
    """
    remedy = "export it with allow_pickle (--allow-pickle), which puts the module itself into the file"
    if wrapper.checkpoint_config is None:
        raise InputError(f"this model is from a package or a module, which do not say how it is built; {remedy}")
    try:
        check_config(wrapper.checkpoint_config)
    except InputError as error:
        raise InputError(f"{error}; {remedy}") from error
    return {"config": json.loads(json.dumps(wrapper.checkpoint_config, default=str)), "species": wrapper.species}


def rebuild(configuration: dict[str, Any], dtype: torch.dtype) -> NequIPWrapper:
    """A wrapper of the same make on the CPU; its weights are random until the file's are loaded."""
    wrapper = NequIPWrapper(build_model(configuration["config"], dtype), species=configuration["species"])
    wrapper.checkpoint_config = configuration["config"]
    return wrapper


FAMILY = ModelFamily(
    name="nequip",
    description="NequIP, equivariant message passing (packages and checkpoints of nequip)",
    build=build,
    options=OPTIONS,
    package="nequip",
    install=INSTALL,
    licence="package MIT; weights as their authors state, on nequip.net for the models there",
    from_calculator=from_calculator,
    configuration=configuration,
    rebuild=rebuild,
)
