"""The table of handlers in the documentation is that of the registry."""

from __future__ import annotations

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_table_of_handlers_is_current():
    spec = importlib.util.spec_from_file_location("handler_table", DOCS / "handler_table.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = script.PAGE.read_text()
    assert page == script.updated(page), "run python docs/handler_table.py"
    assert page.count("core/handlers/") >= len(script.FAMILIES)
