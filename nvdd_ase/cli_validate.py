"""`nvdd validate`: whether a model over ranks gives what it gives in one process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import typer

from nvdd_ase import cli_input as given
from nvdd_ase import cli_report as report
from nvdd_ase.cli_options import Debug, Device, Index, Options

EXIT_NOT_VALID = 1

Factory = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="py:module:factory, or family:checkpoint as for the other commands.", show_default=False
    ),
]
Sample = Annotated[Path, typer.Argument(help="Some tens of atoms, in any format that ASE reads.", show_default=False)]


@report.readable_errors
def validate(
    model: Factory,
    file: Sample,
    option: Options = None,
    ranks: Annotated[int, typer.Option(help="Number of processes; 3 find more than 2.")] = 2,
    device: Device = None,
    atol: Annotated[float | None, typer.Option(help="Largest error, in eV and A; by default by precision.")] = None,
    rtol: Annotated[float | None, typer.Option(help="Largest error over the largest value; both must hold.")] = None,
    steps: Annotated[int, typer.Option(help="Steps of dynamics.")] = 5,
    timeout: Annotated[float, typer.Option(help="Seconds after which ranks count as waiting for each other.")] = 120.0,
    index: Index = "-1",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the spec that works to this .json file.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Compare a model over ranks with one process in many geometries; exit code 1 if it differs."""
    options = given.parse_options(option or [])
    given.check_count("ranks", ranks, 2)
    given.check_count("steps", steps, 0)
    atoms = given.read_structure(file, index)
    if output:
        given.check_output("--output", output, file, (".json",))

    from nvdd.models.composed import normal_options
    from nvdd.models.registry import check, load
    from nvdd.validate import trace_and_validate

    options = normal_options(model, options)
    check(model, options)
    with report.err.status("validating"):
        found = trace_and_validate(
            functools.partial(load, model, **options), atoms, ranks, device or _best_device(), atol, rtol,
            md_steps=steps, timeout=timeout,
        )  # fmt: skip
    verdict, *rest = found.summary().splitlines()
    report.say(verdict, style="green" if found.ok else "bold red")
    for line in rest:
        report.say(line)
    if not found.ok:
        raise typer.Exit(EXIT_NOT_VALID)
    if output:
        found.spec.save(output)
        report.say(f"spec        {output}")


def _best_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
