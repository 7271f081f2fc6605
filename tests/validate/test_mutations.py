"""The validator is tested itself: of a runtime with a planted fault it must say that it is wrong, whatever the fault."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import mutants
import zoo

from nvdd.validate import ValidationSession, trace_and_validate

# fault -> a kind of diagnosis that it must get, where one is due
KINDS = {
    "permuted_forces": "permuted",
    "forces_times_world_size": "times-world-size",
    "energy_times_world_size": "times-world-size",
    "energy_over_world_size": "divided",
    "virial_sign": "sign",
    "per_system_output_of_one_rank": "not-replicated",
    "missing_reduce_of_an_output": "share",
    "skip_an_exchange": "out-of-step",
    "stale_charge": "stale",
}


@pytest.fixture(scope="module")
def session():
    with ValidationSession(world_size=2, timeout=25.0, service="mutants:MutantRanks") as session:
        yield session


def validate(session, fault: str):
    session.call("plant", fault)
    return trace_and_validate(
        functools.partial(zoo.make, "Full"), zoo.sample(), session=session, md_steps=4, max_attempts=1
    )


def test_without_a_fault(session):
    report = validate(session, "")
    assert report.ok, report.summary()


@pytest.mark.parametrize("fault", mutants.FAULTS)
def test_fault_is_caught(session, fault):
    report = validate(session, fault)
    attempt = report.attempts[-1]
    assert attempt.stage == "ranks", f"on one rank nothing is planted:\n{report.summary()}"
    assert not report.ok, f"{fault} is not caught"
    assert attempt.failures or attempt.error is not None or not attempt.halo_completeness.matches, report.summary()
    assert report.next_action
    if fault in KINDS:
        assert KINDS[fault] in attempt.problems, report.summary()
