"""Molecules and cells of H, C, N and O of every kind that the envelope promises."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from ase import Atoms
from ase.build import molecule

SHEAR = np.array([[1, 0.1, 0.05], [-0.08, 1, 0.2], [0.25, 0, 1.0]])


def crystal(repeat: tuple[int, int, int] = (1, 1, 1), stdev: float = 0.06) -> Atoms:
    """Ethanol, ammonia and water in a triclinic cell that is smaller than twice the cutoff: 16 atoms."""
    atoms = molecule("CH3CH2OH")
    for name, place in (("NH3", [3.2, 2.4, 0.4]), ("H2O", [0.3, 2.9, 2.2])):
        other = molecule(name)
        other.positions += place
        atoms += other
    atoms.set_cell(np.diag([5.6, 5.2, 4.8]) @ SHEAR)
    atoms.pbc = True
    atoms = atoms.repeat(repeat)
    atoms.rattle(stdev, seed=4)
    return atoms


def water(repeat: tuple[int, int, int] = (2, 2, 2), stdev: float = 0.02) -> Atoms:
    """Molecules of water on a cubic lattice, each turned another way."""
    atoms, random = Atoms(cell=np.array(repeat) * 3.1, pbc=True), np.random.default_rng(6)
    for place in np.ndindex(*repeat):
        one = molecule("H2O")
        one.rotate(random.uniform(0, 360), random.normal(size=3))
        one.positions += 3.1 * np.array(place) + 1.0
        atoms += one
    atoms.rattle(stdev, seed=9)
    return atoms


def tiny() -> Atoms:
    """Methane in a cell smaller than the radial cutoff."""
    atoms = molecule("CH4")
    atoms.set_cell([4.2, 4.4, 4.6])
    atoms.pbc = True
    atoms.rattle(0.05, seed=1)
    return atoms


def slab() -> Atoms:
    atoms = crystal((2, 1, 1))
    atoms.pbc[2] = False
    return atoms


def wire() -> Atoms:
    """Periodic along one axis, no other cell vectors; atoms far from the origin."""
    atoms = crystal()
    atoms.set_cell([[0, 0, 0], [0, 0, 0], [0, 0, 5.2]])
    atoms.pbc = (False, False, True)
    atoms.positions += [17.0, -40.0, 3.0]
    return atoms


def left_handed() -> Atoms:
    atoms = crystal()
    return Atoms(atoms.numbers, atoms.positions, cell=atoms.cell.array[[1, 0, 2]], pbc=True)


def unwrapped() -> Atoms:
    atoms = crystal()
    atoms.positions += np.random.default_rng(0).integers(-3, 4, (len(atoms), 3)) @ atoms.cell.array
    return atoms


def gas() -> Atoms:
    """Two molecules and an isolated atom."""
    atoms, other = molecule("CH3CONH2"), molecule("H2O")
    other.positions += [30, 0, 0]
    atoms += other
    atoms += Atoms("O", [(0, 45, 5.0)])
    atoms.set_cell([50, 60, 20])
    atoms.pbc = True
    return atoms


ORGANIC: dict[str, Callable[[], Atoms]] = {
    "organic": crystal,
    "water": water,
    "organic large": lambda: crystal((2, 2, 2)),
    "organic bar": lambda: crystal((1, 1, 10)),
    "organic slab": slab,
    "organic wire": wire,
    "organic tiny": tiny,
    "organic left-handed": left_handed,
    "organic unwrapped": unwrapped,
    "organic gas": gas,
    "organic cluster": lambda: molecule("CH3CONH2"),
    "organic pair": lambda: Atoms("CO", [(0.2, 0, 0), (1.4, 0.3, -0.2)]),
    "organic atom": lambda: Atoms("O", [(0.2, 0, 0)]),
}
