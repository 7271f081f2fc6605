"""nvdd from ASE: a drop-in calculator and the ``nvdd`` command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nvdd_ase.calculator import NVDDCalculator
    from nvdd_ase.distributed_md import DistributedMD

__all__ = ["DistributedMD", "NVDDCalculator"]


def __getattr__(name: str) -> Any:
    if name == "NVDDCalculator":
        from nvdd_ase.calculator import NVDDCalculator

        return NVDDCalculator
    if name == "DistributedMD":
        from nvdd_ase.distributed_md import DistributedMD

        return DistributedMD
    raise AttributeError(f"module 'nvdd_ase' has no attribute {name!r}")
