"""Cost: exact where costs are linear; the file of calibrations."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from known_calibration import KNOWN
from nvdd.errors import InputError
from nvdd.planning.calibration import Cost, load, save

SIZES = [(64, 1408), (64, 1024), (216, 4752), (216, 3456), (1000, 22000)]


def test_linear_costs_are_found():
    true = Cost(1.4e6, 52624.0, 9961.0)
    found = Cost.fit([(n, e, true.of(n, e)) for n, e in SIZES])
    assert found.base == pytest.approx(true.base, rel=1e-6)
    assert found.per_atom == pytest.approx(true.per_atom, rel=1e-6)
    assert found.per_edge == pytest.approx(true.per_edge, rel=1e-6)


def test_no_cost_is_negative():
    found = Cost.fit([(n, e, 1e-3 + 2e-6 * e - 1e-6 * n) for n, e in SIZES])
    assert min(found.base, found.per_atom, found.per_edge) >= 0
    assert found.of(*SIZES[-1]) == pytest.approx(1e-3 + 2e-6 * 22000 - 1e-3, rel=0.05)


def test_the_time_of_launching_kernels_is_a_floor():
    true = Cost(0.005, 8e-6, 3.7e-7, floor=0.028)
    samples = [(n, e, true.of(n, e)) for k in range(7) for n, e in ((60 * 2.5**k, 73 * 60 * 2.5**k), (60 * 2.5**k, 50 * 60 * 2.5**k))]
    found = Cost.fit(samples, with_floor=True)
    for n in (100, 576, 1800, 4032, 18252):
        assert found.of(n, 73 * n) == pytest.approx(true.of(n, 73 * n), rel=0.03)
    linear = Cost.fit(samples)
    assert max(abs(linear.of(n, e) / t - 1) for n, e, t in samples) > 0.1


def test_noise_makes_no_floor():
    noise = (1.05, 0.94, 1.02, 0.97, 1.06, 0.95, 1.01, 0.99)
    true = Cost(0.01, 1e-5, 1e-5)
    samples = [(n, e, true.of(n, e) * f) for (n, e), f in zip([s for k in range(4) for s in ((60 * 2**k, 900 * 2**k), (60 * 2**k, 1300 * 2**k))], noise, strict=True)]
    assert Cost.fit(samples, with_floor=True).floor == 0


def test_comes_back_from_its_file(tmp_path):
    file = tmp_path / "calibration.json"
    other = replace(KNOWN, model="lj sigma=2")
    assert load(file, "here", "cpu", KNOWN.model, "halo") is None
    save(KNOWN, file)
    save(other, file)
    assert load(file, "here", "cpu", KNOWN.model, "halo") == KNOWN
    assert load(file, "here", "cpu", other.model, "halo") == other
    for wrong in (("there", "cpu", KNOWN.model, "halo"), ("here", "H200", KNOWN.model, "halo"), ("here", "cpu", "mace", "halo"),
                  ("here", "cpu", KNOWN.model, "graph curve")):  # fmt: skip
        assert load(file, *wrong) is None


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "no calibration that nvdd wrote"),
        ("[]", "no calibration that nvdd wrote"),
        ('{"version": 99, "calibrations": {}}', "version 99"),
    ],
)
def test_another_file_is_refused(tmp_path, content, says):
    file = tmp_path / "other.json"
    file.write_text(content)
    with pytest.raises(InputError, match=says):
        load(file, "here", "cpu", "lj", "halo")
    with pytest.raises(InputError, match=says):
        save(KNOWN, file)
    assert file.read_text() == content


@pytest.mark.parametrize("name", ("network", "device"))
def test_an_entry_that_lacks_something_is_refused(tmp_path, name):
    file = tmp_path / "old.json"
    save(KNOWN, file)
    content = json.loads(file.read_text())
    del content["calibrations"][KNOWN.key][name]
    file.write_text(json.dumps(content))
    with pytest.raises(InputError, match="lacks something"):
        load(file, "here", "cpu", KNOWN.model, "halo")


def test_nothing_costs_nothing():
    assert Cost.fit([(4, 0, 0.0), (8, 0, 0.0)]) == Cost()
