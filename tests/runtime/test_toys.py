"""Small models of every kind over ranks: all numbers of one process, or a clear stop; see `toys`.

All toys of one partition are evaluated in one call of the pool; each has a test of its own.
"""

from __future__ import annotations

import pytest

import toys

# torch's own warning, of a model that calls it
pytestmark = pytest.mark.filterwarnings("ignore:index_reduce")

# (ranks, structure): all on one rank, thin domains, ranks that own nothing or lack a system
SETUPS = [(1, "several"), (2, "triclinic"), (3, "several"), (4, "gas"), (4, "pair")]
REST = [(n, s) for n in (1, 2, 3, 4) for s in toys.STRUCTURES if (n, s) not in SETUPS]
NAMES = [name for name in toys.TOYS if not name.startswith("own vectors")]  # those: tests/handlers/test_anchor.py


def check(evaluated, names, setups, name):
    """One toy on some partitions under both policies."""
    for world_size, structure in setups:
        for policy in toys.POLICIES:
            parts = evaluated(names, world_size, structure, policy, name)
            toys.assert_equal(parts, name, structure)


@pytest.mark.parametrize("name", NAMES)
def test_equals_one_process(evaluated_toys, name):
    check(evaluated_toys, tuple(NAMES), SETUPS, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_equals_one_process_on_all_structures(evaluated_toys, name):
    check(evaluated_toys, tuple(NAMES), REST, name)
