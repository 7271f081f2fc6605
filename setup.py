"""Maps the repository's folders to import names; everything else is in pyproject.toml."""

from setuptools import setup

PACKAGES = {
    "nvdd": "core",
    "nvdd.adapters": "core/adapters",
    "nvdd.dynamics": "core/dynamics",
    "nvdd.handlers": "core/handlers",
    "nvdd.planning": "core/planning",
    "nvdd.runtime": "core/runtime",
    "nvdd.validate": "core/validate",
    "nvdd.specs": "specs",
    "nvdd.models": "models",
    "nvdd_ase": "nvdd_ase",
    "nvdd_lammps": "lammps_plugin",
}

setup(
    packages=list(PACKAGES),
    package_dir=PACKAGES,
    package_data={
        "nvdd": ["py.typed", "__init__.pyi", "troubleshooting.md"],
        "nvdd_ase": ["py.typed"],
        "nvdd_lammps": ["py.typed", "src/*.cpp", "src/*.h"],  # compiled at first use: nvdd_lammps/build.py
    },
)
