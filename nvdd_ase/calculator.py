"""`NVDDCalculator`: an ASE calculator that evaluates a model over ranks."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NoReturn

import numpy as np
from ase.calculators.calculator import Calculator, PropertyNotImplementedError, all_changes

from nvdd.cells import volume
from nvdd.errors import InputError, NvddError
from nvdd.runtime.launcher import Launch, detect
from nvdd_ase import inputs
from nvdd_ase.backends import InProcess, Launched, Workers
from nvdd_ase.engine import ROW_SHAPES, voigt


class NVDDCalculator(Calculator):
    """Machine-learning potentials over many ranks, as an ordinary ASE calculator.

    Args:
        model: ``"family:checkpoint"`` (``"sevenn:7net-0"``, ``"mace:path.model"``, ``"lj"``; `nvdd models` lists
            them), ``"py:module:attribute"`` for a wrapper or factory of your own, a sum of such (``"mace:path.model +
            lj"``), or a wrapper object.
        ranks: number of ranks. 1 computes in this process; more start that many processes on this machine, which
            end with the calculator. Under a launcher (torchrun, mpirun, srun) each of its processes is a rank, and
            this is left out. Default: 1, or all ranks of the launcher.
        spmd: what the script does under a launcher (docs/launching.md). ``"serve"``: from here on it runs on rank 0
            alone; the other ranks serve inside this constructor and exit with rank 0. ``"replicated"``: it runs on
            all ranks, must do the same on all, and is stopped if it does not. ``"off"``: every process by itself.
        device: ``"cpu"``, ``"cuda"`` (rank i takes GPU i), ``"cuda:0"``; None for a GPU if torch sees one.
        dtype: ``"float32"`` or ``"float64"``; None for the model's own.
        skin: A; neighbours are searched again when an atom has moved by half of it. Results don't depend on it.
        model_options: options of the model family (``{"modal": "PBE"}``); of a sum a list, one for each block, or keys
            with the block before them (``{"dftd3.cutoff": 12.0}``).
        balance: ``"auto"``, ``"grid"`` or ``"rcb"``: how atoms are divided.
        grid: ranks along each cell vector, for example (2, 1, 1); None to choose.
        strategy: ``"halo"``: each rank has a domain in space; ``"graph"``: every rank has all positions, and computes
            an equal part of the list of atoms (docs/strategies.md).
        graph_plan: of ``"graph"``: ``"curve"`` (parts along a space-filling curve, rows that edges read are exchanged)
            or ``"blocks"`` (parts in the order of the atoms, all rows are gathered).
        compile: True to compile the model's forward and derivative at its first evaluation (docs/performance.md); or
            how, see `nvdd.DomainConfig`.
        max_edges_per_chunk, recompute: compute again in the backward pass what is of the size of the edges, so many edges at
            a time, or all (docs/performance.md): less memory, more time, the same numbers.
        start_timeout, timeout: seconds that ranks may take to start and to evaluate; None for no limit. A rank
            that dies is noticed at once either way.
        kwargs: as for every ASE calculator: ``atoms``, ``label``, ``directory``.

    Results are in ASE's units and conventions: eV, eV/A, stress in eV/A^3 (Voigt xx, yy, zz, yz, xz, xy; positive
    = tension), and in the order of the user's atoms. ``stresses`` gives each atom half of each of its pairs'
    virial over the volume; they sum to ``stress``.

    A copy of the calculator (``copy.deepcopy(atoms)`` makes one, and so does pickle) has the model and the last
    results; it starts ranks of its own when it first computes.

    Raises:
        InputError: an input that can't be computed; the message names it.
        MissingDependencyError: the model's package is not installed.
        RankError: a rank failed; the message has its number, what it was doing and why. The next calculation
            starts new ranks, unless a process of a launcher is gone.
        DistributedOpError: the model does something whose meaning over ranks is unknown.

    Example::

        atoms.calc = NVDDCalculator("sevenn:7net-0", ranks=2)
        atoms.get_forces()
    """

    name = "nvdd"
    implemented_properties = ["energy", "free_energy", "energies", "forces", "stress", "stresses"]  # noqa: RUF012
    # no reason to compute again, except for models that read them: see check_state
    ignored_changes = {"initial_charges", "initial_magmoms"}  # noqa: RUF012

    def __init__(
        self,
        model: Any,
        *,
        ranks: int | None = None,
        spmd: str = "serve",
        device: str | None = None,
        dtype: str | None = None,
        skin: float = 0.5,
        model_options: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None,
        balance: str = "auto",
        grid: Sequence[int] | None = None,
        strategy: str = "halo",
        graph_plan: str = "curve",
        compile: bool | str = False,
        max_edges_per_chunk: int | None = None,
        recompute: bool = False,
        start_timeout: float | None = 300.0,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> None:
        self._backend: InProcess | Workers | Launched | None = None
        own = [name for name in inspect.signature(NVDDCalculator).parameters if name != "kwargs"]
        inputs.check_keywords(kwargs, own)
        self._spmd = _checked_spmd(spmd)
        launch = self._launch()
        if launch is not None:
            launch.check_ranks(ranks)
        self._ranks = launch.size if launch is not None else inputs.checked_ranks(1 if ranks is None else ranks)
        self._device = inputs.checked_device(device)
        self._timeouts = tuple(
            inputs.checked_seconds(*limit) for limit in (("start_timeout", start_timeout), ("timeout", timeout))
        )
        options = inputs.checked_options(model, model_options)
        self._engine_arguments = {
            "dtype": inputs.checked_dtype(dtype),
            "domain": inputs.checked_domain(
                skin, balance, grid, strategy, self._ranks, graph_plan, compile, max_edges_per_chunk, recompute
            ),
            "model": inputs.checked_model(model, options),
            "options": options,
        }
        self._description = self._start()
        further = sorted({"charges", "magmoms"} & set(self._description["outputs"]))
        self.implemented_properties = [*type(self).implemented_properties, *further]
        super().__init__(**kwargs)
        # for whoever reads the trajectory or data base later
        name = model if isinstance(model, str) else self._description["name"]
        self.parameters.update(model=name, dtype=self._description["dtype"], ranks=self._ranks)

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

    def _launch(self) -> Launch | None:
        return detect() if self._spmd != "off" else None

    def _start(self) -> dict[str, Any]:
        self._sent: dict[str, Any] = {}
        launch = self._launch()
        if launch is not None:
            launch.check_ranks(self._ranks)  # a copy may have come from elsewhere
            self._backend = Launched(launch, self._spmd, self._device, self._engine_arguments, self._timeouts)
        else:
            backend = InProcess if self._ranks == 1 else Workers
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
        """For each rank: owned atoms, halo rows, edges, rebuilds of the neighbour list; process id, device, number of
        evaluations; seconds by phase of the last one.

        Raises:
            NvddError: the ranks are closed.
        """
        if self._backend is None:
            raise NvddError("the ranks are closed; there is nothing to report")
        return self._backend.call("report")

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which share no ranks with this calculator."""
        return {**self.__dict__, "_backend": None, "_sent": {}}

    # -- ASE ------------------------------------------------------------------------------------------------------

    def check_state(self, atoms, tol: float = 1e-15) -> list[str]:
        """What of ``atoms`` has changed by more than ``tol`` since the last calculation, with the info keys and
        arrays that the model reads."""
        changes = super().check_state(atoms, tol)
        if self.atoms is not None:
            for where, read in (("info", inputs.read_info), ("arrays", inputs.read_arrays)):
                before, now = read(self.atoms, self._description), read(atoms, self._description)
                names = sorted(before.keys() | now.keys())
                changes += [f"{where}[{k!r}]" for k in names if not inputs.same(before.get(k), now.get(k))]
        return changes

    def set(self, **kwargs: Any) -> dict[str, Any]:
        """Refuses every argument: the ranks are given theirs when they start. Make a new calculator instead."""
        if kwargs:
            raise InputError(f"{', '.join(kwargs)} can't be set later: make a new NVDDCalculator")
        return {}

    def get_spin_polarized(self) -> bool:
        """False. ASE would else bind a stand-in to the object itself, which then outlives its last reference."""
        return False

    def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes) -> None:
        """Evaluates the model for ``atoms``; fills ``results``. ASE calls it, with the ``properties`` that it wants and
        the ``system_changes`` since the last call."""
        super().calculate(atoms, properties, system_changes)
        atoms = self.atoms
        for name in self._description["system_inputs"]:
            if name in atoms.info:  # Atoms.copy copies arrays, but not the values of info
                atoms.info[name] = copy.deepcopy(atoms.info[name])
        self.results = {}
        inputs.check_atoms(atoms, self._description)
        wanted = self._wanted(atoms, set(properties))
        if self._backend is None or self._backend.closed:
            self._start()
        self.results = self._evaluate(atoms, wanted)

    def _wanted(self, atoms, properties: AbstractSet[str]) -> AbstractSet[str]:
        """What to ask the model for: all that costs little, and what is asked for."""
        has_volume = volume(atoms.cell.array) > 1e-9 * np.prod(atoms.cell.lengths())
        possible = set(self.implemented_properties) & set(self._description["outputs"])
        if not has_volume:
            if properties & {"stress", "stresses"}:
                self._cannot("stress", f"needs a cell with three independent vectors; the cell is {atoms.cell}")
            possible -= {"stress", "stresses"}
        for name in (properties & {"energies", "stress", "stresses"}) - possible:
            self._cannot(name, f"is not among what {self._description['name']} gives: {', '.join(sorted(possible))}")
        return (possible - {"stresses"}) | (properties & {"stresses"})

    @staticmethod
    def _cannot(name: str, why: str) -> NoReturn:
        raise PropertyNotImplementedError(f"{name} {why}")

    def _evaluate(self, atoms, wanted: AbstractSet[str]) -> dict[str, Any]:
        backend, n = self._backend, len(atoms)
        rows = {name: backend.share(name, (n, *shape)) for name, shape in ROW_SHAPES.items() if name in wanted}
        backend.share("positions", (n, 3))[:] = atoms.positions
        payload = {"wanted": wanted, "cell": np.array(atoms.cell.array)}
        changed = self._changed(atoms)
        for name in changed:  # until the ranks have answered it is unknown what they have
            self._sent.pop(name, None)
        answers = backend.call("evaluate", {**payload, **changed})
        self._sent.update(changed)
        first = answers[0]
        results = {"energy": first["energy"], "free_energy": first["energy"]}
        if "stress" in wanted:
            results["stress"] = voigt(first["stress"])
        results.update({name: array.copy() for name, array in rows.items()})
        return results

    def _changed(self, atoms) -> dict[str, Any]:
        """The inputs beside positions and cell, where they differ from what the ranks have."""
        current = {
            "numbers": atoms.numbers.astype(np.int64),
            "pbc": np.array(atoms.pbc, bool),
            "node_fields": inputs.read_arrays(atoms, self._description),
            "system_fields": inputs.read_info(atoms, self._description),
        }
        return {k: v for k, v in current.items() if k not in self._sent or not inputs.same(self._sent[k], v)}


def _checked_spmd(spmd: str) -> str:
    if spmd not in ("serve", "replicated", "off"):
        raise InputError(f"spmd must be 'serve', 'replicated' or 'off', got {spmd!r}")
    return spmd
