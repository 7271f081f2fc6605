"""ANI-1x over ranks, in ASE and in LAMMPS, against torchani's calculator: strictly local, so that only forces cross."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ase.build import molecule

import families
from family_torchani import calculator
from nvdd.errors import InputError
from nvdd.models import load
from nvdd.models.torchani import FAMILY, _pairs

families.require("torchani", "torchani")

# torchani's calculator gives a matrix, which ASE converts with a warning
pytestmark = pytest.mark.filterwarnings("ignore:Converting 3x3 stress tensor", "ignore:pkg_resources", "ignore:cuaev")

test_parity = families.parity_test("torchani")
test_parity_member = families.parity_test("torchani-member", ranks=(1,))
test_parity_float32 = families.parity_test("torchani-float32", ranks=(3,))
test_envelope = families.envelope_test("torchani")
test_several_systems = families.several_test("torchani")
test_stress = families.stress_test("torchani")
test_ase = families.ase_test("torchani")
test_cli = families.cli_test("torchani")
test_lammps = families.lammps_test("torchani")
test_only_forces_cross_ranks = families.only_forces_test("torchani", "organic bar")


def test_published_number():
    """Methane of torchani's documentation, -40.459022 Ha by its own classes."""
    positions = [
        [0.03192167, 0.00638559, 0.01301679], [-0.83140486, 0.39370209, -0.26395324], [-0.66518241, -0.84461308, 0.20759389],
        [0.45554739, 0.54289633, 0.81170881], [0.66091919, -0.16799635, -0.91037834],
    ]  # fmt: skip
    from ase import Atoms
    from ase.units import Hartree

    from nvdd_ase import NVDDCalculator

    atoms = Atoms("CH4", positions)
    atoms.calc = NVDDCalculator("torchani")
    assert abs(atoms.get_potential_energy() / Hartree + 40.459022) < 2e-6


def test_pairs_of_edges():
    centres = torch.tensor([0, 0, 0, 2, 3, 3])
    one, other = _pairs(centres, 5)
    assert sorted(zip(one.tolist(), other.tolist(), strict=True)) == [(1, 0), (2, 0), (2, 1), (5, 4)]
    assert all(len(x) == 0 for x in _pairs(centres[:0], 5))


def test_what_it_needs_and_refuses():
    wrapper = load("torchani", member="2")
    assert wrapper.dtype == torch.float32 and wrapper.model_config.elements == {1, 6, 7, 8}
    assert wrapper.model_config.neighbor_config.cutoff == pytest.approx(5.2) and len(wrapper.networks) == 1
    with pytest.raises(InputError, match=r"no model 'ani-2x'; ani-1x ships"):
        load("torchani:ani-2x")
    with pytest.raises(InputError, match=r"member=8 is none of 0 to 7"):
        load("torchani", member=8)
    assert FAMILY.from_calculator(object()) is None


def test_calculators_model_stays_as_it_is():
    calc = calculator(torch.float64)
    atoms = molecule("CH3CH2OH")
    atoms.calc = calc
    before = atoms.get_forces().copy()
    FAMILY.from_calculator(calc).to(torch.float32)
    atoms.calc = calc
    calc.reset()
    np.testing.assert_array_equal(atoms.get_forces(), before)
