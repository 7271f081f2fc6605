"""Numbers that are wrong in a known way, and numbers that must not be taken for it."""

from __future__ import annotations

import numpy as np
import pytest

from nvdd.validate.patterns import Wrong, recognise

N = 12
OWNER = np.arange(N) // 6
RNG = np.random.default_rng(0)
FORCES = RNG.normal(size=(N, 3))


def rows(found, geometry="default: rattled", reference=FORCES, boundary=None, system=None):
    boundary = np.isin(np.arange(N), [4, 5, 6, 7]) if boundary is None else boundary
    system = np.zeros(N, int) if system is None else system
    return Wrong("forces", geometry, True, found, reference, [], OWNER, boundary, system)


def value(by_rank, reference, geometry="default: rattled"):
    by_rank = [np.asarray(v, float) for v in by_rank]
    return Wrong(
        "energy", geometry, False, by_rank[0], np.asarray(reference, float), by_rank, OWNER, OWNER > 9, OWNER * 0
    )


def kinds(*wrong, passed=()):
    return {d.kind for d in recognise(wrong, {w.output: set(passed) for w in wrong}, 2)}


def changed(at, by=0.1):
    out = FORCES.copy()
    out[at] += by
    return out


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        (rows(2 * FORCES), "times-world-size"),
        (rows(FORCES / 2), "divided"),
        (rows(-FORCES), "sign"),
        (rows(1.5 * FORCES), "scaled"),
        (rows(0 * FORCES), "zeros"),
        (rows(FORCES[::-1]), "permuted"),
        (rows(np.where(FORCES > 0, FORCES, np.nan)), "not-finite"),
        (rows(FORCES[:-1]), "wrong-shape"),
        (rows(changed([4, 6])), "boundary"),
        (rows(changed([1, 5])), "one-rank"),
        (rows(changed([1, 8]), system=np.isin(np.arange(N), [1, 8]).astype(int)), "one-system"),
        (value([[-4.0], [-4.0]], [-2.0]), "times-world-size"),
        (value([[-1.0], [-1.0]], [-2.0]), "divided"),
        (value([[-0.5], [-1.5]], [-2.0]), "share"),
        (value([[-2.1], [-1.8]], [-2.0]), "not-replicated"),
    ],
)
def test_recognised(wrong, kind):
    assert kind in kinds(wrong)


def test_of_one_number_any_ratio_is_an_accident():
    assert kinds(value([[-2.001], [-2.001]], [-2.0])) == set()


def test_rows_must_be_so_in_every_geometry():
    assert "boundary" not in kinds(rows(changed([4, 6])), rows(changed([0, 6]), "default: strained"))


@pytest.mark.parametrize(
    ("geometry", "kind"),
    [
        ("dynamics: step 3", "stale"),
        ("default: changed inputs", "stale"),
        ("default: translated", "images"),
        ("default: strained", "cell"),
        ("two systems: two systems", "one-system"),
        ("vacuum: a rank without edges", "empty-rank"),
    ],
)
def test_what_only_some_geometries_show(geometry, kind):
    wrong = rows(changed([0, 4, 6, 9]), geometry)
    assert kind in kinds(wrong, passed=("default: rattled",))
    assert kind not in kinds(wrong, rows(changed([0, 4, 6, 9]), "default: rattled"), passed=("default: as given",))
