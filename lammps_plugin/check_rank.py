"""One rank of `nvdd lammps-check`: runs a prepared deck for no steps and writes energy, forces and pressure.

mpirun -n N python -m nvdd_lammps.check_rank DECK RESULT.npz [-var NAME VALUE ...]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

PRESSURES = ("pxx", "pyy", "pzz", "pxy", "pxz", "pyz")


def main(deck: str, result: str, arguments: list[str]) -> None:
    """Runs on every rank; the first one writes."""
    from lammps import lammps

    lmp = lammps(cmdargs=["-log", "none", "-screen", "none", *arguments])
    lmp.file(deck)
    lmp.command("thermo_style custom step pe " + " ".join(PRESSURES))
    lmp.command("run 0 post no")
    found: dict[str, Any] = {name: lmp.get_thermo(name) for name in ("pe", *PRESSURES)}
    parts = _gathered(_atoms(lmp))
    low, high, xy, yz, xz, periodic, _ = lmp.extract_box()
    if lmp.extract_setting("world_rank") == 0:
        atoms = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        found |= {
            "cell": [[high[0] - low[0], 0, 0], [xy, high[1] - low[1], 0], [xz, yz, high[2] - low[2]]],
            "origin": low,
            "pbc": [bool(p) for p in periodic],
            "units": lmp.extract_global("units"),
            "nktv2p": lmp.extract_global("nktv2p"),
            "version": lmp.version(),
            "owned": [len(part["type"]) for part in parts],
            "pair_lines": [_expanded(lmp, line) for line in _pair_lines(deck)],
        }
        np.savez(result, **found, **atoms)
    lmp.close()
    lmp.finalize()


def _atoms(lmp: Any) -> dict[str, np.ndarray]:
    n, arrays = lmp.extract_setting("nlocal"), lmp.numpy
    if n == 0:  # for which the library has no arrays
        empty = {"x": np.zeros((0, 3)), "f": np.zeros((0, 3)), "type": np.zeros(0, np.int32)}
        return {**empty, "q": np.zeros(0)} if lmp.extract_setting("q_flag") else empty
    names = ["x", "f", "type", *(["q"] if lmp.extract_setting("q_flag") else [])]
    return {name: np.array(arrays.extract_atom(name)[:n]) for name in names}


def _gathered(part: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    try:
        from mpi4py import MPI
    except ImportError:  # one rank needs none, and several don't get so far without
        return [part]
    return MPI.COMM_WORLD.allgather(part)


def _pair_lines(deck: str) -> list[str]:
    from nvdd_lammps.check_deck import pair_lines

    return pair_lines(Path(deck))


def _expanded(lmp: Any, line: str) -> str:
    """The line with the deck's variables in it replaced."""

    def value(match: re.Match) -> str:
        found = lmp.extract_variable(match[1] or match[2])
        return f"{found:g}" if isinstance(found, float) else str(found)

    return re.sub(r"\$\{(\w+)\}|\$(\w)", value, line)


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2], sys.argv[3:])
    except Exception as error:
        print(f"nvdd-check-error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
