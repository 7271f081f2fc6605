"""Messages lead to their entries in docs/troubleshooting.md; errors name them in tracebacks."""

from __future__ import annotations

import importlib.util
import pickle
import sys
import traceback
from pathlib import Path

import pytest

from nvdd import remedies
from nvdd.errors import DistributedOpError, InputError, MissingDependencyError, NvddError, RankError, link_of
from nvdd.remedies import entry_of

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("message", "anchor"), [
    ("there are no atoms; the model needs at least one", "no-atoms"),
    ("the model does not know Xe; it knows Si, O", "unknown-elements"),
    ("repeat (2, 2) must be three positive whole numbers, such as (40, 40, 40)", "cli-plan-repeat"),
    ("rank 1 failed in phase 'forward': the periodic cell vectors are linearly dependent", "dependent"),
    ("rank 1 failed in phase 'forward': something that nobody has foreseen", "rank-failed"),
    ("ranks are out of step: rank 0 is in exchange 3 (a.py:1), rank 1 in exchange 4 (b.py:2)", "out-of-step"),
    ("no-atoms", "no-atoms"),
])  # fmt: skip
def test_entries(message, anchor):
    entry = entry_of(message)
    assert entry is not None and entry.anchor == anchor and entry.remedy and "<a id" not in entry.message


@pytest.mark.parametrize("message", ["", "must be positive", "a text about something else altogether"])
def test_no_entry(message):
    assert entry_of(message) is None and link_of(message) == ""


def test_most_messages_of_the_code_have_an_entry():
    """All but some whose words are values: 97 in 100. (That each has its words in the page is tests/docs/test_docs.py's.)"""
    spec = importlib.util.spec_from_file_location("docs_tests", ROOT / "tests" / "docs" / "test_docs.py")
    docs_tests = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(docs_tests)
    messages = [text.replace("{}", " Q7 ") for _, text in docs_tests.messages()]
    lost = [text for text in messages if entry_of(text) is None]
    assert len(messages) > 500 and len(lost) < 0.03 * len(messages), lost


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes from Python 3.11 on; runs there")
@pytest.mark.parametrize("error", [
    InputError("there are no atoms; the model needs at least one"), RankError(1, "forward", "killed by signal 9 (SIGKILL)"),
    NvddError("the ranks are closed; there is nothing to report"), MissingDependencyError("a plot needs matplotlib, which is not installed"),
    DistributedOpError("scatter_to_owners takes rows of atoms, and this is: edge", "op", "m.py:1"),
], ids=lambda error: type(error).__name__)  # fmt: skip
def test_a_traceback_names_the_entry_once(error):
    for one in (error, pickle.loads(pickle.dumps(error))):
        text = "".join(traceback.format_exception(one))
        assert text.count("docs/troubleshooting.md#") == 1
        assert "troubleshooting" not in str(one) and one.args == error.args


def test_without_the_page_errors_are_as_they_were(monkeypatch, tmp_path):
    monkeypatch.setattr(remedies, "PAGE", tmp_path / "none.md")
    remedies._page.cache_clear()
    try:
        assert str(InputError("there are no atoms; the model needs at least one")).startswith("there are no atoms")
        assert link_of("there are no atoms; the model needs at least one") == ""
    finally:
        remedies._page.cache_clear()


def test_the_page_is_that_of_the_documentation():
    assert remedies.PAGE.read_text() == (ROOT / "docs" / "troubleshooting.md").read_text()
