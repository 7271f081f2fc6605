"""Hooks that write frames: extended XYZ, or H5MD (HDF5), which holds long runs of many atoms in chunks."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nvdd.dynamics.checkpoint import check_folder
from nvdd.dynamics.hooks import Hook, HookScope, Observation
from nvdd.errors import InputError, MissingDependencyError

if TYPE_CHECKING:
    from nvdd.dynamics.domain_parallel import DomainParallel

_FIELDS = ("positions", "velocities", "forces")


class Trajectory(Hook):
    """Writes a frame for each call, atoms in the order of their global ids. Rank 0 gets them in pieces and writes.

    A run that goes on from a checkpoint keeps the frames up to its step and appends.

    Args:
        path: ``.extxyz`` / ``.xyz``, which everything reads, or ``.h5`` / ``.h5md`` (https://www.nongnu.org/h5md), in
            units A, fs, eV; needs h5py.
        every: steps.
        fields: out of positions, velocities, forces; positions are always there.

    Raises:
        InputError: another suffix or field; when the run starts: no such folder, or several systems.
        MissingDependencyError: h5py is not installed.
    """

    scope = HookScope.GLOBAL
    observes = False

    def __init__(self, path: str | Path, every: int = 100, fields: Sequence[str] = ("positions", "velocities")) -> None:
        super().__init__(every)
        self.path = Path(path)
        unknown = sorted(set(fields) - set(_FIELDS))
        if unknown:
            raise InputError(f"Trajectory: fields {unknown} are not among {', '.join(_FIELDS)}")
        self.fields = [name for name in _FIELDS if name in fields or name == "positions"]
        writers = {".extxyz": _ExtendedXYZ, ".xyz": _ExtendedXYZ, ".h5": _H5MD, ".h5md": _H5MD}
        if self.path.suffix not in writers:
            raise InputError(
                f"Trajectory: {self.path} has suffix {self.path.suffix!r}; use one of {', '.join(writers)}"
            )
        self._writer_type = writers[self.path.suffix]
        self._writer_type.check()
        self._writer: Any = None

    def open(self, run: DomainParallel) -> None:
        """Opens the file on rank 0."""
        if run.state.n_systems > 1:
            raise InputError(
                f"Trajectory writes one system, and these are {run.state.n_systems}; write each from a hook of your own"
            )
        if run.comm.rank == 0:
            check_folder(self.path)
            self._writer = self._writer_type(self.path, run, self.fields)

    def __call__(self, run: DomainParallel, seen: Observation | None) -> None:
        rows = run.batch.gather_rows([*self.fields, "atomic_numbers", "masses"])
        if rows is not None:
            frame = {name: value.numpy() for name, value in rows.items()}
            cell = run.state.cell[0].cpu().numpy()
            self._writer.write(run.state.step, run.state.time, cell, float(run.state.energy[0]), frame)

    def close(self) -> None:
        """Closes the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class _ExtendedXYZ:
    def __init__(self, path: Path, run: DomainParallel, fields: list[str]) -> None:
        self._pbc = run.state.pbc[0].cpu().numpy()
        if run.restarted and path.is_file():
            with path.open("r+b") as file:
                file.truncate(_end_of_step(file, run.state.step))
        self._file = path.open("a" if run.restarted else "w")

    @staticmethod
    def check() -> None:
        pass

    def write(self, step: int, time: float, cell: np.ndarray, energy: float, frame: dict[str, np.ndarray]) -> None:
        from ase import Atoms
        from ase.calculators.singlepoint import SinglePointCalculator
        from ase.io.extxyz import write_extxyz

        atoms = Atoms(frame["atomic_numbers"], frame["positions"], cell=cell, pbc=self._pbc)
        atoms.info |= {"step": step, "time_fs": time}
        if "velocities" in frame:
            atoms.set_momenta(frame["velocities"] * frame["masses"][:, None])
        atoms.calc = SinglePointCalculator(
            atoms, energy=energy, **({"forces": frame["forces"]} if "forces" in frame else {})
        )
        text = io.StringIO()
        write_extxyz(text, [atoms])
        self._file.write(text.getvalue())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _end_of_step(file: Any, step: int) -> int:
    """Where the frames up to ``step`` end, in an extended XYZ file of frames with ``step=``."""
    end = 0
    while (first := file.readline()).strip().isdigit():
        comment = file.readline()
        found = re.search(rb"\bstep=(\d+)", comment)
        lines = [file.readline() for _ in range(int(first))]
        if found is None or int(found.group(1)) > step or not all(line.endswith(b"\n") for line in lines):
            break
        end = file.tell()
    return end


class _H5MD:
    """H5MD 1.1: particles/all with position, velocity, force, species, mass, box; observables/potential_energy."""

    _NAMES = {"positions": "position", "velocities": "velocity", "forces": "force"}  # noqa: RUF012
    _UNITS = {"positions": "Angstrom", "velocities": "Angstrom fs-1", "forces": "eV Angstrom-1"}  # noqa: RUF012

    def __init__(self, path: Path, run: DomainParallel, fields: list[str]) -> None:
        import h5py

        again = run.restarted and path.is_file()
        try:
            self._file = h5py.File(path, "r+" if again else "w")
        except OSError as error:  # HDF5 has no repair for a file whose writer was killed in the middle
            raise InputError(f"{path} can't be appended to ({error}); move it away, and the run goes on with a new one") from error
        n = int(run.state.n_atoms.sum())
        if not again:
            self._create(n, run, fields)
        group = self._file["particles/all"]
        self._series = [group[self._NAMES[name]] for name in fields]
        self._series += [group["box/edges"], self._file["observables/potential_energy"]]
        self._fields = fields
        steps = group["position/step"][:]
        self._n = int(np.searchsorted(steps, run.state.step, side="right"))
        self._resize()

    @staticmethod
    def check() -> None:
        try:
            import h5py  # noqa: F401
        except ImportError as error:
            raise MissingDependencyError("H5MD trajectories need h5py: pip install 'nvdd[h5md]'") from error

    def _create(self, n: int, run: DomainParallel, fields: list[str]) -> None:
        head = self._file.create_group("h5md")
        head.attrs["version"] = [1, 1]
        head.create_group("creator").attrs["name"] = "nvdd"
        head.create_group("author").attrs["name"] = "nvdd"
        group = self._file.create_group("particles/all")
        for name in fields:
            self._element(group, self._NAMES[name], (n, 3), self._UNITS[name])
        box = group.create_group("box")
        box.attrs["dimension"] = 3
        box.attrs["boundary"] = ["periodic" if periodic else "none" for periodic in run.state.pbc[0].tolist()]
        self._element(box, "edges", (3, 3), "Angstrom")
        self._element(self._file.create_group("observables"), "potential_energy", (), "eV")

    def _element(self, group: Any, name: str, shape: tuple[int, ...], unit: str) -> None:
        element = group.create_group(name)
        value = element.create_dataset(
            "value", (0, *shape), "f8", maxshape=(None, *shape), chunks=(1, *shape) if shape else (256,)
        )
        value.attrs["unit"] = unit
        element.create_dataset("step", (0,), "i8", maxshape=(None,), chunks=(256,))
        element.create_dataset("time", (0,), "f8", maxshape=(None,), chunks=(256,)).attrs["unit"] = "fs"

    def _resize(self) -> None:
        """As many entries in all series as there are frames."""
        for element in self._series:
            for name in ("value", "step", "time"):
                element[name].resize(self._n, axis=0)

    def write(self, step: int, time: float, cell: np.ndarray, energy: float, frame: dict[str, np.ndarray]) -> None:
        from nvdd.dynamics.state import FS

        group = self._file["particles/all"]
        if "species" not in group:
            group["species"] = frame["atomic_numbers"]
            group["mass"] = frame["masses"]
        values = [frame[name] * (FS if name == "velocities" else 1.0) for name in self._fields] + [cell, energy]
        self._n += 1
        self._resize()
        for element, value in zip(self._series, values, strict=True):
            for name, entry in (("value", value), ("step", step), ("time", time)):
                element[name][-1] = entry
        self._file.flush()

    def close(self) -> None:
        self._file.close()
