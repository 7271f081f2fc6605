"""AIMNet2: its wrapper and its family. Files are read by `nvdd.models.aimnet2_files`."""

from __future__ import annotations

import copy
import os
import sys
from typing import Any

import torch
from torch import Tensor

from nvdd.errors import InputError, MissingDependencyError
from nvdd.models.aimnet2_ranks import dense_rows, spec, with_halo
from nvdd.models.base import BaseModelMixin, Batch, ModelConfig, ModelOutputs, NeighborConfig
from nvdd.models.precise import Float64Table
from nvdd.models.registry import ModelFamily
from nvdd.shard_tensor import to_local
from nvdd.specs import MLIPSpec

_INSTALL = "pip install 'aimnet>=0.2.6'"
_OUTPUTS = {"energy", "energies", "forces", "stress", "stresses", "charges"}
SCRIPTED = (
    "this AIMNet2 model is TorchScript (.jpt), which hides the steps at which ranks exchange features; convert it: aimnet "
    "convert model.jpt config.yaml model.pt"
)
# Output modules that add to the energy in ways that are no sum over pairs within the cutoff
_LONG_RANGE = {"LRCoulomb": "Coulomb energy", "DFTD3": "dispersion", "D3TS": "dispersion"}


class AIMNet2Wrapper(torch.nn.Module, BaseModelMixin):
    """An AIMNet2 (https://doi.org/10.1039/D4SC08572H) behind edge vectors, with its charge equilibration over ranks.

    The modules of aimnet run as they are, from the neighbour matrix to per-atom energies and charges. Long-range
    Coulomb energy and dispersion are not the network's: what a model leaves to its calculator is left to other blocks
    here, too.

    Args:
        model: an eager ``aimnet.models.AIMNet2`` of one or two charge channels.
        charge: total charge of each system in e; None: ``atoms.info["charge"]``, and 0 where that is missing.
        mult: multiplicity 2S + 1 of each system, for models of two charge channels; None: ``atoms.info["mult"]`` or
            ``["spin"]``, and 1 where both are missing.
        long_range: ``"separate"`` says that Coulomb energy and dispersion, which the model leaves to others, come from
            other blocks or are left out on purpose. Models that need neither don't need it.

    Attributes:
        core: the network without its output modules.
        heads: output modules that give energies of atoms.
        shifts: energies of lone atoms by atomic number, eV, in float64.
        source: the file's description of the model; None if it is not from a file.

    Raises:
        InputError: the module is scripted or of another class, or has output modules that are not sums over atoms or
            pairs; charge and mult that are no numbers; ``long_range`` is missing.
        MissingDependencyError: aimnet is missing.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        charge: float | str | None = None,
        mult: float | str | None = None,
        long_range: str | None = None,
    ) -> None:
        check_module(model)
        super().__init__()
        self.charge, self.mult = _number("charge", charge), _number("mult", mult)
        self.long_range = _long_range(model, long_range)
        self.open_shell = model.num_charge_channels == 2
        self.source: dict[str, Any] | None = None
        metadata = getattr(model, "_metadata", None) or {}
        self._neutral_only = metadata.get("supports_charged_systems") is False
        # a shallow copy: weights are shared, the module that was given stays as it is
        self.core = copy.copy(model)
        self.core._modules = {**model._modules, "outputs": torch.nn.ModuleDict()}
        self.heads, self._short_range, shifts = _heads(model)
        self.shifts = Float64Table(shifts)
        cutoff = max(float(v) for name, v in model.aev.named_parameters() if name.startswith("rc"))
        self._check_short_range(cutoff)
        known = (getattr(model, "_metadata", None) or {}).get("implemented_species") or range(1, len(shifts))
        fields = {"charge": self.charge} | ({"mult": self.mult, "spin": self.mult} if self.open_shell else {})
        self.model_config = ModelConfig(
            outputs=frozenset(_OUTPUTS | ({"spin_charges"} if self.open_shell else set())),
            neighbor_config=NeighborConfig(cutoff=cutoff),
            system_inputs=frozenset(name for name, value in fields.items() if value is None),
            elements=frozenset(int(z) for z in known),
        )

    def forward(self, data: Batch) -> ModelOutputs:
        """``energies`` (n_atoms,) eV in float64, ``charges`` (n_atoms,) e; of two channels ``spin_charges`` (n_atoms,)."""
        values = self.core.forward_prepared(self.adapt_input(data))
        for head in self.heads:
            values = head(values)
        n = data.n_atoms
        numbers = values["numbers"][:n]
        energies = values["energy"][:n].to(torch.float64) + self.shifts(numbers)
        for module in self._short_range:
            energies = energies - _short_range_energies(module, values)[:n]
        outputs = ModelOutputs(energies=energies, charges=values["charges"][:n])
        if self.open_shell:
            outputs["spin_charges"] = values["spin_charges"][:n]
        return outputs

    def adapt_input(self, data: Batch, **kwargs: Any) -> dict[str, Any]:
        """aimnet's dictionary of prepared inputs: a dense matrix of neighbours over ``[atoms | dummy | halo]``."""
        n, device = data.n_atoms, data.device
        receivers, senders = to_local(data.receivers), to_local(data.senders)
        vectors = to_local(data.edge_vectors).to(self.dtype)
        counts = torch.bincount(receivers, minlength=n)
        width = max(1, int(counts.max())) if len(receivers) else 1
        order = receivers.argsort(stable=True)
        first = counts.cumsum(0) - counts
        place = torch.arange(len(order), device=device) - first[receivers[order]]
        at = (receivers[order], place)
        rows = torch.full((n + 1, width), n, device=device)
        rows[at] = dense_rows(senders[order], n)
        shifts = vectors.new_zeros(n + 1, width, 3).index_put(at, vectors[order])
        with_dummy = lambda x, value: torch.nn.functional.pad(to_local(x), (0, 1), value=value)
        dummy = torch.zeros(n + 1, dtype=torch.bool, device=device)
        dummy[-1] = True
        sizes = torch.ones(data.n_systems, dtype=torch.int64, device=device)  # no module of the core reads them
        return {
            "numbers": with_dummy(data.atomic_numbers, 0),
            "mol_idx": with_dummy(data.batch, data.n_systems - 1),
            # the geometry is in the shifts, so that positions need not be read
            "coord": vectors.new_zeros(n + 1, 3),
            "cell": torch.eye(3, dtype=vectors.dtype, device=device),
            "shifts": shifts,
            "nbmat": rows,
            "mask_i": dummy,
            "mask_ij": rows == n,
            "charge": self._charges(data),
            "mult": self._of_systems(data, ("mult", "spin"), self.mult, 1.0),
            "mol_sizes": sizes,
            "_natom": sizes,
            "_num_mol": torch.tensor(data.n_systems),
            "_nb_mode": torch.tensor(1),
            "_input_padded": torch.tensor(True),
            **kwargs,
        }

    def _charges(self, data: Batch) -> Tensor:
        charges = self._of_systems(data, ("charge",), self.charge, 0.0)
        # on a GPU that would cost a synchronisation
        if self._neutral_only and charges.device.type == "cpu" and charges.any():
            raise InputError(
                f"this AIMNet2 model is for neutral systems, and the charges are {charges.tolist()} e; use another model"
            )
        return charges

    def _of_systems(self, data: Batch, names: tuple[str, ...], fixed: float | None, usual: float) -> Tensor:
        """(n_systems,) of the first of the names that the batch has."""
        if fixed is None:
            for name in names:
                if name in data.system_fields:
                    value = to_local(data.system_fields[name]).to(data.device, self.dtype).reshape(-1)
                    if len(value) != data.n_systems:
                        raise InputError(
                            f"aimnet2: {name} has {len(value)} values for {data.n_systems} systems; give one number for each, "
                            f"atoms.info[{name!r}]"
                        )
                    return value
        value = usual if fixed is None else fixed
        return torch.full((data.n_systems,), value, dtype=self.dtype, device=data.device)

    def distribution_spec(self, strategy: Any = None) -> MLIPSpec:
        """Owned rows, halo rows for what is read by neighbours, charges equilibrated over all ranks."""
        return spec(self.open_shell)

    def _check_short_range(self, cutoff: float) -> None:
        for module in self._short_range:
            if float(module.rc) > cutoff:
                raise InputError(
                    f"this AIMNet2 takes off Coulomb energy within {float(module.rc)} A, beyond its cutoff of {cutoff} A; use "
                    "a model whose SRCoulomb ends within the cutoff"
                )


def import_aimnet() -> None:
    """Imports aimnet's models, without Warp's banner.

    Raises:
        MissingDependencyError: aimnet is missing.
    """
    from nvdd.warp_runtime import warp

    warp()  # else its banner comes when aimnet's kernels are imported
    try:
        import aimnet.models  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(f"AIMNet2 models need aimnet ({sys.executable}): {_INSTALL}") from error


def check_module(model: Any) -> None:
    """Raises InputError unless this is an eager AIMNet2."""
    import_aimnet()
    from aimnet.models import AIMNet2

    if isinstance(model, torch.jit.ScriptModule):
        raise InputError(SCRIPTED)
    if not isinstance(model, AIMNet2):
        raise InputError(
            f"nvdd's AIMNet2 wrapper needs an eager aimnet.models.AIMNet2, not a {type(model).__module__}.{type(model).__name__}"
        )


def _long_range(model: Any, given: str | None) -> str | None:
    if given not in (None, "separate"):
        raise InputError(f"aimnet2: long_range={given!r} is not known; write long_range='separate' or leave it out")
    metadata = getattr(model, "_metadata", None) or {}
    needs = {
        "Coulomb energy (as with pme, fed by its charges)": "needs_coulomb",
        "dispersion (as with dftd3)": "needs_dispersion",
    }
    left_out = [what for what, key in needs.items() if metadata.get(key)]
    if left_out and given is None:
        raise InputError(
            f"this AIMNet2 model leaves {' and '.join(left_out)} to others; compose it with them, and say "
            "long_range='separate' to show that its energy alone is not the whole"
        )
    return given


def _heads(model: Any) -> tuple[torch.nn.ModuleList, list[Any], Tensor]:
    """Modules that give energies of atoms, those that take off Coulomb energy, and (n_elements,) atomic energies."""
    heads, short_range = torch.nn.ModuleList(), []
    shifts = torch.zeros(model.afv.num_embeddings, dtype=torch.float64)
    for module in model.outputs.children():
        kind = type(module).__name__
        if kind == "Output":
            heads.append(module)
        elif kind == "AtomicShift" and module.key_out == "energy" and not module.reduce_sum:
            shifts = shifts + module.shifts.weight.detach().squeeze(-1).to(torch.float64)
        elif kind == "SRCoulomb":
            short_range.append(module)
        elif kind not in ("AtomicSum", "Dipole", "Quadrupole"):
            what = _LONG_RANGE.get(kind)
            raise InputError(
                f"this AIMNet2 model has a {kind} among its outputs, "
                + (
                    f"a {what} that reaches beyond its cutoff; take it out, and compose"
                    if what
                    else "which nvdd does not know; use"
                )
                + (" the model with pme, ewald or dftd3" if what else " a model of energy, shifts, sums and SRCoulomb")
            )
    if not any(head.key_out == "energy" for head in heads):
        raise InputError("this AIMNet2 model has no output 'energy'; nvdd needs one")
    return heads, short_range, shifts


def _short_range_energies(module: Any, values: dict[str, Any]) -> Tensor:
    """(n_atoms + 1,) eV: ``SRCoulomb`` before its sum over a molecule."""
    from aimnet import ops

    q, distances, absent = values[module.key_in], values["d_ij"], values["mask_ij"]
    of_neighbours = with_halo(q)[values["nbmat"]]
    switch = (ops.exp_cutoff if module.envelope == "exp" else ops.cosine_cutoff)(distances, module.rc)
    pairs = (switch * q.unsqueeze(1) * of_neighbours / distances).masked_fill(absent, 0.0)
    return module._factor * pairs.sum(-1, dtype=torch.float64)


def _number(name: str, value: Any) -> float | None:
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        raise InputError(f"aimnet2: {name}={value!r} is not a number; write e.g. {name}=1") from None


# --- family -------------------------------------------------------------------------------------------------------


def _build(checkpoint: str | None, *, dtype: torch.dtype | None = None, **options: Any) -> AIMNet2Wrapper:
    from nvdd.models.aimnet2_files import from_file

    if checkpoint is None:
        raise InputError("'aimnet2' needs a model: aimnet2:FILE, the .pt file of an AIMNet2 (format 2)")
    return from_file(os.path.expanduser(checkpoint), dtype=dtype, **options)


def _from_calculator(calculator: Any) -> AIMNet2Wrapper | None:
    from nvdd.models.aimnet2_files import from_calculator

    return from_calculator(calculator)


def _configuration(wrapper: AIMNet2Wrapper) -> dict[str, Any]:
    from nvdd.models.aimnet2_files import configuration

    return configuration(wrapper)


def _rebuild(description: dict[str, Any], dtype: torch.dtype) -> AIMNet2Wrapper:
    from nvdd.models.aimnet2_files import rebuild

    return rebuild(description, dtype)


FAMILY = ModelFamily(
    name="aimnet2",
    description="AIMNet2, message passing with charge equilibration",
    build=_build,
    options={
        "charge": "total charge of each system, e (default atoms.info['charge'], else 0)",
        "mult": "multiplicity of each system (default atoms.info['mult'] or ['spin'], else 1)",
        "long_range": "separate: Coulomb energy and dispersion that the model needs come from other blocks",
    },
    package="aimnet",
    install=_INSTALL,
    licence="package MIT; weights as their authors state",
    from_calculator=_from_calculator,
    configuration=_configuration,
    rebuild=_rebuild,
)
