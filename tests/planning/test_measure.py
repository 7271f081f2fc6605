"""calibrate: what two ranks measure of a model, against what is known of it."""

from __future__ import annotations

import functools
import platform

import pytest
from ase import Atoms
from ase.build import bulk

from nvdd.errors import InputError
from nvdd.models import load
from nvdd.planning import measure
from nvdd.planning.calibration import Calibration
from nvdd.planning.measure import calibrate

OPTIONS = {"epsilon": 0.0104, "sigma": 3.4, "cutoff": 7.0}


@pytest.fixture(scope="module")
def of_lj() -> Calibration:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "_SPEND", 0.1)
        patch.setattr(measure, "_MOST", {"cpu": 500, "cuda": 500})
        atoms = bulk("Ar", "fcc", a=5.26, cubic=True)
        atoms.rattle(0.1, seed=1)
        return calibrate(functools.partial(load, "lj", **OPTIONS), atoms, name="argon")


def test_says_what_it_is_of(of_lj):
    assert (of_lj.machine, of_lj.device, of_lj.model) == (platform.node(), "cpu", "argon")
    assert (of_lj.dtype, of_lj.strategy, of_lj.cutoff) == ("float64", "halo", 7.0)


def test_a_pair_potential_exchanges_forces_alone(of_lj):
    (forces,) = of_lj.exchanges
    assert (forces.site, forces.bytes_per_row, forces.share) == ("forces", 24.0, 1.0)
    assert of_lj.reductions == 1


def test_memory_is_linear_to_the_byte(of_lj):
    """The fit of three numbers goes through all of the steps: there is nothing in it but what grows."""
    assert len(of_lj.samples) >= 4
    for atoms, edges, _, n_bytes in of_lj.samples:
        assert of_lj.memory.of(atoms, edges) == pytest.approx(n_bytes, rel=1e-3)
    # each edge needs its vector and its energy in float64 at least
    assert 32 <= of_lj.memory.per_edge < 1000


def test_densities_differ_so_that_edges_are_told_from_atoms(of_lj):
    per_atom = {edges / atoms for atoms, edges, *_ in of_lj.samples}
    assert max(per_atom) > 1.2 * min(per_atom)


def test_atoms_without_neighbours_are_refused(monkeypatch):
    monkeypatch.setattr(measure, "_SPEND", 0.01)
    gas = Atoms("Ar4", [[30.0 * i, 0, 0] for i in range(4)])
    with pytest.raises(InputError, match="two ranks read no rows of each other in a piece of 4 atoms"):
        calibrate(functools.partial(load, "lj", **OPTIONS), gas)


def test_time_and_messages_are_positive(of_lj):
    assert of_lj.seconds.of(1000, 80_000) > 0 and of_lj.alone.of(1000, 80_000) > 0
    assert of_lj.network.latency >= 0 and of_lj.network.bandwidth > 0 and of_lj.network.reduction > 0
    assert of_lj.network.measured == "2 ranks over gloo on this machine"
    assert of_lj.device_memory > 2**20
