"""SevenNetWrapper in one process, against SevenNetCalculator, and what it refuses."""

from __future__ import annotations

import copy
import sys
from functools import cache

import ase.calculators.lj
import numpy as np
import pytest
import torch
from ase import Atoms

from builders import assert_loads_elsewhere, evaluate, full_stress, make_batch, quartz, spy_on
from nvdd.errors import InputError, MissingDependencyError
from nvdd.models.base import Batch
from nvdd.models.registry import load
from nvdd.models.sevenn import FAMILY, SevenNetWrapper
from nvdd.specs import SPEC_MPNN_HALO

pytest.importorskip("sevenn")

MODELS = [("7net-0", None), ("7net-l3i5", None), ("7net-mf-0", "PBE"), ("7net-mf-0", "R2SCAN")]


@cache
def model_of(name: str) -> torch.nn.Module:
    """A module as sevenn builds it; not to be changed."""
    from sevenn.util import load_checkpoint

    return load_checkpoint(name).build_model()


@cache
def wrapper_of(name: str, modal: str | None = None) -> SevenNetWrapper:
    return SevenNetWrapper(model_of(name), modal=modal)


@cache
def calculator(name: str, modal: str | None = None):
    from sevenn.calculator import SevenNetCalculator

    copied = copy.deepcopy(model_of(name))  # the calculator sets flags of its module
    return SevenNetCalculator(copied, file_type="model_instance", modal=modal, device="cpu")


def structure() -> Atoms:
    return quartz(stdev=0.05)


def permutation_noise(atoms: Atoms, calc, forces: np.ndarray) -> float:
    """By how much the calculator's own forces differ when atoms come in another order, eV/A."""
    noise = 0.0
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(atoms))
        again = atoms[order]
        again.calc = calc
        noise = max(noise, np.abs(again.get_forces() - forces[order]).max())
    return noise


def assert_equal(wrapper: SevenNetWrapper, atoms: Atoms, calc) -> None:
    """All outputs equal those of SevenNetCalculator within its own float32 noise."""
    atoms = atoms.copy()
    atoms.calc = calc
    mine, forces = evaluate(wrapper, atoms), atoms.get_forces()
    energy, energies, stress = atoms.get_potential_energy(), calc.results["energies"], full_stress(atoms)
    np.testing.assert_allclose(mine.energy[0], energy, rtol=1e-6)
    np.testing.assert_allclose(mine.energies, energies, rtol=1e-6)
    assert np.abs(mine.forces - forces).max() <= max(3 * permutation_noise(atoms, calc, forces), 2e-6)
    if atoms.pbc.all():
        assert np.abs(mine.stress[0] - stress).max() <= 1e-6 * max(1, np.abs(stress).max())


@pytest.mark.parametrize("name, modal", MODELS)
def test_equals_calculator(name, modal):
    assert_equal(wrapper_of(name, modal), structure(), calculator(name, modal))


def test_molecule_and_no_edges():
    wrapper, calc = wrapper_of("7net-0"), calculator("7net-0")
    molecule = Atoms("OSiO", [(0, 0, 0), (1.5, 0.1, 0), (3.0, 0, 0.2)], cell=[9, 9, 9])
    assert_equal(wrapper, molecule + Atoms("O", [(6.0, 8.0, 8.0)]), calc)
    alone = evaluate(wrapper, Atoms("Si", cell=[20, 20, 20], pbc=True))
    assert np.isfinite(alone.energy).all() and not alone.forces.any() and not alone.stress.any()


def test_two_systems_equal_each_alone():
    wrapper = wrapper_of("7net-mf-0", "PBE")
    systems = [structure(), quartz(seed=2)[:5], Atoms("O", cell=[12, 12, 12], pbc=True)]
    together, alone = evaluate(wrapper, systems), [evaluate(wrapper, s) for s in systems]
    np.testing.assert_allclose(together.energy, [r.energy[0] for r in alone], rtol=1e-6)
    np.testing.assert_allclose(together.forces, np.concatenate([r.forces for r in alone]), atol=2e-5)
    np.testing.assert_allclose(together.stress, np.concatenate([r.stress for r in alone]), atol=1e-6)


def test_vectors_from_positions():
    """A Batch with neighbour list and shifts alone gives the same: layout and signs fit together."""
    wrapper = wrapper_of("7net-0")
    given = make_batch(wrapper, structure(), torch.float64)
    fields = ("positions", "atomic_numbers", "cell", "pbc", "neighbor_list", "neighbor_list_shifts", "edge_layout")
    derived = Batch(**{name: getattr(given, name) for name in fields})
    torch.testing.assert_close(derived.edge_vectors, given.edge_vectors, rtol=0, atol=1e-12)
    torch.testing.assert_close(wrapper(derived)["energies"], wrapper(given)["energies"])


def test_float64_is_float64():
    """Forces equal finite differences of the energy to 1e-7 and better: no constant stays float32."""
    wrapper, atoms, h = SevenNetWrapper.from_checkpoint("7net-0", dtype=torch.float64), structure()[:4], 1e-4
    assert wrapper.dtype == torch.float64
    forces = evaluate(wrapper, atoms).forces
    for i, c in ((0, 0), (3, 2)):
        energies = []
        for step in (1, -1, 2, -2):
            moved = atoms.copy()
            moved.positions[i, c] += step * h
            energies.append(evaluate(wrapper, moved).energy[0])
        numerical = -(8 * (energies[0] - energies[1]) - (energies[2] - energies[3])) / (12 * h)
        assert abs(numerical - forces[i, c]) < 1e-9
    np.testing.assert_allclose(forces, evaluate(wrapper_of("7net-0"), atoms).forces, atol=2e-5)


def test_float64_of_a_modal():
    wrapper = copy.deepcopy(wrapper_of("7net-mf-0", "R2SCAN")).to(torch.float64)
    reference = evaluate(wrapper_of("7net-mf-0", "R2SCAN"), structure())
    np.testing.assert_allclose(evaluate(wrapper, structure()).forces, reference.forces, atol=2e-5)


def test_default_dtype_does_not_matter():
    """A script that works in float64 gets the same float32 model."""
    torch.set_default_dtype(torch.float64)
    try:
        wrapper = SevenNetWrapper.from_checkpoint("7net-0")
        assert torch.get_default_dtype() == torch.float64
        assert {t.dtype for t in wrapper.parameters()} == {torch.float32}
        assert not wrapper.training and not any(p.requires_grad for p in wrapper.parameters())
        mine = evaluate(wrapper, structure())
    finally:
        torch.set_default_dtype(torch.float32)
    np.testing.assert_allclose(mine.forces, evaluate(wrapper_of("7net-0"), structure()).forces, atol=2e-5)


def test_index_only_gathers_and_scatters():
    """The index is used by nothing but gathers and scatters, and each of the 5 layers reads senders once."""
    for name, modal in (("7net-0", None), ("7net-mf-0", "PBE")):
        counts = spy_on(wrapper_of(name, modal), structure())
        assert counts["feature gather", "sender"] == counts["__getitem__", "sender"] == 5
        assert counts["scatter_reduce_", "receiver"] == 5


def test_says_what_it_needs():
    wrapper = wrapper_of("7net-0")
    config = wrapper.model_config
    assert len(config.elements) == 89 and {1, 8, 14, 94} <= config.elements and 86 not in config.elements
    assert config.neighbor_config.cutoff == 5.0
    assert wrapper.edge_layout.sender_column == 1 and wrapper.edge_layout.sign == 1
    spec = wrapper.distribution_spec()
    assert spec.distribution is SPEC_MPNN_HALO.distribution and {a.kind for a in spec.adapters} == {"edges"}
    assert wrapper.dtype == torch.float32


# --- names, files, modals -----------------------------------------------------------------------------------


def test_names():
    from nvdd.models.sevenn import _find

    for name in FAMILY.checkpoints:
        assert _find(name).is_file()
    latest = _find("7net-0")
    for alias in ("SevenNet-0", "7net-0_11July2024", "7net-0_11Jul2024", str(latest), latest):
        assert _find(alias) == latest
    assert "22May2024" in str(_find("7NET-0_22may2024"))


def test_weights_not_here(monkeypatch, tmp_path):
    """A model whose weights aren't in the package is looked for in sevenn's cache, and never downloaded."""
    import requests

    def refuse(*args, **kwargs):
        raise AssertionError("a download was tried")

    monkeypatch.setattr(requests, "get", refuse)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(
        InputError, match=r"downloads nothing.*https://.*omni.*\.cache/sevennet/SevenNet_omni/.*omni.pth"
    ):
        SevenNetWrapper.from_checkpoint("7net-omni", modal="mpa")
    from nvdd.models.sevenn import _find

    place = tmp_path / ".cache/sevennet/SevenNet_omni/checkpoint_sevennet_omni.pth"
    place.parent.mkdir(parents=True)
    place.write_bytes(b"")
    assert _find("7net-omni") == place


def test_modals():
    with pytest.raises(InputError, match=r"several fidelities; choose modal= from \['R2SCAN', 'PBE'\]"):
        SevenNetWrapper(model_of("7net-mf-0"))
    with pytest.raises(InputError, match=r"no modal 'LDA'; choose from \['R2SCAN', 'PBE'\]"):
        SevenNetWrapper(model_of("7net-mf-0"), modal="LDA")
    with pytest.raises(InputError, match=r"modal='PBE' was given, but .* one fidelity only"):
        load("sevenn:7net-0", modal="PBE")


def test_bad_files(tmp_path):
    with pytest.raises(InputError, match=r"file 'nowhere.pth'.*7net-l3i5"):
        SevenNetWrapper.from_checkpoint("nowhere.pth")
    with pytest.raises(InputError, match="7net-mf-0"):
        load("sevenn")
    path = tmp_path / "x.pth"
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(InputError, match=f"{path} can't be read as a SevenNet checkpoint"):
        SevenNetWrapper.from_checkpoint(path)
    torch.save({"model": 1}, path)
    with pytest.raises(InputError, match=r"can't be read as a SevenNet checkpoint"):
        SevenNetWrapper.from_checkpoint(path)


def test_refused_models():
    with pytest.raises(InputError, match=r"not a torch.nn.modules.linear.Linear"):
        SevenNetWrapper(torch.nn.Linear(2, 2))
    model = copy.deepcopy(model_of("7net-0"))
    model.delete_module_by_key("rescale_atomic_energy")
    with pytest.raises(InputError, match=r"take the serial model"):
        SevenNetWrapper(model)
    model.type_map = None
    with pytest.raises(InputError, match=r"type_map"):
        SevenNetWrapper(model)


def test_package_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "sevenn", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'sevenn"):
        SevenNetWrapper.from_checkpoint("7net-0")


# --- SevenNet's calculator ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name, modal", [("7net-0", None), ("7net-mf-0", "R2SCAN")])
def test_from_calculator(name, modal):
    calc = calculator(name, modal)
    flags = [getattr(m, "_is_batch_data", None) for m in calc.model]
    before = copy.deepcopy(calc.model.state_dict())
    wrapper = FAMILY.from_calculator(calc)
    assert wrapper.modal == modal
    assert_equal(wrapper, structure(), calc)
    evaluate(wrapper.to(torch.float64), structure())
    assert [getattr(m, "_is_batch_data", None) for m in calc.model] == flags
    assert any(p.requires_grad for p in calc.model.parameters())
    after = calc.model.state_dict()
    assert all(torch.equal(after[k], v) and after[k].dtype == v.dtype for k, v in before.items())


def test_users_module_stays_as_it_is():
    model = model_of("7net-0")
    assert wrapper_of("7net-0").model is model
    assert_equal(wrapper_of("7net-0"), structure(), calculator("7net-0"))
    assert model.is_batch_data and all(getattr(m, "_is_batch_data", True) for m in model)
    assert any(p.requires_grad for p in model.parameters())


def test_from_other_calculators():
    from ase.calculators.mixing import SumCalculator
    from sevenn.calculator import SevenNetCalculator

    class Scaled(SevenNetCalculator):
        def calculate(self, *args, **kwargs):
            raise NotImplementedError

    calc = calculator("7net-0")
    for other in (ase.calculators.lj.LennardJones(), SumCalculator([calc]), object()):
        assert FAMILY.from_calculator(other) is None
    scaled = Scaled(copy.deepcopy(model_of("7net-0")), file_type="model_instance", device="cpu")
    assert FAMILY.from_calculator(scaled) is None


def test_pickle(tmp_path):
    assert_loads_elsewhere(wrapper_of("7net-mf-0", "PBE"), tmp_path, "sevenn")
    twin = copy.deepcopy(wrapper_of("7net-0"))
    assert twin.model is not model_of("7net-0")
    np.testing.assert_array_equal(
        evaluate(twin, structure()).energies, evaluate(wrapper_of("7net-0"), structure()).energies
    )
