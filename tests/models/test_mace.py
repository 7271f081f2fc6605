"""MACEWrapper in one process, against MACECalculator, and what it refuses."""

from __future__ import annotations

import copy
import sys

import ase.calculators.lj
import numpy as np
import pytest
import torch
from ase import Atoms

from builders import assert_loads_elsewhere, evaluate, full_stress, make_batch, quartz, random_mace, spy_on
from nvdd.errors import InputError, MissingDependencyError
from nvdd.models.base import Batch
from nvdd.models.mace import FAMILY, MACEWrapper
from nvdd.models.registry import load
from nvdd.specs import SPEC_MPNN_HALO

pytest.importorskip("mace")

MODELS = {
    "plain": {},
    "three layers, l 3": {"n_layers": 3, "l_max": 3},
    "zbl": {"zbl": True},
    "one layer": {"n_layers": 1, "hidden": "16x0e"},
    "MACE, zbl": {"scale_shift": False, "zbl": True},
    "agnesi": {"distance_transform": "Agnesi"},
    "density, soft": {
        "interaction": "RealAgnosticDensityResidualInteractionBlock",
        "distance_transform": "Soft",
    },
    "non-linear": {"interaction": "RealAgnosticResidualNonLinearInteractionBlock"},
    "attention": {"interaction": "RealAgnosticAttResidualInteractionBlock"},
}
TWO_HEADS = {"heads": ("dft", "Default")}


def calculator(module, **options):
    from mace.calculators import MACECalculator

    return MACECalculator(models=module, device="cpu", default_dtype="float64", **options)


def assert_equal(wrapper, atoms: Atoms, calc) -> None:
    """All outputs equal those of MACECalculator to rounding."""
    atoms = atoms.copy()
    atoms.calc = calc
    mine, forces = evaluate(wrapper, atoms), atoms.get_forces()
    np.testing.assert_allclose(mine.energy[0], atoms.get_potential_energy(), rtol=1e-12)
    np.testing.assert_allclose(mine.energies, calc.results["energies"], rtol=1e-12, atol=1e-14)
    assert np.abs(mine.forces - forces).max() <= 1e-11 * np.abs(forces).max() + 1e-14
    if atoms.pbc.all():  # MACECalculator enlarges the cell along open axes
        stress = full_stress(atoms)
        assert np.abs(mine.stress[0] - stress).max() <= 1e-11 * np.abs(stress).max() + 1e-14


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS.keys())
def test_equals_calculator(options):
    module = random_mace(**options)
    assert_equal(MACEWrapper(module), quartz(), calculator(module))


def test_larger_cell_and_isolated_atoms():
    module = random_mace(zbl=True)
    assert_equal(MACEWrapper(module), quartz(repeat=(2, 1, 1)), calculator(module))
    molecule = Atoms("OSiO", [(0, 0, 0), (1.5, 0.1, 0), (3.0, 0, 0.2)], cell=[9, 9, 9])
    assert_equal(MACEWrapper(module), molecule + Atoms("O", [(6.0, 8.0, 8.0)]), calculator(module))


def test_no_edges():
    module = random_mace()
    assert_equal(MACEWrapper(module), Atoms("Si", cell=[20, 20, 20], pbc=True), calculator(module))


def test_two_systems_equal_each_alone():
    wrapper = MACEWrapper(random_mace(zbl=True))
    systems = [quartz(), quartz(seed=2)[:5], Atoms("O", cell=[12, 12, 12], pbc=True)]
    together, alone = evaluate(wrapper, systems), [evaluate(wrapper, s) for s in systems]
    np.testing.assert_allclose(together.energy, [r.energy[0] for r in alone], rtol=1e-13)
    np.testing.assert_allclose(together.forces, np.concatenate([r.forces for r in alone]), atol=1e-13)
    np.testing.assert_allclose(together.stress, np.concatenate([r.stress for r in alone]), atol=1e-14)


def test_vectors_from_positions():
    """A Batch with neighbour list and shifts alone gives the same: layout and signs fit together."""
    wrapper = MACEWrapper(random_mace())
    given = make_batch(wrapper, quartz())
    fields = ("positions", "atomic_numbers", "cell", "pbc", "neighbor_list", "neighbor_list_shifts", "edge_layout")
    derived = Batch(**{name: getattr(given, name) for name in fields})
    torch.testing.assert_close(derived.edge_vectors, given.edge_vectors, rtol=0, atol=1e-12)
    torch.testing.assert_close(wrapper(derived)["energies"], wrapper(given)["energies"])


def test_leaves_the_callers_tensor_alone():
    wrapper = MACEWrapper(random_mace())
    batch = make_batch(wrapper, quartz())
    batch._edge_vectors = vectors = batch.edge_vectors.detach()
    wrapper(batch)
    assert not vectors.requires_grad


# --- what crosses ranks -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, features, integers",
    [
        ("one layer", 1, 0),
        ("plain", 2, 0),
        ("three layers, l 3", 3, 0),
        ("zbl", 2, 1),
        ("agnesi", 2, 1),
        ("density, soft", 2, 1),
        ("non-linear", 4, 0),
        ("attention", 3, 0),
    ],
)
def test_index_only_gathers_and_scatters(name, features, integers):
    """The index is used by nothing but gathers and scatters, and each layer reads senders once."""
    counts = spy_on(MACEWrapper(random_mace(**MODELS[name])), quartz())
    assert counts["feature gather", "sender"] == features
    assert counts["integer gather", "sender"] == integers


def test_says_what_it_needs():
    wrapper = MACEWrapper(random_mace())
    config = wrapper.model_config
    assert config.elements == {8, 14} and config.neighbor_config.cutoff == 4.5
    assert config.node_inputs == config.system_inputs == frozenset()
    assert wrapper.edge_layout.sender_column == 0 and wrapper.edge_layout.sign == -1
    spec = wrapper.distribution_spec()
    assert spec.distribution is SPEC_MPNN_HALO.distribution and {a.kind for a in spec.adapters} == {"atoms", "edges"}
    assert wrapper.dtype == torch.float64


# --- heads --------------------------------------------------------------------------------------------------


def test_heads():
    module = random_mace(**TWO_HEADS)
    for head in ("dft", "Default"):
        assert_equal(MACEWrapper(module, head=head), quartz(), calculator(module, head=head))
    assert MACEWrapper(module).head == "Default"
    assert MACEWrapper(module, head=0).head == "dft"
    for wrong in ("pbe", 2, -1, True, 1.0):
        with pytest.raises(InputError, match=r"no head .*'dft', 'Default'"):
            MACEWrapper(module, head=wrong)


def test_head_must_be_chosen():
    module = copy.deepcopy(random_mace(**TWO_HEADS))
    module.heads = ["dft", "ccsd"]
    with pytest.raises(InputError, match=r"heads \['dft', 'ccsd'\]; choose one with head="):
        MACEWrapper(module)


# --- files --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    """A float32 model on disk."""
    path = tmp_path_factory.mktemp("mace") / "small.model"
    torch.save(random_mace(dtype=torch.float32), path)
    return path


def test_from_checkpoint(model_file):
    wrapper = MACEWrapper.from_checkpoint(model_file)
    assert wrapper.dtype == torch.float32 and not wrapper.training
    assert not any(p.requires_grad for p in wrapper.parameters())
    same = evaluate(load(f"mace:{model_file}", head="Default"), quartz())
    np.testing.assert_allclose(same.forces, evaluate(wrapper, quartz()).forces, atol=1e-6)


def test_float64_is_float64(model_file):
    """Forces of a converted model equal finite differences of its energy to 1e-9: no constant stays float32."""
    wrapper, atoms, h = MACEWrapper.from_checkpoint(model_file, dtype=torch.float64), quartz(), 1e-4
    assert wrapper.dtype == torch.float64
    forces = evaluate(wrapper, atoms).forces
    for i, c in ((0, 0), (4, 1), (8, 2)):
        energies = []
        for step in (1, -1, 2, -2):
            moved = atoms.copy()
            moved.positions[i, c] += step * h
            energies.append(evaluate(wrapper, moved).energy[0])
        numerical = -(8 * (energies[0] - energies[1]) - (energies[2] - energies[3])) / (12 * h)
        assert abs(numerical - forces[i, c]) < 1e-9


def test_foundation_model_from_cache(monkeypatch, tmp_path, model_file):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = tmp_path / "mace" / "20231203mace128L1_epoch199model"
    with pytest.raises(InputError, match=f"downloads nothing.*https.*{place.name}"):
        MACEWrapper.from_checkpoint("medium")
    with pytest.raises(InputError, match=r"MACE-OFF23_small.model"):
        MACEWrapper.from_checkpoint("off-small")
    place.parent.mkdir()
    place.write_bytes(model_file.read_bytes())
    assert MACEWrapper.from_checkpoint("medium", dtype=torch.float64).dtype == torch.float64


def test_bad_files(tmp_path):
    with pytest.raises(InputError, match=r"no MACE model file 'nowhere.model'.*medium-mpa-0"):
        MACEWrapper.from_checkpoint("nowhere.model")
    with pytest.raises(InputError, match=r"mace:FILE\.model"):
        load("mace")
    path = tmp_path / "x.model"
    path.write_bytes(b"not a model")
    with pytest.raises(InputError, match=f"{path} can't be read"):
        MACEWrapper.from_checkpoint(path)
    torch.save({"model": random_mace().state_dict(), "epoch": 3}, path)
    with pytest.raises(InputError, match="training checkpoint"):
        MACEWrapper.from_checkpoint(path)
    torch.save(torch.nn.Linear(2, 2), path)
    with pytest.raises(InputError, match=r"torch.nn.modules.linear.Linear: its forward"):
        MACEWrapper.from_checkpoint(path)
    torch.jit.script(torch.nn.Linear(2, 2)).save(path)
    with pytest.raises(InputError, match=r"TorchScript file.*<name>.model beside <name>_compiled.model"):
        MACEWrapper.from_checkpoint(path)


def test_file_of_a_missing_package(tmp_path, monkeypatch):
    path = tmp_path / "x.model"
    module = type(sys)("absent_package")
    module.Layer = type("Layer", (torch.nn.Module,), {"__module__": "absent_package"})
    monkeypatch.setitem(sys.modules, "absent_package", module)
    torch.save(module.Layer(), path)
    monkeypatch.delitem(sys.modules, "absent_package")
    with pytest.raises(MissingDependencyError, match="'absent_package'"):
        MACEWrapper.from_checkpoint(path)


def test_old_package(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.3.13")
    with pytest.raises(MissingDependencyError, match=r"0.3.13 is too old.*pip install"):
        MACEWrapper(random_mace())


def test_refused_models():
    from mace.modules import models
    from mace.modules.extensions import MACELES

    for cls, why in (
        (MACELES, "long-range"),
        (models.EnergyDipolesMACE, "dipoles"),
        (models.AtomicDipolesMACE, "no energy"),
    ):
        with pytest.raises(InputError, match=f"{cls.__name__}.*{why}"):
            MACEWrapper(cls.__new__(cls))
    with pytest.raises(InputError, match="TorchScript"):
        MACEWrapper(torch.jit.script(torch.nn.Linear(2, 2)))
    with pytest.raises(InputError, match=r"compiled by torch.compile"):
        MACEWrapper(torch.compile(random_mace()))
    embedded = copy.deepcopy(random_mace())
    embedded.joint_embedding, embedded.embedding_specs = torch.nn.Identity(), {"total_charge": {}}
    with pytest.raises(InputError, match=r"\(total_charge\)"):
        MACEWrapper(embedded)


# --- MACE's calculator --------------------------------------------------------------------------------------


def test_from_calculator():
    calc = calculator(random_mace(**TWO_HEADS), head="dft")
    before = copy.deepcopy(calc.models[0].state_dict())
    wrapper = FAMILY.from_calculator(calc)
    assert wrapper.head == "dft"
    assert_equal(wrapper, quartz(), calc)
    wrapper.to(torch.float32)
    after = calc.models[0].state_dict()
    assert all(torch.equal(after[k], v) and after[k].dtype == v.dtype for k, v in before.items())


def test_from_other_calculators():
    from ase.calculators.mixing import SumCalculator
    from mace.calculators import MACECalculator

    class Scaled(MACECalculator):
        def calculate(self, *args, **kwargs):
            raise NotImplementedError

    module = random_mace()
    for calc in (ase.calculators.lj.LennardJones(), SumCalculator([calculator(module)]), object()):
        assert FAMILY.from_calculator(calc) is None
    assert FAMILY.from_calculator(Scaled(models=module, device="cpu", default_dtype="float64")) is None
    with pytest.raises(InputError, match="committee of 2 models"):
        FAMILY.from_calculator(calculator([module, module]))
    with pytest.raises(InputError, match=r"energy_units_to_eV=27.2"):
        FAMILY.from_calculator(calculator(module, energy_units_to_eV=27.2))


# --- other processes ----------------------------------------------------------------------------------------


def test_pickle(tmp_path):
    assert_loads_elsewhere(MACEWrapper(random_mace(zbl=True)), tmp_path, "mace")
    twin = copy.deepcopy(MACEWrapper(random_mace()))
    assert twin.model is not random_mace()
    assert_equal(twin, quartz(), calculator(random_mace()))
