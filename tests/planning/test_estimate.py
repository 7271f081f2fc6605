"""estimate: numbers that can be worked out by hand, counts of a real run, refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk

import nvdd
from known_calibration import KNOWN
from nvdd.errors import InputError
from nvdd.planning.calibration import Cost
from nvdd.planning.estimate import estimate, most_atoms
from nvdd_ase import NVDDCalculator


def argon() -> Atoms:
    atoms = bulk("Ar", "fcc", a=5.26, cubic=True)
    atoms.rattle(0.1, seed=1)
    return atoms


def test_time_and_memory_are_those_of_the_model_by_hand():
    found = estimate(None, argon(), (4, 1), repeat=(6, 6, 6), calibration=KNOWN)
    one, four = found.plans
    assert (one.n_ranks, four.n_ranks) == (1, 4)
    assert one.seconds == pytest.approx(0.01 + 1e-6 * found.n_atoms + 1e-6 * found.n_edges)
    assert one.exchange == 0 and len(one.bytes_per_exchange) == 0
    loads = four.loads
    per_rank = 0.02 + 1e-6 * loads.owned + 2e-6 * loads.edges
    # two exchanges, one of half the rows; two sums over 4 ranks, each in two rounds
    messages = 2 * 1e-4 + (512 + 0.5 * 24) * loads.halo / 1e9 + 2 * 2e-4 * 2
    assert four.seconds == pytest.approx((per_rank + messages).max())
    np.testing.assert_allclose(four.bytes_per_exchange, np.array([512, 12]) * loads.halo.max())
    assert four.memory == pytest.approx((1e6 + 500 * loads.owned + 100 * loads.edges + 24 * loads.halo).max())
    assert four.speedup == pytest.approx(one.seconds / four.seconds)
    assert four.efficiency == pytest.approx(four.speedup / 4)


def test_what_a_step_over_ranks_takes_beyond_messages_is_added():
    slower = replace(KNOWN, network=replace(KNOWN.network, overhead=0.007))
    before, after = (estimate(None, argon(), (1, 4), repeat=(6, 6, 6), calibration=c).plans for c in (KNOWN, slower))
    assert after[0].seconds == before[0].seconds
    assert after[1].exchange == pytest.approx(before[1].exchange + 0.007)


def test_the_slowest_rank_counts_not_the_mean():
    uneven = argon().repeat((4, 1, 1))
    uneven.positions[:, 0] = np.sort(uneven.positions[:, 0] ** 2 / 21.0)
    found = estimate(None, uneven, (2,), repeat=(1, 4, 4), balance="grid", calibration=KNOWN)
    loads = found.plans[0].loads
    assert loads.imbalance > 1.1
    assert found.plans[0].compute == pytest.approx((0.02 + 1e-6 * loads.owned + 2e-6 * loads.edges).max(), rel=1e-3)


def test_counts_are_those_of_a_run():
    cell, repeat = argon(), (4, 3, 3)
    # lj is given the pairs within the skin, too
    found = estimate(None, cell, (2,), repeat=repeat, calibration=replace(KNOWN, far_edges=True))
    assert found.n_edges > estimate(None, cell, (2,), repeat=repeat, calibration=KNOWN).n_edges
    atoms = cell.repeat(repeat)
    options = {"epsilon": 0.0104, "sigma": 3.4, "cutoff": KNOWN.cutoff}
    with NVDDCalculator("lj", ranks=2, device="cpu", model_options=options) as atoms.calc:
        atoms.get_forces()
        report = atoms.calc.report()
    loads = found.plans[0].loads
    assert [r["owned"] for r in report] == loads.owned.tolist()
    assert [r["halo"] for r in report] == loads.halo.tolist()
    assert [r["edges"] for r in report] == loads.edges.tolist()


def test_a_network_is_replaced_by_a_given_one():
    found = estimate(None, argon(), (8,), repeat=(6, 6, 6), calibration=KNOWN, latency=0.0, bandwidth=1e30)
    assert found.plans[0].exchange == pytest.approx(0, abs=1e-12)
    assert found.calibration.network.measured == "given: latency, bandwidth"


def test_most_atoms_fill_the_memory():
    found = estimate(None, argon(), (1, 4), repeat=(6, 6, 6), calibration=KNOWN)
    for plan in found.plans:
        most = most_atoms(KNOWN, plan.loads, found.memory_limit, found.n_atoms)
        scale = most / found.n_atoms
        halo = plan.loads.halo * scale ** (2 / 3)
        filled = KNOWN.memory.of(plan.loads.owned * scale, plan.loads.edges * scale, halo).max()
        assert filled == pytest.approx(found.memory_limit, rel=1e-3)
    assert not estimate(None, argon(), (1,), calibration=KNOWN, memory=1e3).plans[0].fits
    assert estimate(None, argon(), (1,), calibration=replace(KNOWN, memory=Cost(1e9, 1.0)), memory=1e6).plans[0].most_atoms == 0


def test_graph_partition():
    found = estimate(None, argon(), (3,), repeat=(3, 3, 3), strategy="graph", graph_plan="blocks", calibration=replace(KNOWN, strategy="graph blocks"))
    assert found.plans[0].loads.how == "blocks"
    assert found.plans[0].loads.halo.tolist() == [72, 72, 72]


def test_every_number_is_plain():
    import json

    content = json.loads(json.dumps(estimate(None, argon(), (1, 2), repeat=(4, 4, 4), calibration=KNOWN).as_dict()))
    assert content["plans"][1]["owned_atoms"]["mean"] == 128
    assert content["exchanges"][0] == {"site": "h", "bytes_per_row": 512.0}


def test_is_public():
    assert nvdd.estimate is estimate


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"ranks": ()}, "whole numbers from 1 to 4096"),
        ({"ranks": (0, 2)}, r"got \[0\]"),
        ({"ranks": (2, 5000)}, r"got \[5000\]"),
        ({"ranks": (1.5,)}, r"got \[1.5\]"),
        ({"ranks": (2, 64)}, "64 ranks are more than the 4 atoms"),
        ({"memory": -1.0}, "memory must be positive"),
        ({"bandwidth": 0.0}, "bandwidth must be positive"),
        ({"latency": -1.0}, "latency must be zero or positive"),
        ({"balance": "fair"}, "'fair'"),
        ({"atoms": Atoms()}, "without atoms"),
        ({"strategy": "graph"}, "the calibration is of strategy 'halo', and 'graph curve' is asked for"),
        ({"calibration": None}, "model_factory must be a function"),
    ],
)
def test_refuses(arguments, says):
    with pytest.raises(InputError, match=says):
        estimate(None, **{"atoms": argon(), "ranks": (2,), "calibration": KNOWN, **arguments})
