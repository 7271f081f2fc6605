"""What the `nvdd` command is given: structures, KEY=VALUE options, names of files. All raise InputError."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nvdd.errors import InputError

if TYPE_CHECKING:
    from ase import Atoms

STRATEGIES = ("halo", "graph")
GRAPH_PLANS = ("curve", "blocks")
DTYPES = ("float32", "float64")

_CHARGES = ("charges", "charge", "q")  # names of a column of charges

_INTEGER = re.compile(r"[+-]?\d+")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_INDEX = re.compile(r"-?\d+|(-?\d+)?:(-?\d+)?(:-?\d+)?")


def parse_options(texts: Sequence[str]) -> dict[str, Any]:
    """``["sigma=3.4", "shifted=true", "modal=PBE"]`` as a dictionary of numbers, booleans and strings."""
    options: dict[str, Any] = {}
    for text in texts:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not key:
            raise InputError(f"--option {text!r} is not KEY=VALUE, for example --option cutoff=8.5")
        if key in options:
            raise InputError(f"--option {key} is given twice: {options[key]!r} and {value!r}")
        options[key] = _parse_value(value)
    return options


def _parse_value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else text


def parse_counts(name: str, text: str) -> tuple[int, ...]:
    """``"1,2,4"`` as numbers, of which each is at least 1."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise InputError(f"--{name} {text!r} must be positive whole numbers with commas between, such as 1,2,4")
    return tuple(map(int, parts))


def check_count(name: str, value: int, least: int) -> None:
    """Raises unless the value of an option is at least so large."""
    if value < least:
        raise InputError(f"--{name} must be at least {least}, but is {value}")


def check_engine(engine: str, npt_mode: str, tau_t: Any, tau_p: Any, checkpoint: Any, restart: Any) -> str:
    """The engine of `nvdd md`; raises for another name, and for options that ASE's integrators don't have."""
    if engine not in ("ase", "native"):
        raise InputError(f"unknown --engine {engine!r}; choose one of ase, native")
    native = {
        "--npt-mode": npt_mode != "iso",
        "--tau-t": tau_t is not None,
        "--tau-p": tau_p is not None,
        "--checkpoint": checkpoint is not None,
        "--restart": restart is not None,
    }
    used = [name for name, is_used in native.items() if is_used]
    if engine == "ase" and used:
        raise InputError(f"{', '.join(used)}: only with --engine native")
    return engine


def check_native_strategy(strategy: str) -> None:
    """Raises where atoms that stay on their ranks are to be divided otherwise than in space."""
    if strategy != "halo":
        raise InputError(f"--engine native divides atoms in space: leave out --strategy {strategy}, or take --engine ase")


def check_calculator_options(
    ranks: int, dtype: str | None, skin: float, strategy: str = "halo", graph_plan: str = "curve"
) -> None:
    """Raises for values that no calculator takes."""
    check_count("ranks", ranks, 1)
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"unknown --dtype {dtype!r}; choose one of {', '.join(DTYPES)}, or leave it out")
    if not 0 <= skin < float("inf"):
        raise InputError(f"--skin must be a length of 0 A or more, but is {skin:g} A")
    if strategy not in STRATEGIES:
        raise InputError(f"unknown --strategy {strategy!r}; choose one of {', '.join(STRATEGIES)}")
    if graph_plan not in GRAPH_PLANS:
        raise InputError(f"unknown --graph-plan {graph_plan!r}; choose one of {', '.join(GRAPH_PLANS)}")


def read_structures(file: Path, index: str) -> list[Atoms]:
    """The frames of a file that ASE reads: one for ``"-1"``, several for ``"::10"``."""
    if not _INDEX.fullmatch(index):
        raise InputError(f"--index {index!r} is neither a number nor a range such as 0:100:10")
    if not file.exists():
        raise InputError(f"no such file: {file}")
    import ase.io

    try:
        frames = ase.io.read(file, index=index)
    except (IndexError, StopIteration) as error:
        raise InputError(f"{file} has no frame {index}") from error
    except Exception as error:  # each of ASE's readers fails in its own way
        why = f"{type(error).__name__}: {error}".rstrip(": ")
        raise InputError(f"cannot read {file} as a structure ({why}); `ase info --formats` lists formats") from error
    frames = frames if isinstance(frames, list) else [frames]
    if not frames:
        raise InputError(f"{file} has no frame {index}")
    for atoms in frames:
        if len(atoms) == 0:
            raise InputError(f"{file} has a structure without atoms")
        _take_charges(atoms)
    return frames


def _take_charges(atoms: Atoms) -> None:
    """A column of charges as initial charges, which is where models look: ASE takes most names for results."""
    if atoms.has("initial_charges"):
        return
    results = atoms.calc.results if atoms.calc is not None else {}
    found = [values[name] for values in (results, atoms.arrays) for name in _CHARGES if name in values]
    if found and np.shape(found[0]) == (len(atoms),):
        atoms.set_initial_charges(found[0])


def read_structure(file: Path, index: str) -> Atoms:
    """The one frame that md or relax start from."""
    if ":" in index:
        raise InputError(f"--index {index}: this command starts from one frame, so give one number")
    return read_structures(file, index)[0]


def check_output(option: str, path: Path, source: Path, suffixes: Sequence[str] = ()) -> None:
    """Raises if the file could not be written afterwards, or would replace the input."""
    if suffixes and path.suffix not in suffixes:
        raise InputError(f"{option} {path}: the name must end in one of {', '.join(suffixes)}")
    if not path.parent.is_dir():
        raise InputError(f"{option} {path}: the folder {path.parent} does not exist")
    if path.is_dir():
        raise InputError(f"{option} {path} is a folder")
    if path.exists() and path.samefile(source):
        raise InputError(f"{option} {path} would replace the input file; choose another name")


def check_structure_format(path: Path) -> None:
    """Raises unless ASE can tell from the name which format to write."""
    from ase.io.formats import UnknownFileTypeError, filetype, ioformats

    try:
        known = ioformats[filetype(str(path), read=False)].can_write
    except (UnknownFileTypeError, KeyError):
        known = False
    if not known:
        raise InputError(f"--output {path}: ASE has no format for that name; use .extxyz, .cif, .vasp, ...")
