"""CHGNet over ranks, in ASE and in LAMMPS, against chgnet itself: its own graph, layers and calculator."""

from __future__ import annotations

import copy
import json
import sys
from functools import cache

import numpy as np
import pytest
import torch
from ase import Atoms
from typer.testing import CliRunner

import chgnet_reference
import families
import parity
from nvdd import Batch, DistributedModel, DomainConfig
from nvdd.communicator import Communicator
from nvdd.errors import InputError, MissingDependencyError
from nvdd.models.chgnet import FAMILY, CHGNetWrapper
from nvdd.models.registry import load
from nvdd_ase import NVDDCalculator
from nvdd_ase.cli import app

families.require("chgnet", "chgnet")

test_parity = families.parity_test("chgnet", ci=(1, 2))  # each rank imports chgnet, some seconds
test_envelope = families.envelope_test("chgnet", world_size=2)
test_stress = families.stress_test("chgnet")
test_lammps = families.lammps_test("chgnet", ranks=(2,))
test_lammps_on_one_rank = pytest.mark.slow(families.lammps_test("chgnet", ranks=(1,)))  # a path that CI has on two

# of every kind that the envelope promises: with angles, with bonds but no angle, several images of an atom, open axes,
# lone atoms
NAMES = ("quartz", "silica left-handed", "silica unwrapped", "quartz slab", "silica wire", "silica tiny", "silane-like",
         "silica gas", "silica atom", "silica pair", "triclinic", "argon")  # fmt: skip
FEW = ("quartz unit", "silica pair", "triclinic")
WANTED = ("energies", "forces", "magmoms")


@cache
def wrapper(name: str, dtype: str | None = "float64") -> CHGNetWrapper:
    return load(f"chgnet:{name}", dtype=getattr(torch, dtype) if dtype else None)


@cache
def expected(name: str, structure: str) -> dict[str, np.ndarray]:
    return chgnet_reference.float64(name, parity.structure(structure))


def on_rank(comm: Communicator, model: str, names, strategies, skin: float) -> list[dict]:
    found = []
    for strategy in strategies:
        distributed = DistributedModel(wrapper(model), DomainConfig(mesh=comm, skin=skin, strategy=strategy))
        for name in names:
            atoms = parity.structure(name).copy()
            moved = atoms.copy()  # the plan is made of other positions: some edges and bonds come, some go
            moved.rattle(0.05, seed=1)
            distributed(Batch.from_atoms(moved), {"energy"})
            wanted = {"energy", *WANTED} | ({"stress"} if atoms.cell.rank == 3 else set())
            out = distributed(Batch.from_atoms(atoms), wanted)
            found.append({"ids": out.ids.numpy(), **{k: v.numpy() for k, v in out.items()}})
    return found


def assert_equal(parts: tuple[dict, ...], reference: dict[str, np.ndarray], atoms: Atoms, what: str) -> None:
    """In the user's order, to rounding in float64."""
    ids = np.concatenate([part["ids"] for part in parts])
    assert sorted(ids) == list(range(len(atoms))), what
    for name in WANTED:
        rows = np.concatenate([part[name] for part in parts])
        found = np.empty_like(rows)
        found[ids] = rows
        error, scale = np.abs(found - reference[name]).max(), np.abs(reference[name]).max()
        assert error <= 1e-11 * scale + 1e-14, f"{what}: {name} differ by {error}, largest {scale}"
    for part in parts:
        assert abs(part["energy"][0] - reference["energy"]) <= 1e-12 * abs(reference["energy"]), what
        if atoms.pbc.all():
            scale = np.abs(reference["stress"]).max()
            assert np.abs(part["stress"][0] - reference["stress"]).max() <= 1e-11 * scale + 1e-14, what


def check(ranks, size: int, model: str, names: tuple[str, ...]) -> None:
    strategies = ("halo", "graph")
    many = list(zip(*ranks.run(size, on_rank, model, names, strategies, 1.0), strict=True))
    for k, name in enumerate(names * len(strategies)):
        assert_equal(many[k], expected(model, name), parity.structure(name), f"{strategies[k // len(names)]}, {name}")


@pytest.mark.parametrize("model", ("0.3.0", "0.2.0", "r2scan"))
def test_magnetic_moments_and_a_plan_of_other_positions(ranks, model):
    """0.2.0 has a bias that changes bonds without angles, in systems that have an angle anywhere."""
    check(ranks, 2, model, FEW if model == "0.2.0" else FEW[:1])


@pytest.mark.slow  # the paths are those above; here on all structures and numbers of ranks, half a minute
@pytest.mark.parametrize("model", ("0.3.0", "0.2.0"))
@pytest.mark.parametrize("size", (1, 2, 3, 4))
def test_every_structure(ranks, size, model):
    check(ranks, size, model, NAMES)


def several_on_rank(comm: Communicator, model: str, names: tuple[str, ...]) -> dict:
    batch = Batch.from_atoms([parity.structure(name) for name in names])
    out = DistributedModel(wrapper(model), DomainConfig(mesh=comm))(batch, {"energy", *WANTED})
    return {"ids": out.ids.numpy(), **{k: v.numpy() for k, v in out.items()}}


def test_several_systems_equal_each_alone(ranks):
    """chgnet leaves out layers where a system has no angle: each system of a batch for itself."""
    parts = ranks.run(2, several_on_rank, "0.2.0", FEW)
    alone = [expected("0.2.0", name) for name in FEW]
    for part in parts:
        np.testing.assert_allclose(part["energy"], [r["energy"] for r in alone], rtol=1e-12)
    found = parity.assemble([{**p, "energy": p["energy"][:1]} for p in parts], sum(len(r["forces"]) for r in alone))
    forces = np.concatenate([r["forces"] for r in alone])
    assert np.abs(found.forces - forces).max() <= 1e-11 * np.abs(forces).max()


# --- as it ships: float32 -------------------------------------------------------------------------------------------


def noise(name: str, atoms: Atoms) -> float:
    """By how much chgnet's own forces change where they should not, eV/A: in another order, and somewhere else.

    It makes vectors from float32 coordinates, so that the second is the larger part.
    """
    forces, largest = chgnet_reference.as_it_ships(name, atoms)["forces"], 0.0
    for seed in range(2):
        random = np.random.default_rng(seed)
        order = random.permutation(len(atoms))
        again = atoms[order]
        again.positions += random.random(3)
        largest = max(largest, np.abs(chgnet_reference.as_it_ships(name, again)["forces"] - forces[order]).max())
    return largest


def assert_ships(atoms: Atoms, name: str) -> None:
    """The atoms' calculator against CHGNetCalculator."""
    theirs = chgnet_reference.as_it_ships(name, atoms)
    n = len(atoms)
    assert abs(atoms.get_potential_energy() - theirs["energy"]) <= 1e-6 * abs(theirs["energy"])
    np.testing.assert_allclose(atoms.get_potential_energies(), theirs["energies"], rtol=2e-6, atol=2e-6)
    assert np.abs(atoms.get_forces() - theirs["forces"]).max() <= max(3 * noise(name, atoms), 2e-6)
    stress = theirs["stress"].flat[[0, 4, 8, 5, 2, 1]]
    assert np.abs(atoms.get_stress() - stress).max() <= 1e-5 * np.abs(stress).max() + 1e-7
    np.testing.assert_allclose(atoms.get_magnetic_moments(), theirs["magmoms"], rtol=1e-5, atol=2e-6)
    assert atoms.get_magnetic_moments().shape == (n,)


@pytest.mark.parametrize("name", ("0.3.0", "0.2.0", "r2scan"))
def test_equals_chgnet_calculator(name):
    atoms = parity.structure("quartz unit").copy()
    with NVDDCalculator(f"chgnet:{name}") as calculator:
        assert calculator.description["dtype"] == "float32"
        atoms.calc = calculator
        assert_ships(atoms, name)


def test_ase_on_two_ranks():
    """Magnetic moments in the user's order, too; float64 of the same weights."""
    atoms, reference = parity.structure("quartz unit").copy(), expected("0.3.0", "quartz unit")
    with NVDDCalculator("chgnet:0.3.0", ranks=2, dtype="float64") as calculator:
        atoms.calc = calculator
        assert np.abs(atoms.get_forces() - reference["forces"]).max() <= 1e-11 * np.abs(reference["forces"]).max()
        np.testing.assert_allclose(atoms.get_magnetic_moments(), reference["magmoms"], rtol=1e-11)
        assert abs(atoms.get_potential_energy() / reference["energy"] - 1) < 1e-12


def test_command(tmp_path):
    from ase.io import read, write

    write(tmp_path / "quartz.extxyz", parity.structure("quartz unit"))
    out = tmp_path / "out.json"
    done = CliRunner().invoke(
        app, ["single", str(tmp_path / "quartz.extxyz"), "-m", "chgnet:0.3.0", "--dtype", "float64", "-o", str(out)]
    )
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())["forces_eV_per_A"]
    reference = chgnet_reference.float64("0.3.0", read(tmp_path / "quartz.extxyz"))["forces"]
    assert np.abs(np.array(found) - reference).max() <= 1e-11 * np.abs(reference).max()


def test_from_calculator():
    calculator = chgnet_reference.calculator("0.3.0")
    before = copy.deepcopy(calculator.model.state_dict())
    atoms = parity.structure("quartz unit").copy()
    atoms.calc = NVDDCalculator.from_calculator(calculator, dtype="float64")
    atoms.get_forces()
    assert all(torch.equal(v, before[k]) and v.dtype == before[k].dtype for k, v in calculator.model.state_dict().items())
    atoms.calc = NVDDCalculator.from_calculator(calculator)
    assert_ships(atoms, "0.3.0")
    strange = copy.copy(calculator)
    strange.stress_weight = 1.0
    with pytest.raises(InputError, match=r"stress in units of its own \(stress_weight=1.0\)"):
        FAMILY.from_calculator(strange)
    assert FAMILY.from_calculator(object()) is None


# --- files and refusals ---------------------------------------------------------------------------------------------


def test_says_what_it_needs():
    config = wrapper("0.3.0").model_config
    assert (config.neighbor_config.cutoff, config.neighbor_config.bond_cutoff) == (6.0, 3.0)
    assert wrapper("0.2.0").model_config.neighbor_config.cutoff == 5.0
    assert config.elements == frozenset(range(1, 95)) and "magmoms" in config.outputs


def test_models_without_parts(ranks):
    """Without composition model, layers for angles, or magnetic moments; bonds as long as edges."""
    from chgnet.model.model import CHGNet

    torch.manual_seed(0)
    small = {"composition_model": None, "atom_fea_dim": 8, "bond_fea_dim": 8, "angle_fea_dim": 8, "num_radial": 5,
             "num_angular": 5, "atom_conv_hidden_dim": 8, "bond_conv_hidden_dim": 8, "mlp_hidden_dims": [8]}  # fmt: skip
    atoms = parity.structure("silica left-handed")
    for options in ({"update_angle": False}, {"update_bond": False, "n_conv": 3}, {"conv_norm": "layer"},
                    {"atom_graph_cutoff": 3.5, "bond_graph_cutoff": 3.5, "is_intensive": False}):  # fmt: skip
        module = CHGNet(**{**small, **options}).double().eval()
        reference = chgnet_reference.float64("", atoms, module)
        out = DistributedModel(CHGNetWrapper(module))(Batch.from_atoms(atoms), {"energy", "forces", "magmoms"})
        scale = np.abs(reference["forces"]).max()
        assert np.abs(out["forces"].numpy() - reference["forces"]).max() <= 1e-11 * scale, options
        assert abs(float(out["energy"][0]) / reference["energy"] - 1) <= 1e-12
    single = CHGNetWrapper(CHGNet(**small, n_conv=1))
    assert "magmoms" not in single.model_config.outputs and "magmoms" not in single.distribution_spec().outputs


def test_bad_files(tmp_path):
    with pytest.raises(InputError, match=r"needs a model: chgnet:FILE, or chgnet: and one of 0.3.0, 0.2.0, r2scan"):
        load("chgnet")
    with pytest.raises(InputError, match=r"no CHGNet file 'nowhere.pth.tar'.*names: 0.3.0"):
        load("chgnet:nowhere.pth.tar")
    path = tmp_path / "x.pth.tar"
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(InputError, match=r"can't be read as a CHGNet checkpoint"):
        load(f"chgnet:{path}")


def test_refused_models():
    from chgnet.model.composition_model import CompositionModel
    from chgnet.model.model import CHGNet

    with pytest.raises(InputError, match=r"needs a chgnet.model.CHGNet, not a torch.nn.modules.linear.Linear"):
        CHGNetWrapper(torch.nn.Linear(2, 2))
    with pytest.raises(InputError, match=r"reads its energy off a mean over all atoms \(read_out='ave'\)"):
        CHGNetWrapper(CHGNet(mlp_first=False, composition_model=None))
    with pytest.raises(InputError, match=r"composition model of this CHGNet is a CompositionModel that is no fitted sum"):
        CHGNetWrapper(CHGNet(composition_model=CompositionModel()))
    with pytest.raises(InputError, match=r"was made with composition_model, a CompositionModel, which has no form in a file"):
        FAMILY.configuration(type("W", (), {"model": CHGNet(composition_model=CompositionModel())}))


def test_package_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "chgnet.model.model", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'chgnet"):
        load("chgnet:0.3.0")
