"""MatterSim over ranks, in ASE and in LAMMPS, against its own network and calculator; files, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import families
import parity
from nvdd.errors import InputError
from nvdd.models.registry import load

families.require("mattersim", "mattersim")

import family_mattersim  # noqa: E402
from nvdd.models.mattersim import FAMILY, MatterSimWrapper  # noqa: E402

test_parity = families.parity_test("mattersim")
test_parity_float32 = families.parity_test("mattersim-float32", ranks=(1, 2))
test_envelope = families.envelope_test("mattersim")
test_stress = families.stress_test("mattersim")
test_cli = families.cli_test("mattersim")
test_ase = families.ase_test("mattersim-float32")
test_lammps = families.lammps_test("mattersim")


def test_files(tmp_path, monkeypatch):
    model, _ = family_mattersim.write(tmp_path)
    wrapper = load(model)
    assert wrapper.dtype == torch.float32 and not any(p.requires_grad for p in wrapper.parameters())
    path = tmp_path / "x.pth"
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(InputError, match=r"can't be read as a MatterSim checkpoint"):
        load(f"mattersim:{path}")
    torch.save({"model_args": {**family_mattersim.ARGUMENTS, "units": 8}, "model": wrapper.model.state_dict()}, path)
    with pytest.raises(InputError, match=r"can't be read as a MatterSim checkpoint: RuntimeError"):
        load(f"mattersim:{path}")
    with pytest.raises(InputError, match=r"no MatterSim checkpoint file 'nothing.pth'.*mattersim-v1.0.0-1M"):
        load("mattersim:nothing.pth")
    with pytest.raises(InputError, match="'mattersim' needs a model"):
        load("mattersim")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(InputError, match=r"nvdd downloads nothing: get https://.*/mattersim-v1.0.0-5M.pth and put it at"):
        load("mattersim:mattersim-v1.0.0-5M")


def test_triples_are_those_of_mattersim():
    """Each pair of short edges of a centre, in both orders, and no other."""
    from mattersim.datasets.utils.convertor import compute_threebody_indices

    random = np.random.default_rng(2)
    centre, length = np.sort(random.integers(0, 7, 60)), random.uniform(2, 4.5, 60)
    pairs = np.column_stack([centre, random.integers(0, 7, 60)])
    expected, *_ = compute_threebody_indices(pairs, length, 7, np.ones(7, int), family_mattersim.ARGUMENTS["threebody_cutoff"])
    wrapper = MatterSimWrapper(family_mattersim.model_of(torch.float64))
    found = wrapper._triples(torch.from_numpy(length), torch.from_numpy(centre), 7)
    assert sorted(map(tuple, found.tolist())) == sorted(map(tuple, expected.tolist()))
    assert wrapper._triples(torch.zeros(0), torch.zeros(0, dtype=torch.int64), 3).shape == (0, 2)


def test_batch(ranks):
    """Several systems at once, also where a rank has none of them."""
    names = ["quartz unit", "silica gas", "silica tiny"]
    parts = ranks.run(3, parity.several_on_rank, "family:mattersim", names)
    np.testing.assert_allclose(parts[0]["energy"], [families.reference("mattersim", n).energy for n in names], rtol=1e-12)
    ids = np.concatenate([p["ids"] for p in parts])
    forces = np.concatenate([p["forces"] for p in parts])[np.argsort(ids)]
    wanted = np.concatenate([families.reference("mattersim", n).forces for n in names])
    assert np.abs(forces - wanted).max() <= 1e-11 * np.abs(wanted).max()


def test_refused():
    with pytest.raises(InputError, match=r"not a torch.nn.modules.linear.Linear"):
        MatterSimWrapper(torch.nn.Linear(2, 2))

    class Other(type(family_mattersim.model_of(torch.float64))):
        def forward(self, *args, **kwargs):
            raise NotImplementedError

    with pytest.raises(InputError, match="a forward of its own"):
        MatterSimWrapper(Other(device="cpu", **family_mattersim.ARGUMENTS))
    calc = family_mattersim.calculator_of_float32()
    calc.stress_weight = 1.0
    with pytest.raises(InputError, match=r"stress_weight=1\.0"):
        FAMILY.from_calculator(calc)
    assert FAMILY.from_calculator(object()) is None
