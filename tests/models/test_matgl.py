"""matgl's TensorNet over ranks, in ASE and in LAMMPS, against PESCalculator; files, and what is refused."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

import families
import family_matgl
import parity
from nvdd.errors import InputError, MissingDependencyError
from nvdd.models.matgl import FAMILY, TensorNetWrapper
from nvdd.models.registry import load
from nvdd_ase import NVDDCalculator

families.require("matgl", "matgl")

test_parity = families.parity_test("matgl")
test_parity_of_another = families.parity_test("matgl-SO(3)", ranks=(2,))
test_envelope = families.envelope_test("matgl")
test_several_systems = families.several_test("matgl")
test_stress = families.stress_test("matgl")
test_lammps = families.lammps_test("matgl")


def potential(**options):
    from matgl.apps.pes import Potential
    from matgl.models import TensorNet

    of_potential = {key: options.pop(key) for key in ("calc_repuls", "data_mean", "element_refs") if key in options}
    options = {"element_types": family_matgl.TYPES, "is_intensive": False, "units": 8, "nblocks": 1, **options}
    return Potential(TensorNet(**options), calc_stresses=True, **of_potential)


def test_ase_and_files(tmp_path):
    """The folder that matgl saves, in float32, is made float64."""
    name, _ = families.case("matgl").write(tmp_path)
    atoms, expected = parity.structure("quartz unit").copy(), families.reference("matgl", "quartz unit")
    with NVDDCalculator(name, ranks=2, dtype="float64") as calculator:
        atoms.calc = calculator
        assert np.abs(atoms.get_forces() - expected.forces).max() <= 1e-11 * np.abs(expected.forces).max()
        assert abs(atoms.get_potential_energy() / expected.energy - 1) < 1e-12


@pytest.mark.parametrize("kernels", (False, True))
def test_from_calculator(kernels):
    """As matgl makes it, in float32, with and without its Warp kernels."""
    from matgl.ext.ase import PESCalculator

    if kernels:
        pytest.importorskip("nvalchemiops", reason="matgl's kernels need nvalchemi-toolkit-ops; matgl's own environment has it")
    atoms = parity.structure("quartz unit").copy()
    theirs = PESCalculator(potential(use_warp=kernels, element_refs=[-3.0, -2.0, -1.0]), stress_unit="eV/A3")
    atoms.calc = theirs
    forces, stress, energy = atoms.get_forces(), atoms.get_stress(), atoms.get_potential_energy()
    atoms.calc = NVDDCalculator.from_calculator(theirs)
    scale = np.abs(forces).max()
    assert np.abs(atoms.get_forces() - forces).max() <= 1e-4 * scale + 2e-6  # float32 coordinates there
    assert np.abs(atoms.get_stress() - stress).max() <= 1e-4 * np.abs(stress).max() + 1e-7
    assert abs(atoms.get_potential_energy() / energy - 1) < 1e-6
    assert FAMILY.from_calculator(object()) is None
    with pytest.raises(InputError, match="stress in GPa, nvdd in eV/A"):
        FAMILY.from_calculator(PESCalculator(theirs.potential))


def test_refused():
    from matgl.apps.pes import Potential
    from matgl.models import CHGNet, M3GNet

    with pytest.raises(InputError, match=r"needs a matgl.apps.pes.Potential, not a torch.nn.modules.linear.Linear"):
        TensorNetWrapper(torch.nn.Linear(2, 2))
    for other, why in ((M3GNet, "three-body terms"), (CHGNet, "bond graph")):
        with pytest.raises(InputError, match=f"a {other.__name__} of matgl can't be divided over ranks.*{why}"):
            TensorNetWrapper(Potential(other(element_types=family_matgl.TYPES, is_intensive=False)))
    with pytest.raises(InputError, match=r"is no potential that is a sum over atoms \(is_intensive=True"):
        TensorNetWrapper(potential(is_intensive=True))
    for options in ({"calc_repuls": True}, {"data_mean": 1.0}):
        with pytest.raises(InputError, match=r"adds what nvdd does not divide"):
            TensorNetWrapper(potential(**options))


def test_bad_files(tmp_path):
    with pytest.raises(InputError, match="needs a model: matgl:FOLDER"):
        load("matgl")
    with pytest.raises(InputError, match=r"'TensorNet-PES' is no folder of a matgl model .*nvdd downloads nothing"):
        load("matgl:TensorNet-PES")
    for name in ("model.pt", "state.pt", "model.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(InputError, match="can't be read as a matgl model"):
        load(f"matgl:{tmp_path}")


def test_package_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "matgl.apps.pes", None)
    with pytest.raises(MissingDependencyError, match="pip install 'matgl"):
        TensorNetWrapper(torch.nn.Linear(2, 2))
