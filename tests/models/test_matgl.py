"""matgl's TensorNet, M3GNet and CHGNet over ranks, in ASE and in LAMMPS, against PESCalculator; files, and what is refused."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

import families
import family_matgl
import parity
from nvdd.errors import InputError, MissingDependencyError
from nvdd.models.matgl import FAMILY, CHGNetWrapper, TensorNetWrapper, wrap
from nvdd.models.registry import load
from nvdd_ase import NVDDCalculator

families.require("matgl", "matgl")

test_parity = families.parity_test("matgl")
test_parity_of_another = families.parity_test("matgl-SO(3)", ranks=(2,))
test_parity_m3gnet = families.parity_test("matgl-M3GNet")
test_parity_m3gnet_smooth = families.parity_test("matgl-M3GNet-smooth", ranks=(2,))
test_parity_chgnet = families.parity_test("matgl-CHGNet")
test_parity_chgnet_norms = families.parity_test("matgl-CHGNet-norms", ranks=(3,))
test_parity_chgnet_pairs = families.parity_test("matgl-CHGNet-pairs", ranks=(2,))
test_envelope = families.envelope_test("matgl")
test_envelope_m3gnet = families.envelope_test("matgl-M3GNet")
test_envelope_chgnet = families.envelope_test("matgl-CHGNet")
test_several_systems = families.several_test("matgl")
test_several_systems_m3gnet = families.several_test("matgl-M3GNet")
test_several_systems_chgnet = families.several_test("matgl-CHGNet")
test_stress = families.stress_test("matgl")
test_stress_m3gnet = families.stress_test("matgl-M3GNet")
test_stress_chgnet = families.stress_test("matgl-CHGNet")
test_lammps = families.lammps_test("matgl")
test_lammps_m3gnet = families.lammps_test("matgl-M3GNet")
test_lammps_chgnet = families.lammps_test("matgl-CHGNet")


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


def of(name):
    """nvdd's calculator, made of matgl's around a case's potential."""
    from matgl.ext.ase import PESCalculator

    return NVDDCalculator.from_calculator(PESCalculator(family_matgl.potential(name), stress_unit="eV/A3"))


def test_magmoms():
    """Of a CHGNet whose potential computes them."""
    theirs, atoms = family_matgl.calculator("matgl-CHGNet"), parity.structure("quartz unit").copy()
    atoms.calc = theirs
    expected = np.asarray(theirs.get_property("magmoms", atoms)).reshape(-1)
    atoms.calc = of("matgl-CHGNet")
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(atoms.get_magnetic_moments(), expected, rtol=0, atol=1e-11 * np.abs(expected).max())
    without = family_matgl.potential("matgl-CHGNet-pairs")
    without.calc_magmom = False
    try:
        assert "magmoms" not in CHGNetWrapper(without).model_config.outputs
    finally:
        without.calc_magmom = True


def test_no_triples_with_azimuth():
    """matgl's own basis has another width where there is none, with which its layers can't go on."""
    from ase import Atoms

    atoms = Atoms("Si2", [[0, 0, 0], [0, 0, 2.2]], cell=[30, 30, 30], pbc=True)
    atoms.calc = of("matgl-M3GNet-smooth")
    forces, energy = atoms.get_forces(), []
    assert forces[0, 2] == -forces[1, 2] != 0
    for step in (1e-3, -1e-3):
        atoms.positions[1, 2] = 2.2 + step
        energy.append(atoms.get_potential_energy())
    np.testing.assert_allclose((energy[1] - energy[0]) / 2e-3, forces[1, 2], rtol=1e-5)


def test_refused():
    from matgl.apps.pes import Potential
    from matgl.models import CHGNet, M3GNet, SO3Net

    with pytest.raises(InputError, match=r"needs a matgl.apps.pes.Potential, not a torch.nn.modules.linear.Linear"):
        wrap(torch.nn.Linear(2, 2))
    types = {"element_types": family_matgl.TYPES}
    with pytest.raises(InputError, match="a SO3Net of matgl can't be divided over ranks by nvdd: nvdd has no wrapper"):
        wrap(Potential(SO3Net(is_intensive=False, **types)))
    with pytest.raises(InputError, match=r"this TensorNet is no potential that is a sum over atoms \(is_intensive=True"):
        wrap(potential(is_intensive=True))
    with pytest.raises(InputError, match=r"this M3GNet is no potential that is a sum over atoms \(is_intensive=True"):
        wrap(Potential(M3GNet(is_intensive=True, **types)))
    with pytest.raises(InputError, match=r"include_state=True"):
        wrap(Potential(CHGNet(dim_state_feats=2, dim_state_embedding=4, **types)))
    for options in ({"readout_field": "bond_feat"}, {"pooling_operation": "mean"}):
        with pytest.raises(InputError, match=r"this CHGNet of matgl reads its energy from the (sum of bond|mean of atom)_feat"):
            wrap(Potential(CHGNet(**options, **types)))
    with pytest.raises(InputError, match=r"has layer_bond_weights='both', whose layers cast to float32"):
        wrap(Potential(CHGNet(layer_bond_weights="both", **types)))
    for options in ({"calc_repuls": True}, {"data_mean": 1.0}):
        with pytest.raises(InputError, match=r"adds what nvdd does not divide"):
            wrap(potential(**options))


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
