"""The documentation: links lead somewhere, the Python blocks that say so run, every error message has its entry."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/*.md")])
TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"
FOLDERS = ("core", "specs", "models", "nvdd_ase", "lammps_plugin")
SOURCES = sorted(path for folder in FOLDERS for path in ROOT.glob(f"{folder}/**/*.py"))
RUNS = "<!-- runs -->"  # stands before the Python blocks that are run

name = lambda path: str(path.relative_to(ROOT))


# -- links --------------------------------------------------------------------------------------------------------


def without_code(text: str) -> str:
    """The text without code blocks and `code`, in which brackets are no links."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "", text)


@cache
def anchors(path: Path) -> frozenset[str]:
    """What may follow # in a link to the page: its headings as GitHub names them, and <a id="...">."""
    text = path.read_text()
    found = set(re.findall(r'<a id="([^"]+)"', text))
    outside = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for heading in re.findall(r"^#+ +(.*)$", outside, flags=re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower())
        found.add(words.strip().replace(" ", "-"))
    return frozenset(found)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links(page):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


def test_no_anchor_stands_twice():
    for page in PAGES:
        given = re.findall(r'<a id="([^"]+)"', page.read_text())
        assert len(given) == len(set(given)), page


def test_no_path_of_one_machine():
    for page in PAGES:
        assert not re.findall(r"(?<![\w./])/(?:work|tmp|root|home)/\S*", page.read_text()), page


# -- code ---------------------------------------------------------------------------------------------------------


def python_blocks(page: Path) -> list[str]:
    """The blocks that are run, each with the lines before it blank, so that a traceback names the page's line."""
    text = page.read_text()
    found = []
    for match in re.finditer(rf"^{re.escape(RUNS)}\n+```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        found.append((text[: match.start(1)].count("\n"), match.group(1)))
    return found


@pytest.mark.parametrize("page", [p for p in PAGES if python_blocks(p)], ids=name)
def test_python_blocks_run(page, tmp_path):
    """The blocks of a page, one after the other in one process, from an empty folder."""
    lines: list[str] = []
    for start, block in python_blocks(page):
        lines += [""] * (start - len(lines)) + block.splitlines()
    script = tmp_path / page.name.replace(".md", "_blocks.py")
    script.write_text("\n".join(lines) + "\n")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_modules_and_names_in_code_exist():
    """`nvdd.module.name` in backquotes is there."""
    import importlib

    missing = set()
    for page in PAGES:
        for dotted in re.findall(r"`(nvdd(?:_ase)?(?:\.\w+)+)(?:\(\))?`", page.read_text()):
            parts = dotted.split(".")
            value, at = importlib.import_module(parts[0]), 1
            while at < len(parts):
                try:
                    value = getattr(value, parts[at])
                except AttributeError:
                    try:
                        value = importlib.import_module(".".join(parts[: at + 1]))
                    except ModuleNotFoundError:
                        missing.add(dotted)
                        break
                at += 1
    assert not missing


# -- errors -------------------------------------------------------------------------------------------------------

ERRORS = {
    "InputError", "NvddError", "RankError", "CommunicationError", "DistributedOpError", "MissingDependencyError",
    "AgreedError", "PropertyNotImplementedError",
}  # fmt: skip
FEWEST_WORDS = 3  # of a message's fixed text that must stand in the page, in a row


def messages() -> Iterator[tuple[str, str]]:
    """(place, text) of every message with which nvdd raises one of its errors; ``{}`` where a value goes."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ERRORS or called == "refuse":
                text = template(node.args[0])
                if len(words(text)) >= FEWEST_WORDS:
                    yield f"{name(path)}:{node.lineno}", text


def template(node: ast.expr) -> str:
    """The fixed text of a string expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(template(value) for value in node.values)
    if isinstance(node, ast.BinOp):
        return template(node.left) + template(node.right)
    return " {} "


def words(text: str) -> list[str]:
    return re.findall(r"[\w'.=-]+|\{\}", text.replace("`", ""))


def in_a_row(text: str, n: int) -> set[tuple[str, ...]]:
    """All runs of ``n`` words without a value between them."""
    runs, found = words(text), set()
    for k in range(len(runs) - n + 1):
        run = tuple(w.strip(".'").lower() for w in runs[k : k + n])
        if "{}" not in run:
            found.add(run)
    return found


def test_every_error_is_explained():
    """A run of words of each message stands in troubleshooting.md, so that a search for the message finds it."""
    page = in_a_row(re.sub(r"[…|]", " {} ", TROUBLESHOOTING.read_text()), FEWEST_WORDS)
    missing = []
    for place, text in messages():
        runs = in_a_row(text, FEWEST_WORDS)
        if runs and len(runs & page) < max(1, len(runs) // 4):
            missing.append(f"{place}: {text}")
    assert not missing, "add these to docs/troubleshooting.md:\n" + "\n".join(missing)


def test_anchors_that_messages_name_exist():
    for path in SOURCES:
        for page, anchor in re.findall(r"docs/([\w-]+\.md)#([\w-]+)", path.read_text()):
            assert anchor in anchors(ROOT / "docs" / page), f"{name(path)} points to docs/{page}#{anchor}"
