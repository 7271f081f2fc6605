"""From a model's outputs on each rank to global ones: checks that roles are as declared, then combines.

This is the second lock. Scripted code can lose roles on the way, so what arrives must be what the spec says: a
per-system value is known to be summed over ranks or declared as a share, a per-atom value has a row for each
owned atom. Anything else would be a wrong number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nvdd.errors import DistributedOpError, InputError
from nvdd.exchange import counted_once, sum_over_ranks
from nvdd.roles import Role, ShardMeta
from nvdd.shard_tensor import ShardTensor, to_local
from nvdd.specs import MLIPSpec, OutputKind, OutputSpec, Reduce


@dataclass(frozen=True, eq=False)
class DistributedOutputs(Mapping):
    """Outputs of one evaluation on this rank; a mapping by name.

    Attributes:
        ids: (n,) global ids of the atoms that this rank owns, ascending: the rows of per-atom outputs.
        values: ``energy`` (n_systems,) eV and ``stress`` (n_systems, 3, 3) eV/A^3, the same on every rank;
            ``energies`` (n,) eV, ``forces`` (n, 3) eV/A, ``stresses`` (n, 3, 3) eV/A^3 of the owned atoms; what
            else the model returns. All float64.
        n_halo, n_edges: remote rows that this rank read, and edges that it computed.
    """

    ids: Tensor
    values: dict[str, Tensor]
    n_halo: int = 0
    n_edges: int = 0

    def __getitem__(self, name: str) -> Tensor:
        return self.values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values)

    def __len__(self) -> int:
        return len(self.values)


def check_roles(outputs: Mapping[str, Tensor], spec: MLIPSpec, meta: ShardMeta) -> None:
    """Raises DistributedOpError where an output is not what the spec declares."""
    for name, value in outputs.items():
        if not isinstance(value, Tensor):
            continue
        declared = spec.outputs.get(name)
        kind = declared.kind if declared else OutputKind.UNKNOWN
        role = getattr(value, "_role", None)
        label = f"output {name!r} of shape {tuple(value.shape)}"
        if kind is OutputKind.PER_NODE:
            # owned rows are final in any case, so those of the halo may be there or not
            either = declared.reduce is Reduce.OWNED_ONLY
            if role not in (None, meta.atom_role) and not (either and role.is_atoms):
                raise DistributedOpError(f"{label} is declared PER_NODE but is {role.value}")
            if value.shape[:1] not in ((meta.n_rows,), *([(meta.n_owned,), (meta.n_padded,)] if either else [])):
                raise DistributedOpError(f"{label} is declared PER_NODE but this rank has {meta.n_rows} rows of atoms")
        elif kind is OutputKind.PER_GRAPH and declared.reduce is not Reduce.ALL_REDUCE:
            if role is not Role.SYSTEM and meta.comm.size > 1:
                raise DistributedOpError(
                    f"{label} is declared PER_GRAPH, but it is not known to be summed over ranks (its role was lost, "
                    "perhaps in scripted code). Return per-atom energies and let the framework sum them, or declare "
                    "it as this rank's share: OutputSpec(OutputKind.PER_GRAPH, Reduce.ALL_REDUCE)"
                )
        elif kind is OutputKind.UNKNOWN and meta.comm.size > 1:
            raise DistributedOpError(
                f"{label} is not declared in the model's spec, so it is unknown how ranks combine it; add it to "
                "MLIPSpec(outputs={...})"
            )


@dataclass(frozen=True, eq=False)
class Energy:
    """The energy of one forward.

    Attributes:
        differentiated: scalar, this rank's seed: the derivative of the global energy is the sum over ranks of the
            derivatives of these (through the adjoints of the exchanges).
        by_system: (n_systems,) float64, this rank's share.
        by_atom: (n_counted,) float64, or None.
    """

    differentiated: Tensor
    by_system: Tensor
    by_atom: Tensor | None

    def detached(self) -> Energy:
        """The same without its autograd graph."""
        by_atom = None if self.by_atom is None else self.by_atom.detach()
        return Energy(self.differentiated.detach(), self.by_system.detach(), by_atom)

    def per_atom(self) -> Tensor:
        """``by_atom``; raises InputError where the model gives none."""
        if self.by_atom is None:
            raise InputError("this model gives no per-atom energies")
        return self.by_atom

    @classmethod
    def of(
        cls,
        outputs: Mapping[str, Tensor],
        spec: MLIPSpec,
        meta: ShardMeta,
        system: Tensor,
        differentiated: str = "energies",
    ) -> Energy:
        """From per-atom ``energies`` if the model gives them, else from ``energy``.

        Args:
            differentiated: ``"energy"`` to differentiate that where a model gives both (`ModelConfig.differentiated`).
        """
        if "energies" in outputs:
            energies = to_local(outputs["energies"])
            if energies.numel() != meta.n_rows:
                raise DistributedOpError(
                    f"energies of shape {tuple(energies.shape)} are not one number an atom ({meta.n_rows} rows)"
                )
            energies = meta.only_counted(energies.reshape(-1)).to(torch.float64)
            share = energies.new_zeros(meta.n_systems).index_add(0, system[: len(energies)], energies)
            seed = energies.sum()
            if differentiated == "energy" and "energy" in outputs:
                seed = to_local(outputs["energy"]).to(torch.float64).sum()
            return cls(seed, share, energies)
        if "energy" not in outputs:
            raise DistributedOpError(f"the model returned {sorted(outputs)}: neither 'energies' nor 'energy'")
        energy = to_local(outputs["energy"]).reshape(-1).to(torch.float64)
        if energy.shape != (meta.n_systems,):
            raise DistributedOpError(f"energy has shape {tuple(outputs['energy'].shape)} for {meta.n_systems} systems")
        declared = spec.outputs.get("energy", OutputSpec(OutputKind.PER_GRAPH))
        replicated = isinstance(outputs["energy"], ShardTensor) and declared.reduce is not Reduce.ALL_REDUCE
        return cls(energy.sum(), counted_once(energy, meta.comm) if replicated else energy, None)


def sum_systems(parts: dict[str, Tensor], meta: ShardMeta) -> dict[str, Tensor]:
    """Sums per-system shares over ranks, all in one message."""
    if not parts:
        return {}
    flat = [p.reshape(meta.n_systems, -1) for p in parts.values()]
    total = sum_over_ranks(torch.cat(flat, 1), meta.comm, "per-system outputs")
    pieces = total.split([f.shape[1] for f in flat], 1)
    return {name: piece.reshape(part.shape) for (name, part), piece in zip(parts.items(), pieces, strict=True)}
