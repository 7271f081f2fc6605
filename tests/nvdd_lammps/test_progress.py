"""A rank that leaves an evaluation out of step is found; one that is slow is waited for."""

from __future__ import annotations

import re

import lammps_models
from lammps_runs import lmp


def run(folder, how: str):
    lammps_models.save(folder, how, 1)
    return lmp(lammps_models.DECK.format(model=f"{how}1.pkl") + "run 4", 2, cwd=folder, limit=90)


def test_skipped_exchange_ends_all_ranks(tmp_path):
    """The rank goes back to LAMMPS, and waits there for those that wait for it."""
    done = run(tmp_path, "skip")
    said = done.out + done.err
    assert done.code != 0
    assert "ranks are out of step, and wait for each other: rank 1 is at the end of the call; rank 0 in exchange" in said
    assert said.count("ERROR") == 1, said
    assert not re.search(r"^ +2 ", done.out, re.MULTILINE), "nothing goes on"


def test_slow_ranks_are_waited_for(tmp_path):
    """One rank computes for longer than ranks may stand still."""
    done = run(tmp_path, "slow")
    assert done.code == 0 and "ERROR" not in done.out, done.out + done.err
