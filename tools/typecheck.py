"""Runs mypy over the modules that define public names: ./dev types

mypy finds modules by their folders, and ours have other names (setup.py), so it is shown a tree of links.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PUBLIC = ("nvdd", "nvdd_ase", "nvdd_lammps")


def packages() -> dict[str, str]:
    """Import name -> folder, as setup.py has it."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PACKAGES":
            return ast.literal_eval(node.value)
    raise SystemExit("setup.py has no PACKAGES")


def link(tree: Path) -> None:
    """Makes the import tree of links to the repository's files."""
    for name, folder in packages().items():
        place = tree.joinpath(*name.split("."))
        place.mkdir(parents=True, exist_ok=True)
        for file in [*(ROOT / folder).glob("*.py"), *(ROOT / folder).glob("*.pyi"), *(ROOT / folder).glob("py.typed")]:
            (place / file.name).symlink_to(file)


def public_modules() -> list[str]:
    """The packages, and every module in which a public class or function is defined."""
    found = set(PUBLIC)
    for package in PUBLIC:
        module = importlib.import_module(package)
        values = [getattr(module, name) for name in module.__all__]
        found |= {value.__module__ for value in values if inspect.isclass(value) or inspect.isfunction(value)}
    return sorted(found)


def main() -> int:
    """mypy's exit status; its arguments may follow."""
    with tempfile.TemporaryDirectory() as folder:
        link(Path(folder))
        modules = [argument for name in public_modules() for argument in ("-m", name)]
        users = [str(ROOT / "tests" / "typing" / "user_code.py")]
        config = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
        status = 0
        for what in (modules, users):
            status |= subprocess.run([sys.executable, "-m", "mypy", *config, *sys.argv[1:], *what], cwd=folder).returncode
    return status


if __name__ == "__main__":
    sys.exit(main())
