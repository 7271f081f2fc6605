"""ANI potentials of torchani: the wrapper, ANI-1x from the parameters that ship with the package, and the family."""

from __future__ import annotations

import copy
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nvdd.config import StrategyKind
from nvdd.errors import InputError, MissingDependencyError
from nvdd.models.base import BaseModelMixin, Batch, ModelConfig, ModelOutputs, NeighborConfig
from nvdd.models.calculators import is_own_calculator
from nvdd.models.precise import Float64Table
from nvdd.models.registry import ModelFamily
from nvdd.shard_tensor import to_local
from nvdd.specs import SPEC_MPNN_GP, SPEC_MPNN_HALO, MLIPSpec

_INSTALL = "pip install torchani==2.2.4 'setuptools<81' importlib_metadata lark-parser requests"
_SHIPPED = "ani-1x"
_MEMBERS = 8


class TorchANIWrapper(torch.nn.Module, BaseModelMixin):
    """An ANI potential (https://doi.org/10.1039/C6SC05720A) behind edge vectors; strictly local.

    torchani's own functions make the radial and angular terms of each atom's environment from this rank's edges, and its
    networks the energies, the mean of an ensemble's members. Nothing of other atoms is read but their species.

    Args:
        model: a ``torchani.models.BuiltinModel`` or ``BuiltinEnsemble``.

    Attributes:
        aev: its ``AEVComputer``, for its constants.
        networks: the members, an ``ANIModel`` each.
        shifts: energies of lone atoms by number of the species, eV, in float64.
        source: the name of the model and the member in use, if it was loaded by name; else None.

    Raises:
        InputError: another kind of module.
        MissingDependencyError: torchani is missing or is not 2.2.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        theirs = _import_torchani()
        if not isinstance(model, (theirs.models.BuiltinModel, theirs.models.BuiltinEnsemble)):
            raise InputError(
                f"nvdd's torchani wrapper needs a BuiltinModel or BuiltinEnsemble of torchani 2.2, not a "
                f"{type(model).__module__}.{type(model).__name__}"
            )
        super().__init__()
        from ase.data import atomic_numbers
        from ase.units import Hartree

        networks = model.neural_networks
        self.aev = model.aev_computer
        self.networks = torch.nn.ModuleList(networks if isinstance(networks, theirs.nn.Ensemble) else [networks])
        if model.energy_shifter.fit_intercept:
            raise InputError("this ANI model has an energy that belongs to no atom (fit_intercept), which can't be divided")
        self.shifts = Float64Table(model.energy_shifter.self_energies * Hartree)
        self.source: dict[str, Any] | None = None
        numbers = [atomic_numbers[symbol] for symbol in model.species]
        self.model_config = ModelConfig(
            neighbor_config=NeighborConfig(cutoff=float(self.aev.Rcr)), elements=frozenset(numbers)
        )
        species = torch.full((119,), -1)
        species[numbers] = torch.arange(len(numbers))
        self.register_buffer("_species_of_number", species.to(self.aev.EtaR.device), persistent=False)
        self._hartree = Hartree

    @classmethod
    def from_name(cls, name: str, member: int | None = None, dtype: torch.dtype | None = None) -> TorchANIWrapper:
        """ANI-1x (https://doi.org/10.1063/1.5023802), from torchani's parameter files.

        Args:
            name: ``"ani-1x"``.
            member: 0 to 7, one network of the ensemble; None for the mean of all.
            dtype: torch.float32 or torch.float64; None for float32, which is what the parameters are.

        Raises:
            InputError: another name or member; a torchani without parameter files. Nothing is ever downloaded.
        """
        wrapper = cls(_load(name, member))
        wrapper.source = {"name": name, "member": member}
        return wrapper.to(dtype=dtype or torch.float32).eval().requires_grad_(False)

    @property
    def strictly_local(self) -> bool:
        """No feature of another atom is read."""
        return True

    def forward(self, data: Batch) -> ModelOutputs:
        """Energies (n_atoms,) in eV, float64."""
        numbers = to_local(data.atomic_numbers)
        species = self._species_of_number[numbers]
        # by the index as given: over several ranks it reads remote senders, too
        of_senders = self._species_of_number[to_local(data.atomic_numbers[data.senders])]
        vectors, receivers = to_local(data.edge_vectors).to(self.dtype), to_local(data.receivers)
        radial = self._radial(vectors, receivers, of_senders, len(numbers))
        angular = self._angular(vectors, receivers, of_senders, len(numbers))
        environment = species[None], torch.cat([radial, angular], dim=1)[None]
        members = [network._atomic_energies(environment)[0] for network in self.networks]
        energies = torch.stack(members).mean(0).double() * self._hartree
        return ModelOutputs(energies=energies + self.shifts(species))

    def _radial(self, vectors: Tensor, receivers: Tensor, of_senders: Tensor, n: int) -> Tensor:
        from torchani.aev import radial_terms

        aev = self.aev
        terms = radial_terms(aev.Rcr, aev.EtaR, aev.ShfR, vectors.norm(dim=1))
        sums = terms.new_zeros(n * aev.num_species, aev.radial_sublength)
        return sums.index_add(0, receivers * aev.num_species + of_senders, terms).reshape(n, aev.radial_length)

    def _angular(self, vectors: Tensor, receivers: Tensor, of_senders: Tensor, n: int) -> Tensor:
        """Of pairs of edges to one atom that are both within the angular cutoff."""
        from torchani.aev import angular_terms

        aev = self.aev
        near = (vectors.norm(dim=1) <= aev.Rca).nonzero().flatten()
        near = near[receivers[near].argsort(stable=True)]
        one, other = (near[k] for k in _pairs(receivers[near], n))
        terms = angular_terms(aev.Rca, aev.ShfZ, aev.EtaA, aev.Zeta, aev.ShfA, vectors[torch.stack([one, other])])
        n_kinds = aev.angular_length // aev.angular_sublength
        kinds = aev.triu_index[of_senders[one], of_senders[other]]
        sums = terms.new_zeros(n * n_kinds, aev.angular_sublength)
        return sums.index_add(0, receivers[one] * n_kinds + kinds, terms).reshape(n, aev.angular_length)

    def distribution_spec(self, strategy: Any = None) -> MLIPSpec:
        """Owned rows; nothing but species is read by senders."""
        return SPEC_MPNN_GP if strategy is StrategyKind.GRAPH_PARTITION else SPEC_MPNN_HALO


def _pairs(centres: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """All pairs (a, b), b < a, of entries with the same value; ``centres`` are sorted, in [0, n)."""
    counts = torch.bincount(centres, minlength=n)
    first = counts.cumsum(0) - counts
    at = torch.arange(len(centres), device=centres.device)
    before = at - first[centres]  # entries of the same value that come earlier
    one = at.repeat_interleave(before)
    start = before.cumsum(0) - before
    other = torch.arange(len(one), device=centres.device) - start[one] + first[centres][one]
    return one, other


def _import_torchani() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of setuptools, and that its CUDA extension is not there
            import torchani
            import torchani.models
            import torchani.neurochem
    except ImportError as error:
        raise MissingDependencyError(f"ANI models need torchani 2.2.4 ({sys.executable}): {_INSTALL} ({error})") from error
    if not hasattr(torchani.models, "BuiltinEnsemble"):
        raise MissingDependencyError(f"torchani here ({sys.executable}) is newer than 2.2, which nvdd needs: {_INSTALL}")
    return torchani


def _load(name: str, member: int | None) -> torch.nn.Module:
    """The model from parameter files; torchani's own ``ANI1x()`` reads a list that its wheel has left empty."""
    torchani = _import_torchani()
    if name.lower() != _SHIPPED:
        raise InputError(f"torchani: no model {name!r}; {_SHIPPED} ships with the package (parameters of others don't)")
    if member is not None and (str(member) not in map(str, range(_MEMBERS))):
        raise InputError(f"torchani: member={member!r} is none of 0 to {_MEMBERS - 1}, the networks of {_SHIPPED}")
    from torchani import neurochem

    folder = Path(torchani.__file__).parent / "resources" / "ani-1x_8x"
    constants_file = folder / "rHCNO-5.2R_16-3.5A_a4-8.params"
    if not constants_file.is_file():
        raise InputError(f"torchani: {constants_file} is missing; the wheel of 2.2.4 has it: {_INSTALL}")
    constants = neurochem.Constants(str(constants_file))
    shifter, energies = neurochem.load_sae(str(folder / "sae_linfit.dat"), return_dict=True)
    if member is None:
        kind, networks = torchani.models.BuiltinEnsemble, neurochem.load_model_ensemble(constants.species, f"{folder}/train", _MEMBERS)
    else:
        kind, networks = torchani.models.BuiltinModel, neurochem.load_model(constants.species, f"{folder}/train{member}/networks")
    converter, computer = torchani.nn.SpeciesConverter(constants.species), torchani.AEVComputer(**constants)
    return kind(converter, computer, networks, shifter, constants.species_to_tensor, constants, energies, True)


# --- family -------------------------------------------------------------------------------------------------


def _build(checkpoint: str | None, *, dtype: torch.dtype | None = None, member: int | None = None) -> TorchANIWrapper:
    return TorchANIWrapper.from_name(checkpoint or _SHIPPED, member=member, dtype=dtype)


def _from_calculator(calc: Any) -> TorchANIWrapper | None:
    """A wrapper around a copy of the model of a ``torchani.ase.Calculator``; None for another one."""
    if not is_own_calculator(calc, "torchani.ase", "Calculator"):
        return None
    return TorchANIWrapper(copy.deepcopy(calc.model)).eval().requires_grad_(False)


def _configuration(wrapper: TorchANIWrapper) -> dict[str, Any]:
    if wrapper.source is None:
        raise InputError(
            "this ANI model was not loaded by name, so how it was made is unknown; export it with allow_pickle "
            "(--allow-pickle), which puts the module itself into the file"
        )
    return dict(wrapper.source)


def _rebuild(configuration: dict[str, Any], dtype: torch.dtype) -> TorchANIWrapper:
    return TorchANIWrapper.from_name(configuration["name"], member=configuration["member"], dtype=dtype)


FAMILY = ModelFamily(
    name="torchani",
    description="ANI, strictly local networks for molecules of H, C, N, O (ANI-1x comes with the package)",
    build=_build,
    checkpoints=(_SHIPPED,),
    options={"member": f"0 to {_MEMBERS - 1}: one network of the ensemble instead of its mean"},
    package="torchani",
    install=_INSTALL,
    licence="package MIT; the parameters in it carry no statement of their own",
    from_calculator=_from_calculator,
    configuration=_configuration,
    rebuild=_rebuild,
)
