"""Ensembles by name, as nvdd's own integrators."""

from __future__ import annotations

from typing import Any

from nvdd.errors import InputError

NATIVE_ENSEMBLES = ("nve", "langevin", "nvt", "csvr", "npt", "nph")
_THERMOSTATS = ("langevin", "nvt", "csvr", "npt")


def make_dynamics(
    ensemble: str,
    *,
    timestep: float = 1.0,
    temperature: float | None = None,
    pressure: float = 0.0,
    friction: float = 0.01,
    tau_t: float | None = None,
    tau_p: float | None = None,
    npt_mode: str = "iso",
    seed: int = 0,
) -> Any:
    """The integrator of an ensemble.

    Args:
        ensemble: ``nve`` velocity Verlet; ``langevin`` (BAOAB); ``nvt`` Nose-Hoover chain; ``csvr`` (Bussi); ``npt``
            Martyna-Tobias-Klein; ``nph``.
        timestep: fs.
        temperature: K; needed by all but nve and nph.
        pressure: GPa (npt, nph).
        friction: 1/fs (langevin).
        tau_t: fs, of the thermostat (nvt, csvr, npt); None for 100 steps.
        tau_p: fs, of the barostat (npt, nph); None for 1000 steps.
        npt_mode: ``iso``, ``aniso`` or ``full`` (npt, nph).
        seed: of the noise (langevin, csvr).

    Raises:
        InputError: an unknown name, or a value without meaning for it.
    """
    import nvdd

    if ensemble not in NATIVE_ENSEMBLES:
        raise InputError(f"unknown ensemble {ensemble!r}; choose one of {', '.join(NATIVE_ENSEMBLES)}")
    if ensemble in _THERMOSTATS and temperature is None:
        raise InputError(f"ensemble {ensemble} needs a temperature (K)")
    barostat = ensemble in ("npt", "nph")
    if not barostat and (pressure or tau_p is not None or npt_mode != "iso"):
        raise InputError(f"pressure, tau_p and npt_mode belong to ensembles npt and nph, not {ensemble}")
    if tau_t is not None and ensemble not in ("nvt", "csvr", "npt"):
        raise InputError(f"tau_t belongs to ensembles nvt, csvr and npt, not {ensemble}")
    if ensemble == "nve":
        return nvdd.NVE(timestep)
    if ensemble == "langevin":
        return nvdd.Langevin(timestep, temperature, friction, seed)
    if ensemble == "nvt":
        return nvdd.NoseHoover(timestep, temperature, tau_t)
    if ensemble == "csvr":
        return nvdd.CSVR(timestep, temperature, tau_t, seed)
    if ensemble == "nph":
        return nvdd.NPH(timestep, pressure, tau_p, npt_mode)
    return nvdd.NPT(timestep, temperature, pressure, tau_t, tau_p, npt_mode)
