"""Ranks that wait for each other, by what they say they do."""

from __future__ import annotations

from nvdd.runtime.standstill import PATIENCE, Standstill

A, B = (7, "exchange 3 (layer 1)"), (9, "sum over ranks (energy)")


def seen(*states, finished=()):
    """What is found at the end of ``PATIENCE`` and a bit, if these states follow each other."""
    watch, now = Standstill(), 100.0
    for state in states:
        assert watch.look(now, dict(enumerate(state)) if isinstance(state, tuple) else state, finished) is None
        now += PATIENCE + 0.1
    last = states[-1]
    return watch.look(now, dict(enumerate(last)) if isinstance(last, tuple) else last, finished)


def test_different_operations():
    rank, cause = seen((A, A, B))
    assert rank == 2 and "rank 0 in exchange 3 (layer 1) (operation 7)" in cause and "(operation 9)" in cause


def test_one_is_through():
    rank, cause = seen({0: A, 2: A}, finished=[1])
    assert rank == 1 and "rank 1 is at the end of the call; rank 0 in exchange 3" in cause


def test_all_go_on():
    assert seen((A, A)) is None  # the same one: slow, not stuck
    assert seen((None, A)) is None  # one computes, the other waits for it
    assert seen({}, finished=[0, 1]) is None
    assert seen((A, B), (B, B)) is None


def test_any_change_begins_anew():
    watch = Standstill()
    for k in range(20):
        assert watch.look(k * PATIENCE, {0: (k, "x"), 1: B}) is None
    assert watch.look(19 * PATIENCE + PATIENCE / 2, {0: (19, "x"), 1: B}) is None
    assert watch.look(20 * PATIENCE + 1, {0: (19, "x"), 1: B})[0] == 1
