"""A small structure on which two builds of a model must agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from ase import Atoms

from nvdd.errors import InputError

_N_ATOMS = 12
# sums over 12 atoms of values that are equal to rounding; float32 models may fuse operations another way
_TOLERANCE = {"float32": 2e-6, "float64": 1e-12}


@dataclass(frozen=True)
class Probe:
    """What a model gives for the structure.

    Attributes:
        energy: eV.
        forces: (12, 3), eV/A.
        dtype: of the model.
    """

    energy: float
    forces: np.ndarray
    dtype: str

    def summary(self) -> dict[str, float]:
        """Energy and largest force component, for a file's meta data."""
        return {"energy": self.energy, "max_force": float(np.abs(self.forces).max())}


def probe(wrapper: Any, elements: Sequence[str]) -> Probe:
    """Evaluates a wrapper on one rank and the CPU.

    Raises:
        InputError: it gives no finite numbers.
    """
    from nvdd.config import DomainConfig
    from nvdd.data import Batch
    from nvdd.runtime.model import DistributedModel

    atoms = structure(elements)
    if wrapper.model_config.pbc is not None:
        atoms.pbc = wrapper.model_config.pbc
    for name in wrapper.model_config.node_inputs:  # charges: LAMMPS has no others
        atoms.set_array(name, np.linspace(-1.0, 1.0, len(atoms)))
    out = DistributedModel(wrapper, DomainConfig())(Batch.from_atoms(atoms), ("energy", "forces"))
    forces = np.zeros((len(atoms), 3))
    forces[out.ids.cpu().numpy()] = out["forces"].detach().cpu().numpy()
    energy = float(out["energy"].sum())
    if not (np.isfinite(energy) and np.isfinite(forces).all()):
        raise InputError(
            f"it gives an energy of {energy} eV for {atoms.get_chemical_formula()}, which is no model to run"
        )
    return Probe(energy, forces, str(getattr(wrapper, "dtype", torch.float64)).removeprefix("torch."))


def structure(elements: Sequence[str]) -> Atoms:
    """Twelve atoms of up to twelve of the elements in a periodic, triclinic cell, every 2.2 A and a bit off."""
    random = np.random.default_rng(7)
    sites = np.stack(np.meshgrid(range(2), range(2), range(3), indexing="ij"), axis=-1).reshape(-1, 3)
    chosen = random.permutation(len(elements))[:_N_ATOMS]
    symbols = [elements[chosen[k % len(chosen)]] for k in range(_N_ATOMS)]
    cell = np.array([[4.4, 0.0, 0.0], [0.5, 4.4, 0.0], [0.3, -0.4, 6.6]])
    positions = (sites / [2, 2, 3]) @ cell + random.uniform(-0.2, 0.2, (_N_ATOMS, 3))
    return Atoms(symbols, positions, cell=cell, pbc=True)


def refuse_difference(original: Probe, again: Probe) -> None:
    """Raises InputError unless both are the same up to rounding."""
    tolerance = _TOLERANCE[original.dtype]
    off_energy = abs(again.energy - original.energy) / max(abs(original.energy), 1e-30)
    off_forces = np.abs(again.forces - original.forces).max() / max(np.abs(original.forces).max(), 1e-30)
    if again.dtype != original.dtype or not max(off_energy, off_forces) <= tolerance:  # also if one of them is NaN
        raise InputError(
            f"rebuilt from its configuration it is another model: energy {again.energy!r} instead of {original.energy!r} eV, "
            f"forces off by {off_forces:.1e} of the largest"
        )
