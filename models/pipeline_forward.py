"""The forward of a `PipelineModelWrapper` in one process, on plain tensors.

Over ranks `DistributedModel` evaluates the blocks by itself; this is the same sum without it, for training in one
process and as the reference of `trace_and_validate`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nvdd.data import Batch
from nvdd.errors import InputError
from nvdd.model_config import EdgeLayout
from nvdd.models.base import ModelOutputs
from nvdd.neighbors import attach_bonds
from nvdd.shard_tensor import ShardTensor
from nvdd.specs import ForceStrategy
from nvdd.specs.declared import ADDITIVE, spec_of

_DERIVED = (ForceStrategy.EDGE_VECTORS, ForceStrategy.POSITIONS)


def forward(pipeline: Any, data: Batch, order: Sequence[int]) -> ModelOutputs:
    """The sum over the blocks; ``order`` is that of evaluation."""
    if isinstance(data.positions, ShardTensor):
        raise InputError("a PipelineModelWrapper is no part of another model over ranks; give it to DistributedModel")
    blocks = pipeline.composed_of
    predicted = [k for k, b in enumerate(blocks) if _strategy(b) not in _DERIVED]
    strain = None
    if predicted:
        data, strain = _differentiable(data)
    raws: dict[int, Mapping[str, Tensor]] = {}
    for k in order:
        wired = {w.input: _read(raws[w.source], w) for w in pipeline.wires if w.target == k}
        raws[k] = blocks[k](view(data, blocks[k], wired))
    out = _summed(raws, data)
    if predicted:
        derived = [_energy(raw, data) for k, raw in raws.items() if k not in predicted]
        out.update(_with_derived(raws, predicted, [e for e in derived if e is not None], data, strain))
    for k in range(len(blocks)):
        for name, value in raws[k].items():
            if name not in ADDITIVE:
                out.setdefault(name, value)
    return out


def view(data: Batch, block: Any, inputs: Mapping[str, Tensor]) -> Batch:
    """What one block sees of a batch of plain tensors: the edges within its cutoff, in its layout and type."""
    layout = getattr(block, "edge_layout", EdgeLayout())
    config, dtype = block.model_config.neighbor_config, block.dtype
    cast = lambda v: v.to(dtype) if v.is_floating_point() else v
    vectors = data.edge_vectors
    near = (vectors.detach().to(torch.float64).square().sum(1) < config.cutoff**2).nonzero().squeeze(1)
    pair = data.neighbor_list.index_select(0, near)
    same_column = layout.sender_column == data.edge_layout.sender_column
    sign = layout.sign * data.edge_layout.sign
    by_vectors = _strategy(block) is ForceStrategy.EDGE_VECTORS
    mine = Batch(
        positions=cast(data.positions),
        atomic_numbers=data.atomic_numbers,
        cell=cast(data.cell),
        pbc=data.pbc,
        batch=data.batch,
        n_systems=data.n_systems,
        node_fields={k: cast(v) for k, v in (data.node_fields | dict(inputs)).items()},
        system_fields={k: cast(v) for k, v in data.system_fields.items() if k not in inputs},
        neighbor_list=pair if same_column else pair.flip(1),
        neighbor_list_shifts=cast(sign * data.neighbor_list_shifts.index_select(0, near)),
        edge_vectors=cast(sign * vectors.index_select(0, near)) if by_vectors else None,
        edge_layout=layout,
    )
    for name in block.model_config.system_inputs & inputs.keys():
        mine.system_fields[name] = mine.node_fields.pop(name)
    if config.bonds:
        _set_bonds(mine, config.bond_cutoff)
    return mine


def _set_bonds(batch: Batch, bond_cutoff: float | None) -> None:
    numpy = lambda t: t.detach().cpu().numpy()
    shifts = batch.edge_layout.sign * batch.neighbor_list_shifts.to(torch.float64)
    attach_bonds(batch, numpy(batch.receivers), numpy(batch.senders), numpy(shifts), bond_cutoff)


def _strategy(block: Any) -> ForceStrategy:
    return spec_of(block).force_strategy


def _read(raw: Mapping[str, Tensor], wire: Any) -> Tensor:
    if wire.output not in raw:
        raise InputError(f"block {wire.source} did not return {wire.output!r}; it returned {sorted(raw)}")
    value = raw[wire.output]
    return value.detach() if wire.fixed else value


def _energy(raw: Mapping[str, Tensor], data: Batch) -> Tensor | None:
    """(n_systems,) float64."""
    if "energies" in raw:
        energies = raw["energies"].reshape(-1).to(torch.float64)
        return energies.new_zeros(data.n_systems).index_add(0, data.batch, energies)
    return raw["energy"].reshape(-1).to(torch.float64) if "energy" in raw else None


def _summed(raws: Mapping[int, Mapping[str, Tensor]], data: Batch) -> ModelOutputs:
    """Per-atom energies if every block with an energy gives them, else energies of systems."""
    having = [raw for _, raw in sorted(raws.items()) if "energies" in raw or "energy" in raw]
    if not having:
        return ModelOutputs()
    if all("energies" in raw for raw in having):
        return ModelOutputs(energies=sum(raw["energies"].reshape(-1).to(torch.float64) for raw in having))
    return ModelOutputs(energy=sum(_energy(raw, data) for raw in having))


def _differentiable(data: Batch) -> tuple[Batch, Tensor]:
    """The batch as a function of positions that require a gradient and of a strain (n_systems, 3, 3)."""
    x = data.positions if data.positions.requires_grad else data.positions.detach().requires_grad_(True)
    strain = torch.zeros(data.n_systems, 3, 3, dtype=x.dtype, device=x.device, requires_grad=True)
    symmetric = 0.5 * (strain + strain.transpose(1, 2))
    moved = Batch(
        positions=x + torch.einsum("ni,nij->nj", x, symmetric[data.batch]),
        atomic_numbers=data.atomic_numbers,
        cell=data.cell.to(x.dtype) + data.cell.to(x.dtype) @ symmetric,
        pbc=data.pbc,
        batch=data.batch,
        n_systems=data.n_systems,
        node_fields=data.node_fields,
        system_fields=data.system_fields,
        neighbor_list=data.neighbor_list,
        neighbor_list_shifts=data.neighbor_list_shifts,
        edge_layout=data.edge_layout,
    )
    moved._unstrained = x
    return moved, strain


def _with_derived(
    raws: Mapping[int, Mapping[str, Tensor]], predicted: list[int], energies: list[Tensor], data: Batch, strain: Tensor
) -> dict[str, Tensor]:
    """Forces, and stress where every block that predicts has it: predicted ones and those of the other energies."""
    names = [n for n in ("forces", "stress") if all(n in raws[k] for k in predicted if _has_energy(raws[k]))]
    volume = torch.linalg.det(data.cell).abs()[:, None, None]
    if "stress" in names and bool((volume == 0).any()):  # a molecule has none
        names.remove("stress")
    out = {n: sum(raws[k][n].to(torch.float64) for k in predicted if n in raws[k]) for n in names}
    differentiable = [e.sum() for e in energies if e.requires_grad]
    if differentiable and torch.is_grad_enabled():
        gradient, virial = torch.autograd.grad(
            sum(differentiable), (data._unstrained, strain), create_graph=True, materialize_grads=True
        )
        parts = {"forces": -gradient, "stress": virial / volume}
        out = {n: value + parts[n] for n, value in out.items()}
    return out


def _has_energy(raw: Mapping[str, Tensor]) -> bool:
    return "energies" in raw or "energy" in raw
