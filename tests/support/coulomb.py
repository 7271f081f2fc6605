"""Point charges: structures with charges, models on them over ranks, and Ewald's sum written out in numpy."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import torch
from ase import Atoms
from scipy.special import erfc

from nvdd import Batch, DistributedModel, DomainConfig, dispatch_trace
from nvdd.communicator import Communicator
from nvdd.models import EwaldModelWrapper, PMEModelWrapper
from structures import structure

KE = 14.399645351950548  # eV A
MADELUNG = {"NaCl": 1.7475645946331821906, "CsCl": 1.7626747730709883979, "ZnS": 1.6380550533887894238}


def slab() -> Atoms:
    """Three layers, periodic along two vectors, whose third vector says nothing."""
    atoms = structure("slab").copy()
    atoms.cell[2] = [3.0, 1.0, 4.0]
    return atoms


OTHERS = {"slab": slab, "atom in a box": lambda: Atoms("Ne", [(1.0, 2.0, 3.0)], cell=[9.0, 10.0, 11.0], pbc=True)}


def charged(name: str, net: float = 0.0) -> Atoms:
    """A structure of structures.py with random charges that sum to ``net``."""
    atoms = OTHERS[name]() if name in OTHERS else structure(name).copy()
    charges = np.random.default_rng(11).normal(size=len(atoms))
    charges += (net - charges.sum()) / len(atoms)
    atoms.set_initial_charges(charges)
    return atoms


WRAPPERS = {"ewald": EwaldModelWrapper, "pme": PMEModelWrapper}
WANTED = ("energy", "energies", "forces", "stress")


@dataclass(frozen=True)
class Case:
    """A model on charged structures, all in one batch."""

    model: str
    structures: tuple[str, ...]
    net: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)
    domain: dict[str, Any] = field(default_factory=dict)
    wanted: tuple[str, ...] = WANTED

    def wrapper(self) -> Any:
        return WRAPPERS[self.model](**{"cutoff": 6.0, "accuracy": 1e-7} | self.options)

    def atoms(self) -> list[Atoms]:
        return [charged(name, self.net) for name in self.structures]


def on_rank(comm: Communicator, cases: list[Case]) -> list[dict[str, Any]]:
    """Runs on each rank: each case twice, the second time traced."""
    found = []
    for case in cases:
        model = DistributedModel(case.wrapper(), DomainConfig(mesh=comm, **case.domain))
        batch = Batch.from_atoms(case.atoms())
        model(batch, {"energy"})
        with dispatch_trace() as trace:
            out = model(batch, set(case.wanted))
        found.append({
            "ids": out.ids.numpy(), "reductions": dict(trace.reductions), "exchanges": [e.site for e in trace.exchanges],
            "setup": dict(trace.setup), **{k: v.numpy() for k, v in out.items()},
        })  # fmt: skip
    return found


@dataclass
class Sum:
    """energy eV, energies (N,) eV, forces (N, 3) eV/A, virial (3, 3) eV: dE/d(strain)."""

    energy: float
    energies: np.ndarray
    forces: np.ndarray
    virial: np.ndarray


def ewald(atoms: Atoms, alpha: float, cutoff: float, k_cutoff: float) -> Sum:
    """Pair by pair and wave by wave, with a neutralising background."""
    q, x, cell = atoms.get_initial_charges(), atoms.positions, atoms.cell.array
    volume, inverse = abs(np.linalg.det(cell)), np.linalg.inv(cell)
    energies, forces, virial = np.zeros(len(q)), np.zeros((len(q), 3)), np.zeros((3, 3))
    x = x - np.floor(x @ inverse) @ cell
    reach = [int(np.ceil(cutoff * np.linalg.norm(inverse[:, a]))) + 1 for a in range(3)]
    for image in product(*(range(-n, n + 1) for n in reach)):
        d = x[None] - x[:, None] + np.array(image) @ cell  # i -> j
        r = np.linalg.norm(d, axis=2)
        near = (r < cutoff) & (r > 1e-9)
        r = np.where(near, r, 1.0)
        qq = np.where(near, q[:, None] * q[None], 0.0)
        pair = qq * erfc(alpha * r) / r
        energies += 0.5 * pair.sum(1)
        slope = -(pair / r + qq * 2 * alpha / np.sqrt(np.pi) * np.exp(-((alpha * r) ** 2)) / r)
        along = (slope / r)[:, :, None] * d
        forces += along.sum(1)
        virial += 0.5 * np.einsum("ija,ijb->ab", along, d)
    n = [int(k_cutoff * np.linalg.norm(cell[a]) / (2 * np.pi)) for a in range(3)]
    h = np.array([v for v in product(*(range(-m, m + 1) for m in n)) if any(v)], float).reshape(-1, 3)
    k = 2 * np.pi * h @ inverse.T
    k2 = (k**2).sum(1)
    k, k2 = k[k2 <= k_cutoff**2], k2[k2 <= k_cutoff**2]
    weight = 2 * np.pi / volume * np.exp(-k2 / (4 * alpha**2)) / k2
    phase = np.exp(1j * x @ k.T)
    factor = q @ phase
    energies += q * np.real(phase.conj() @ (weight * factor))
    forces += -2 * q[:, None] * np.imag(phase * factor.conj() * weight) @ -k
    strained = 2.0 * (1 / k2 + 1 / (4 * alpha**2))
    by_wave = weight * np.abs(factor) ** 2
    virial += np.einsum("k,ka,kb->ab", by_wave * strained, k, k) - np.eye(3) * by_wave.sum()
    background = -0.5 * np.pi / (volume * alpha**2) * q.sum()
    energies += q * background - alpha / np.sqrt(np.pi) * q**2
    virial -= np.eye(3) * background * q.sum()
    return Sum(KE * energies.sum(), KE * energies, KE * forces, KE * virial)


def lattice(name: str, a: float = 5.0) -> tuple[Atoms, float]:
    """The primitive cell of NaCl, CsCl or ZnS with charges of 1 e, and its nearest distance."""
    from ase.build import bulk

    kind, distance = {
        "NaCl": ("rocksalt", a / 2),
        "CsCl": ("cesiumchloride", a * 3**0.5 / 2),
        "ZnS": ("zincblende", a * 3**0.5 / 4),
    }[name]
    atoms = bulk(name, kind, a=a)
    atoms.set_initial_charges([1.0, -1.0])
    return atoms, distance


def melt(repeat: int = 2, triclinic: bool = True) -> Atoms:
    """Rattled rock salt, in a triclinic cell with LAMMPS's orientation."""
    from ase.build import bulk

    atoms = bulk("NaCl", "rocksalt", a=5.64, cubic=True).repeat(repeat)
    atoms.rattle(0.3, seed=4)
    if triclinic:
        shear = np.array([[1.0, 0.0, 0.0], [0.08, 1.03, 0.0], [-0.11, 0.06, 0.97]])
        atoms.set_cell(atoms.cell.array @ shear, scale_atoms=True)
    charges = np.random.default_rng(2).normal(size=len(atoms))
    atoms.set_initial_charges(charges - charges.mean())
    return atoms


def sequence_on_rank(comm: Communicator, model: str, options: dict, steps: list[Atoms]) -> list[dict[str, Any]]:
    """Runs on each rank: one step after another by one model."""
    distributed = DistributedModel(WRAPPERS[model](**options), DomainConfig(mesh=comm))
    found = []
    for atoms in steps:
        out = distributed(Batch.from_atoms(atoms), set(WANTED))
        found.append({"ids": out.ids.numpy(), **{k: v.numpy() for k, v in out.items()}})
    return found


def hessian_on_rank(comm: Communicator, model: str, options: dict, atoms: Atoms) -> np.ndarray:
    """Runs on each rank: the gradient by positions of the sum of forces times fixed numbers."""
    batch = Batch.from_atoms(atoms)
    batch.positions.requires_grad_(True)
    distributed = DistributedModel(WRAPPERS[model](**options), DomainConfig(mesh=comm))
    out = distributed(batch, {"forces"}, create_graph=True)
    weights = torch.from_numpy(directions(len(atoms)))[out.ids]
    (gradient,) = torch.autograd.grad((out["forces"] * weights).sum(), batch.positions)
    return gradient.numpy()


def directions(n: int) -> np.ndarray:
    """(n, 3) fixed numbers."""
    return np.random.default_rng(9).normal(size=(n, 3))
