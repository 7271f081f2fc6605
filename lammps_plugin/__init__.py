"""nvdd from LAMMPS: `pair_style mliap unified model.nvdd`.

This module is imported by pickles of `.nvdd` files and must stay light: everything is imported when it is used.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nvdd_lammps.export import export_model as export_model
    from nvdd_lammps.unified import NVDDUnified

# public name -> module that defines it
_PUBLIC = {"NVDDUnified": "nvdd_lammps.unified", "export_model": "nvdd_lammps.export"}

__all__ = [*_PUBLIC, "from_bytes", "load_unified"]


def load_unified(path: str | os.PathLike) -> NVDDUnified:
    """The object for `pair_style mliap unified` that a `.nvdd` file, ``path``, holds.

    Raises:
        InputError: the file is missing, damaged, newer than this nvdd, or can't be rebuilt here.
        MissingDependencyError: the package of the model's family is not installed.
    """
    from nvdd_lammps.model_file import load_file
    from nvdd_lammps.unified import NVDDUnified

    return NVDDUnified(*load_file(path))


def from_bytes(content: bytes) -> NVDDUnified:
    """What unpickling a `.nvdd` file calls with its ``content``: the one global in it. Name and argument are part of the
    format."""
    from nvdd_lammps.model_file import load_bytes
    from nvdd_lammps.unified import NVDDUnified

    return NVDDUnified(*load_bytes(content))


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        value = getattr(importlib.import_module(_PUBLIC[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'nvdd_lammps' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
