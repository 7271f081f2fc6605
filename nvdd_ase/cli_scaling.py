"""`nvdd scaling`: what numbers of ranks gain for a structure on this machine, measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nvdd_ase import cli_input as given
from nvdd_ase import cli_report as report
from nvdd_ase.cli_options import (
    Compile,
    Debug,
    Device,
    Dtype,
    File,
    GraphPlan,
    Index,
    MaxEdges,
    Model,
    Options,
    Recompute,
    Skin,
    Strategy,
)

if TYPE_CHECKING:
    from nvdd_ase.scaling import ScalingRow

EXIT_DIFFERS = 1

RankList = Annotated[str, typer.Option("--ranks", metavar="N,N,...", help="Numbers of ranks; the first is compared with.")]
Repeat = Annotated[str, typer.Option(metavar="A,B,C", help="Repeat the cell so often along its vectors.")]


@report.readable_errors
def scaling(
    file: File,
    model: Model,
    option: Options = None,
    ranks: RankList = "1,2",
    repeat: Repeat = "1,1,1",
    steps: Annotated[int, typer.Option(help="Steps that are timed, after two that are not.")] = 10,
    device: Device = None,
    dtype: Dtype = None,
    skin: Skin = 0.5,
    strategy: Strategy = "halo",
    graph_plan: GraphPlan = "curve",
    compile: Compile = False,
    max_edges_per_chunk: MaxEdges = None,
    recompute: Recompute = False,
    index: Index = "-1",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The rows, as .json.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw time, efficiency and loads to this .png, .pdf or .svg file.")] = None,
    debug: Debug = False,
) -> None:
    """Time a step over numbers of ranks on this machine; exit code 1 if their forces differ."""
    from nvdd_ase.plots import check_plot

    options = given.parse_options(option or [])
    given.check_calculator_options(1, dtype, skin, strategy, graph_plan)
    given.check_count("steps", steps, 1)
    numbers, times = given.parse_counts("ranks", ranks), given.parse_counts("repeat", repeat)
    cell = given.read_structure(file, index)
    if output:
        given.check_output("--output", output, file, (".json",))
    if plot:
        check_plot(plot)
        given.check_output("--plot", plot, file)

    from nvdd.planning.tiles import TiledStructure
    from nvdd_ase.scaling import measure_scaling

    TiledStructure.of(cell, times)  # raises for repeats that make no sense
    atoms = cell.repeat(times)
    report.say(f"structure   {file}: {len(atoms)} atoms, {atoms.get_chemical_formula()}")
    report.say(f"model       {model}; median of {steps} steps")
    report.say("")
    report.say("  ".join(f"{name:>{width}}" for name, width in _COLUMNS))
    rows = measure_scaling(
        atoms, model, numbers, steps, on_row=lambda row: report.say(_line(row)), model_options=options, device=device,
        dtype=dtype, skin=skin, strategy=strategy, graph_plan=graph_plan, compile=compile,
        max_edges_per_chunk=max_edges_per_chunk, recompute=recompute,
    )  # fmt: skip
    report.say("")
    if output:
        run = {"file": str(file), "repeat": times, "atoms": len(atoms), "model": model, "model_options": options}
        report.write_json(output, {**run, "steps": steps, "rows": [row.as_dict() for row in rows]})
        report.say(f"results     {output}")
    if plot:
        from nvdd_ase.plots_scaling import plot_scaling

        plot_scaling(rows, plot, title=f"{file.name}, {len(atoms)} atoms, {model}")
        report.say(f"plot        {plot}")
    for row in rows:
        if not row.agrees:
            report.complain(
                f"on {row.ranks} ranks a force differs by {row.difference:.1e} eV/A from that on {rows[0].ranks}, "
                f"more than rounding, {row.limit:.0e} eV/A: `nvdd validate` says where"
            )
            raise typer.Exit(EXIT_DIFFERS)


_COLUMNS = (("ranks", 5), ("ms/step", 9), ("speed-up", 8), ("eff.", 5), ("owned min/max", 15), ("halo max", 8),
            ("imbal.", 6), ("max dF (eV/A)", 18))  # fmt: skip


def _line(row: ScalingRow) -> str:
    cells = (
        str(row.ranks), f"{1e3 * row.seconds:.4g}", f"{row.speedup:.2f}", f"{row.efficiency:.2f}",
        f"{min(row.owned)}/{max(row.owned)}", str(max(row.halo)), f"{row.imbalance:.2f}",
        f"{row.difference:.1e} of {row.largest:.2g}",
    )  # fmt: skip
    return "  ".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, _COLUMNS, strict=True))
