"""Finds the entry of docs/troubleshooting.md that a message belongs to: errors name it, `nvdd explain` prints it.

The page has each message with ``…`` in place of values. Where the text around these stands in the message, in its order, that
is its entry. Where the page has a message in other words, runs of three words decide that both have: a run counts the less,
the more entries have it, so that "must be positive" decides nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PAGE = Path(__file__).with_name("troubleshooting.md")  # a link in the repository, a file in a wheel
_LEAST = 8  # letters of a message's fixed text by which it is known
_WORDS = 3  # in a run
_ANCHOR = re.compile(r'<a id="([^"]+)"></a>')


@dataclass(frozen=True)
class Entry:
    """A row of a table of the page, or a section with an anchor of its own.

    Attributes:
        anchor: its name.
        message: the messages that it is about; ``…`` stands for values.
        remedy: what to do.
    """

    anchor: str
    message: str
    remedy: str


def entry_of(message: str) -> Entry | None:
    """The entry that explains a message, or has this anchor; None if nothing points to one more than to others."""
    page = _page()
    if message in page.entries:
        return page.entries[message]
    message = message.replace("`", "")
    known = [(letters, anchor) for letters, parts, anchor in page.texts if _stands_in(parts, message)]
    if known:
        return page.entries[max(known)[1]]
    score: dict[str, float] = {}
    for run in _runs(message):
        found = page.runs.get(run, ())
        for anchor in found:
            score[anchor] = score.get(anchor, 0.0) + 1 / len(found)
    best = max(score, key=lambda anchor: score[anchor], default="")
    return page.entries[best] if score.get(best, 0.0) >= 1 else None


@dataclass(frozen=True)
class _Page:
    entries: dict[str, Entry]  # by anchor
    texts: list[tuple[int, tuple[str, ...], str]]  # letters of a message's fixed text, its parts, anchor
    runs: dict[tuple[str, ...], set[str]]  # of words in messages -> anchors


@cache
def _page() -> _Page:
    entries = {entry.anchor: entry for entry in _read(PAGE.read_text(encoding="utf-8") if PAGE.exists() else "")}
    texts: list[tuple[int, tuple[str, ...], str]] = []
    runs: dict[tuple[str, ...], set[str]] = {}
    for entry in entries.values():
        for text in re.findall(r"`([^`]+)`", entry.message):
            letters = sum(map(str.isalpha, text))
            if letters >= _LEAST and " " in text:  # a name alone is no message
                texts.append((letters, tuple(part.strip() for part in text.split("…")), entry.anchor))
        for run in _runs(entry.message):
            runs.setdefault(run, set()).add(entry.anchor)
    return _Page(entries, texts, runs)


def _read(page: str) -> Iterator[Entry]:
    """The rows of tables that have an anchor, and the sections that have one and begin with a paragraph."""
    blocks = [block.splitlines() for block in page.split("\n\n")]
    for block, following in zip(blocks, [*blocks[1:], []], strict=True):
        for line in block:
            found = _ANCHOR.search(line)
            if found and line.startswith("|"):
                message, _, remedy = line.strip("| ").rpartition(" | ")
                yield Entry(found[1], _ANCHOR.sub("", message), remedy)
        found = _ANCHOR.fullmatch(block[0]) if len(block) == 2 else None
        if found and block[1].startswith("#") and following and following[0][:1] not in "|*#<":
            heading = re.sub(r"^\w+Error: ", "", block[1].lstrip("# "))
            yield Entry(found[1], f"`{heading}`", " ".join(following))


def _stands_in(parts: tuple[str, ...], message: str) -> bool:
    """Whether the parts stand in the message one after the other."""
    end = 0
    for part in parts:
        start = message.find(part, end)
        if start < 0:
            return False
        end = start + len(part)
    return True


def _runs(text: str) -> set[tuple[str, ...]]:
    """All runs of three words without a value between them."""
    words = [word.strip(".':").lower() for word in re.findall(r"[\w'.=-]+|…", text.replace("`", "").replace(", …", " …"))]
    runs = (tuple(words[k : k + _WORDS]) for k in range(len(words) - _WORDS + 1))
    return {run for run in runs if "…" not in run}
