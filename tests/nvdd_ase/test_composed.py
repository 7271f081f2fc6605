"""Sums of models on the command line and over several ranks of a calculator."""

from __future__ import annotations

import json

import ase.io
import numpy as np
import pytest
from typer.testing import CliRunner

import composed
import parity
from nvdd_ase import NVDDCalculator
from nvdd_ase.cli import app

OPTIONS = [
    f"--option={block}.{key}={value}"
    for block, given in ((0, {"sigma": 2.9, "cutoff": 4.3}), (1, {"sigma": 3.1, "cutoff": 8.1}))
    for key, value in {"epsilon": 0.02, "shift": "smooth", **given}.items()
]


def nvdd(*arguments: object, code: int = 0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def structure(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    atoms = parity.structure("triclinic").copy()
    ase.io.write("argon.extxyz", atoms)
    return ase.io.read("argon.extxyz")  # positions as they are in the file


def test_single(structure):
    nvdd("single", "argon.extxyz", "-m", "lj + lj", *OPTIONS, "-o", "out.json")
    with open("out.json") as file:
        found = json.load(file)
    expected = composed.plain("lj + lj", structure)
    assert abs(found["energy_eV"] - expected["energy"][0]) <= 1e-12 * abs(expected["energy"][0])
    assert np.abs(np.array(found["forces_eV_per_A"]) - expected["forces"]).max() <= 1e-11 * np.abs(expected["forces"]).max()
    assert found["model"] == "lj + lj"


def test_md_and_refusals(structure):
    out = nvdd("md", "argon.extxyz", "-m", "lj + lj", *OPTIONS, "--steps", 2, "--seed", 1).stdout
    assert "model       lj + lj, 1 rank" in out and "2 steps" in out
    error = nvdd("md", "argon.extxyz", "-m", "lj + lj", "--option=cutoff=4", code=2).stderr
    assert "whose option is 'cutoff'? Write the block before it" in " ".join(error.split())
    assert "A sum of models is written" in nvdd("models").stdout


def test_a_calculator_over_ranks(structure):
    """Model objects go to the ranks whole, with their wires; the charges of a block are no property of ASE's."""
    expected = composed.plain("wired to two", structure)
    with NVDDCalculator(composed.pipeline("wired to two"), ranks=2) as calculator:
        structure.calc = calculator
        assert abs(structure.get_potential_energy() - expected["energy"][0]) <= 1e-12 * abs(expected["energy"][0])
        assert np.abs(structure.get_forces() - expected["forces"]).max() <= 1e-10 * np.abs(expected["forces"]).max()
        assert calculator.description["cutoff"] == 6.1


def test_charges_of_atoms_reach_the_block_that_reads_them(structure):
    model = composed.PipelineModelWrapper([composed.lj(5.0), composed.Coulomb()])
    charges = np.random.default_rng(0).uniform(-1, 1, len(structure))
    structure.set_initial_charges(charges)
    structure.calc = NVDDCalculator(model)
    energy = structure.get_potential_energy()
    structure.set_initial_charges(2 * charges)
    assert structure.get_potential_energy() != energy, "a change of the charges is noticed"
    structure.set_array("initial_charges", None)
    with pytest.raises(ValueError, match=r"reads atoms.arrays\['charges'\], which these atoms don't have"):
        structure.get_potential_energy()
