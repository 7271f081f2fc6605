"""The `nvdd` command: dynamics, relaxation and single points of any structure that ASE reads, validation of models.

Torch, ASE and the models are imported inside the commands, so that help and mistyped input answer at once.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nvdd_ase import cli_input as given
from nvdd_ase import cli_lammps as lammps
from nvdd_ase import cli_report as report
from nvdd_ase.cli_options import (
    CheckpointFile,
    CheckpointInterval,
    Compile,
    Debug,
    Device,
    Dtype,
    File,
    GraphPlan,
    Index,
    MaxEdges,
    Model,
    NptMode,
    Options,
    Plot,
    Pressure,
    Ranks,
    Recompute,
    Restart,
    Skin,
    Strategy,
    TauP,
    TauT,
)
from nvdd_ase.cli_plan import plan
from nvdd_ase.cli_progress import step_progress
from nvdd_ase.cli_scaling import scaling
from nvdd_ase.cli_validate import validate

if TYPE_CHECKING:
    from ase import Atoms

    from nvdd_ase.md import MDStep
    from nvdd_ase.relax import RelaxStep

app = typer.Typer(
    name="nvdd",
    help="Machine-learning interatomic potentials over many ranks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Entry point of the `nvdd` script."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        from nvdd import __version__

        typer.echo(f"nvdd {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@contextmanager
def _calculator(
    model: str, options: dict[str, Any], ranks: int, device: str | None, dtype: str | None, skin: float, strategy: str,
    graph_plan: str, memory: dict[str, Any], compile: bool,
) -> Iterator[Any]:
    """The calculator, its start announced; closed at the end."""
    from nvdd_ase import NVDDCalculator

    start = time.perf_counter()
    where = {"ranks": ranks, "device": device, "strategy": strategy, "graph_plan": graph_plan, "compile": compile, **memory}
    with NVDDCalculator(model, dtype=dtype, skin=skin, model_options=options, **where) as calculator:
        seconds = time.perf_counter() - start
        report.say(f"model       {model}, {ranks} rank{'s' * (ranks > 1)}, ready in {seconds:.1f} s")
        yield calculator


@app.command()
@report.readable_errors
def md(
    file: File,
    model: Model,
    option: Options = None,
    ranks: Ranks = 1,
    device: Device = None,
    dtype: Dtype = None,
    skin: Skin = 0.5,
    strategy: Strategy = "halo",
    graph_plan: GraphPlan = "curve",
    compile: Compile = False,
    max_edges_per_chunk: MaxEdges = None,
    recompute: Recompute = False,
    engine: Annotated[
        str, typer.Option(metavar="ase|native", help="ASE's integrators, or nvdd's: atoms stay on their ranks.")
    ] = "ase",
    ensemble: Annotated[
        str, typer.Option(metavar="nve|langevin|nvt|npt", help="With --engine native also csvr and nph.")
    ] = "nve",
    temperature: Annotated[float, typer.Option(help="K, of thermostat and drawn velocities.")] = 300.0,
    pressure: Pressure = 0.0,
    timestep: Annotated[float, typer.Option(help="fs.")] = 1.0,
    friction: Annotated[float, typer.Option(help="1/fs, of langevin.")] = 0.01,
    steps: Annotated[int, typer.Option(help="Number of steps.")] = 1000,
    interval: Annotated[int, typer.Option(help="Write a frame and a line of the log every so many steps.")] = 10,
    cell: Annotated[bool, typer.Option("--cell", help="npt: let the shape of the cell change too.")] = False,
    npt_mode: NptMode = "iso",
    tau_t: TauT = None,
    tau_p: TauP = None,
    checkpoint: CheckpointFile = None,
    checkpoint_interval: CheckpointInterval = 1000,
    restart: Restart = None,
    seed: Annotated[int | None, typer.Option(help="Of velocities and noise; by default drawn, or the checkpoint's.")] = None,
    index: Index = "-1",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Trajectory, .extxyz or .traj; the log goes beside it."),
    ] = None,
    plot: Plot = None,
    debug: Debug = False,
) -> None:
    """Run molecular dynamics; writes a trajectory and a log (CSV)."""
    if given.check_engine(engine, npt_mode, tau_t, tau_p, checkpoint, restart) == "native":
        given.check_native_strategy(strategy)
        from nvdd_ase.cli_native import run_native

        run_native(
            file, index, model, option, ranks, device, dtype, skin, compile, max_edges_per_chunk, recompute, ensemble, temperature, pressure, timestep, friction, steps,
            interval, "full" if cell else npt_mode, tau_t, tau_p, checkpoint, checkpoint_interval, restart, seed, output, plot,
        )  # fmt: skip
        return
    from nvdd_ase.frames import TRAJECTORY_SUFFIXES
    from nvdd_ase.md import MDSettings, prepare_velocities, run_md
    from nvdd_ase.plots import check_plot, plot_md

    options = given.parse_options(option or [])
    given.check_calculator_options(ranks, dtype, skin, strategy, graph_plan)
    given.check_count("steps", steps, 0)
    given.check_count("interval", interval, 1)
    seed = secrets.randbelow(2**31) if seed is None else seed
    settings = MDSettings(ensemble, temperature, pressure, timestep, friction, seed, cell)
    atoms = given.read_structure(file, index)
    settings.check_structure(atoms)
    output = output or Path(f"{file.stem}-md.extxyz")
    log = output.with_suffix(".csv")
    given.check_output("--output", output, file, TRAJECTORY_SUFFIXES)
    given.check_output("log", log, file)
    if plot:
        check_plot(plot)
        given.check_output("--plot", plot, file)

    report.say(f"structure   {file}: {len(atoms)} atoms, {atoms.get_chemical_formula()}")
    report.say(f"velocities  {prepare_velocities(atoms, settings)}")
    if ensemble == "langevin":
        report.say(f"noise       seed {seed}")
    memory = {"max_edges_per_chunk": max_edges_per_chunk, "recompute": recompute}
    with _calculator(model, options, ranks, device, dtype, skin, strategy, graph_plan, memory, compile) as calculator:
        atoms.calc = calculator
        atoms.get_forces()  # the first call loads and compiles: not part of the speed
        start = time.perf_counter()
        with step_progress(ensemble, steps, report.err) as progress:
            records = run_md(
                atoms,
                settings,
                steps,
                interval=interval,
                trajectory=output,
                log=log,
                on_step=lambda now: progress(now.step, f"T {now.temperature_K:.0f} K  E {now.etot_eV:.4f} eV"),
            )
        seconds = time.perf_counter() - start
    _print_md_summary(records, seconds)
    report.say(f"trajectory  {output}")
    report.say(f"log         {log}")
    if plot:
        plot_md(records, plot, title=f"{file.name}, {model}, {ensemble}")
        report.say(f"plot        {plot}")


def _print_md_summary(records: list[MDStep], seconds: float) -> None:
    first, last = records[0], records[-1]
    mean = sum(record.temperature_K for record in records) / len(records)
    done = f"{last.step} steps, {last.time_fs:g} fs, in {seconds:.1f} s"
    if last.step:
        done += f": {last.time_fs * 1e-6 / seconds * 86400:.3g} ns/day"
    report.say(f"done        {done}")
    report.say(
        f"energy      {last.etot_eV:.6f} eV in all, {last.etot_eV - first.etot_eV:+.6f} eV since the start; "
        f"mean T {mean:.1f} K"
    )


@app.command()
@report.readable_errors
def relax(
    file: File,
    model: Model,
    option: Options = None,
    ranks: Ranks = 1,
    device: Device = None,
    dtype: Dtype = None,
    skin: Skin = 0.5,
    strategy: Strategy = "halo",
    graph_plan: GraphPlan = "curve",
    compile: Compile = False,
    max_edges_per_chunk: MaxEdges = None,
    recompute: Recompute = False,
    fmax: Annotated[float, typer.Option(help="Largest force to leave, in eV/A.")] = 0.05,
    steps: Annotated[int, typer.Option(help="Most steps to take.")] = 500,
    optimizer: Annotated[str, typer.Option(metavar="fire|lbfgs|bfgs")] = "fire",
    cell: Annotated[bool, typer.Option("--cell", help="Relax the cell too.")] = False,
    pressure: Pressure = 0.0,
    interval: Annotated[int, typer.Option(help="Print a line every so many steps.")] = 10,
    index: Index = "-1",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Relaxed structure, in any format that ASE writes.")
    ] = None,
    plot: Plot = None,
    debug: Debug = False,
) -> None:
    """Relax the atoms and, with --cell, the cell; exit code 1 if that takes more than --steps."""
    import ase.io

    from nvdd_ase.frames import snapshot
    from nvdd_ase.plots import check_plot, plot_relax
    from nvdd_ase.relax import check_relax
    from nvdd_ase.relax import relax as run_relax

    options = given.parse_options(option or [])
    given.check_calculator_options(ranks, dtype, skin, strategy, graph_plan)
    given.check_count("steps", steps, 0)
    given.check_count("interval", interval, 1)
    atoms = given.read_structure(file, index)
    what = {"fmax": fmax, "optimizer": optimizer, "cell": cell, "pressure": pressure}
    check_relax(atoms, **what)
    output = output or Path(f"{file.stem}-relaxed.extxyz")
    given.check_output("--output", output, file)
    given.check_structure_format(output)
    if plot:
        check_plot(plot)
        given.check_output("--plot", plot, file)

    report.say(f"structure   {file}: {len(atoms)} atoms, {atoms.get_chemical_formula()}")
    memory = {"max_edges_per_chunk": max_edges_per_chunk, "recompute": recompute}
    with _calculator(model, options, ranks, device, dtype, skin, strategy, graph_plan, memory, compile) as calculator:
        atoms.calc = calculator

        def print_state(state: RelaxStep) -> None:
            if state.step % interval == 0 or state.converged or state.step == steps:
                report.say(f"step {state.step:5d}  energy {state.energy_eV:14.6f} eV  {_residual(state)}")

        history = run_relax(atoms, steps=steps, on_step=print_state, **what)
        relaxed = snapshot(atoms)
    ase.io.write(output, relaxed)
    last = history[-1]
    report.say(f"structure   {output}")
    if plot:
        plot_relax(history, plot, title=f"{file.name}, {model}, {optimizer}")
        report.say(f"plot        {plot}")
    if not last.converged:
        report.complain(
            f"not converged: {_residual(last)} after {last.step} steps with --fmax {fmax:g}; "
            f"go on from {output}, or give more --steps"
        )
        raise typer.Exit(report.EXIT_NOT_CONVERGED)
    report.say(f"converged   in {last.step} steps: {_residual(last)}", style="green")


def _residual(state: RelaxStep) -> str:
    stress = "" if state.smax_GPa is None else f", stress {state.smax_GPa:.5f} GPa"
    return f"max force {state.fmax_eV_per_A:.6f} eV/A{stress}"


@app.command()
@report.readable_errors
def single(
    file: File,
    model: Model,
    option: Options = None,
    ranks: Ranks = 1,
    device: Device = None,
    dtype: Dtype = None,
    skin: Skin = 0.5,
    strategy: Strategy = "halo",
    graph_plan: GraphPlan = "curve",
    compile: Compile = False,
    max_edges_per_chunk: MaxEdges = None,
    recompute: Recompute = False,
    index: Annotated[str, typer.Option(help="Frame, or range of frames such as 0:100:10.")] = "-1",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Results, as .json or .extxyz.", show_default=False)
    ] = None,
    debug: Debug = False,
) -> None:
    """Compute energy, forces and stress; prints a table."""
    options = given.parse_options(option or [])
    given.check_calculator_options(ranks, dtype, skin, strategy, graph_plan)
    frames = given.read_structures(file, index)
    if output:
        given.check_output("--output", output, file, (".json", ".extxyz", ".xyz"))

    memory = {"max_edges_per_chunk": max_edges_per_chunk, "recompute": recompute}
    with _calculator(model, options, ranks, device, dtype, skin, strategy, graph_plan, memory, compile) as calculator:
        results, written = _compute(frames, calculator)
    title = f"{file}, {model}"
    if len(frames) == 1:
        report.print_single(title, results[0], written[0].get_chemical_symbols())
    else:
        report.print_frames(title, results)
    if not output:
        return
    if output.suffix == ".json":
        run = {"file": str(file), "index": index, "model": model, "model_options": options, "ranks": ranks}
        content = [{**run, **result} for result in results]
        report.write_json(output, content if ":" in index else content[0])
    else:
        import ase.io

        ase.io.write(output, written, format="extxyz")
    report.say(f"results     {output}")


def _compute(frames: list[Atoms], calculator: Any) -> tuple[list[dict[str, Any]], list[Atoms]]:
    from nvdd_ase.frames import snapshot

    results, written = [], []
    for atoms in frames:
        atoms.calc = calculator
        results.append(report.measure(atoms))
        written.append(snapshot(atoms))
    return results, written


app.command()(plan)
app.command()(scaling)
app.command()(validate)


@app.command()
@report.readable_errors
def models(debug: Debug = False) -> None:
    """List the model families, their checkpoints and options."""
    report.print_models()


@app.command()
@report.readable_errors
def explain(
    message: Annotated[str, typer.Argument(help="An error message, in quotes, or the name of an entry.", show_default=False)],
    debug: Debug = False,
) -> None:
    """Say what an error message means and what to do; exit code 1 if the page has no entry for it."""
    from nvdd.remedies import entry_of

    entry = entry_of(message)
    if entry is None:
        report.complain("no entry of docs/troubleshooting.md is about this message; search the page for its words")
        raise typer.Exit(report.EXIT_UNKNOWN)
    report.say(f"message     {entry.message.replace('`', '')}")
    report.say(f"remedy      {entry.remedy}")
    report.say(f"page        docs/troubleshooting.md#{entry.anchor}")


@app.command()
@report.readable_errors
def handlers(debug: Debug = False) -> None:
    """List what each torch operation means over several ranks."""
    report.print_handlers()


@app.command()
@report.readable_errors
def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Import no model package and start no ranks.")] = False,
    debug: Debug = False,
) -> None:
    """Say what is installed, what is missing and how to get it; exit code 1 if nvdd can't be used."""
    from nvdd_ase.doctor import diagnose, healthy, render

    with report.err.status("looking around"):
        found = diagnose(quick)
    report.out.print(render(found))
    if not healthy(found):
        raise typer.Exit(report.EXIT_UNUSABLE)


app.command("export")(lammps.export)
app.command("lammps-check")(lammps.check)


if __name__ == "__main__":
    main()
