"""The truth: the wrapper's own forward in one process, on plain tensors, differentiated by plain autograd."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nvdd.data import Batch
from nvdd.dispatch import op_name
from nvdd.model_config import EdgeLayout
from nvdd.neighbors import attach_neighbors
from nvdd.specs import OutputKind
from nvdd.validate.edges import reference_edges
from nvdd.validate.geometries import with_geometry
from nvdd.validate.helpers import HelperOutput, HelperWatch
from nvdd.validate.layers import LayerOutput, record_layers


@dataclass(frozen=True)
class Truth:
    """One geometry in one process.

    Attributes:
        values: output -> float64 array; what the wrapper returned, and ``energy``, ``forces``, ``virial``.
        returned: the names that the wrapper returned itself.
        severed: the energy does not depend on the geometry through autograd, so there are no derivatives.
        edges: (E, 5) of `nvdd.validate.edges`, in the order in which the wrapper had them.
        layers, helpers: records, if they were asked for.
    """

    values: dict[str, np.ndarray]
    returned: frozenset[str]
    severed: bool
    edges: np.ndarray
    layers: list[LayerOutput] = field(default_factory=list)
    helpers: list[HelperOutput] = field(default_factory=list)


class _OpTrace(TorchFunctionMode):
    """Counts torch operations by their names in nvdd's dispatch."""

    def __init__(self, into: Counter) -> None:
        super().__init__()
        self.into = into

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.into[op_name(func)[0]] += 1
        return func(*args, **(kwargs or {}))


def evaluate(
    wrapper: Any,
    batch: Batch,
    device: torch.device | str,
    layers: bool = False,
    watch: HelperWatch | None = None,
    ops: Counter | None = None,
) -> Truth:
    """Calls ``wrapper`` once with all atoms, and differentiates its energy by positions and strain.

    The records that are asked for (outputs of modules, of helpers, operations) are those of this call.
    """
    config, layout = wrapper.model_config, getattr(wrapper, "edge_layout", EdgeLayout())
    cutoff, bonds = config.neighbor_config.cutoff, config.neighbor_config.bond_cutoff
    plain = attach_neighbors(with_geometry(batch, batch.positions.detach()), cutoff, layout, bonds)
    local, positions, strain = _differentiable(plain, getattr(wrapper, "dtype", torch.float64), torch.device(device))
    with torch.inference_mode(False), torch.enable_grad(), ExitStack() as stack:
        recorded = stack.enter_context(record_layers(wrapper)) if layers else []
        with _OpTrace(ops) if ops is not None else nullcontext():
            raw = wrapper(local)
        values = {k: v.detach().to(torch.float64).cpu().numpy() for k, v in raw.items() if isinstance(v, Tensor)}
        energy = _energy(raw, local)
        gradient, virial = None, None
        if energy is not None and energy.requires_grad:
            # a model that has differentiated itself may have let go of the graph
            with suppress(RuntimeError) if "forces" in raw else nullcontext():
                gradient, virial = torch.autograd.grad(energy.sum(), (positions, strain), allow_unused=True)
    if energy is not None:
        values["energy"] = energy.detach().cpu().numpy()
    if gradient is not None:
        values.setdefault("forces", -gradient.cpu().numpy())
    if virial is not None:
        values["virial"] = virial.cpu().numpy()
    edges = plain_edges(plain, layout)
    assert len(edges) == len(reference_edges(plain, cutoff))
    return Truth(values, frozenset(raw), gradient is None, edges, recorded, watch.take() if watch is not None else [])


def plain_edges(batch: Batch, layout: EdgeLayout) -> np.ndarray:
    """(E, 5) receiver, sender, image (of the core's convention) in the order of the batch's neighbour list."""
    pair = batch.neighbor_list.cpu().numpy()
    shift = np.rint(layout.sign * batch.neighbor_list_shifts.cpu().numpy()).astype(np.int64)
    return np.column_stack([pair[:, 1 - layout.sender_column], pair[:, layout.sender_column], shift])


def _differentiable(plain: Batch, dtype: torch.dtype, device: torch.device) -> tuple[Batch, Tensor, Tensor]:
    """The batch in the model's dtype, as a function of float64 positions and of a symmetric strain."""
    put = lambda v: v.to(device)
    cast = lambda v: v.to(device, dtype) if v.is_floating_point() else v.to(device)
    positions = put(plain.positions).to(torch.float64).clone().requires_grad_(True)
    strain = torch.zeros(plain.n_systems, 3, 3, dtype=torch.float64, device=device, requires_grad=True)
    symmetric, system = 0.5 * (strain + strain.transpose(1, 2)), put(plain.batch)
    cell = put(plain.cell).to(torch.float64)
    x = positions + torch.einsum("ni,nij->nj", positions, symmetric[system])
    cell = cell + cell @ symmetric
    layout, pair, shifts = plain.edge_layout, put(plain.neighbor_list), put(plain.neighbor_list_shifts)
    senders, receivers = pair[:, layout.sender_column], pair[:, 1 - layout.sender_column]
    images = torch.einsum("ei,eij->ej", shifts.to(torch.float64), cell[system[receivers]])
    vectors = layout.sign * (x[senders] - x[receivers]) + images
    local = Batch(
        positions=x.to(dtype),
        atomic_numbers=put(plain.atomic_numbers),
        cell=cell.to(dtype),
        pbc=put(plain.pbc),
        batch=system,
        n_systems=plain.n_systems,
        node_fields={k: cast(v) for k, v in plain.node_fields.items()},
        system_fields={k: cast(v) for k, v in plain.system_fields.items()},
        neighbor_list=pair,
        neighbor_list_shifts=shifts.to(dtype),
        edge_vectors=vectors.to(dtype),
        edge_layout=layout,
    )
    for name in ("reverse_edges", "bond_of_edge", "edge_of_bond", "bonded_edges"):
        rows = getattr(plain, name)
        setattr(local, name, None if rows is None else put(rows))
    return local, positions, strain


def _energy(raw: Any, batch: Batch) -> Tensor | None:
    """(n_systems,) float64, from per-atom energies if there are any, as the runtime takes them."""
    if "energies" in raw:
        energies = raw["energies"].reshape(-1).to(torch.float64)
        if energies.shape != batch.batch.shape:
            return None
        return energies.new_zeros(batch.n_systems).index_add(0, batch.batch, energies)
    if "energy" in raw and raw["energy"].numel() == batch.n_systems:
        return raw["energy"].reshape(-1).to(torch.float64)
    return None


def permuted(batch: Batch, seed: int) -> tuple[Batch, np.ndarray]:
    """The batch with the atoms of each system in another order, and the old row of each new one."""
    rng, system = np.random.default_rng(seed), batch.batch.numpy()
    order = np.concatenate([rng.permutation(np.flatnonzero(system == k)) for k in range(batch.n_systems)])
    rows = torch.from_numpy(order)
    moved = with_geometry(
        batch,
        batch.positions[rows],
        atomic_numbers=batch.atomic_numbers[rows],
        batch=batch.batch[rows],
        node_fields={k: v[rows] for k, v in batch.node_fields.items()},
    )
    return moved, order


def infer_kinds(one: Truth, n_atoms: int, n_systems: int, many: Truth | None, n_atoms_many: int, n_systems_many: int):
    """Kind of each returned output, from how its shape changes between two batches (never from one shape alone)."""
    kinds: dict[str, OutputKind] = {}
    for name in one.returned & one.values.keys():
        a = one.values[name].shape[:1]
        if many is None or name not in many.values:
            # a single batch leaves a doubt only where both numbers are equal
            if n_atoms != n_systems and a in ((n_atoms,), (n_systems,)):
                kinds[name] = OutputKind.PER_NODE if a == (n_atoms,) else OutputKind.PER_GRAPH
            continue
        b = many.values[name].shape[:1]
        if (a, b) == ((n_atoms,), (n_atoms_many,)) and (a, b) != ((n_systems,), (n_systems_many,)):
            kinds[name] = OutputKind.PER_NODE
        elif (a, b) == ((n_systems,), (n_systems_many,)) and (a, b) != ((n_atoms,), (n_atoms_many,)):
            kinds[name] = OutputKind.PER_GRAPH
        elif a == b:
            kinds[name] = OutputKind.GLOBAL
    return kinds
