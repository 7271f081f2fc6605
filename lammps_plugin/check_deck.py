"""A user's deck as far as its first run, made harmless: it reads what it reads and writes nothing of the user's.

The deck is run in a folder of its own, in which every file of the deck's folder is a link, except for those that the
deck may write. Commands that only write (dump, restart, write_data, log, ...) are left out.
"""

from __future__ import annotations

import fnmatch
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path

from nvdd.errors import InputError

NAME = "nvdd-check.in"

# commands that begin a run; the deck ends before the first of them
_RUNS = {
    *("run", "minimize", "rerun", "temper", "temper/npt", "temper/grem", "prd", "tad", "neb", "neb/spin", "hyper"),
    *("dynamical_matrix", "third_order"),
}
# commands that write, or go elsewhere: not needed for forces
_LEFT_OUT = {
    *("dump", "dump_modify", "undump", "restart", "write_data", "write_restart", "write_dump", "write_coeff"),
    *("log", "shell", "quit"),
}
_KEYWORDS = ("file", "append", "screen")  # of fix ave/*, print: what follows is written


def prepare(deck: Path, folder: Path) -> Path:
    """Writes the harmless deck into ``folder``, which is empty, with links to the files beside it.

    Raises:
        InputError: the deck is missing, or has no run.
    """
    if not deck.is_file():
        raise InputError(f"no such deck: {deck}")
    lines, found = [], False
    for line in _commands(deck, deck.parent):
        word = line.split()[0]
        if word in _RUNS:
            found = True
            break
        if word not in _LEFT_OUT:
            lines.append(line)
    if not found:
        raise InputError(f"{deck} has no run or minimize outside `if` and loops, so there is nothing to check")
    written = [name for line in lines for name in _written(line)]
    for entry in deck.parent.iterdir():
        if not any(fnmatch.fnmatch(entry.name, pattern) for pattern in written):
            os.symlink(entry.resolve(), folder / entry.name)
    target = folder / NAME
    target.write_text("\n".join(lines) + "\n")
    return target


def _commands(deck: Path, base: Path) -> Iterator[str]:
    """Lines without comments and continuation, included files in their places."""
    text = re.sub(r"&[ \t]*\n", " ", deck.read_text())
    for line in text.splitlines():
        line = _without_comment(line).strip()
        if not line:
            continue
        words = line.split()
        if words[0] == "include" and len(words) > 1 and (base / words[1]).is_file():
            yield from _commands(base / words[1], base)
        else:
            yield line


def _without_comment(line: str) -> str:
    quote = ""
    for at, letter in enumerate(line):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter == "#":
            return line[:at]
    return line


def _written(line: str) -> Iterator[str]:
    """Patterns of names that the command writes; a variable in a name may be anything."""
    words = line.split()
    if words[0] not in ("fix", "print", "compute", "thermo_modify", "info"):
        return
    for keyword, name in itertools.pairwise(words):
        if keyword in _KEYWORDS:
            yield re.sub(r"\$\{[^}]*\}|\$\([^)]*\)|\$\w", "*", Path(name).name)


def pair_lines(deck: Path) -> list[str]:
    """The lines of the prepared deck that choose the potential, variables not replaced."""
    return [line for line in deck.read_text().splitlines() if line.split()[0] in ("pair_style", "pair_coeff")]
