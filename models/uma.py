"""UMA, eSCN and eSEN: their wrapper and families. Files are read by `nvdd.models.uma_files`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nvdd.errors import InputError
from nvdd.models.base import BaseModelMixin, Batch, ModelConfig, ModelOutputs, NeighborConfig
from nvdd.models.precise import Float64Table
from nvdd.models.registry import ModelFamily
from nvdd.models.uma_inputs import RANGES, of_systems, whole_number
from nvdd.models.uma_parts import INSTALL, UMAParts
from nvdd.models.uma_ranks import check_spec, spec
from nvdd.shard_tensor import to_local
from nvdd.specs import MLIPSpec
from nvdd.verbs import refresh_neighbors


class _Inputs(dict):
    """The backbone's inputs; fairchem asks by ``get(name, default=...)``, which a dict does not know."""

    def get(self, key: str, default: Any = None) -> Any:
        return super().get(key, default)


class UMAWrapper(torch.nn.Module, BaseModelMixin):
    """A backbone of fairchem's eSCN-MD code and the energy head of one task, behind edge vectors.

    UMA (https://arxiv.org/abs/2506.23971) is this backbone with a mixture of experts, chosen by composition, charge,
    spin and task; eSEN (https://arxiv.org/abs/2502.12147) has no experts.

    Args:
        parts: of fairchem's model; `nvdd.models.uma_files` has what reads or makes them. Weights are shared with the
            model that they come from, whose settings stay as they are.
        charge: total charge of each system in e, a whole number; None: ``atoms.info["charge"]``, and 0 where that is missing.
        spin: multiplicity 2S + 1 of each system; None: ``atoms.info["spin"]``, and where that is missing fairchem's
            default: 1 for the task omol, 0 ("not given") for others.

    Attributes:
        task: in fairchem's words: ``"omol"``, ``"omat"``, ``"oc20"``, ``"odac"``, ``"omc"``, ...
        direct: whether forces come from a head of their own and are no derivative of the energy.
        references: energies of elements, eV, in float64.

    Raises:
        InputError: a charge or spin that is no whole number in fairchem's range.
    """

    def __init__(self, parts: UMAParts, *, charge: int | None = None, spin: int | None = None) -> None:
        super().__init__()
        self.task, self.source, self.direct = parts.task, parts.source, parts.force_head is not None
        self.backbone, self.energy_block = parts.as_handed_edges(), parts.head.energy_block
        self.force_block = parts.force_head.linear if self.direct else None
        self.references = Float64Table(parts.references)
        self.scale, self.shift, self.force_scale = parts.scale, parts.shift, parts.force_scale
        self._mole, self._experts, self._single_atoms = parts.mole, parts.datasets, parts.single_atoms
        self.charge, self.spin = whole_number("charge", charge), whole_number("spin", spin)
        free = frozenset(name for name in RANGES if getattr(self, name) is None)
        derived = set() if self.direct else {"stress", "stresses"}
        self.model_config = ModelConfig(
            outputs=frozenset({"energy", "energies", "forces"} | derived),
            autograd_outputs=frozenset() if self.direct else frozenset({"forces"} | derived),
            neighbor_config=NeighborConfig(cutoff=float(self.backbone.cutoff)),
            system_inputs=free,
            # of molecules fairchem itself warns where they are missing
            optional_inputs=frozenset() if self.task == "omol" else free,
            elements=frozenset(range(1, min(self.backbone.max_num_elements, len(parts.references)))),
        )

    def forward(self, data: Batch) -> ModelOutputs:
        """``energies`` (n_atoms,) eV in float64; of a model with direct forces ``forces`` (n_atoms, 3) eV/A, too."""
        if self.training:
            raise InputError("nvdd's UMA wrapper is for inference (dropout and statistics of experts differ by rank): call eval()")
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.direct):
            embedding = self.backbone(self.adapt_input(data))["node_embedding"]
        if self._mole is not None:
            self._choose_expert(to_local(data.batch), data.n_systems)
        energies = self.energy_block(embedding[:, 0]).reshape(-1).to(torch.float64) * self.scale
        energies = energies + self.references(to_local(data.atomic_numbers))
        if self.shift:
            per_atom = self.shift / data.n_atoms_per_system.to(torch.float64)
            energies = energies + to_local(per_atom[data.batch])
        outputs = ModelOutputs(energies=energies)
        if self.direct:  # degrees 0 and 1 go in, the vector of degree 1 comes out
            outputs["forces"] = self.force_block(embedding[:, :4])[:, 1:4].reshape(-1, 3) * self.force_scale
        return outputs

    def adapt_input(self, data: Batch, **kwargs: Any) -> dict[str, Any]:
        """fairchem's inputs. Edges are offsets in cells of unit vectors, between atoms that are all at the origin."""
        numbers, batch = to_local(data.atomic_numbers), to_local(data.batch)
        of_edges = to_local(refresh_neighbors(data.atomic_numbers, pad=True))  # halo rows, which edges read, as well
        vectors = to_local(data.edge_vectors).to(self.dtype)
        senders, receivers = to_local(data.senders), to_local(data.receivers)
        if data.n_systems > 1:  # experts take edges system by system
            order = batch[receivers].argsort(stable=True)
            senders, receivers, vectors = senders[order], receivers[order], vectors[order]
        n_atoms = to_local(data.n_atoms_per_system + 0)  # of all ranks
        self._check_system(data, receivers, n_atoms)
        return _Inputs(
            pos=vectors.new_zeros(len(of_edges), 3),
            cell=torch.eye(3, dtype=self.dtype, device=data.device).expand(data.n_systems, 3, 3),
            atomic_numbers=numbers,
            numbers_of_edges=of_edges,
            batch=batch,
            natoms=n_atoms,
            edge_index=torch.stack([senders, receivers]),
            cell_offsets=vectors,
            nedges=torch.bincount(batch[receivers], minlength=data.n_systems),
            charge=of_systems(data, "charge", self.charge, 0),
            spin=of_systems(data, "spin", self.spin, 1 if self.task == "omol" else 0),
            dataset=[self.task] * data.n_systems,
            **kwargs,
        )

    def _choose_expert(self, batch: Tensor, n_systems: int) -> None:
        """Tells the head which expert is the task's, and how many of the rows are of each system."""
        n_experts = len(self._experts)
        chosen = torch.zeros(n_systems, n_experts, dtype=self.dtype, device=batch.device)
        chosen[:, self._experts[self.task]] = 1
        self._mole.expert_mixing_coefficients = chosen
        self._mole.mole_sizes = torch.bincount(batch, minlength=n_systems)

    def _check_system(self, data: Batch, receivers: Tensor, n_atoms: Tensor) -> None:
        most, limit = torch.bincount(receivers).max().item() if len(receivers) else 0, self.backbone.max_neighbors
        if most > limit:
            raise InputError(
                f"an atom has {most} neighbours within {self.backbone.cutoff} A, of which this model takes the nearest {limit} "
                "(max_neighbors), so that its energy jumps when two of them change places; nvdd does not run it on this system"
            )
        lone = (n_atoms == 1).cpu() & ~to_local(data.pbc).cpu().any(1)
        if not self._single_atoms and bool(lone.any()):
            raise InputError(
                "uma: a lone atom without periodic boundaries; its energy is in a table that fairchem has beside the model, "
                "which nvdd has not (FAIRChemCalculator by the model's name reads it)"
            )

    def distribution_spec(self, strategy: Any = None) -> MLIPSpec:
        """Owned rows, with halo rows for what edges read in each layer; the same under graph partition."""
        return spec(self.direct)

    def distributed_setup(self, ctx: Any) -> None:
        """Refuses a spec without the adapters."""
        check_spec(ctx.spec, self.direct)


# --- families -----------------------------------------------------------------------------------------------------


def _build(checkpoint: str | None, *, dtype: torch.dtype | None = None, **options: Any) -> UMAWrapper:
    from nvdd.models.uma_files import build

    return build("uma", checkpoint, dtype=dtype, **options)


def _build_escn(checkpoint: str | None, *, dtype: torch.dtype | None = None, **options: Any) -> UMAWrapper:
    from nvdd.models.uma_files import build

    return build("escn", checkpoint, dtype=dtype, **options)


def _from_calculator(calculator: Any) -> UMAWrapper | None:
    from nvdd.models.uma_files import from_calculator

    return from_calculator(calculator)


def _configuration(wrapper: UMAWrapper) -> dict[str, Any]:
    from nvdd.models.uma_files import configuration

    return configuration(wrapper)


def _rebuild(description: dict[str, Any], dtype: torch.dtype) -> UMAWrapper:
    from nvdd.models.uma_files import rebuild

    return rebuild(description, dtype)


FAMILY = ModelFamily(
    name="uma",
    description="UMA of fairchem: eSCN-MD with a mixture of experts (also reads eSEN)",
    build=_build,
    checkpoints=("random",),
    options={
        "task": "omol, omat, oc20, odac, omc, ... (needed where the model has several)",
        "charge": "total charge of each system, e (default atoms.info['charge'], else 0)",
        "spin": "multiplicity of each system (default atoms.info['spin'], else 1 for omol and 0 for others)",
        "checkpointing": "yes: compute edges again in the derivative, which takes time and saves memory",
        "seed": "of random weights (default 0)",
        "size": "of random weights: tiny, small (UMA-S's); default tiny",
    },
    package="fairchem",
    install=INSTALL,
    licence="package MIT; weights of UMA: FAIR Chemistry License, which its users accept with Meta",
    from_calculator=_from_calculator,
    configuration=_configuration,
    rebuild=_rebuild,
)
ESCN = replace(
    FAMILY,
    name="escn",
    description="eSEN and eSCN-MD of fairchem: the backbone of UMA without experts",
    build=_build_escn,
    from_calculator=None,  # uma's takes both
    licence="package MIT; weights as their authors state",
)
