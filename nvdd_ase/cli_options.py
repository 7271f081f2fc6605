"""Options that several commands of `nvdd` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

File = Annotated[Path, typer.Argument(help="Structure, in any format that ASE reads.", show_default=False)]
Model = Annotated[
    str, typer.Option("--model", "-m", help="family:checkpoint, such as sevenn:7net-0, mace:my.model, lj; 'A + B' for a sum.")
]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="KEY=VALUE", help="Option of the model (`nvdd models`), BLOCK.KEY of a sum; repeatable."),
]
Ranks = Annotated[int, typer.Option(help="Number of processes that share the atoms.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, ...; by default the best there is.")]
Dtype = Annotated[str | None, typer.Option(metavar="float32|float64", help="By default the model's own.")]
Skin = Annotated[float, typer.Option(help="Margin of the neighbour lists, in A.")]
Strategy = Annotated[str, typer.Option(metavar="halo|graph", help="Domains in space, or equal parts of the list of atoms.")]
GraphPlan = Annotated[str, typer.Option(metavar="curve|blocks", help="graph: parts along a curve, or in the file's order.")]
Compile = Annotated[bool, typer.Option("--compile", help="Compile the model at its first evaluation.")]
MaxEdges = Annotated[
    int | None, typer.Option("--max-edges-per-chunk", help="Compute with so many edges at a time: less memory, more time.")
]
Recompute = Annotated[
    bool, typer.Option("--recompute", help="Keep nothing of the size of the edges for the backward pass: less memory, more time.")
]
Index = Annotated[str, typer.Option(help="Frame of a file with several; -1 is the last.")]
Plot = Annotated[Path | None, typer.Option(help="Draw the run to this .png, .pdf or .svg file.")]
Debug = Annotated[bool, typer.Option("--debug", help="On an error, show the traceback too.")]
Pressure = Annotated[float, typer.Option(help="Pressure, in GPa.")]

# of `nvdd md --engine native`
NptMode = Annotated[str, typer.Option(metavar="iso|aniso|full", help="native, npt and nph: what the cell may do.")]
TauT = Annotated[float | None, typer.Option(help="native: fs, of the thermostat; 100 steps by default.")]
TauP = Annotated[float | None, typer.Option(help="native: fs, of the barostat; 1000 steps by default.")]
CheckpointFile = Annotated[Path | None, typer.Option("--checkpoint", help="native: file for checkpoints.")]
CheckpointInterval = Annotated[int, typer.Option(help="native: steps between checkpoints.")]
Restart = Annotated[Path | None, typer.Option(help="native: checkpoint to go on from, for --steps more steps.")]
