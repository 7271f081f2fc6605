"""Orb over ranks, in ASE and in LAMMPS, against ORBCalculator; files, and what is refused."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from ase.build import bulk

import families
import parity
from nvdd import Batch, DistributedModel, DomainConfig
from nvdd.errors import DistributedOpError, InputError
from nvdd.models.orb_files import PRETRAINED
from nvdd.models.registry import load
from structures import structure

families.require("orb", "orb_models", "cached_path")

import family_orb  # noqa: E402
from nvdd.models.orb import FAMILY, OrbWrapper  # noqa: E402

test_parity = families.parity_test("orb")
test_parity_all_neighbours = families.parity_test("orb-inf", ranks=(2,))
test_parity_direct = families.parity_test("orb-direct")
test_parity_v2 = families.parity_test("orb-v2", ranks=(2,))
test_parity_charged = families.parity_test("orb-charged", ranks=(2,))
test_parity_float32 = families.parity_test("orb-float32", ranks=(2,))
test_envelope = families.envelope_test("orb")
test_envelope_direct = families.envelope_test("orb-direct")
test_stress = families.stress_test("orb")
test_cli = families.cli_test("orb")
test_ase = families.ase_test("orb")
test_ase_direct = families.ase_test("orb-direct")
test_lammps = families.lammps_test("orb")
test_lammps_direct = families.lammps_test("orb-direct", ranks=(2,))


def test_confidence(ranks):
    """Bins of the error of each atom's force, as ORBCalculator gives them."""
    parts = ranks.run(2, confidence_on_rank, "orb")
    atoms = structure("quartz unit").copy()
    atoms.calc = families.calculator("orb")
    atoms.get_potential_energy()
    found = np.concatenate([p["confidence"] for p in parts])[np.argsort(np.concatenate([p["ids"] for p in parts]))]
    np.testing.assert_allclose(found, atoms.calc.results["confidence"], rtol=1e-11)


def confidence_on_rank(comm, name):
    model = DistributedModel(parity.wrapper(f"family:{name}"), DomainConfig(mesh=comm))
    out = model(Batch.from_atoms(structure("quartz unit")), {"energy", "confidence"})
    return {"ids": out.ids.numpy(), "confidence": out["confidence"].numpy()}


BATCH = ("quartz unit", "silica gas", "silica tiny")


@pytest.mark.parametrize("name", ["orb", "orb-direct"])
def test_batch(ranks, name):
    """Several systems: means over the atoms of each, also where a rank has none of them."""
    parts = ranks.run(3, batch_on_rank, name, list(BATCH))
    expected = [families.reference(name, of) for of in BATCH]
    np.testing.assert_allclose(parts[0]["energy"], [r.energy for r in expected], rtol=1e-12)
    ids = np.concatenate([p["ids"] for p in parts])
    forces = np.concatenate([p["forces"] for p in parts])[np.argsort(ids)]
    wanted = np.concatenate([r.forces for r in expected])
    assert np.abs(forces - wanted).max() <= 1e-11 * np.abs(wanted).max()


def batch_on_rank(comm, name, of):
    model = DistributedModel(parity.wrapper(f"family:{name}"), DomainConfig(mesh=comm))
    out = model(Batch.from_atoms([structure(o) for o in of]), {"energy", "forces"})
    return {"ids": out.ids.numpy(), "energy": out["energy"].numpy(), "forces": out["forces"].numpy()}


def test_molecules_with_heads_need_a_batch_of_their_own():
    """Orb takes the torque off the forces of molecules, by picking them out of a batch."""
    molecule = structure("silica gas").copy()
    molecule.pbc, molecule.cell = False, None
    model = DistributedModel(family_orb.wrapper("orb-direct"))
    with pytest.raises(DistributedOpError):
        model(Batch.from_atoms([structure("quartz unit"), molecule]))
    alone = model(Batch.from_atoms(molecule))["forces"].numpy()
    assert np.abs(np.cross(molecule.positions, alone).sum(0)).max() < 1e-10


def test_neighbours_at_one_distance(ranks):
    """In a perfect crystal the 20 nearest of a shell are chosen by direction: alike for every order of atoms and rank."""
    crystal = bulk("SiO", "rocksalt", a=4.4, cubic=True)
    order = np.random.default_rng(0).permutation(len(crystal))
    model = DistributedModel(family_orb.wrapper("orb"))
    found = [float(model(Batch.from_atoms(atoms))["energy"]) for atoms in (crystal, crystal[order])]
    crystal.positions += [0.3, -7.1, 20.0]
    found += [float(part) for part in ranks.run(2, energy_on_rank, crystal)]
    np.testing.assert_allclose(found, found[0], rtol=1e-12)


def energy_on_rank(comm, atoms):
    model = DistributedModel(parity.wrapper("family:orb"), DomainConfig(mesh=comm))
    return model(Batch.from_atoms(atoms))["energy"].numpy()[0]


def test_charge_and_spin():
    atoms = structure("quartz charged")
    given, fixed = family_orb.wrapper("orb-charged"), OrbWrapper(family_orb.model_of("orb-charged"), charge=1, spin=2)
    energy = lambda model, of: float(DistributedModel(model)(Batch.from_atoms(of))["energy"])
    bare = structure("quartz unit")
    assert energy(fixed, bare) == energy(given, atoms) != energy(OrbWrapper(given.model, charge=0, spin=2), bare)
    with pytest.raises(InputError, match=r"atoms.info\['charge'\]"):
        energy(given, bare)
    with pytest.raises(InputError, match="does not read charge and spin"):
        OrbWrapper(family_orb.model_of("orb"), charge=1)
    with pytest.raises(InputError, match="must be numbers"):
        OrbWrapper(given.model, charge="much")


def test_files(tmp_path, monkeypatch):
    path = tmp_path / "weights.ckpt"
    torch.save(family_orb.model_of("orb").state_dict(), path)
    with pytest.raises(InputError, match="does not say what network"):
        load(f"orb:{path}")
    with pytest.raises(InputError, match="can't be read as weights of the Orb architecture"):
        load(f"orb:{path}", architecture="orb-v3-conservative-20-omat")
    with pytest.raises(InputError, match="is not JSON"):
        load(f"orb:{path}", architecture="{kind")
    with pytest.raises(InputError, match="kind='v9'"):
        load(f"orb:{path}", architecture='{"kind": "v9"}')
    with pytest.raises(InputError, match="unexpected keyword"):
        load(f"orb:{path}", architecture={"kind": "v2", "depth": 3})
    with pytest.raises(InputError, match=r"no file 'orb-v7'.*orb-v3-conservative-20-omat"):
        load("orb:orb-v7")
    with pytest.raises(InputError, match="'orb' needs a model"):
        load("orb")
    wrapper = load(f"orb:{path}", architecture=family_orb.CONFIGS["orb"], max_num_neighbors=7)
    assert wrapper.max_num_neighbors == 7 and wrapper.dtype == torch.float32
    text = json.dumps(family_orb.CONFIGS["orb"])
    assert load(f"orb:{path}", architecture=text, dtype=torch.float64).dtype == torch.float64
    torch.save({k: v for k, v in family_orb.model_of("orb").state_dict().items() if "confidence" not in k}, path)
    with pytest.raises(InputError, match=r"has no weights for heads.confidence"):
        load(f"orb:{path}", architecture=text)
    monkeypatch.setenv("CACHED_PATH_CACHE_ROOT", str(tmp_path))
    with pytest.raises(InputError, match=r"nvdd downloads nothing: get https://.*orb-v3-conservative-20-omat"):
        load("orb:orb-v3-conservative-20-omat")


@pytest.mark.parametrize("name", PRETRAINED)
def test_architectures_are_those_of_orb_models(name, monkeypatch):
    """Each pretrained model of orb-models, with the function that makes its network caught in the act."""
    from orb_models.forcefield import pretrained

    made = {}
    for kind in ("v2", "v3_conservative", "v3_direct"):

        def make(kind=kind, system_config=None, device=None, **arguments):
            made.update(kind=kind, **vars(system_config), **arguments)

        monkeypatch.setattr(pretrained, f"orb_{kind}_architecture", make)
    monkeypatch.setattr(pretrained, "load_model", lambda *args, **kwargs: None)
    pretrained.ORB_PRETRAINED_MODELS[name](device="cpu", compile=False)
    assert made.pop("radius") == 6.0
    usual = {"v2": 15}.get(made["kind"], 5)
    assert {"num_message_passing_steps": usual, **made} == {"num_message_passing_steps": usual, **PRETRAINED[name]}


def test_refused_models():
    with pytest.raises(InputError, match=r"not a torch.nn.modules.linear.Linear"):
        OrbWrapper(torch.nn.Linear(2, 2))
    model = copy.deepcopy(family_orb.model_of("orb"))
    model._system_config = None
    with pytest.raises(InputError, match="give it a system_config"):
        OrbWrapper(model)
    model = copy.deepcopy(family_orb.model_of("orb"))
    model.heads["forces"] = family_orb.model_of("orb-direct").heads["forces"]
    with pytest.raises(InputError, match=r"heads \['forces'\]"):
        OrbWrapper(model)
    model = copy.deepcopy(family_orb.model_of("orb-direct"))
    del model.heads["forces"]
    with pytest.raises(InputError, match="no head for forces"):
        OrbWrapper(model)
    model = copy.deepcopy(family_orb.model_of("orb"))
    model.compile()
    with pytest.raises(InputError, match="compile=False"):
        OrbWrapper(model)


def test_from_calculator():
    calc = family_orb.calculator_of("orb")
    calc.max_num_neighbors = 9
    wrapper = FAMILY.from_calculator(calc)
    assert wrapper.max_num_neighbors == 9 and wrapper.model is not calc.model
    calc.conservative = False
    with pytest.raises(InputError, match="conservative=True"):
        FAMILY.from_calculator(calc)
    assert FAMILY.from_calculator(object()) is None
