"""What type checkers see of the package: the same names that it loads lazily."""

from __future__ import annotations

import ast
from pathlib import Path

import nvdd

STUB = Path(nvdd.__file__).with_name("__init__.pyi")


def test_the_stub_has_every_public_name_and_its_module():
    """`core/__init__.pyi`; whoever adds a name to `_PUBLIC` adds a line there."""
    found = {
        alias.asname: node.module
        for node in ast.parse(STUB.read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name  # the form that re-exports
    }
    assert found == nvdd._PUBLIC
