"""`measure_scaling`: times are taken, loads are those of the ranks, a wrong force is seen."""

from __future__ import annotations

import numpy as np
import pytest
from ase.build import bulk

from nvdd.errors import InputError
from nvdd_ase import scaling
from nvdd_ase.scaling import LIMITS, measure_scaling

ARGON = {"epsilon": 0.0104, "sigma": 3.4, "cutoff": 6.0}


@pytest.fixture(scope="module")
def argon():
    return bulk("Ar", "fcc", a=5.26, cubic=True).repeat((3, 2, 2))


def test_rows(argon):
    before, seen = argon.positions.copy(), []
    rows = measure_scaling(argon, "lj", (1, 2), steps=2, warm_up=0, on_row=seen.append, model_options=ARGON, device="cpu")
    assert rows == seen and [row.ranks for row in rows] == [1, 2]
    one, two = rows
    assert one.owned == (48,) and one.halo == (0,) and sum(two.owned) == 48 and min(two.halo) > 0
    assert sum(two.edges) == one.edges[0]
    assert (one.speedup, one.efficiency, one.difference) == (1.0, 1.0, 0.0)
    assert two.speedup == pytest.approx(one.seconds / two.seconds) and two.efficiency == pytest.approx(two.speedup / 2)
    assert two.difference < 1e-13 and two.largest > 1e-3 and two.agrees and two.limit == LIMITS["float64"]
    assert two.imbalance == pytest.approx(max(two.owned) / 24)
    assert np.array_equal(argon.positions, before) and argon.calc is None
    assert two.as_dict()["seconds_per_step"] == two.seconds and two.as_dict()["agrees"] is True


class Wrong:
    """As NVDDCalculator, but that more ranks than one give other forces, and that a call costs a millisecond a rank."""

    made: dict = {}  # noqa: RUF012  what the last one was made with
    off = 0.0

    def __init__(self, model, *, ranks, **arguments):
        self.ranks, Wrong.made = ranks, arguments

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    description = {"dtype": "float64"}  # noqa: RUF012

    def get_forces(self, atoms):
        return atoms.positions + (Wrong.off if self.ranks > 1 else 0.0)

    def report(self):
        return [{"owned": 3, "halo": 1, "edges": 9}] * self.ranks


@pytest.mark.parametrize(("model", "off", "agrees"), [
    ("lj", 1e-7, False), ("lj", 0.0, True), ("lj", float("nan"), False), ("lj + mace:m.model", 1e-7, True),
    ("lj + mace:m.model", 1e-2, False),
])  # fmt: skip
def test_other_forces_are_seen(argon, monkeypatch, model, off, agrees):
    monkeypatch.setattr(scaling, "NVDDCalculator", Wrong)
    monkeypatch.setattr(Wrong, "off", off)
    small = argon[:4].copy()
    rows = measure_scaling(small, model, (1, 3), steps=1, skin=0.3)
    assert [row.agrees for row in rows] == [True, agrees]
    assert Wrong.made == {"skin": 0.3}


def test_speedup_counts_from_the_first_number_of_ranks(argon, monkeypatch):
    monkeypatch.setattr(scaling, "NVDDCalculator", Wrong)
    monkeypatch.setattr(Wrong, "off", 0.0)
    ticks = iter(np.cumsum([0, 9, 0, 4, 0, 9, 0, 1]).tolist())  # a first step of 9 s, then one of 4; with more ranks of 1
    monkeypatch.setattr(scaling.time, "perf_counter", lambda: next(ticks))
    two, eight = measure_scaling(argon, "lj", (2, 8), steps=1, warm_up=0)
    assert (two.seconds, two.speedup, two.efficiency) == (4, 2, 1)
    assert (eight.seconds, eight.speedup, eight.efficiency) == (1, 8, 1)


@pytest.mark.parametrize("arguments", [((),), ((1, 0),), ((1,), 0), ((1,), 1, -1)])
def test_mistakes(argon, arguments):
    with pytest.raises(InputError, match="scaling needs ranks >= 1"):
        measure_scaling(argon, "lj", *arguments)
