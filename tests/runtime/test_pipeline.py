"""Sums of models over 1 to 4 ranks against each of them in one process, searched and differentiated by itself."""

from __future__ import annotations

import numpy as np
import pytest

import composed
import parity

RANKS = (1, 2, 3, 4)
# name -> structure; those of argon for toys and lj, of silica for networks
CASES = {
    "lj + lj": "triclinic",
    "mace + lj": "silica left-handed",
    "sevennet + lj": "silica unwrapped",
    "three": "silica left-handed",
    "mace + positions": "silica unwrapped",
    "toy + positions": "triclinic",
    "direct + lj": "triclinic",
    "internal + lj": "unwrapped",
    "policies": "triclinic",
    "energy of systems + lj": "triclinic",
    "wired": "triclinic",
    "wired, energies of both": "left-handed",
    "wired backwards": "triclinic",
    "wired to two": "triclinic",
    "wired, positions": "unwrapped",
    "wired, halo read": "triclinic",
    "wired, fixed": "triclinic",
}


def check(ranks, world_size: int, name: str, atoms, **options) -> list[dict]:
    expected = composed.plain(name, atoms)
    parts = ranks.run(world_size, composed.on_rank, name, atoms, sorted(expected), options)
    composed.assert_equal(parts, expected)
    assert np.abs(expected["forces"]).max() > 1e-6 or len(expected["forces"]) == 1
    for part in parts:
        assert not part["setup"], "the second step must build no plan"
        assert part["builds"] == 1, "one partition and one halo for all blocks"
    return parts


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world_size", RANKS)
def test_parity(ranks, world_size, name):
    check(ranks, world_size, name, parity.structure(CASES[name]), skin=0.5 if world_size % 2 else 1.0)
