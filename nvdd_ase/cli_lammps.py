"""`nvdd export` and `nvdd lammps-check`: models for LAMMPS, and whether LAMMPS runs them right here."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import typer

from nvdd_ase import cli_input as given
from nvdd_ase import cli_report as report
from nvdd_ase.cli_options import Compile, Debug, Dtype, MaxEdges, Options, Recompute
from nvdd_ase.doctor_check import MISSING, OK, WARNING

_STYLE = {OK: "", WARNING: "yellow", MISSING: "red"}


@report.readable_errors
def export(
    model: Annotated[
        str, typer.Argument(help="family:checkpoint, such as sevenn:7net-0, mace:my.model, lj.", show_default=False)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file, NAME.nvdd.", show_default=False)],
    option: Options = None,
    dtype: Dtype = None,
    elements: Annotated[
        str | None,
        typer.Option(metavar="Si,O", help="Elements that decks may use; by default all that the model knows."),
    ] = None,
    allow_pickle: Annotated[
        bool,
        typer.Option("--allow-pickle", help="Put a model that can't be rebuilt into the file as code and all."),
    ] = False,
    compile: Compile = False,
    max_edges_per_chunk: MaxEdges = None,
    recompute: Recompute = False,
    debug: Debug = False,
) -> None:
    """Write a model to a file for LAMMPS: `pair_style mliap unified NAME.nvdd`."""
    from nvdd_lammps.export import export_model

    options = given.parse_options(option or [])
    symbols = [symbol.strip() for symbol in elements.split(",") if symbol.strip()] if elements is not None else None
    with warnings.catch_warnings(record=True) as caught, report.err.status("loading, rebuilding and comparing"):
        warnings.simplefilter("always")
        meta = export_model(
            model, output, options=options, dtype=dtype, elements=symbols, allow_pickle=allow_pickle, compile=compile,
            max_edges_per_chunk=max_edges_per_chunk, recompute=recompute,
        )  # fmt: skip
    for warning in caught:
        if "as a pickle" in str(warning.message):
            report.complain(f"warning: {warning.message}")
    known = meta["elements"]
    shown = known if symbols is not None or len(known) <= 8 else ["El1", "El2"]
    report.say(f"model       {model}, cutoff {meta['cutoff']:g} A, {meta['dtype']}, {_count(known)}")
    size = output.stat().st_size / 1e6
    how = "pickled" if meta["pickled"] else "rebuilt from configuration and weights"
    report.say(f"file        {output}, {size:.3g} MB; {how}, it gives the same energy and forces")
    report.say("LAMMPS      units           metal")
    report.say(f"            pair_style      mliap unified {output}")
    report.say(f"            pair_coeff      * * {' '.join(shown)}")
    if shown is not known:
        report.say("            (one element of the model for each atom type, in the order of the types)")


def _count(elements: list[str]) -> str:
    return f"elements {', '.join(elements)}" if len(elements) <= 8 else f"{len(elements)} elements"


@report.readable_errors
def check(
    target: Annotated[Path, typer.Argument(help="A deck, or a .nvdd file.", show_default=False)],
    ranks: Annotated[int, typer.Option(help="Number of ranks to compare with one.")] = 2,
    var: Annotated[
        list[str] | None, typer.Option("--var", metavar="NAME=VALUE", help="Variable of the deck; repeatable.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Run a deck for no steps in LAMMPS on 1 and on several ranks and compare; exit code 1 if they differ."""
    from nvdd_lammps.check import findings

    failed = False
    with report.err.status("running LAMMPS"):
        for finding in findings(target, ranks, var or []):
            report.say(f"{finding.status:8} {finding.name:15} {finding.value}", style=_STYLE[finding.status])
            if finding.remedy:
                report.say(f"{'':25}{finding.remedy}", style=_STYLE[finding.status])
            failed = failed or finding.status == MISSING
    if failed:
        raise typer.Exit(report.EXIT_UNUSABLE)
