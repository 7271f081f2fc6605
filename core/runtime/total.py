"""`Total`: the sum of the passes of all blocks on one rank, with one exchange and one sum over ranks for all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nvdd.cells import volume
from nvdd.data import Batch
from nvdd.errors import DistributedOpError, InputError
from nvdd.exchange import counted_once, fold_packed
from nvdd.roles import ShardMeta
from nvdd.runtime.block import Block, Pass
from nvdd.runtime.graph import LocalGraph, Topology
from nvdd.runtime.outputs import sum_systems
from nvdd.shard_tensor import to_local
from nvdd.specs import OutputKind, Reduce
from nvdd.specs.declared import ADDITIVE


class Total:
    """What this rank has of a step.

    Args:
        blocks, passes: one for each other.
        graph: the edges of the widest cutoff; the rows of its topology are the ones that results have.
        n_systems: of the batch.
    """

    def __init__(self, blocks: Sequence[Block], passes: Sequence[Pass], graph: LocalGraph, n_systems: int) -> None:
        self.parts = list(zip(blocks, passes, strict=True))
        self.graph, self.n_systems = graph, n_systems
        topology = graph.topology
        self.n_counted = topology.plan.n_owned - topology.n_phantom

    @property
    def _meta(self) -> ShardMeta:
        return self.parts[0][1].meta  # for what blocks have in common: ranks and systems

    def energy(self) -> Tensor:
        """(n_systems,) eV, this rank's share."""
        return _sum([done.energy.by_system for _, done in self.parts if done.energy is not None])

    def energies(self) -> Tensor:
        """(n_counted,) eV."""
        return _sum([done.energy.per_atom() for _, done in self.parts if done.energy is not None])

    def fold(self) -> dict[str, Tensor]:
        """``forces`` (n_counted, 3) eV/A and ``virials`` (n_counted, 3, 3) eV, as far as they were derived or returned."""
        out = self._folded()
        for _, done in self.parts:
            if done.derivatives.forces is not None:
                _add(out, "forces", done.derivatives.forces)
        out = {name: value[: self.n_counted] for name, value in out.items()}
        for block, done in self.parts:
            if "forces" in done.raw:
                _add(out, "forces", self._returned("forces", block, done))
        return out

    def _folded(self) -> dict[str, Tensor]:
        """The shares of all blocks, folded in one message."""
        shares = [(done.graph.topology, done.derivatives.padded) for _, done in self.parts if done.derivatives.padded]
        if not shares:
            return {}
        names = list(dict.fromkeys(name for _, padded in shares for name in padded))
        one = all(topology is shares[0][0] for topology, _ in shares)
        topology = shares[0][0] if one else self.graph.topology
        rows = [_sum([_lifted(t, padded[name], topology) for t, padded in shares if name in padded]) for name in names]
        return dict(zip(names, fold_packed(rows, topology.plan, "forces"), strict=True))

    def virial(self) -> Tensor | None:
        """(n_systems, 3, 3) eV, this rank's share of what was derived; None if nothing was."""
        derived = [done.derivatives.virial for _, done in self.parts if done.derivatives.virial is not None]
        return _sum(derived) if derived else None

    def returned_stress(self) -> Tensor | None:
        """(n_systems, 3, 3) eV/A^3, this rank's share of what blocks predict themselves; None if none does."""
        found = [self._share("stress", block, done) for block, done in self.parts if "stress" in done.raw]
        for block, done in self.parts:
            if "stress" in done.raw and (shape := tuple(done.raw["stress"].shape)) != (self.n_systems, 3, 3):
                raise DistributedOpError(
                    f"the stress that {block.name} returned has shape {shape}; it must be ({self.n_systems}, 3, 3), "
                    "(n_systems, 3, 3) in eV/A^3"
                )
        return _sum(found) if found else None

    def stresses(self, virials: Tensor | None, volumes: list[float]) -> Tensor:
        """(n_counted, 3, 3) eV/A^3: ``virials`` of `fold` over the volume, and what blocks return themselves."""
        returned = [self._returned("stresses", block, done) for block, done in self.parts if "stresses" in done.raw]
        if virials is not None:
            returned.append(over_volume(virials, volumes, self.graph.topology.system[: self.n_counted]))
        return _sum(returned) if returned else self.as_returned("stresses")

    def pair_forces(self) -> Tensor:
        """(E, 3) eV/A, dE/d(edge vector) for the edges of ``graph``; of blocks on its own rows, all of edge vectors."""
        total = None
        for block, done in self.parts:
            pair = done.derivatives.pair_forces
            if pair is None and done.energy is None:
                continue
            if pair is None or (done.graph is not self.graph and done.graph.kept is None):
                raise InputError(f"{block.name} gives no pair forces that could be added to those of the other blocks")
            if done.graph is not self.graph:
                pair = pair.new_zeros(self.graph.pair.shape[1], 3).index_add(0, done.graph.kept, pair)
            total = pair if total is None else total + pair
        if total is None:
            raise InputError("this model gives no pair forces")
        return total

    def share(self, name: str) -> Tensor | None:
        """An output that is none of the sums, if each rank has a share of it; else None."""
        block, done = self._giver(name)
        declared = block.spec.outputs.get(name)
        if declared is None or declared.reduce is not Reduce.ALL_REDUCE:
            return None
        return to_local(done.raw[name]).to(torch.float64)

    def as_returned(self, name: str) -> Tensor:
        """An output that needs no sum over ranks, float64."""
        if name in ADDITIVE:
            return _sum([self._returned(name, block, done) for block, done in self.parts if done.energy is not None])
        return self._returned(name, *self._giver(name))

    def _giver(self, name: str) -> tuple[Block, Pass]:
        givers = [(block, done) for block, done in self.parts if name in done.raw]
        if not givers:
            names = sorted({key for _, done in self.parts for key in done.raw})
            raise InputError(f"the model did not return {name!r}; it returned {names}")
        return givers[0]

    def _returned(self, name: str, block: Block, done: Pass) -> Tensor:
        if name not in done.raw:
            raise InputError(f"{block.name} did not return {name!r}; it returned {sorted(done.raw)}")
        value = to_local(done.raw[name]).to(torch.float64)
        declared = block.spec.outputs.get(name)
        per_atom = declared is not None and declared.kind is OutputKind.PER_NODE
        return value[: self.n_counted] if per_atom else value

    def _share(self, name: str, block: Block, done: Pass) -> Tensor:
        value = to_local(done.raw[name]).to(torch.float64)
        declared = block.spec.outputs.get(name)
        shared = declared is not None and declared.reduce is Reduce.ALL_REDUCE
        return value if shared else counted_once(value, done.meta.comm)

    def sum_systems(self, shares: dict[str, Tensor]) -> dict[str, Tensor]:
        """Per-system shares summed over ranks, all in one message."""
        return sum_systems(shares, self._meta)


def volumes_of(batch: Batch) -> list[float]:
    """Volume of each system, A^3; 0 where a cell vector is missing."""
    return [volume(cell) for cell in batch.cell.detach().cpu().numpy()]


def over_volume(virial: Tensor, volumes: list[float], system: Tensor | None = None) -> Tensor:
    """(..., 3, 3) eV/A^3, of systems, or of atoms of the given systems."""
    if min(volumes) == 0:
        raise InputError("stress needs a cell with three independent vectors; ask for 'virial' instead")
    divisor = virial.new_tensor(volumes)
    return virial / (divisor if system is None else divisor[system])[:, None, None]


def times_volume(stress: Tensor, volumes: list[float]) -> Tensor:
    """(n_systems, 3, 3) eV."""
    if min(volumes) == 0:
        raise InputError(
            "the model returns stress itself, of which a virial needs the volume, and the cell has no three independent vectors"
        )
    return stress * stress.new_tensor(volumes)[:, None, None]


def _lifted(topology: Topology, rows: Tensor, into: Topology) -> Tensor:
    """Rows of a block's own halo, as rows of the wider one."""
    if topology is into:
        return rows
    return rows.new_zeros(into.plan.n_padded, *rows.shape[1:]).index_add(0, topology.wider, rows)


def _add(out: dict[str, Tensor], name: str, value: Tensor) -> None:
    out[name] = out[name] + value if name in out else value


def _sum(values: Sequence[Tensor]) -> Tensor:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total
