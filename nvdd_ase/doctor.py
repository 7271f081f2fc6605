"""`nvdd doctor`: what nvdd finds on this machine, what is missing, and how to get it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from nvdd_ase import doctor_machine as machine
from nvdd_ase import doctor_packages as packages
from nvdd_ase.doctor_check import MISSING, OK, WARNING, Check

if TYPE_CHECKING:
    from rich.console import RenderableType


def diagnose(quick: bool = False) -> list[Check]:
    """Looks at everything; never raises.

    Args:
        quick: import no model package, ask no MPI and start no ranks, which take some ten seconds.
    """
    first = [
        *(machine.python, machine.nvdd_itself, machine.torch_build, packages.dependencies, machine.backends),
        *(machine.gpus, machine.cores, machine.network, machine.shared_memory, machine.warp),
    ]
    # imports of model packages, one a core, beside the two that wait for such processes
    with ThreadPoolExecutor(2 + (os.cpu_count() or 1)) as pool:
        families = pool.submit(_guarded, packages.families, quick, pool)
        mpi = pool.submit(_guarded, packages.mpi, quick)
        found = [check for look in first for check in _guarded(look)]
        found += families.result() + _guarded(packages.e3nn) + mpi.result() + _guarded(packages.lammps)
    if healthy(found) and not quick:
        found += _guarded(two_ranks)
    return found


def healthy(checks: list[Check]) -> bool:
    """Whether nothing essential is missing."""
    return not any(check.essential and check.status == MISSING for check in checks)


def render(checks: list[Check]) -> RenderableType:
    """The findings as a table, each with its remedy below it."""
    from rich.table import Table
    from rich.text import Text

    style = {OK: "green", WARNING: "yellow", MISSING: "red"}
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        value = Text(check.value)
        if check.remedy:
            value.append(f"\n{check.remedy}", style=style[check.status])
        table.add_row(Text(check.status, style=style[check.status]), check.name, value)
    return table


def _guarded(look: Callable[..., Check | list[Check]], *arguments: Any) -> list[Check]:
    try:
        found = look(*arguments)
    except Exception as error:  # a doctor that falls ill is of no use
        value = f"could not be looked at: {type(error).__name__}: {error}"
        return [
            Check(look.__name__.replace("_", " "), WARNING, value, "see the lines above, then docs/troubleshooting.md")
        ]
    return found if isinstance(found, list) else [found]


def two_ranks() -> Check:
    """The same structure on one rank and on two: processes, gloo, kernels and numbers in one."""
    from ase.build import bulk

    from nvdd_ase import NVDDCalculator

    atoms = bulk("Ar", cubic=True, a=5.3).repeat((3, 1, 1))
    atoms.rattle(0.1)
    options = {"epsilon": 0.0104, "sigma": 3.4, "cutoff": 6.0}
    forces, start = [], time.perf_counter()
    try:
        for ranks in (1, 2):
            with NVDDCalculator("lj", ranks=ranks, model_options=options, device="cpu", start_timeout=60) as atoms.calc:
                forces.append(atoms.get_forces())
    except Exception as error:
        return Check("two ranks", MISSING, f"{type(error).__name__}: {error}", "see docs/troubleshooting.md")
    difference = abs(forces[1] - forces[0]).max()
    if not difference < 1e-12:
        remedy = "this must not be: report it, with all of this table"
        return Check("two ranks", MISSING, f"forces differ from those of one rank by {difference:.1e} eV/A", remedy)
    seconds = time.perf_counter() - start
    return Check("two ranks", OK, f"give the forces of one (lj, on the CPU, started and computed in {seconds:.1f} s)")
