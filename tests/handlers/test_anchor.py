"""Models that compute their edge vectors from stand-ins, in several spellings and layouts; see `toys`."""

from __future__ import annotations

import pytest

import toys

NAMES = tuple(name for name in toys.TOYS if name.startswith("own vectors"))
SETUPS = [(1, "triclinic"), (2, "slab"), (3, "several"), (4, "pair")]


@pytest.mark.parametrize("name", NAMES)
def test_own_vectors(evaluated_toys, name):
    for world_size, structure in SETUPS:
        for policy in toys.POLICIES:
            parts = evaluated_toys(NAMES, world_size, structure, policy, name)
            toys.assert_equal(parts, name, structure)
            assert not any("positions" in site for part in parts for site in part[name]["sites"]), "zeros were sent"


def test_exchanges_are_those_of_features_and_forces(evaluated_toys):
    """Two layers: features fetched in each, one fold, as those of the first layer depend on species only."""
    parts = evaluated_toys(NAMES, 2, "several", "halo_fetch", NAMES[0])
    kinds = [site.partition(" toys.py")[0] for site in parts[0][NAMES[0]]["sites"]]
    assert kinds == ["getitem", "getitem", "fold of getitem", "forces"]
