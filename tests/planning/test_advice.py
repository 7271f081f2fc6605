"""Advice follows from the numbers."""

from __future__ import annotations

from dataclasses import replace

from ase.build import bulk

from known_calibration import KNOWN
from nvdd.planning.advice import milliseconds, recommend
from nvdd.planning.calibration import Cost
from nvdd.planning.estimate import estimate
from nvdd.runtime.out_of_memory import gib, ranks_needed

CELL = bulk("Ar", "fcc", a=5.26, cubic=True)


def test_the_most_ranks_that_are_efficient_are_recommended():
    found = estimate(None, CELL, (1, 2, 4, 8, 64, 512), repeat=(24, 24, 24), calibration=replace(KNOWN, alone=KNOWN.seconds))
    best = [plan for plan in found.plans if plan.efficiency >= 0.8][-1]
    lines = recommend(found, "GPUs")
    assert 1 < best.n_ranks < 512
    assert lines[0].startswith(f"{best.n_ranks} GPUs: {milliseconds(best.seconds)} a step")
    assert f"more than {best.n_ranks} GPUs leave fewer than {round(found.n_atoms / best.n_ranks)} atoms a rank" in lines[1]


def test_what_does_not_fit_says_how_many_ranks_it_takes():
    calibration = replace(KNOWN, memory=Cost(0.0, 1e4))
    found = estimate(None, CELL, (1, 2), repeat=(10, 10, 10), calibration=calibration, memory=1e6)
    needed = ranks_needed(found.plans[-1].memory, 1e6, 2)
    assert needed == 45  # 4e7 bytes in pieces of 9e5
    assert f"about {needed} ranks are needed" in recommend(found)[0]
    partly = estimate(None, CELL, (1, 64), repeat=(10, 10, 10), calibration=calibration, memory=1e6)
    assert "1 rank or fewer are too few: 38.1 MiB of 0.954 MiB" in recommend(partly)[-1]


def test_uneven_domains_are_named():
    slab = bulk("Ar", "fcc", a=5.26, cubic=True)
    slab.cell[2, 2] *= 4  # vacuum in a periodic cell
    found = estimate(None, slab, (8,), repeat=(4, 4, 1), balance="grid", calibration=KNOWN)
    assert found.plans[0].loads.imbalance > 1.25
    assert any("balance='rcb' divides evenly" in line for line in recommend(found))


def test_units():
    assert (milliseconds(0.0123), milliseconds(2.5)) == ("12.3 ms", "2.5 s")
    assert (gib(3 * 2**30), gib(2**20)) == ("3 GiB", "1 MiB")
