"""The validator believes `NeighborConfig.drops_far_edges` of a model that does, and of no other."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import far_edges
import zoo

from nvdd.validate import trace_and_validate


@pytest.mark.parametrize("drops", (True, False))
def test_the_numbers_tell(drops, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    made = functools.partial(far_edges.Repulsion, drops)
    report = trace_and_validate(made, zoo.sample(), world_size=2, md_steps=2, max_attempts=1)
    assert report.ok is drops, report.summary()
    assert drops or report.attempts[-1].failures
