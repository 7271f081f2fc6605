"""Structures with their results, on the way to files: snapshots, and a writer for growing trajectories."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ase import Atoms

TRAJECTORY_SUFFIXES = (".extxyz", ".xyz", ".traj")
_WRITTEN = ("energy", "free_energy", "energies", "forces", "stress")


def is_bulk(atoms: Atoms) -> bool:
    """Whether the structure is periodic along three axes, so that stress and pressure mean what they say."""
    return bool(atoms.pbc.all()) and atoms.cell.rank == 3


def snapshot(atoms: Atoms, **info: Any) -> Atoms:
    """A copy in the same order with the calculator's current results, ready to be written to a file."""
    from ase.calculators.singlepoint import SinglePointCalculator
    from ase.constraints import FixCom

    frame = atoms.copy()
    frame.set_constraint([c for c in frame.constraints if type(c) is not FixCom])
    results = {name: atoms.calc.results[name] for name in _WRITTEN if name in atoms.calc.results}
    for name in results:  # ASE's writer refuses a name that stands in both places
        frame.info.pop(name, None)
        frame.arrays.pop(name, None)
    frame.info.update(info)
    frame.calc = SinglePointCalculator(frame, **results)
    return frame


@contextmanager
def frame_writer(path: str | Path | None) -> Iterator[Callable[[Atoms], None]]:
    """Gives a function that appends a frame to an extxyz or .traj file; no path, no file.

    Who reads the growing file meets whole frames: each is one write.
    """
    if path is None:
        yield lambda frame: None
    elif Path(path).suffix == ".traj":
        from ase.io.trajectory import Trajectory

        with Trajectory(str(path), "w") as trajectory:
            yield trajectory.write
    else:
        from ase.io.extxyz import write_extxyz

        with open(path, "wb") as file:

            def write(frame: Atoms) -> None:
                text = io.StringIO()
                write_extxyz(text, frame)
                file.write(text.getvalue().encode())
                file.flush()

            yield write
