"""`Calibration`: what a step costs per atom, edge, halo row and byte on a machine; kept in a small JSON file."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nvdd.errors import InputError

_VERSION = 1


@dataclass(frozen=True)
class Cost:
    """A quantity that grows linearly with what a rank has.

    Attributes:
        base: of a rank that has nothing.
        per_atom, per_edge, per_halo: for each owned atom, edge that is computed, halo row.
        floor: what it is at the least: on a GPU the time in which a step's kernels are launched, whatever their size.
    """

    base: float = 0.0
    per_atom: float = 0.0
    per_edge: float = 0.0
    per_halo: float = 0.0
    floor: float = 0.0

    def of(self, atoms: Any, edges: Any, halo: Any = 0) -> Any:
        """The quantity for numbers, or arrays of numbers."""
        return np.maximum(self.floor, self.base + self.per_atom * atoms + self.per_edge * edges + self.per_halo * halo)

    @classmethod
    def fit(cls, samples: Sequence[tuple[int, int, float]], with_floor: bool = False) -> Cost:
        """From (atoms, edges, quantity) of several sizes and densities: least relative squares, no negative cost.

        ``with_floor`` lets the smallest sizes be a floor where that leaves less than half of the squares.
        """
        samples = sorted((s for s in samples if s[2] > 0), key=lambda s: (s[1], s[0]))
        if not samples:
            return cls()
        best = cls(*_linear(samples))
        least = best._squares(samples)
        for k in range(2, len(samples) - 2 if with_floor else 0):
            linear = _linear(samples[k:])
            found = cls(*linear, floor=float(np.median([quantity for *_, quantity in samples[:k]])))
            if (squares := found._squares(samples)) < 0.5 * least:
                best, least = found, squares
        return best

    def _squares(self, samples: Sequence[tuple[int, int, float]]) -> float:
        return sum(float(self.of(atoms, edges) / quantity - 1) ** 2 for atoms, edges, quantity in samples)


def _linear(samples: Sequence[tuple[int, int, float]]) -> tuple[float, float, float]:
    """base, per_atom, per_edge."""
    rows = np.array([[1.0, atoms, edges] for atoms, edges, _ in samples])
    weighted = rows / np.array([quantity for *_, quantity in samples])[:, None]
    best, found = np.inf, np.zeros(3)
    # of so few unknowns every set that may be other than zero is tried
    for used in itertools.chain.from_iterable(itertools.combinations(range(3), k) for k in (1, 2, 3)):
        scale = np.maximum(np.abs(weighted[:, used]).max(0), 1e-300)
        solution = np.linalg.lstsq(weighted[:, used] / scale, np.ones(len(rows)), rcond=None)[0] / scale
        residual = float(((weighted[:, used] @ solution - 1) ** 2).sum())
        if (solution >= 0).all() and residual < best * (1 - 1e-9):
            best, found = residual, np.zeros(3)
            found[list(used)] = solution
    return tuple(map(float, found))


@dataclass(frozen=True)
class Traffic:
    """One exchange of a step.

    Attributes:
        site: what it is for.
        bytes_per_row: of a message.
        share: rows that travel over the halo rows of atoms: 1, less for a block with a smaller cutoff, more for bonds.
    """

    site: str
    bytes_per_row: float
    share: float = 1.0


@dataclass(frozen=True)
class Network:
    """What a message costs.

    Attributes:
        latency: s of an exchange, however short.
        bandwidth: bytes/s of one rank.
        reduction: s of one sum over two ranks; over P ranks it takes log2(P) times that.
        measured: between which ranks, in words; or that it was given.
        overhead: s of a step that more than one rank takes beyond all this: found on two ranks with few atoms.
    """

    latency: float
    bandwidth: float
    reduction: float
    measured: str
    overhead: float = 0.0


@dataclass(frozen=True)
class Calibration:
    """What was measured of one model on one machine.

    Attributes:
        machine, device: host and processor.
        model: what makes it, in words: with its options, and its type unless it is the model's own.
        dtype: of its weights.
        strategy: ``"halo"``, ``"graph curve"`` or ``"graph blocks"``.
        cutoff: A.
        seconds: of a step of one rank without messages, while others compute beside it.
        alone: the same with the machine to itself.
        memory: bytes, at the peak of a step.
        exchanges: of a step.
        reductions: sums over ranks in a step.
        network: what messages cost.
        device_memory: bytes that a rank may use.
        samples: the steps that were timed: atoms, edges, seconds, bytes.
        far_edges: whether the model computes the edges within the skin as well (`NeighborConfig.drops_far_edges`).
    """

    machine: str
    device: str
    model: str
    dtype: str
    strategy: str
    cutoff: float
    seconds: Cost
    alone: Cost
    memory: Cost
    exchanges: tuple[Traffic, ...]
    reductions: int
    network: Network
    device_memory: float
    samples: tuple[tuple[int, int, float, float], ...]
    far_edges: bool = False

    @property
    def key(self) -> str:
        """What it is of, as in a file of several."""
        return " | ".join((self.machine, self.device, self.model, self.strategy))

    @property
    def largest(self) -> int:
        """Atoms of the largest step that was timed."""
        return max(atoms for atoms, *_ in self.samples)


def save(calibration: Calibration, file: str | Path) -> None:
    """Writes it into a JSON file, beside those of other models and machines that are there."""
    file = Path(file)
    known = _read(file) if file.exists() else {}
    known[calibration.key] = asdict(calibration)
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(json.dumps({"version": _VERSION, "calibrations": known}, indent=1) + "\n")
    partial.replace(file)


def load(file: str | Path, machine: str, device: str, model: str, strategy: str) -> Calibration | None:
    """The one of a machine and model, as these are in `Calibration`; None if the file or the entry is not there."""
    if not Path(file).exists():
        return None
    for entry in _read(Path(file)).values():
        try:
            found = tuple(entry[name] for name in ("machine", "device", "model", "strategy"))
        except (KeyError, TypeError) as error:
            raise InputError(f"a calibration in {file} lacks something ({error}); remove the file") from None
        if found == (machine, device, model, strategy):
            return _from_dict(entry)
    return None


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
        version, known = content["version"], content["calibrations"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} is no calibration that nvdd wrote ({type(error).__name__}: {error}); name another file") from None
    if version != _VERSION:
        raise InputError(f"{file} is a calibration of version {version!r}, this is nvdd with version {_VERSION}; remove it")
    return known


def _from_dict(entry: dict[str, Any]) -> Calibration:
    try:
        parts = {name: Cost(**entry[name]) for name in ("seconds", "alone", "memory")}
        parts["exchanges"] = tuple(Traffic(**e) for e in entry["exchanges"])
        parts["network"] = Network(**entry["network"])
        parts["samples"] = tuple(map(tuple, entry["samples"]))
        return Calibration(**{**entry, **parts})
    except (KeyError, TypeError) as error:
        raise InputError(f"the calibration of {entry.get('model')!r} lacks something ({error}); remove its file") from None
