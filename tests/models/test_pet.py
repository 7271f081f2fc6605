"""PET over ranks, in ASE and in LAMMPS, against metatomic's calculator; files, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import families
import parity
from nvdd import Batch, DistributedModel
from nvdd.errors import InputError
from nvdd.models.registry import load
from structures import structure

families.require("pet", "metatrain", "metatomic_ase")

import family_pet  # noqa: E402
from nvdd.models.pet import FAMILY, PETWrapper  # noqa: E402

test_parity = families.parity_test("pet")
test_parity_residual = families.parity_test("pet-residual", ranks=(3,))
test_parity_adaptive = families.parity_test("pet-adaptive", ranks=(2,))
test_parity_float32 = families.parity_test("pet-float32", ranks=(2,))
test_envelope = families.envelope_test("pet")
test_envelope_adaptive = families.envelope_test("pet-adaptive")
test_stress = families.stress_test("pet")
test_cli = families.cli_test("pet")
test_ase = families.ase_test("pet")
test_lammps = families.lammps_test("pet")
test_lammps_adaptive = families.lammps_test("pet-adaptive", ranks=(2,))


def test_rebuilt_from_its_description():
    """As ranks and files do: the network from plain values, then the weights, with scales and energies of elements."""
    wrapper = PETWrapper.from_model(family_pet.model_of("pet-residual"))
    again = FAMILY.rebuild(json.loads(json.dumps(FAMILY.configuration(wrapper))), torch.float64)
    again.load_state_dict(wrapper.state_dict())
    batch = Batch.from_atoms(structure("quartz unit"))
    energies = [float(DistributedModel(model.eval())(batch)["energy"]) for model in (wrapper, again)]
    assert energies[0] == energies[1]


def test_batch(ranks):
    """Several systems at once, also where a rank has none of them."""
    names = ["quartz unit", "silica gas", "silica tiny"]
    parts = ranks.run(3, parity.several_on_rank, "family:pet", names)
    np.testing.assert_allclose(parts[0]["energy"], [families.reference("pet", n).energy for n in names], rtol=1e-12)
    ids = np.concatenate([p["ids"] for p in parts])
    forces = np.concatenate([p["forces"] for p in parts])[np.argsort(ids)]
    wanted = np.concatenate([families.reference("pet", n).forces for n in names])
    assert np.abs(forces - wanted).max() <= 1e-11 * np.abs(wanted).max()


def test_tables():
    """Scale and energies of elements are the model's, by atomic number."""
    wrapper = PETWrapper.from_model(family_pet.model_of("pet"))
    numbers = torch.tensor([8, 14])
    np.testing.assert_allclose(wrapper.scales(numbers), [family_pet.SCALE] * 2, rtol=1e-6)
    np.testing.assert_allclose(wrapper.shifts(numbers), family_pet.SHIFTS, rtol=1e-6)
    assert wrapper.model_config.elements == {8, 14}


def test_files(tmp_path):
    model, _ = family_pet.CASES["pet"].write(tmp_path)
    assert load(model).dtype == torch.float32
    assert load(model, target="energy", dtype=torch.float64).dtype == torch.float64
    with pytest.raises(InputError, match=r"no energy 'enthalpy'; choose target= from \['energy'\]"):
        load(model, target="enthalpy")
    with pytest.raises(InputError, match="no PET checkpoint file 'nothing'"):
        load("pet:nothing")
    with pytest.raises(InputError, match="'pet' needs a model"):
        load("pet")
    path = tmp_path / "x.ckpt"
    torch.save({"architecture_name": "gap"}, path)
    with pytest.raises(InputError, match="can't be read as a checkpoint of metatrain"):
        load(f"pet:{path}")


def test_refused():
    with pytest.raises(InputError, match=r"not a torch\.nn.modules.linear.Linear; an exported model"):
        PETWrapper.from_model(torch.nn.Linear(2, 2))
    for hypers, words in (
        ({"zbl": True}, "ZBL repulsion"),
        ({"system_conditioning": True}, "conditioned by charge and spin"),
        ({"long_range": {"enable": True, "use_ewald": True, "smearing": 1.4, "kspace_resolution": 1.33, "interpolation_nodes": 5}},
         "long-range features"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=words):
            PETWrapper.from_model(family_pet.make_model(**family_pet.SMALL, **hypers))
