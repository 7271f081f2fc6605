"""Unified objects for LAMMPS that misbehave, or tell what they are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lammps_runs import LennardJones


class Agreed(LennardJones):
    """Raises the same error on every rank."""

    def compute_forces(self, data: Any) -> None:
        from nvdd_lammps.ranks import AgreedError

        raise AgreedError("every rank says this")


class FailsOnOne(LennardJones):
    """Raises on the last rank while the others go on."""

    def compute_forces(self, data: Any) -> None:
        if data.host.me == data.host.nprocs - 1:
            raise ValueError("this rank alone is unwell")
        super().compute_forces(data)


def save_all(folder: Path) -> None:
    """Writes a pickle of each, named in small letters."""
    for kind in (Agreed, FailsOnOne):
        kind().save(folder / f"{kind.__name__.lower()}.pkl")
