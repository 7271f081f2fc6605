"""Structures by name, so that a test sends a name to the ranks: every kind that the envelope promises.

Lennard-Jones gets argon and neon, networks silicon and oxygen, those for molecules what is in `organic`.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from ase import Atoms
from ase.build import bulk, fcc111, molecule

from builders import quartz
from organic import ORGANIC


def argon(repeat=(2, 2, 2), stdev=0.15) -> Atoms:
    atoms = bulk("Ar", "fcc", a=5.26, cubic=True).repeat(repeat)
    atoms.rattle(stdev, seed=3)
    atoms.numbers[::5] = 10
    return atoms


def triclinic() -> Atoms:
    atoms = argon((2, 2, 3))
    atoms.set_cell(atoms.cell.array @ np.array([[1, 0.1, 0.05], [-0.08, 1, 0.2], [0.3, 0, 1.0]]), scale_atoms=True)
    return atoms


def left_handed() -> Atoms:
    atoms = triclinic()
    return Atoms(atoms.numbers, atoms.positions, cell=atoms.cell.array[[1, 0, 2]], pbc=True)


def unwrapped() -> Atoms:
    atoms = triclinic()
    cells = np.random.default_rng(0).integers(-3, 4, (len(atoms), 3))
    atoms.positions += cells @ atoms.cell.array
    return atoms


def slab() -> Atoms:
    atoms = fcc111("Ar", (3, 3, 3), a=5.26, vacuum=None)
    atoms.rattle(0.1, seed=5)
    atoms.numbers[::4] = 10
    del atoms.arrays["tags"]
    atoms.pbc = (True, True, False)
    atoms.cell[2] = 0
    return atoms


def wire() -> Atoms:
    atoms = argon((1, 1, 4))
    atoms.pbc = (False, False, True)
    atoms.positions += [17.0, -40.0, 3.0]  # outside the cell along the open axes
    return atoms


def tiny() -> Atoms:
    atoms = bulk("Ar", "fcc", a=5.26)  # one atom; the cell is smaller than the cutoff
    atoms.positions += 0.3
    return atoms


def pair() -> Atoms:
    return Atoms("Ar2", [(0.2, 0, 0), (4.1, 0.3, -0.2)])


def gas() -> Atoms:
    atoms = Atoms("Ar6", np.array([[0, 0, 0], [3.7, 0, 0], [30, 0, 0], [30, 3.9, 0], [60, 0, 0], [0, 90, 5.0]]))
    atoms.set_cell([100, 100, 20])
    atoms.pbc = True
    return atoms


def silica(repeat=(1, 1, 1), a=4.4, stdev=0.15) -> Atoms:
    """A dense oxide in the structure of rock salt, rattled: each atom has many neighbours."""
    atoms = bulk("SiO", "rocksalt", a=a, cubic=True).repeat(repeat)
    atoms.rattle(stdev, seed=8)
    return atoms


def silica_left_handed() -> Atoms:
    atoms = silica((1, 1, 2))
    atoms.set_cell(atoms.cell.array @ np.array([[1, 0.1, 0.05], [-0.08, 1, 0.2], [0.3, 0, 1.0]]), scale_atoms=True)
    return Atoms(atoms.numbers, atoms.positions, cell=atoms.cell.array[[1, 0, 2]], pbc=True)


def silica_unwrapped() -> Atoms:
    atoms = silica((1, 1, 2))
    atoms.positions += np.random.default_rng(0).integers(-3, 4, (len(atoms), 3)) @ atoms.cell.array
    return atoms


def silica_wire() -> Atoms:
    """Periodic along one axis, no other cell vectors; atoms far from the origin."""
    atoms = silica((1, 1, 2))
    atoms.pbc = (False, False, True)
    atoms.cell[:2] = 0
    atoms.positions += [17.0, -40.0, 3.0]
    return atoms


def silica_tiny() -> Atoms:
    """Two atoms in a cell smaller than any cutoff."""
    atoms = bulk("SiO", "rocksalt", a=4.4)
    atoms.positions[1] += [0.1, 0.2, -0.05]
    return atoms


def silica_gas() -> Atoms:
    """Two molecules and an isolated atom."""
    x = [[0, 0, 0], [1.6, 0, 0], [30, 0, 0], [30, 1.7, 0.2], [29, -1, 0], [0, 45, 5.0]]
    return Atoms("SiOSiO2Si", x, cell=[50, 60, 20], pbc=True)


def silica_pair() -> Atoms:
    return Atoms("SiO", [(0.2, 0, 0), (1.7, 0.3, -0.2)])


def _open(atoms: Atoms, axis: int) -> Atoms:
    atoms.pbc[axis] = False
    return atoms


def quartz_charged() -> Atoms:
    atoms = quartz((1, 1, 1))
    atoms.info.update(charge=1, spin=2)
    return atoms


def silane_like() -> Atoms:
    atoms = molecule("Si2H6")
    atoms.numbers[atoms.numbers == 1] = 8
    atoms.positions *= 1.15
    atoms.rattle(0.05, seed=2)
    return atoms


STRUCTURES = {
    "argon": argon,
    "triclinic": triclinic,
    "left-handed": left_handed,
    "unwrapped": unwrapped,
    "slab": slab,
    "wire": wire,
    "tiny cell": tiny,
    "pair": pair,
    "gas": gas,
    "atom": lambda: pair()[:1],
    "bar": lambda: argon((1, 1, 8)),
    "quartz": lambda: quartz((2, 2, 1)),
    "quartz slab": lambda: _open(quartz((2, 2, 1)), 2),
    "quartz bar": lambda: quartz((2, 2, 6)),
    "quartz unit": lambda: quartz((1, 1, 1)),
    "quartz charged": quartz_charged,
    "silane-like": silane_like,
    "silica left-handed": silica_left_handed,
    "silica unwrapped": silica_unwrapped,
    "silica wire": silica_wire,
    "silica tiny": silica_tiny,
    "silica gas": silica_gas,
    "silica pair": silica_pair,
    "silica atom": lambda: silica_pair()[:1],
    "silica bar": lambda: silica((1, 1, 4)),
    **ORGANIC,
}


@cache
def structure(name: str) -> Atoms:
    """A named structure; copy it before changing it."""
    return STRUCTURES[name]()
