"""Fixtures of all tests: a pool of persistent ranks, and the switch for long runs."""

from __future__ import annotations

import itertools
import os
import sys
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the ranks of a test share two cores
sys.path.insert(0, str(Path(__file__).parent / "support"))

import pytest


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="of the validator's ranks: cpu, cuda:0 (all on one GPU), cuda")
    parser.addoption("--run-slow", action="store_true", help="also run the tests marked slow (minutes each)")


# The files that take longest, the longest first: what begins late must not be long, or one core waits for it.
LONG = (
    "nvdd_lammps/test_parity.py", "runtime/test_model.py", "validate/test_zoo.py", "runtime/test_pipeline.py",
    "nvdd_ase/test_spmd_calculator.py", "validate/test_mutations.py", "nvdd_ase/test_calculator_faults.py",
    "runtime/test_spmd.py", "docs/test_docs.py", "nvdd_ase/test_ase_workflows.py", "models/test_aimnet2.py",
    "runtime/test_fault_injection.py", "models/test_sevenn.py", "nvdd_ase/test_cli.py",
    "nvdd_lammps/test_cli_lammps.py", "models/test_mace.py", "runtime/test_local_ranks.py",
    "nvdd_lammps/test_model_file.py",
)  # fmt: skip


def _place(item) -> int:
    file = item.path.relative_to(Path(__file__).parent).as_posix()
    return LONG.index(file) if file in LONG else len(LONG)


def pytest_collection_modifyitems(config, items):
    items.sort(key=_place)  # the others as they are
    if not config.getoption("--run-slow"):
        skip = pytest.mark.skip(reason="long run; runs with --run-slow")
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(skip)


def pytest_terminal_summary(terminalreporter, config):
    """With --durations, the files that take longest, too: what CI's time goes into."""
    if not config.getoption("durations"):
        return
    seconds = Counter()
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid.partition("::")[0]] += report.duration
    terminalreporter.write_sep("=", "slowest files")
    for file, total in seconds.most_common(40):
        terminalreporter.write_line(f"{total:7.0f} s  {file}")


@pytest.fixture(scope="session")
def ranks():
    """Runs functions of test modules on 1 to 4 persistent ranks; see `rank_pool.RankPool`."""
    from rank_pool import RankPool

    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def evaluated_toys(ranks):
    """What each rank finds for some `toys`, all in one call of the pool, once a session."""
    from functools import cache

    import toys

    @cache
    def evaluate(names, world_size, structure, policy):
        try:
            return ranks.run(world_size, toys.on_rank, list(names), structure, policy)
        except Exception:  # one at a time, so that one that fails does not take the others along
            return [{}] * world_size

    def one(names, world_size, structure, policy, name):
        parts = evaluate(names, world_size, structure, policy)
        return parts if name in parts[0] else ranks.run(world_size, toys.on_rank, [name], structure, policy)

    return one
