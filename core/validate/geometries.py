"""Structures made from the sample, each of which shows faults that the others hide."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nvdd.cells import Frame
from nvdd.data import Batch

_STRAIN = np.array([[0.03, 0.04, -0.02], [0.0, -0.02, 0.05], [0.0, 0.0, 0.02]])  # triclinic
_TRANSLATION = np.array([0.37, 0.61, -1.23])  # in cell vectors; 3 A of each where an axis is open
_RATTLE = 0.08  # A
_DRIFT = np.array([0.10, 0.07, 0.06])  # A a step: the partition lasts a step or two, then atoms change their owner
_LARGEST_STEP = 0.04  # A, of an atom against the others
_VACUUM = 40.0  # A
_DILUTION = 1.1  # a rank's domain in vacuum is so much larger than the sample


@dataclass(frozen=True)
class Case:
    """Geometries that one DistributedModel evaluates one after the other, keeping what it keeps.

    Attributes:
        name: for messages.
        geometries: their names, in order.
        domain: arguments of `DomainConfig`.
        essential: whether the model must be able to evaluate them in one process; else they are left out with a note.
    """

    name: str
    geometries: tuple[str, ...]
    domain: Mapping[str, Any] = field(default_factory=dict)
    essential: bool = True


def with_geometry(source: Batch, positions: Tensor, cell: Tensor | None = None, **changes: Any) -> Batch:
    """A copy of ``source`` with other positions and cells, without neighbours."""
    fields = {
        "atomic_numbers": source.atomic_numbers,
        "pbc": source.pbc,
        "batch": source.batch,
        "node_fields": source.node_fields,
        "system_fields": source.system_fields,
        **changes,
    }
    return Batch(positions=positions, cell=source.cell if cell is None else cell, **fields)


def make_cases(sample: Batch, n_ranks: int, seed: int) -> tuple[dict[str, Batch], list[Case]]:
    """The geometries by name, and in which order and partition they are evaluated (dynamics apart)."""
    rng = np.random.default_rng(seed)
    positions = sample.positions.numpy()
    put = lambda x, c=None: with_geometry(sample, torch.from_numpy(x), None if c is None else torch.from_numpy(c))
    rattled = positions + rng.normal(scale=_RATTLE, size=positions.shape)
    made = {
        "as given": sample,
        "translated": put(_translated(sample, rng)),
        "rattled": put(rattled),
        "strained": put(*_strained(sample, rattled)),
    }
    sequence = [*made, "as given"]
    changed = _changed_inputs(sample, rattled)
    if changed is not None:
        made["changed inputs"] = changed
        sequence.insert(4, "changed inputs")
    cases = [
        Case("default", tuple(sequence)),
        Case("recursive bisection", ("rattled", "strained"), {"balance": "rcb", "skin": 1.0}),
    ]
    for axis in range(3):
        grid = tuple(n_ranks if a == axis else 1 for a in range(3))
        cases.append(Case(f"slices along {'abc'[axis]}", ("strained", "rattled"), {"grid_dims": grid, "skin": 0.0}))
    if len(positions):
        made["two systems"] = _doubled(made["rattled"], made["strained"])
        cases.append(Case("two systems", ("two systems",), essential=False))
    if sample.n_systems == 1 and len(positions) > 1:
        made |= _dilute(put(rattled), n_ranks)
        slices = {"grid_dims": (1, 1, n_ranks)}
        names = ("a rank without atoms", "a rank without edges", "rattled")
        cases.append(Case("vacuum", names, slices, essential=False))
    return made, cases


def _axes(sample: Batch, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Cell with three vectors (unit vectors or a bounding box where open), and which are periodic."""
    frame = Frame.of(sample.cell[k].numpy(), sample.pbc[k].numpy())
    return frame.cell, frame.pbc


def _translated(sample: Batch, rng: np.random.Generator) -> np.ndarray:
    """Everything moved across faces of the cell, and each atom into another image."""
    out = sample.positions.numpy().copy()
    system = sample.batch.numpy()
    for k in range(sample.n_systems):
        mine = system == k
        cell, pbc = _axes(sample, k)
        shift = np.where(pbc[:, None], _TRANSLATION[:, None] * cell, 3.0 * np.eye(3)).sum(0)
        images = rng.integers(-2, 3, (int(mine.sum()), 3)) * pbc
        out[mine] += shift + images @ cell
    return out


def _strained(sample: Batch, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    strain = np.eye(3) + _STRAIN
    return positions @ strain, sample.cell.numpy() @ strain


def _changed_inputs(sample: Batch, positions: np.ndarray) -> Batch | None:
    """The charges and other inputs of the model changed between two calls."""
    change = lambda fields: {k: 1.1 * v + 0.013 if v.is_floating_point() else v for k, v in fields.items()}
    if not any(v.is_floating_point() for v in (*sample.node_fields.values(), *sample.system_fields.values())):
        return None
    return with_geometry(
        sample,
        torch.from_numpy(positions),
        node_fields=change(sample.node_fields),
        system_fields=change(sample.system_fields),
    )


def _doubled(first: Batch, second: Batch) -> Batch:
    """The systems of both in one batch, of different sizes: the second has lost its last atom."""
    keep = torch.ones(second.n_atoms, dtype=torch.bool)
    if second.n_atoms > 2 and bool((second.batch == second.batch[-1]).sum() > 1):
        keep[-1] = False
    join = lambda a, b: torch.cat([a, b])
    fields = {k: join(v, second.node_fields[k][keep]) for k, v in first.node_fields.items()}
    return Batch(
        positions=join(first.positions, second.positions[keep]),
        atomic_numbers=join(first.atomic_numbers, second.atomic_numbers[keep]),
        cell=join(first.cell, second.cell),
        pbc=join(first.pbc, second.pbc),
        batch=join(first.batch, second.batch[keep] + first.n_systems),
        node_fields=fields,
        system_fields={k: join(v, second.system_fields[k]) for k, v in first.system_fields.items()},
    )


def _dilute(sample: Batch, n_ranks: int) -> dict[str, Batch]:
    """The sample at one end of a long periodic cell, so that the last domains along c are empty or nearly so."""
    frame = Frame.of(sample.cell[0].numpy(), sample.pbc[0].numpy())
    scaled, _ = frame.wrap(sample.positions.numpy())
    low, high = scaled.min(0), scaled.max(0)
    extent = np.where(frame.pbc, 1.0, high - low + 6.0 / frame.heights)
    inside = np.where(frame.pbc, scaled, scaled - low + 1.0 / frame.heights)
    cell = frame.cell * extent[:, None]
    height = abs(np.linalg.det(cell)) / np.linalg.norm(np.cross(cell[0], cell[1]))
    # a domain holds the sample, and vacuum wider than any cutoff
    factor = max(n_ranks, 2) * max(_DILUTION, _VACUUM / height + 1.0)
    long = cell.copy()
    long[2] *= factor
    points = inside @ frame.cell
    apart, wide = points.copy(), long.copy()
    wide[:2] += _VACUUM * long[:2] / np.linalg.norm(long[:2], axis=1)[:, None]  # no images of the atom apart either
    apart[-1] = 0.5 * wide[0] + 0.5 * wide[1] + (1.0 - 0.5 / max(n_ranks, 2)) * wide[2]
    pbc = torch.ones(1, 3, dtype=torch.bool)
    put = lambda x, c: with_geometry(sample, torch.from_numpy(x), torch.from_numpy(c)[None], pbc=pbc)
    return {"a rank without atoms": put(points, long), "a rank without edges": put(apart, wide)}


def dynamics(sample: Batch, forces: Callable[[Batch], np.ndarray], steps: int, seed: int) -> dict[str, Batch]:
    """Frames of a short run by the single process's forces, with a drift that carries atoms into other domains.

    Velocity Verlet with equal masses, in units in which no coordinate moves farther than 0.04 A a step against the others;
    the last frame is the mirror image of the one before, in which every atom off the mirror has a new owner.
    """
    rng = np.random.default_rng(seed + 1)
    x = sample.positions.numpy().copy()
    force = forces(sample)
    largest = max(float(np.abs(force).max()), 1e-12)
    velocity = rng.normal(scale=0.04, size=x.shape)
    frames: dict[str, Batch] = {}
    acceleration = lambda f: np.clip(0.05 * f / largest, -0.1, 0.1)
    for step in range(steps):
        velocity += 0.5 * acceleration(force)
        x = x + np.clip(velocity, -_LARGEST_STEP, _LARGEST_STEP) + _DRIFT
        frame = with_geometry(sample, torch.from_numpy(x.copy()))
        force = forces(frame)
        velocity += 0.5 * acceleration(force)
        frames[f"step {step + 1}"] = frame
    mirror = np.diag([-1.0, -1.0, -1.0])
    frames["mirrored"] = with_geometry(sample, torch.from_numpy(x @ mirror + 0.7))
    return frames
