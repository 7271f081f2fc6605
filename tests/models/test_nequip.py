"""NequIP over ranks, in ASE and in LAMMPS, against NequIPCalculator; files, and what is refused."""

from __future__ import annotations

import copy
import pickle
import random
import sys

import numpy as np
import pytest
import torch

import families
import family_nequip
from builders import evaluate
from family_nequip import CONFIGS, NEQUIP, calculator_of, model_of, wrapper
from nvdd.errors import InputError, MissingDependencyError
from nvdd.models import load
from nvdd.models.nequip import FAMILY, NequIPWrapper
from nvdd.models.nequip_files import build_model, check_config, convert, framework
from structures import structure

families.require("nequip", "nequip")

pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated", "ignore:`torch.jit.set_fusion_strategy`")

# In CI on two ranks: each further one would import nequip once more, ten seconds.
test_parity = families.parity_test("nequip", ci=(1, 2))
test_parity_zbl = families.parity_test("nequip-zbl", ranks=(2, 3), ci=(2,))
test_parity_float32 = families.parity_test("nequip-float32", ranks=(2,))
test_envelope = families.envelope_test("nequip", 2)
test_envelope_on_three = families.envelope_test("nequip", 3, ci=False)
test_envelope_zbl = families.envelope_test("nequip-zbl", 3, ci=False)
test_several_systems = families.several_test("nequip")
test_stress = families.stress_test("nequip")
test_ase = families.ase_test("nequip", ci=False)
test_cli = families.cli_test("nequip")
test_lammps = families.lammps_test("nequip", ci=())


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    return family_nequip.write_package(CONFIGS["nequip-zbl"], tmp_path_factory.mktemp("nequip") / "model.nequip.zip")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return family_nequip.write_checkpoint(CONFIGS["nequip-zbl"], tmp_path_factory.mktemp("nequip") / "model.ckpt")


def assert_same(found: NequIPWrapper, expected: NequIPWrapper) -> None:
    one, other = (evaluate(w, structure("quartz unit")) for w in (found, expected))
    np.testing.assert_allclose(one.energies, other.energies, rtol=1e-13)
    np.testing.assert_allclose(one.forces, other.forces, atol=1e-12)


# -- files ---------------------------------------------------------------------------------------------------------


def test_package(package, tmp_path):
    """Its classes are its own; copies and pickles of the wrapper bring them along, and the weights as they are now."""
    loaded = load(f"nequip:{package}")
    assert type(loaded.model).__module__.startswith("<torch_package")
    assert_same(loaded, wrapper("nequip-zbl"))
    with torch.no_grad():
        next(loaded.model.parameters()).mul_(1.5)
    assert_same(pickle.loads(pickle.dumps(loaded)), loaded)
    assert_same(copy.deepcopy(loaded), loaded)
    half = pickle.loads(pickle.dumps(load(f"nequip:{package}", dtype=torch.float32)))
    assert half.dtype == torch.float32


def test_package_in_lammps_files(package, tmp_path):
    from nvdd_lammps import export_model
    from nvdd_lammps.model_file import load_file

    with pytest.raises(InputError, match=r"from a package or a module, which do not say how it is built; .*--allow-pickle"):
        export_model(f"nequip:{package}", tmp_path / "a.nvdd")
    with pytest.warns(UserWarning, match="goes into .* as a pickle"):
        export_model(f"nequip:{package}", tmp_path / "a.nvdd", allow_pickle=True)
    with pytest.warns(UserWarning, match="executes code from the file"):
        assert_same(load_file(tmp_path / "a.nvdd")[0], wrapper("nequip-zbl"))


def test_checkpoint_is_rebuilt_from_its_configuration(checkpoint):
    loaded = load(f"nequip:{checkpoint}")
    assert_same(loaded, wrapper("nequip-zbl"))
    again = FAMILY.rebuild(FAMILY.configuration(loaded), torch.float64)
    again.load_state_dict(loaded.state_dict())
    assert_same(again, loaded)


def test_no_such_files(tmp_path, package, checkpoint):
    for path, message in (
        ("nowhere.ckpt", "no nequip model file 'nowhere.ckpt'"),
        ("nequip.net:group/model:1", "nvdd downloads nothing: get the package"),
    ):
        with pytest.raises(InputError, match=message):
            load(f"nequip:{path}")
    for name, message in (
        ("a.nequip.pth", "is compiled, which hides"), ("a.nequip.pt2", "is compiled, which hides"),
        ("a.model", r"packages \(.nequip.zip\) and checkpoints"), ("a.ckpt", "can't be read as a model of nequip"),
        ("a.nequip.zip", "can't be read as a model of nequip"),
    ):  # fmt: skip
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(InputError, match=message):
            load(f"nequip:{tmp_path / name}")
    with pytest.raises(InputError, match="no model 'other'; it has"):
        load(f"nequip:{package}", model_name="other")
    with pytest.raises(InputError, match="need a model"):
        load("nequip")
    with pytest.raises(MissingDependencyError, match="pip install 'nequip"), pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "nequip", None)
        patch.delitem(sys.modules, "nequip.model")
        load(f"nequip:{checkpoint}")


@pytest.mark.parametrize(
    "config, message",
    [
        ({"_target_": "os.system", "command": "true"}, "made by os.system, not by a model builder"),
        ({**NEQUIP, "pair_potential": {"_target_": "subprocess.run"}}, "a part of its own, subprocess.run"),
        ([], "made by None"),
    ],
)
def test_configurations_call_nothing_else(config, message):
    with pytest.raises(InputError, match=message):
        check_config(config)


# -- modules -------------------------------------------------------------------------------------------------------


def test_nothing_of_the_process_changes():
    """nequip sets seeds, the default type and more when it is first used; a user's script keeps its own."""
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    expected = torch.rand(1).item(), random.random(), np.random.rand()
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    import e3nn

    defaults = e3nn.get_optimization_defaults()
    with framework():
        assert torch.get_default_dtype() == torch.float64
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == expected
    assert torch.get_default_dtype() == torch.float32 and e3nn.get_optimization_defaults() == defaults


def test_types():
    double = wrapper("nequip")
    single = NequIPWrapper(model_of("nequip")).to(torch.float32)
    assert (double.dtype, single.dtype) == (torch.float64, torch.float32)
    assert model_of("nequip").model_dtype == torch.float64, "the module that was given stays as it is"
    scale = np.abs(evaluate(double, structure("quartz unit")).forces).max()
    found = evaluate(single, structure("quartz unit"), torch.float64)
    assert np.abs(found.forces - evaluate(double, structure("quartz unit")).forces).max() < 1e-5 * scale
    # constants that nequip keeps in float64 have not been rounded
    for one, other in zip(convert(model_of("nequip"), torch.float32).modules(), model_of("nequip").modules(), strict=True):
        if type(one).__name__ in ("PerTypeScaleShift", "EdgeLengthNormalizer"):
            assert all(torch.equal(a, b) for a, b in zip(one.buffers(), other.buffers(), strict=True))
    inside = torch.nn.ModuleList([NequIPWrapper(model_of("nequip"))]).float()[0]  # as a part of another module
    np.testing.assert_array_equal(evaluate(inside, structure("quartz unit"), torch.float64).forces, found.forces)
    with pytest.raises(InputError, match=r"float32 or float64, not in torch.float16"):
        NequIPWrapper(model_of("nequip")).to(torch.float16)


def test_species():
    model = build_model({**NEQUIP, "num_layers": 1, "type_names": ["oxide", "cation"], "per_type_energy_shifts": 0.0}).eval()
    with pytest.raises(InputError, match=r"oxide, cation of this nequip model are no chemical symbols; give species"):
        NequIPWrapper(model)
    with pytest.raises(InputError, match=r"'Si': 'metal' is not a chemical symbol and one of this model's types"):
        NequIPWrapper(model, species={"Si": "metal"})
    mapped = NequIPWrapper(model, species={"Si": "cation", "Ti": "cation", "O": "oxide"})
    assert mapped.model_config.elements == {8, 14, 22}
    other = structure("quartz unit").copy()
    other.numbers[other.numbers == 14] = 22
    np.testing.assert_array_equal(evaluate(mapped, other).energies, evaluate(mapped, structure("quartz unit")).energies)


def test_refused():
    with pytest.raises(InputError, match=r"needs a GraphModel of nequip, not a torch.nn.modules.linear.Linear"):
        NequIPWrapper(torch.nn.Linear(1, 1))
    model = copy.deepcopy(model_of("nequip"))
    model.model_input_fields.append("charge")
    with pytest.raises(InputError, match="reads charge of each system"):
        NequIPWrapper(model)
    model = copy.deepcopy(model_of("nequip"))
    model.model.func._modules["layer0_convnet"] = torch.nn.Identity()
    with pytest.raises(InputError, match="has a Identity, of which nvdd does not know"):
        NequIPWrapper(model)
    model = copy.deepcopy(model_of("nequip"))
    scatter = model.model.func.layer0_convnet.conv.tp_scatter
    scatter.__class__ = type("OpenEquivarianceTensorProductScatter", (type(scatter),), {})
    with pytest.raises(InputError, match="fused kernel OpenEquivarianceTensorProductScatter"):
        NequIPWrapper(model)
    del model.model.func._modules["total_energy_sum"]
    with pytest.raises(InputError, match="no sum of energies of atoms"):
        NequIPWrapper(model)


def test_lennard_jones_as_pair_potential():
    """nequip 0.19 can't compute it itself."""
    lj = {"_target_": "nequip.nn.pair_potential.LennardJones", "lj_sigma": 1.4, "lj_epsilon": 0.1}
    with pytest.raises(InputError, match=r"a part of its own, nequip.nn.pair_potential.LennardJones"):
        build_model({**NEQUIP, "num_layers": 1, "pair_potential": lj})


def test_other_calculators():
    calc = calculator_of(model_of("nequip"))
    assert FAMILY.from_calculator(object()) is None
    assert FAMILY.from_calculator(calc).species == {name: name for name in family_nequip.TYPES}
    calc.energy_units_to_eV = 27.2
    with pytest.raises(InputError, match=r"energy_units_to_eV=27.2"):
        FAMILY.from_calculator(calc)
    calc.energy_units_to_eV = 1.0
    calc.transforms = calc.transforms[1:]
    with pytest.raises(InputError, match="no ChemicalSpeciesToAtomTypeMapper"):
        FAMILY.from_calculator(calc)
    other = type("Scaled", (type(calc),), {"call_model": lambda self, data: data})
    calc.__class__ = other
    assert FAMILY.from_calculator(calc) is None
