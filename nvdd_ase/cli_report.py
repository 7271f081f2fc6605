"""What the `nvdd` command prints: tables, results, one red line for an error."""

from __future__ import annotations

import functools
import json
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nvdd.errors import InputError, MissingDependencyError, NvddError, RankError, link_of

if TYPE_CHECKING:
    from ase import Atoms

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

EXIT_NOT_CONVERGED = 1
EXIT_UNUSABLE = 1
EXIT_UNKNOWN = 1
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130


def readable_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Makes errors that a user can act on one red message and exit code 2; --debug adds the traceback."""

    @functools.wraps(command)
    def run(*args: Any, debug: bool = False, **kwargs: Any) -> None:
        try:
            command(*args, debug=debug, **kwargs)
        except KeyboardInterrupt:
            err.print("interrupted; the frames and log lines written so far are whole", style="yellow")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except (InputError, MissingDependencyError, NvddError, NotImplementedError, OSError) as error:
            if debug:
                err.print(Text(traceback.format_exc()), soft_wrap=True)
                if isinstance(error, RankError) and error.details:
                    err.print(Text(f"on rank {error.rank}:\n{error.details}"), soft_wrap=True)
            message = str(error) or type(error).__name__
            where = link_of(message)
            complain(f"error: {message}{where and f' [{where}]'}")
            raise typer.Exit(EXIT_ERROR) from None

    return run


def complain(text: str) -> None:
    """Prints a red message on the error stream."""
    err.print(Text(text, style="bold red"), soft_wrap=True)


def say(text: str, style: str = "") -> None:
    """Prints a line that is not folded, so that paths can be copied."""
    out.print(Text(text, style=style), soft_wrap=True)


def measure(atoms: Atoms) -> dict[str, Any]:
    """Energy, forces and, where periodic, stress: plain lists and numbers, each with its unit in the name."""
    import numpy as np
    from ase import units

    forces = atoms.get_forces()
    energy = float(atoms.get_potential_energy())
    lengths = np.linalg.norm(forces, axis=1)
    result = {
        "formula": atoms.get_chemical_formula(),
        "n_atoms": len(atoms),
        "energy_eV": energy,
        "energy_per_atom_eV": energy / len(atoms),
        "max_force_eV_per_A": float(lengths.max()),
        "max_force_atom": int(lengths.argmax()),
        "forces_eV_per_A": forces.tolist(),
    }
    if "energies" in atoms.calc.results:
        result["energies_eV"] = np.asarray(atoms.calc.results["energies"]).tolist()
    if atoms.pbc.any() and atoms.cell.rank == 3:
        stress = atoms.get_stress()
        result["stress_eV_per_A3"] = stress.tolist()
        result["stress_GPa"] = (stress / units.GPa).tolist()
        result["pressure_GPa"] = float(-stress[:3].mean() / units.GPa)
    return result


def print_single(title: str, result: dict[str, Any], symbols: Sequence[str]) -> None:
    """The table of one structure."""
    atom = result["max_force_atom"]
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column()
    table.add_row("structure", f"{result['n_atoms']} atoms", result["formula"])
    table.add_row("energy", f"{result['energy_eV']:.6f}", "eV")
    table.add_row("energy per atom", f"{result['energy_per_atom_eV']:.6f}", "eV")
    table.add_row("max force", f"{result['max_force_eV_per_A']:.6f}", f"eV/A, atom {atom} ({symbols[atom]})")
    if "stress_GPa" in result:
        for name, value in zip(("xx", "yy", "zz", "yz", "xz", "xy"), result["stress_GPa"], strict=True):
            table.add_row(f"stress {name}", f"{value:.6f}", "GPa")
        table.add_row("pressure", f"{result['pressure_GPa']:.6f}", "GPa")
    else:
        table.add_row("stress", "none", "the structure is not periodic")
    out.print(table)


def print_frames(title: str, results: Iterable[dict[str, Any]]) -> None:
    """The table of several frames, one a row."""
    table = Table(title=title, title_justify="left")
    for name in ("frame", "atoms", "energy (eV)", "per atom (eV)", "max force (eV/A)", "pressure (GPa)"):
        table.add_column(name, justify="right")
    for number, result in enumerate(results):
        table.add_row(
            str(number),
            str(result["n_atoms"]),
            f"{result['energy_eV']:.6f}",
            f"{result['energy_per_atom_eV']:.6f}",
            f"{result['max_force_eV_per_A']:.6f}",
            f"{result['pressure_GPa']:.6f}" if "pressure_GPa" in result else "",
        )
    out.print(table)


def write_json(path: Path, content: Any) -> None:
    """Writes the whole file or leaves the old one."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)


def print_models() -> None:
    """The table of model families."""
    from nvdd.models.registry import families

    table = Table(show_header=False, show_lines=True)
    table.add_column("family")
    table.add_column("what it is", overflow="fold")
    for name, family in sorted(families().items()):
        installed = Text("installed", style="green") if family.installed() else Text("not installed", style="red")
        about = Table.grid(padding=(0, 2))
        about.add_column(style="dim")
        about.add_column(overflow="fold")
        options = [f"{key}: {text}" for key, text in (family.options or {}).items()]
        for label, texts in (
            ("", [family.description]),
            ("checkpoints", [", ".join(family.checkpoints)]),
            ("options", options),
            ("licence", [family.licence]),
            ("install", [family.install]),
        ):
            for number, text in enumerate(text for text in texts if text):
                about.add_row("" if number else label, Text(text))
        table.add_row(Text.assemble((name, "bold"), "\n", installed), about)
    out.print(table)
    say("A model is written family:checkpoint, family:path, or py:module:attribute for a wrapper of your own.")
    say("A sum of models is written 'mace:my.model + lj', its options --option lj.cutoff=8 (docs/compose.md).")


def print_handlers() -> None:
    """The dispatch table: what each torch operation means over several ranks; alike operations share a row."""
    from nvdd.dispatch import handler_table

    alike: dict[tuple[str, str, str], list[str]] = {}
    for handler in handler_table():
        key = (str(handler.family), str(handler.when), str(handler.does))
        alike.setdefault(key, []).append(str(handler.op))
    rows = [(family, ", ".join(dict.fromkeys(ops)), when, does) for (family, when, does), ops in sorted(alike.items())]
    if not out.is_terminal:  # a pipe or a file has no width: a line for each row, which grep finds
        for row in rows:
            print("\t".join(row))
        return
    table = Table(show_lines=True)
    table.add_column("family")
    for name in ("operations", "when", "does"):
        table.add_column(name, overflow="fold", ratio=1)
    for row in rows:
        table.add_row(*(Text(text) for text in row))
    out.print(table)
