"""`DistributedMD`: dynamics of ASE atoms that stay on the ranks between steps."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator

from nvdd.dynamics.checkpoint import check_folder
from nvdd.dynamics.single import constraints_of
from nvdd.errors import InputError, NvddError
from nvdd.runtime.launcher import detect
from nvdd_ase import inputs
from nvdd_ase.backends import InProcess, Launched, Workers
from nvdd_ase.engine import voigt
from nvdd_ase.ensembles import make_dynamics
from nvdd_ase.md_engine import COLUMNS, WIDTH

_SERVICE = "nvdd_ase.md_engine:MDEngine"


class DistributedMD:
    """Molecular dynamics over ranks, without a round trip through Python and ASE at each step.

    The ranks keep the atoms, each those of its part of space. After `run` positions, velocities, cell, energy, forces
    and stress are in the user's ``atoms``, in their order.

    Args:
        atoms: positions, velocities, masses, ``FixAtoms`` and ``FixCom`` constraints are taken from it. Atoms at rest
            get velocities drawn at ``temperature``, if one is given.
        model: as for `NVDDCalculator`.
        ranks: number of processes; 1 computes in this one. Under a launcher (torchrun, mpirun, srun) left out.
        ensemble: ``"nve"``, ``"langevin"``, ``"nvt"``, ``"csvr"``, ``"npt"``, ``"nph"``, or an integrator or
            optimiser object of nvdd.
        timestep, temperature, pressure, friction, tau_t, tau_p, npt_mode, seed: see `make_dynamics`; fs, K, GPa, 1/fs.
        log: CSV file, see `nvdd.dynamics.logs.CSVLog`.
        trajectory: ``.extxyz`` or ``.h5`` (H5MD) file, see `nvdd.dynamics.trajectory.Trajectory`.
        interval: steps between lines of the log and frames.
        checkpoint: file for checkpoints, written every ``checkpoint_interval`` steps and at the end of each `run`.
        restart: a checkpoint to go on from, of any number of ranks; ``atoms`` are moved there. Log and trajectory are
            kept up to its step, and appended to.
        fix_com: hold the centre of mass. None: where atoms have ASE's ``FixCom``, and with a thermostat or barostat (an
            integrator whose ``holds_com`` is true), unless atoms are constrained or alone. ``nve`` keeps the momentum
            that the atoms have, ``langevin`` moves them all.
        hooks: more hooks, called on the ranks; they and their functions must be defined in a module.
        device, dtype, skin, model_options, balance, grid, compile: as for `NVDDCalculator`.
        max_edges_per_chunk, recompute, start_timeout, timeout: as for `NVDDCalculator`.

    Raises:
        InputError, MissingDependencyError: before anything runs.
        RankError: a rank failed or died; the last checkpoint is whole.

    Example::

        with DistributedMD(atoms, "sevenn:7net-0", ranks=4, ensemble="langevin", temperature=300) as md:
            md.run(10_000)
        atoms.get_temperature()
    """

    def __init__(
        self,
        atoms: Atoms,
        model: Any,
        ranks: int | None = None,
        ensemble: Any = "nve",
        *,
        timestep: float = 1.0,
        temperature: float | None = None,
        pressure: float = 0.0,
        friction: float = 0.01,
        tau_t: float | None = None,
        tau_p: float | None = None,
        npt_mode: str = "iso",
        seed: int = 0,
        log: str | Path | None = None,
        trajectory: str | Path | None = None,
        interval: int = 100,
        checkpoint: str | Path | None = None,
        checkpoint_interval: int = 1000,
        restart: str | Path | None = None,
        fix_com: bool | None = None,
        hooks: Sequence[Any] = (),
        device: str | None = None,
        dtype: str | None = None,
        skin: float = 0.5,
        model_options: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None,
        balance: str = "auto",
        grid: Sequence[int] | None = None,
        compile: bool | str = False,
        max_edges_per_chunk: int | None = None,
        recompute: bool = False,
        start_timeout: float | None = 300.0,
        timeout: float | None = None,
    ) -> None:
        self.atoms = atoms
        self._backend: InProcess | Workers | Launched | None = None
        self._checkpoint = None if checkpoint is None else Path(checkpoint).absolute()
        self.dynamics = ensemble
        if isinstance(ensemble, str):
            self.dynamics = make_dynamics(
                ensemble, timestep=timestep, temperature=temperature, pressure=pressure, friction=friction, tau_t=tau_t,
                tau_p=tau_p, npt_mode=npt_mode, seed=seed,
            )  # fmt: skip
        self._fixed, held = constraints_of(atoms)
        free = not atoms.constraints and len(atoms) > 1 and self.dynamics.holds_com
        self._fix_com = (held or free) if fix_com is None else fix_com
        draw = temperature is not None and self.dynamics.kinetic and not atoms.get_momenta().any()
        self._draw = (temperature, seed) if draw else None
        launch = detect()
        if launch is not None:
            launch.check_ranks(ranks)
        ranks = launch.size if launch is not None else inputs.checked_ranks(1 if ranks is None else ranks)
        options = inputs.checked_options(model, model_options)
        arguments = {
            "model": inputs.checked_model(model, options),
            "options": options,
            "dtype": inputs.checked_dtype(dtype),
            "domain": inputs.checked_domain(
                skin, balance, grid, "halo", ranks, "curve", compile, max_edges_per_chunk, recompute
            ),
            "dynamics": self.dynamics,
            "hooks": [*self._files(log, trajectory, interval, checkpoint_interval), *hooks],
        }
        device = inputs.checked_device(device)
        limits = (inputs.checked_seconds("start_timeout", start_timeout), inputs.checked_seconds("timeout", timeout))
        if launch is not None:
            self._backend = Launched(launch, "serve", device, arguments, limits, _SERVICE)
        else:
            backend: type[InProcess | Workers] = InProcess if ranks == 1 else Workers
            self._backend = backend(ranks, device, arguments, limits, _SERVICE)
        self._observers: list[tuple[Callable, int]] = []
        self._begin(restart)

    def _files(self, log, trajectory, interval: int, checkpoint_interval: int) -> list[Any]:
        from nvdd.dynamics.checkpoint import Checkpoint
        from nvdd.dynamics.logs import CSVLog, Guard
        from nvdd.dynamics.trajectory import Trajectory

        bulk = bool(self.atoms.pbc.all()) and self.atoms.cell.rank == 3
        made: list[Any] = [Guard(interval)]
        if log is not None:
            made.append(CSVLog(Path(log).absolute(), interval, pressure=bulk))
        if trajectory is not None:
            made.append(Trajectory(Path(trajectory).absolute(), interval))
        if self._checkpoint is not None:
            made.append(Checkpoint(self._checkpoint, checkpoint_interval))
        return made

    def _begin(self, restart: str | Path | None) -> None:
        atoms, backend = self.atoms, self._backend
        description = backend.call("describe")[0]
        inputs.check_atoms(atoms, description)
        table = backend.share("atoms", (len(atoms), WIDTH))
        self._table, self._forces = table, backend.share("forces", (len(atoms), 3))
        table[:, COLUMNS["positions"]] = atoms.positions
        table[:, COLUMNS["velocities"]] = atoms.get_velocities()
        table[:, COLUMNS["masses"]] = atoms.get_masses()
        table[:, COLUMNS["numbers"]] = atoms.numbers
        table[:, COLUMNS["fixed"]] = self._fixed
        given = inputs.read_arrays(atoms, description)
        for name, values in given.items():
            backend.share("input " + name, values.shape)[:] = values
        payload = {
            "restart": None if restart is None else str(Path(restart).absolute()),
            "cell": atoms.cell.array,
            "pbc": atoms.pbc.copy(),
            "system_fields": inputs.read_info(atoms, description),
            "node_fields": sorted(given),
            "fix_com": self._fix_com,
            "draw": self._draw,
        }
        self._take(backend.call("begin", payload)[0])

    # -- the run

    @property
    def step(self) -> int:
        """Steps done, those before a restart too."""
        return self._answer["step"]

    @property
    def record(self) -> dict[str, Any]:
        """The last step in the log's columns: energies in eV, temperature in K, pressure in GPa (None if not known)."""
        return dict(self._answer["record"])

    def attach(self, function: Callable[[DistributedMD], None], interval: int = 1) -> None:
        """Calls ``function(md)`` here after every ``interval``-th step; ``md.record`` and ``md.atoms`` are up to date.

        All atoms come back for it each time; a hook on the ranks is cheaper.
        """
        if interval < 1:
            raise InputError(f"interval must be at least 1, got {interval}")
        self._observers.append((function, interval))

    def run(self, steps: int, progress: Callable[[int, dict[str, Any]], None] | None = None, every: int = 100) -> bool:
        """Makes steps, and brings the atoms up to date.

        Args:
            steps: number of steps.
            progress: called as ``progress(steps done in this run, record)`` every ``every`` steps, and after the last.
            every: see ``progress``.

        Returns:
            Whether an optimiser has converged, or a hook has stopped the run.
        """
        if steps < 0:
            raise InputError(f"the number of steps must be zero or more, got {steps}")
        self._check_open()
        if progress and every < 1:
            raise InputError(f"every must be at least 1, got {every}")
        first = shown = self.step
        last, ended = first + steps, False
        while not ended:  # once at least: without steps, too, the stress is wanted
            ends = [(self.step // interval + 1) * interval for _, interval in self._observers]
            ends += [shown + every] if progress else []
            target = min([*ends, last])
            answer = self._backend.call("advance", {"steps": target - self.step, "stress": self._has_volume()})[0]
            moved, self._answer = answer["step"] > self.step, answer
            ended = answer["over"] or self.step == last
            if progress and self.step > shown and (ended or self.step == shown + every):
                shown = self.step
                progress(self.step - first, self.record)
            due = [f for f, interval in self._observers if moved and self.step % interval == 0]
            if due:
                self._take(answer)
            for function in due:
                function(self)
        self._take(self._answer)
        if self._checkpoint is not None:
            self.save(self._checkpoint)
        return self._answer["over"]

    def _check_open(self) -> None:
        if self._backend is None:
            raise NvddError("the ranks are closed; make a new DistributedMD, with restart= to go on from a checkpoint")

    def _has_volume(self) -> bool:
        return self.atoms.cell.rank == 3

    def _take(self, answer: dict[str, Any]) -> None:
        """Everything into the user's atoms; constraints stand aside."""
        self._answer = answer
        self._backend.call("collect")
        atoms = self.atoms
        atoms.set_cell(answer["cell"], scale_atoms=False)
        atoms.arrays["positions"][:] = self._table[:, COLUMNS["positions"]]
        momenta = self._table[:, COLUMNS["velocities"]] * self._table[:, COLUMNS["masses"], None]
        atoms.set_momenta(momenta, apply_constraint=False)
        results = {"energy": answer["energy"], "free_energy": answer["energy"], "forces": self._forces.copy()}
        if answer["stress"] is not None and self._has_volume():
            results["stress"] = voigt(answer["stress"])
        atoms.calc = SinglePointCalculator(atoms, **results)

    def save(self, path: str | Path) -> None:
        """Writes a checkpoint to ``path``.

        Raises:
            InputError: it can't be written there; the run can go on.
        """
        path = Path(path).absolute()
        check_folder(path)
        self._check_open()
        failure = self._backend.call("checkpoint", str(path))[0]
        if failure is not None:
            raise InputError(failure)

    def report(self) -> list[dict[str, Any]]:
        """For each rank: process id, device, atoms, evaluations, rebuilds, atoms that have arrived, seconds waited."""
        return self._backend.call("report")

    def close(self) -> None:
        """Closes the files and ends the ranks. A second time it does nothing."""
        backend, self._backend = self._backend, None
        if backend is not None:
            with contextlib.suppress(NvddError):  # of ranks that have failed and are gone
                if not backend.closed:
                    backend.call("close")
            backend.close()

    def __enter__(self) -> DistributedMD:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def ns_per_day(record: Mapping[str, Any]) -> str:
    """Of a record, for a line of progress."""
    value = record["ns_per_day"]
    return "" if value is None or not math.isfinite(value) else f"{value:.3g} ns/day"
