"""Energies and forces of atoms that ranks own, against one process, for everything that the envelope promises."""

from __future__ import annotations

import numpy as np
import pytest

import md
import parity

NAMES = ["argon", "triclinic", "left-handed", "unwrapped", "slab", "wire", "tiny cell", "pair", "gas", "atom", "bar"]


@pytest.mark.parametrize("options", [{"skin": 0.0}, {"balance": "rcb", "skin": 1.0}], ids=["grid", "rcb"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_structure(ranks, size, options):
    parts = ranks.run(size, md.evaluate_on_rank, "lj", NAMES, options)
    for k, name in enumerate(NAMES):
        expected = parity.reference("lj", name)
        found = parity.assemble([part[k] for part in parts], len(expected.forces))
        assert abs(found.energy - expected.energy) <= 1e-12 * abs(expected.energy) + 1e-14, name
        limit = 1e-11 * np.abs(expected.forces).max() + 1e-14
        assert np.abs(found.forces - expected.forces).max() <= limit, name
        if found.stress is not None:
            assert np.abs(found.stress - expected.stress).max() <= 1e-11 * np.abs(expected.stress).max() + 1e-14, name
