"""ProbeRanks in one process: peaks of memory, and what it says of a model."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from ase.build import bulk

from nvdd import Batch, Communicator
from nvdd.models import load
from nvdd.planning.probe import ProbeRanks
from nvdd.validate.factory import FactoryRef


def probe(dtype: str | None = None) -> ProbeRanks:
    factory = FactoryRef.of(functools.partial(load, "lj", epsilon=0.0104, sigma=3.4, cutoff=7.0))
    return ProbeRanks(Communicator(None), {}, lambda phase: None, factory=factory, dtype=dtype)


def test_the_peak_is_that_of_what_is_alive(capfd):
    ranks = probe()
    with ranks._peak() as base:
        pass
    with ranks._peak() as peak:
        a = torch.zeros(1_000_000, dtype=torch.float64)
        b = torch.zeros(500_000, dtype=torch.float64)
        del a
        c = torch.zeros(250_000, dtype=torch.float64)
        del b, c
    assert peak() - base() == pytest.approx(12e6, rel=1e-3)
    assert capfd.readouterr().err == "", "the profiler's own messages are not the user's"


@pytest.mark.parametrize("dtype", (None, "float32"))
def test_describes_the_model(dtype):
    said: dict[str, Any] = probe(dtype).describe()
    assert (said["cutoff"], said["dtype"], said["device"]) == (7.0, dtype or "float64", "cpu")
    assert said["far_edges"]


def test_a_step_by_itself():
    atoms = bulk("Ar", "fcc", a=5.26, cubic=True).repeat(2)
    task = {"batch": Batch.from_atoms(atoms), "domain": {"skin": 0.5}, "together": False, "seconds": 0.01}
    found = probe().measure(task)
    assert (found["owned"], found["edges"]) == (32, 32 * 54)  # four shells within 7.5 A, of which lj drops the last
    assert found["seconds"] > 0 and found["bytes"] > 32 * 54 * 8
