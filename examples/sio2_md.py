"""Dynamics of alpha-quartz with SevenNet-0 over several ranks, checked against the model's own calculator.

Run it with ``./dev demo``. First the energy, forces and stress of one structure: NVDDCalculator on ``--ranks``
processes beside SevenNetCalculator in one. Then Langevin dynamics on the ranks. Everything is in ``--output``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import numpy as np
from ase import Atoms, units
from ase.spacegroup import crystal
from rich.console import Console
from rich.table import Table

from nvdd_ase import NVDDCalculator
from nvdd_ase.cli_progress import step_progress
from nvdd_ase.md import MDSettings, prepare_velocities, run_md
from nvdd_ase.plots import plot_md

LEAST_TOLERANCE = 2e-6  # eV/A, for a float32 model whose own noise is smaller still
REORDERINGS = 3
PROPERTIES = ("energy", "forces", "stress")


def main() -> int:
    """Runs the demo; 1 if the ranks do not reproduce the single process."""
    options = parse_arguments()
    console = Console(highlight=False)
    say = partial(console.print, soft_wrap=True)
    folder = options.output
    folder.mkdir(parents=True, exist_ok=True)
    atoms = quartz()
    say(f"alpha-quartz, {len(atoms)} atoms, SevenNet-0, {options.ranks} ranks on {options.device}")

    say(f"SevenNetCalculator in this process, and {REORDERINGS} times with the atoms in another order ...")
    reference, noise = single_process(atoms, options.device)

    say(f"NVDDCalculator on {options.ranks} ranks ...")
    start = time.perf_counter()
    with NVDDCalculator("sevenn:7net-0", ranks=options.ranks, device=options.device) as calculator:
        atoms.calc = calculator
        distributed = compute(atoms)
        say(f"ready, with the first forces, after {time.perf_counter() - start:.1f} s")
        difference = differences(reference, distributed)
        tolerance = max(3 * noise["forces"], LEAST_TOLERANCE)
        console.print(comparison(reference, distributed, difference, noise, len(atoms)))
        agrees = difference["forces"] <= tolerance
        verdict = "agree" if agrees else "DO NOT AGREE"
        say(
            f"forces {verdict}: {difference['forces']:.1e} eV/A, allowed {tolerance:.1e}",
            style="green" if agrees else "bold red",
        )

        settings = MDSettings("langevin", temperature=300, timestep=1, friction=0.01, seed=1)
        say(f"velocities {prepare_velocities(atoms, settings)}")
        start = time.perf_counter()
        with step_progress("langevin", options.steps) as progress:
            records = run_md(
                atoms,
                settings,
                options.steps,
                trajectory=folder / "trajectory.extxyz",
                log=folder / "log.csv",
                on_step=lambda now: progress(now.step, f"T {now.temperature_K:.0f} K  E {now.etot_eV:.3f} eV"),
            )
        seconds = time.perf_counter() - start

    plot_md(records, folder / "plot.png", title=f"alpha-quartz, SevenNet-0, {options.ranks} ranks")
    summary = {
        "atoms": len(atoms),
        "ranks": options.ranks,
        "device": options.device,
        "difference": difference,
        "permutation_noise": noise,
        "force_tolerance_eV_per_A": tolerance,
        "agrees": bool(agrees),
        "steps": options.steps,
        "seconds_per_step": seconds / options.steps if options.steps else None,
        "mean_temperature_K": float(np.mean([record.temperature_K for record in records])),
        "final_energy_eV": records[-1].etot_eV,
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    say(f"{options.steps} steps in {seconds:.1f} s")
    for name in ("trajectory.extxyz", "log.csv", "plot.png", "summary.json"):
        say(f"  {folder / name}")
    return 0 if agrees else 1


def parse_arguments() -> argparse.Namespace:
    """The command line; NVDD_EXAMPLES_SHORT=1 makes the dynamics short."""
    short = os.environ.get("NVDD_EXAMPLES_SHORT", "0") not in ("", "0")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10 if short else 50, help="steps of 1 fs (%(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="processes that share the atoms (%(default)s)")
    parser.add_argument("--device", default="cpu", help="of both calculators (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder (%(default)s)")
    options = parser.parse_args()
    if options.steps < 0 or options.ranks < 1:
        parser.error("--steps must be 0 or more, --ranks 1 or more")
    return options


def quartz() -> Atoms:
    """72 atoms of alpha-quartz, each moved a little so that no force is zero by symmetry."""
    atoms = crystal(
        ["Si", "O"],
        [(0.4697, 0, 2 / 3), (0.4135, 0.2669, 0.7858)],
        spacegroup=154,
        cellpar=[4.913, 4.913, 5.405, 90, 90, 120],
    ).repeat(2)
    atoms.rattle(0.02, seed=1)
    return Atoms(atoms.symbols, atoms.positions, cell=atoms.cell, pbc=True)


def single_process(atoms: Atoms, device: str) -> tuple[dict, dict[str, float]]:
    """SevenNetCalculator's results, and by how much they change when the atoms stand in another order."""
    from sevenn.calculator import SevenNetCalculator

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="No tensor product accelerator")
        calculator = SevenNetCalculator("7net-0", device=device)
    results = []
    for number in range(1 + REORDERINGS):
        order = np.random.default_rng(number).permutation(len(atoms)) if number else np.arange(len(atoms))
        reordered = atoms[order]
        reordered.calc = calculator
        result = compute(reordered)
        result["forces"] = result["forces"][np.argsort(order)]
        results.append(result)
    reference, *others = results
    changes = [differences(reference, other) for other in others]
    return reference, {name: max(change[name] for change in changes) for name in PROPERTIES}


def compute(atoms: Atoms) -> dict:
    """Energy (eV), forces (eV/A) and stress (eV/A^3, Voigt order)."""
    return {
        "energy": float(atoms.get_potential_energy()),
        "forces": atoms.get_forces(),
        "stress": atoms.get_stress(),
    }


def differences(one: dict, other: dict) -> dict[str, float]:
    """Largest absolute difference of each property."""
    return {name: float(np.abs(np.subtract(one[name], other[name])).max()) for name in PROPERTIES}


def comparison(one: dict, other: dict, difference: dict, noise: dict, n_atoms: int) -> Table:
    """A row a property: both values, their difference, and what reordering the atoms alone changes."""
    table = Table(title="one process beside several ranks", title_justify="left")
    for name in ("", "one process", "ranks", "difference", "reordered"):
        table.add_column(name, justify="right" if name else "left")
    largest = np.unravel_index(np.abs(one["forces"]).argmax(), one["forces"].shape)
    for label, name, pick, scale in (
        ("eV per atom", "energy", lambda value: value, 1 / n_atoms),
        ("largest force, eV/A", "forces", lambda value: value[largest], 1),
        ("stress xx, GPa", "stress", lambda value: value[0], 1 / units.GPa),
    ):
        table.add_row(
            label,
            f"{pick(one[name]) * scale:.6f}",
            f"{pick(other[name]) * scale:.6f}",
            f"{difference[name] * scale:.1e}",
            f"{noise[name] * scale:.1e}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
