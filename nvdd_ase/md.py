"""Molecular dynamics of an ASE structure that has a calculator, as a loop that reports each step.

Units are the ones users type: K, GPa, fs, 1/fs, eV. ASE's own appear only where ASE is called.
"""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nvdd.errors import InputError, MissingDependencyError, NvddError
from nvdd_ase.frames import frame_writer, is_bulk, snapshot

if TYPE_CHECKING:
    from ase import Atoms
    from ase.md.md import MolecularDynamics

ENSEMBLES = ("nve", "langevin", "nvt", "npt")

# Relaxation times of the thermostat and the barostat, in time steps, as ASE recommends.
_THERMOSTAT_STEPS = 100
_BAROSTAT_STEPS = 1000


@dataclass(frozen=True)
class MDSettings:
    """What to integrate. A value that no integrator can work with raises InputError at once.

    Attributes:
        ensemble: ``nve`` velocity Verlet, ``langevin``, ``nvt`` Nose-Hoover chain, ``npt``
            Martyna-Tobias-Klein.
        temperature: K; of the drawn velocities, and of the thermostat (all but nve).
        pressure: GPa, of the barostat (npt).
        timestep: fs.
        friction: 1/fs (langevin).
        seed: of the drawn velocities and of the Langevin noise.
        flexible_cell: npt changes all six cell parameters, not the volume alone.
    """

    ensemble: str = "nve"
    temperature: float = 300.0
    pressure: float = 0.0
    timestep: float = 1.0
    friction: float = 0.01
    seed: int = 0
    flexible_cell: bool = False

    def __post_init__(self) -> None:
        if self.ensemble not in ENSEMBLES:
            raise InputError(f"unknown ensemble {self.ensemble!r}; choose one of {', '.join(ENSEMBLES)}")
        for name in ("temperature", "pressure", "timestep", "friction"):
            if not math.isfinite(getattr(self, name)):
                raise InputError(f"{name} must be a finite number, but is {getattr(self, name)}")
        if self.temperature < 0:
            raise InputError(f"temperature must not be negative, but is {self.temperature:g} K")
        if self.temperature == 0 and self.ensemble in ("nvt", "npt"):
            raise InputError(f"ensemble {self.ensemble} needs a temperature above 0 K")
        if self.timestep <= 0:
            raise InputError(f"timestep must be positive, but is {self.timestep:g} fs")
        if self.friction < 0:
            raise InputError(f"friction must not be negative, but is {self.friction:g} 1/fs")
        if self.seed < 0:
            raise InputError(f"seed must not be negative, but is {self.seed}")
        if self.ensemble != "npt" and (self.pressure or self.flexible_cell):
            raise InputError(f"pressure and a flexible cell belong to ensemble npt, not {self.ensemble}")

    def check_structure(self, atoms: Atoms) -> None:
        """Raises InputError where the ensemble has no meaning for the structure."""
        if self.ensemble == "npt" and not is_bulk(atoms):
            raise InputError(
                f"ensemble npt needs a structure that is periodic along all three axes; pbc is {atoms.pbc.tolist()}"
            )
        if self.ensemble in ("nvt", "npt") and atoms.constraints:
            kinds = ", ".join(sorted({type(c).__name__ for c in atoms.constraints}))
            raise InputError(f"ensemble {self.ensemble} works without constraints ({kinds}); use langevin")


@dataclass(frozen=True)
class MDStep:
    """One step of a run; the field names are the columns of the log. None where there is no value."""

    step: int
    time_fs: float
    epot_eV: float
    ekin_eV: float
    etot_eV: float
    temperature_K: float
    pressure_GPa: float | None
    ns_per_day: float | None


def prepare_velocities(atoms: Atoms, settings: MDSettings) -> str:
    """Keeps the structure's velocities or draws them, removes the drift, and says in one line what it did."""
    from ase.md import velocitydistribution

    given = atoms.get_momenta()
    if not np.isfinite(given).all():
        raise InputError("the structure's velocities are not all finite numbers; repair or remove them")
    drawn = not given.any()
    if drawn:
        draw = getattr(velocitydistribution, "thermalize_momenta", None)  # ASE >= 3.29
        draw = draw or velocitydistribution.MaxwellBoltzmannDistribution
        draw(atoms, temperature_K=settings.temperature, rng=np.random.default_rng([settings.seed, 0]))
        done = f"drawn at {settings.temperature:g} K with seed {settings.seed}"
    else:
        done = "taken from the file"
    if atoms.constraints:
        return f"{done}, T = {atoms.get_temperature():.1f} K (drift kept: the structure has constraints)"
    if len(atoms) > 1:
        velocitydistribution.Stationary(atoms, preserve_temperature=drawn)
    return f"{done}, drift of the centre of mass removed, T = {atoms.get_temperature():.1f} K"


def make_integrator(atoms: Atoms, settings: MDSettings) -> MolecularDynamics:
    """ASE's integrator for the settings."""
    from ase import units
    from ase.md.langevin import Langevin
    from ase.md.verlet import VelocityVerlet

    settings.check_structure(atoms)
    timestep = settings.timestep * units.fs
    if settings.ensemble == "nve":
        return VelocityVerlet(atoms, timestep)
    if settings.ensemble == "langevin":
        friction = settings.friction / units.fs
        noise = np.random.default_rng([settings.seed, 1])
        return Langevin(atoms, timestep, temperature_K=settings.temperature, friction=friction, fixcm=False, rng=noise)
    try:
        from ase.md.nose_hoover_chain import MTKNPT, IsotropicMTKNPT, NoseHooverChainNVT
    except ImportError as error:
        raise MissingDependencyError(
            f"ensemble {settings.ensemble} needs an ASE with ase.md.nose_hoover_chain; get it with: pip install -U ase"
        ) from error
    thermostat = {"temperature_K": settings.temperature, "tdamp": _THERMOSTAT_STEPS * timestep}
    if settings.ensemble == "nvt":
        return NoseHooverChainNVT(atoms, timestep, **thermostat)
    barostat = {"pressure_au": settings.pressure * units.GPa, "pdamp": _BAROSTAT_STEPS * timestep}
    integrator = MTKNPT if settings.flexible_cell else IsotropicMTKNPT
    return integrator(atoms, timestep, **thermostat, **barostat)


def run_md(
    atoms: Atoms,
    settings: MDSettings,
    steps: int,
    *,
    interval: int = 1,
    trajectory: str | Path | None = None,
    log: str | Path | None = None,
    on_step: Callable[[MDStep], None] | None = None,
) -> list[MDStep]:
    """Runs dynamics from the atoms' positions and velocities, and moves the atoms with it.

    Args:
        atoms: structure with a calculator; :func:`prepare_velocities` gives it velocities.
        settings: ensemble and its parameters.
        steps: number of steps.
        interval: a frame and a line of the log every this many steps; the last step always.
        trajectory: file for the frames (.extxyz, .xyz or .traj), in the order of ``atoms``.
        log: CSV file with the columns of :class:`MDStep`.
        on_step: called after every step; the pressure is there only at logged steps.

    Returns:
        The logged steps.

    Raises:
        NvddError: the energy is no longer a finite number.
    """
    records: list[MDStep] = []
    with ExitStack() as stack:
        stack.enter_context(_centre_of_mass_held(atoms, settings))
        integrator = make_integrator(atoms, settings)
        atoms.get_forces()  # a model that fails here leaves an earlier run's files alone
        write_frame = stack.enter_context(frame_writer(trajectory))
        write_line = stack.enter_context(_csv_log(log))
        clock = _Clock(settings.timestep)
        for _ in integrator.irun(steps):
            step = integrator.nsteps
            logged = step % interval == 0 or step == steps
            record = _measure(atoms, step, settings, clock if logged else None)
            if not math.isfinite(record.epot_eV):
                raise NvddError(_diverged(record, settings, trajectory))
            if logged:
                records.append(record)
                write_line(record)
                write_frame(snapshot(atoms, step=step, time_fs=record.time_fs))
            if on_step:
                on_step(record)
    return records


@contextmanager
def _centre_of_mass_held(atoms: Atoms, settings: MDSettings) -> Iterator[None]:
    """Langevin noise pushes the centre of mass: holds it, unless the structure has constraints of its own."""
    from ase.constraints import FixCom

    held = settings.ensemble == "langevin" and not atoms.constraints and len(atoms) > 1
    if held:
        atoms.set_constraint(FixCom())
    try:
        yield
    finally:
        if held:
            atoms.set_constraint()


@contextmanager
def _csv_log(path: str | Path | None) -> Iterator[Callable[[MDStep], None]]:
    """Gives a function that appends a record to the CSV file, one flushed line each; no path, no file."""
    if path is None:
        yield lambda record: None
        return
    with open(path, "w", newline="") as file:
        table = csv.writer(file)
        table.writerow([field.name for field in fields(MDStep)])

        def write(record: MDStep) -> None:
            table.writerow(["" if value is None else value for value in astuple(record)])
            file.flush()

        yield write


class _Clock:
    """Speed since the last logged step."""

    def __init__(self, timestep: float) -> None:
        self._timestep = timestep
        self._step, self._time = 0, time.perf_counter()

    def ns_per_day(self, step: int) -> float | None:
        now = time.perf_counter()
        done, seconds = step - self._step, now - self._time
        self._step, self._time = step, now
        return done * self._timestep * 1e-6 / seconds * 86400 if done and seconds else None


def _measure(atoms: Atoms, step: int, settings: MDSettings, clock: _Clock | None) -> MDStep:
    epot, ekin = float(atoms.get_potential_energy()), float(atoms.get_kinetic_energy())
    return MDStep(
        step=step,
        time_fs=step * settings.timestep,
        epot_eV=epot,
        ekin_eV=ekin,
        etot_eV=epot + ekin,
        temperature_K=float(atoms.get_temperature()),
        pressure_GPa=_pressure(atoms) if clock and is_bulk(atoms) else None,
        ns_per_day=clock.ns_per_day(step) if clock else None,
    )


def _pressure(atoms: Atoms) -> float:
    """Pressure with the kinetic part, GPa."""
    from ase import units

    return float(-atoms.get_stress(include_ideal_gas=True)[:3].mean() / units.GPa)


def _diverged(record: MDStep, settings: MDSettings, trajectory: str | Path | None) -> str:
    kept = f"; the frames before it are in {trajectory}" if trajectory and record.step else ""
    return (
        f"step {record.step}: the potential energy is {record.epot_eV}. Relax the structure first, or use a "
        f"timestep below {settings.timestep:g} fs{kept}"
    )
