"""Charges on their way to a model: initial charges of ASE, a column of a file for the command, what is missing."""

from __future__ import annotations

import json

import numpy as np
import pytest
from ase.io import write
from typer.testing import CliRunner

import coulomb
from nvdd import NVE, Simulation
from nvdd.errors import InputError
from nvdd_ase import NVDDCalculator
from nvdd_ase.cli import app
from nvdd_ase.cli_input import read_structures

OPTIONS = {"cutoff": 6.0, "accuracy": 1e-7}


def exact(atoms) -> coulomb.Sum:
    wrapper = coulomb.WRAPPERS["ewald"](**OPTIONS)
    return coulomb.ewald(atoms, wrapper.alpha, wrapper.cutoff, wrapper.k_cutoff)


@pytest.mark.parametrize("ranks", (1, 2))
def test_initial_charges_of_ase(ranks):
    """Computed again when they change; an array named charges comes first; none is refused on all ranks at once."""
    atoms = coulomb.charged("triclinic", 0.2)
    with NVDDCalculator("ewald", ranks=ranks, device="cpu", model_options=OPTIONS) as calculator:
        atoms.calc = calculator
        for k in range(3):
            if k == 1:
                atoms.set_initial_charges(atoms.get_initial_charges()[::-1])
            elif k == 2:
                atoms.set_array("charges", 0.5 * atoms.get_initial_charges())
            wanted = exact(atoms)
            scale = 0.25 if k == 2 else 1.0  # energies are a quadratic form of charges
            assert abs(atoms.get_potential_energy() / (scale * wanted.energy) - 1) < 1e-12
            assert np.abs(atoms.get_forces() - scale * wanted.forces).max() < 1e-11 * np.abs(wanted.forces).max()
            assert np.abs(atoms.get_stress(voigt=False) * atoms.get_volume() - scale * wanted.virial).max() < 1e-10 * np.abs(wanted.virial).max()
        del atoms.arrays["charges"], atoms.arrays["initial_charges"]
        with pytest.raises(InputError, match=r"the atoms have no charges; give them by atoms\.set_initial_charges"):
            atoms.get_potential_energy()


@pytest.mark.parametrize("column", ("initial_charges", "charge", "charges", "q"))
def test_column_of_a_file(tmp_path, column):
    atoms = coulomb.charged("triclinic", 0.2)
    path = tmp_path / "ions.extxyz"
    write(path, atoms)
    path.write_text(path.read_text().replace("initial_charges", column))
    (found,) = read_structures(path, "-1")
    np.testing.assert_allclose(found.get_initial_charges(), atoms.get_initial_charges(), atol=1e-7)


def test_native_dynamics():
    """Initial charges are what a model reads as charges, also without the calculator."""
    atoms = coulomb.charged("triclinic", 0.0)
    state = Simulation(atoms, coulomb.WRAPPERS["ewald"](**OPTIONS), NVE(1.0)).state
    assert state.node_fields["charges"].tolist() == atoms.get_initial_charges().tolist()


def test_column_of_vectors_is_no_charge(tmp_path):
    atoms = coulomb.charged("triclinic", 0.2)
    del atoms.arrays["initial_charges"]
    atoms.set_array("q", np.ones((len(atoms), 3)))
    write(tmp_path / "ions.extxyz", atoms)
    (found,) = read_structures(tmp_path / "ions.extxyz", "-1")
    assert not found.has("initial_charges")


def test_command(tmp_path):
    """`nvdd single` with a column of charges, and without."""
    atoms = coulomb.charged("triclinic", 0.0)
    write(tmp_path / "ions.extxyz", atoms)
    (there,) = read_structures(tmp_path / "ions.extxyz", "-1")
    arguments = ["single", str(tmp_path / "ions.extxyz"), "--model", "ewald", "--option=cutoff=6.0", "--option=accuracy=1e-7"]
    done = CliRunner().invoke(app, [*arguments, "--output", str(tmp_path / "out.json")])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "out.json").read_text())
    energy = found["energy_eV"]
    assert abs(energy / exact(there).energy - 1) < 1e-9
    del atoms.arrays["initial_charges"]
    write(tmp_path / "ions.extxyz", atoms)
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code != 0 and "column initial_charges in a file" in " ".join(done.stderr.split())
