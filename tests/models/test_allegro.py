"""Allegro over ranks, in ASE and in LAMMPS, against NequIPCalculator: strictly local, so that only forces cross."""

from __future__ import annotations

import pytest

import families
import parity
from family_nequip import CONFIGS, write_checkpoint
from nvdd.errors import InputError
from nvdd.models import load

families.require("allegro", "nequip", "allegro")

# In CI on two ranks: each further one would import nequip once more, ten seconds.
test_parity = families.parity_test("allegro", ci=(2,))
test_parity_spline = families.parity_test("allegro-spline", ranks=(2, 3), ci=(2,))
test_envelope = families.envelope_test("allegro", 3, ci=False)
test_several_systems = families.several_test("allegro")
test_stress = families.stress_test("allegro")
test_ase = families.ase_test("allegro", ci=False)
test_cli = families.cli_test("allegro")
test_lammps = families.lammps_test("allegro", ci=())
test_only_forces_cross_ranks = families.only_forces_test("allegro", "quartz bar")


def test_no_other_family_passes_for_it(tmp_path):
    path = write_checkpoint(CONFIGS["nequip-zbl"], tmp_path / "nequip.ckpt")
    with pytest.raises(InputError, match=r"no Allegro model: .* take nequip:.*nequip\.ckpt"):
        load(f"allegro:{path}")
    assert not parity.wrapper("family:nequip-zbl").strictly_local
