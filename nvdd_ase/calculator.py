"""`NVDDCalculator`: an ASE calculator that evaluates a model over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ase.calculators.calculator import Calculator, PropertyNotImplementedError, all_changes

from nvdd.cells import Frame, volume
from nvdd.errors import InputError, NvddError
from nvdd_ase.backends import InProcess, Workers
from nvdd_ase.engine import ROW_SHAPES, voigt

_DTYPES = ("float32", "float64")


class NVDDCalculator(Calculator):
    """Machine-learning potentials over many ranks, as an ordinary ASE calculator.

    Args:
        model: ``"family:checkpoint"`` (``"sevenn:7net-0"``, ``"mace:path.model"``, ``"lj"``; `nvdd models` lists
            them), ``"py:module:attribute"`` for a wrapper or factory of your own, or a wrapper object.
        ranks: number of ranks. 1 computes in this process; more start that many processes on this machine, which
            end with the calculator.
        device: ``"cpu"``, ``"cuda"`` (rank i takes GPU i), ``"cuda:0"``; None for a GPU if torch sees one.
        dtype: ``"float32"`` or ``"float64"``; None for the model's own.
        skin: A; neighbours are searched again when an atom has moved by half of it. Results don't depend on it.
        model_options: options of the model family (``{"modal": "PBE"}``).
        balance: ``"auto"``, ``"grid"`` or ``"rcb"``: how atoms are divided.
        grid: ranks along each cell vector, for example (2, 1, 1); None to choose.
        strategy: ``"halo"``.
        start_timeout, timeout: seconds that ranks may take to start and to evaluate; None for no limit. A rank
            that dies is noticed at once either way.
        kwargs: as for every ASE calculator.

    Results are in ASE's units and conventions: eV, eV/A, stress in eV/A^3 (Voigt xx, yy, zz, yz, xz, xy; positive
    = tension), and in the order of the user's atoms. ``stresses`` gives each atom half of each of its pairs'
    virial over the volume; they sum to ``stress``.

    Raises:
        InputError: an input that can't be computed; the message names it.
        MissingDependencyError: the model's package is not installed.
        RankError: a rank failed; the message has its number, what it was doing and why. The next calculation
            starts new ranks.
        DistributedOpError: the model does something whose meaning over ranks is unknown.

    Example::

        atoms.calc = NVDDCalculator("sevenn:7net-0", ranks=2)
        atoms.get_forces()
    """

    implemented_properties = ["energy", "free_energy", "energies", "forces", "stress", "stresses"]  # noqa: RUF012

    def __init__(
        self,
        model: Any,
        *,
        ranks: int = 1,
        device: str | None = None,
        dtype: str | None = None,
        skin: float = 0.5,
        model_options: Mapping[str, Any] | None = None,
        balance: str = "auto",
        grid: Sequence[int] | None = None,
        strategy: str = "halo",
        start_timeout: float | None = 300.0,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> None:
        self._backend: InProcess | Workers | None = None
        if not isinstance(ranks, (int, np.integer)) or isinstance(ranks, bool) or ranks < 1:
            raise InputError(f"ranks must be a whole number of at least 1, got {ranks!r}")
        name = str(dtype).removeprefix("torch.") if dtype is not None else None
        if name is not None and name not in _DTYPES:
            raise InputError(f"dtype must be one of {', '.join(_DTYPES)} or None (the model's own), got {dtype!r}")
        domain = {"skin": float(skin), "balance": balance, "grid_dims": grid, "strategy": strategy}
        _check_domain(domain, int(ranks))
        self._engine_arguments = {
            "model": model, "options": dict(model_options or {}), "dtype": name, "domain": domain,
        }  # fmt: skip
        self._ranks, self._device = int(ranks), device or _default_device()
        self._timeouts = (start_timeout, timeout)
        self._description = self._start()
        super().__init__(**kwargs)

    @classmethod
    def from_calculator(cls, calculator: Calculator, **kwargs: Any) -> NVDDCalculator:
        """Distributes the model of an existing calculator (SevenNetCalculator, MACECalculator, ...).

        Args:
            calculator: of a family that nvdd knows; it is not changed.
            kwargs: as for the class, without ``model`` and ``model_options``.

        Raises:
            InputError: no family takes this calculator.
        """
        from nvdd.models import families

        for family in families().values():
            wrapper = family.from_calculator(calculator) if family.from_calculator else None
            if wrapper is not None:
                return cls(wrapper, **kwargs)
        known = ", ".join(sorted(f.name for f in families().values() if f.from_calculator))
        raise InputError(
            f"no model family takes a {type(calculator).__module__}.{type(calculator).__name__}; those that can: {known}. "
            "Write a wrapper for the model and pass it, or 'py:module:factory'"
        )

    # -- the ranks ----------------------------------------------------------------------------------------------

    def _start(self) -> dict[str, Any]:
        backend = InProcess if self._ranks == 1 else Workers
        self._sent: dict[str, Any] = {}
        self._backend = backend(self._ranks, self._device, self._engine_arguments, self._timeouts)
        return self._backend.call("describe")[0]

    def close(self) -> None:
        """Ends the ranks. The next calculation starts new ones."""
        if self._backend is not None:
            self._backend.close()
            self._backend = None

    def __enter__(self) -> NVDDCalculator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self._ranks

    @property
    def description(self) -> dict[str, Any]:
        """The model in a few words: name, cutoff (A), elements, dtype, outputs, further inputs."""
        return dict(self._description)

    def report(self) -> list[dict[str, Any]]:
        """For each rank: owned atoms, halo rows, edges, rebuilds of the neighbour list, device, seconds by phase."""
        if self._backend is None:
            raise NvddError("the ranks are closed; there is nothing to report")
        return self._backend.call("report")

    # -- ASE ------------------------------------------------------------------------------------------------------

    def check_state(self, atoms, tol: float = 1e-15) -> list[str]:
        """What has changed since the last calculation, with the info keys and arrays that the model reads."""
        changes = super().check_state(atoms, tol)
        if self.atoms is not None:
            for name in self._description["system_inputs"]:
                if not _equal(self.atoms.info.get(name), atoms.info.get(name)):
                    changes.append(f"info[{name!r}]")
            for name in self._description["node_inputs"]:
                if not _equal(self.atoms.arrays.get(name), atoms.arrays.get(name)):
                    changes.append(f"arrays[{name!r}]")
        return changes

    def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes) -> None:
        """Evaluates the model; fills ``results``."""
        super().calculate(atoms, properties, system_changes)
        atoms = self.atoms
        self.results = {}
        has_volume = volume(atoms.cell.array) > 1e-9
        wanted = {"energy", "forces"} | ({"energies"} & set(self._description["outputs"]))
        if has_volume:
            wanted.add("stress")
        for name in {"stress", "stresses"} & set(properties):
            if not has_volume:
                raise PropertyNotImplementedError(
                    f"{name} needs a cell with three independent vectors; the cell is {atoms.cell}"
                )
            if name not in self._description["outputs"]:
                raise PropertyNotImplementedError(f"{self._description['name']} gives no {name}")
            wanted.add(name)
        if "energies" in properties and "energies" not in wanted:
            raise PropertyNotImplementedError(f"{self._description['name']} gives no per-atom energies")
        self._check_atoms(atoms)
        if self._backend is None or self._backend.closed:
            self._start()
        self.results = self._evaluate(atoms, wanted)

    def _evaluate(self, atoms, wanted: set[str]) -> dict[str, Any]:
        backend, n = self._backend, len(atoms)
        rows = {name: backend.share(name, (n, *shape)) for name, shape in ROW_SHAPES.items() if name in wanted}
        backend.share("positions", (n, 3))[:] = atoms.positions
        payload = {"wanted": wanted, "cell": np.array(atoms.cell.array)}
        payload.update(self._changed(atoms))
        answers = backend.call("evaluate", payload)
        first = answers[0]
        results = {"energy": first["energy"], "free_energy": first["energy"]}
        if "stress" in wanted:
            results["stress"] = voigt(first["stress"])
        results.update({name: array.copy() for name, array in rows.items()})
        return results

    def _changed(self, atoms) -> dict[str, Any]:
        """The inputs beside positions and cell, where they differ from what the ranks have."""
        d = self._description
        inputs = {
            "numbers": atoms.numbers.astype(np.int64),
            "pbc": np.array(atoms.pbc, bool),
            "node_fields": {k: np.array(atoms.arrays[k]) for k in d["node_inputs"] if k in atoms.arrays},
            "system_fields": {k: np.array(atoms.info[k]) for k in d["system_inputs"] if k in atoms.info},
        }
        changed = {k: v for k, v in inputs.items() if k not in self._sent or not _equal(self._sent[k], v)}
        self._sent.update(changed)
        return changed

    def _check_atoms(self, atoms) -> None:
        """Everything that can be wrong with the input, before any rank is asked."""
        if len(atoms) == 0:
            raise InputError("there are no atoms")
        bad = np.flatnonzero(~np.isfinite(atoms.positions).all(1))
        if len(bad):
            shown = ", ".join(f"{i} ({atoms.symbols[i]}): {atoms.positions[i]}" for i in bad[:3])
            raise InputError(f"{len(bad)} of {len(atoms)} atoms have positions that are not finite numbers: {shown}")
        elements = self._description["elements"]
        if elements is not None:
            unknown = sorted(set(atoms.numbers.tolist()) - set(elements))
            if unknown:
                from ase.data import chemical_symbols as symbols

                names = ", ".join(symbols[z] for z in unknown)
                known = ", ".join(symbols[z] for z in sorted(elements))
                raise InputError(f"the model does not know {names}; it knows {known}")
        Frame.of(atoms.cell.array, atoms.pbc)


def _default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _check_domain(domain: Mapping[str, Any], ranks: int) -> None:
    from nvdd.config import DomainConfig
    from nvdd.partition import SpatialPartitioner

    DomainConfig(**domain)
    SpatialPartitioner(ranks, domain["grid_dims"], domain["balance"])


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if a is None or b is None:
        return a is b
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and bool(np.array_equal(a, b))
