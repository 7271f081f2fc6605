"""Fills the markers in reference pages from the code: `<!-- public: PACKAGE [MODULE ...] -->`, `<!-- cli -->`.

With modules, the public names that these define (or modules below them); without, all that no other marker names.
"""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

PAGES = Path(__file__).parents[1]
PUBLIC = re.compile(r"^<!-- public: ([\w.]+)((?: [\w.]+)*) -->$", re.MULTILINE)
CLI = "<!-- cli -->"


def symbols(package: str) -> dict[str, str]:
    """Public name -> module that defines it."""
    module = importlib.import_module(package)
    lazy = getattr(module, "_PUBLIC", {})
    home = lambda name: lazy.get(name) or getattr(module, name).__module__
    return {name: home(name) for name in module.__all__ if name != "__version__"}


def named_modules() -> dict[str, set[str]]:
    """Package -> the modules that markers of any page name."""
    found: dict[str, set[str]] = {}
    for page in PAGES.glob("*.md"):
        for package, modules in PUBLIC.findall(page.read_text()):
            found.setdefault(package, set()).update(modules.split())
    return found


def chosen(package: str, modules: set[str]) -> list[str]:
    """The public names that a marker stands for, in the order of the package."""
    named = named_modules().get(package, set())
    below = lambda home, given: any(home == m or home.startswith(m + ".") for m in given)
    homes = symbols(package)
    if modules:
        return [name for name, home in homes.items() if below(home, modules)]
    return [name for name, home in homes.items() if not below(home, named)]


def _public(package: str, modules: str) -> str:
    names = chosen(package, set(modules.split()))
    if not names:
        raise ValueError(f"no public name of {package} is defined in {modules}")
    return "\n".join(("```{eval-rst}", *(line for name in names for line in _auto(package, name)), "```"))


def _auto(package: str, name: str) -> Iterator[str]:
    value = getattr(importlib.import_module(package), name)
    full = f"{package}.{name}"
    if inspect.isclass(value):
        yield from (f".. autoclass:: {full}", "   :members:", "   :show-inheritance:", "")
    elif inspect.isfunction(value):
        yield from (f".. autofunction:: {full}", "")
    else:
        yield from (f".. py:data:: {full}", "", *(f"   {line}" for line in _comment(package, name)), "")


def _comment(package: str, name: str) -> list[str]:
    """What `#:` says before the definition of a constant."""
    home = symbols(package)[name]
    for module in [m for m in sys.modules if m == home or m.startswith(home + ".")]:
        found = ModuleAnalyzer.for_module(module).find_attr_docs().get(("", name))
        if found:
            return found
    raise ValueError(f"{package}.{name} has no comment #: where it is defined")


def command_line() -> str:
    """Every command of `nvdd` with its arguments, options and defaults, in Markdown, as typer writes it."""
    call = [sys.executable, "-m", "typer", "nvdd_ase.cli", "utils", "docs", "--name", "nvdd"]
    done = subprocess.run(call, capture_output=True, text=True, check=True)
    return done.stdout[done.stdout.index("\n## ") + 1 :]  # the page has a title and a list of its own


def fill(app: Sphinx | None, docname: str, source: list[str]) -> None:
    """Sphinx's event `source-read`."""
    text = PUBLIC.sub(lambda match: _public(*match.groups()), source[0])
    source[0] = text.replace(CLI, command_line()) if CLI in text else text


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", fill)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
