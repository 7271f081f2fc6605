"""`nvdd md --engine native`: dynamics of atoms that stay on their ranks."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Any

from nvdd.errors import InputError, RankError
from nvdd_ase import cli_input as given
from nvdd_ase import cli_report as report
from nvdd_ase.cli_progress import step_progress

_SUFFIXES = (".extxyz", ".xyz", ".h5", ".h5md")


def run_native(
    file: Path,
    index: str,
    model: str,
    option: list[str] | None,
    ranks: int,
    device: str | None,
    dtype: str | None,
    skin: float,
    compile: bool,
    max_edges_per_chunk: int | None,
    recompute: bool,
    ensemble: str,
    temperature: float,
    pressure: float,
    timestep: float,
    friction: float,
    steps: int,
    interval: int,
    npt_mode: str,
    tau_t: float | None,
    tau_p: float | None,
    checkpoint: Path | None,
    checkpoint_interval: int,
    restart: Path | None,
    seed: int | None,
    output: Path | None,
    plot: Path | None,
) -> None:
    """The command, with its options as `nvdd md` has them."""
    from nvdd.dynamics.checkpoint import read_parameters
    from nvdd_ase.distributed_md import DistributedMD
    from nvdd_ase.plots import check_plot, plot_md_log

    options = given.parse_options(option or [])
    given.check_calculator_options(ranks, dtype, skin)
    for name, value, least in (
        ("steps", steps, 0),
        ("interval", interval, 1),
        ("checkpoint-interval", checkpoint_interval, 1),
    ):
        given.check_count(name, value, least)
    atoms = given.read_structure(file, index)
    output = output or Path(f"{file.stem}-md.extxyz")
    log = output.with_suffix(".csv")
    given.check_output("--output", output, file, _SUFFIXES)
    given.check_output("log", log, file)
    if plot:
        check_plot(plot)
        given.check_output("--plot", plot, file)
    if restart is not None and not restart.is_file():
        raise InputError(f"--restart {restart}: no such file")
    if seed is None and restart is not None:
        seed = read_parameters(restart).get("seed")  # the noise goes on as it was
    seed = secrets.randbelow(2**31) if seed is None else seed

    report.say(f"structure   {file}: {len(atoms)} atoms, {atoms.get_chemical_formula()}")
    if restart is None:
        drawn = not atoms.get_momenta().any()
        report.say(f"velocities  {f'drawn at {temperature:g} K with seed {seed}' if drawn else 'taken from the file'}")
    start = time.perf_counter()
    with DistributedMD(
        atoms, model, ranks, ensemble, timestep=timestep, temperature=temperature, pressure=pressure, friction=friction,
        tau_t=tau_t, tau_p=tau_p, npt_mode=npt_mode, seed=seed, log=log, trajectory=output, interval=interval,
        checkpoint=checkpoint, checkpoint_interval=checkpoint_interval, restart=restart, device=device, dtype=dtype, skin=skin,
        model_options=options, compile=compile, max_edges_per_chunk=max_edges_per_chunk, recompute=recompute,
    ) as md:  # fmt: skip
        report.say(
            f"model       {model}, {ranks} rank{'s' * (ranks > 1)}, ready in {time.perf_counter() - start:.1f} s"
        )
        if restart is not None:
            report.say(f"restart     {restart}, step {md.step}")
        first, start = md.record, time.perf_counter()
        try:
            with step_progress(ensemble, steps, report.err) as progress:
                md.run(steps, lambda done, now: progress(done, _line(now)), every=interval)
        except RankError as error:
            if checkpoint is not None and checkpoint.is_file():
                report.complain(f"go on from the last checkpoint with --restart {checkpoint}")
            raise error
        seconds = time.perf_counter() - start
        last = md.record
    done = last["step"] - first["step"]
    speed = f": {done * timestep * 1e-6 / seconds * 86400:.3g} ns/day" if done else ""
    report.say(f"done        {done} steps, {done * timestep:g} fs, in {seconds:.1f} s{speed}")
    report.say(
        f"energy      {last['etot_eV']:.6f} eV in all, conserved quantity {last['conserved_eV'] - first['conserved_eV']:+.6f} eV "
        f"since the start; T {last['temperature_K']:.1f} K"
    )
    report.say(f"trajectory  {output}")
    report.say(f"log         {log}")
    if checkpoint is not None:
        report.say(f"checkpoint  {checkpoint}")
    if plot:
        plot_md_log(log, plot, title=f"{file.name}, {model}, {ensemble}")
        report.say(f"plot        {plot}")


def _line(now: dict[str, Any]) -> str:
    return f"T {now['temperature_K']:.0f} K  E {now['etot_eV']:.4f} eV"
