"""Writes the table of handlers in how-fields-flow.md from the registry: python docs/handler_table.py"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from nvdd.dispatch import Handler, handler_table
from nvdd.handlers import FAMILIES

PAGE = Path(__file__).parent / "how-fields-flow.md"
BEGIN, END = "<!-- handlers: begin -->", "<!-- handlers: end -->"


def table() -> str:
    """One Markdown table a family, in the order in which handlers are tried."""
    groups: dict[str, dict[tuple[str, str], list[str]]] = {family: {} for family in FAMILIES}
    for handler in handler_table():
        groups[handler.family].setdefault((handler.when, handler.does), []).append(_name(handler))
    return "\n".join(line for family, rows in groups.items() for line in _family(family, rows))


def _family(family: str, rows: dict[tuple[str, str], list[str]]) -> Iterator[str]:
    yield from (f"**{family}** (`core/handlers/{family}.py`)", "", "| operations | with | does |", "|---|---|---|")
    for (when, does), names in rows.items():
        yield f"| {', '.join(names)} | {_plain(when)} | {_plain(does)} |"
    yield ""


def _name(handler: Handler) -> str:
    name = "any" if handler.op == "*" else handler.op.removeprefix("get:").removeprefix("set:")
    return name if handler.op == "*" else f"`{name}`"


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


def updated(page: str) -> str:
    """The page with the table of now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}{END}{after}"


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(updated(text))
    sys.exit(0)
