"""`ewald` and `pme` in real LAMMPS: beside LAMMPS's own kspace styles, and beside the same models from ASE."""

from __future__ import annotations

import numpy as np
import pytest
from ase import Atoms
from ase.io import write

import coulomb
import lammps_parity
import parity
from lammps_parity import Job
from lammps_runs import Deck, decks
from nvdd import Batch, DistributedModel
from nvdd_lammps import export_model

BAR = 1.6021765e6  # LAMMPS's, from eV/A^3
QQR2E = 14.399645  # LAMMPS's constant in units metal, eV A
OPTIONS = {
    "ewald": {"cutoff": 7.0},
    "pme": {"cutoff": 7.0, "accuracy": 1e-5},
    "divided": {"cutoff": 7.0, "accuracy": 1e-5, "distributed_fft": True},
    "slab": {"cutoff": 7.0, "accuracy": 1e-5, "slab": True},
}
NVE = "fix 1 all nve\nrun 10"
JOBS = {
    "ewald": Job("ewald", "melt", NVE),
    "ewald, NPT": Job("ewald", "melt", "fix 1 all npt temp 300 300 0.1 tri 0 0 1\nrun 10"),
    "pme": Job("pme", "melt", NVE),
    "transform over ranks, NPT": Job("divided", "melt", "fix 1 all npt temp 300 300 0.1 tri 0 0 1\nrun 10"),
    "slab": Job("slab", "surface", NVE, boundary="boundary p p f"),
    "without charges": Job("ewald", "plain", "run 0"),
    "charges of zero": Job("ewald", "zero", "run 0"),
    "exclusion": Job("ewald", "melt", "neigh_modify exclude type 1 1\nrun 0"),
}


def melt() -> Atoms:
    """Charges that a data file holds in full."""
    atoms = coulomb.melt()
    atoms.wrap()
    atoms.set_initial_charges(np.resize([1.0, -1.0, 0.5, -0.75, 0.25], len(atoms)))
    return atoms


def surface() -> Atoms:
    atoms = coulomb.melt(2, triclinic=False)
    atoms.set_initial_charges(np.resize([0.75, -1.0, 0.25], len(atoms)))
    atoms.pbc = (True, True, False)
    atoms.center(vacuum=6.0, axis=2)
    atoms.wrap()
    return atoms


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("coulomb")
    for name, options in OPTIONS.items():
        family = name if name in ("ewald", "pme") else {"divided": "pme", "slab": "ewald"}[name]
        export_model(family, folder / f"{name}.nvdd", options=options, elements=["Na", "Cl"])
    zero = melt()
    zero.set_initial_charges(np.zeros(len(zero)))
    for name, atoms in (("melt", melt()), ("surface", surface()), ("plain", melt()), ("zero", zero)):
        style = "atomic" if name == "plain" else "charge"
        write(folder / f"{name}.data", atoms, format="lammps-data", specorder=["Na", "Cl"], atom_style=style, masses=False)
    return folder


@pytest.fixture(scope="module")
def numbers(folder):
    jobs = {}
    for name, job in JOBS.items():
        job.elements, job.stress_atom = "Na Cl", False
        job.style = "atomic" if job.structure == "plain" else "charge"
        jobs[name] = job
    return lammps_parity.run(jobs, 2, folder)


@pytest.mark.parametrize("name", [name for name, job in JOBS.items() if job.structure not in ("plain", "zero") and name != "exclusion"])
def test_equals_ase(numbers, name):
    """At the positions and the cell to which LAMMPS has brought them, on one rank."""
    job, found = JOBS[name], numbers[name]
    assert "error" not in found, found["error"]
    atoms = Atoms(np.array([11, 17])[found["type"] - 1], found["x"], cell=found["cell"], pbc=found["pbc"])
    atoms.set_initial_charges((surface() if name == "slab" else melt()).get_initial_charges())
    wrapper = coulomb.WRAPPERS["pme" if job.model in ("pme", "divided") else "ewald"](**OPTIONS[job.model])
    wanted = ("energy", "energies", "forces", "virial")
    out = {k: v.numpy() for k, v in DistributedModel(wrapper)(Batch.from_atoms(atoms), wanted).items()}
    stress = -found["pressure"][[0, 3, 4, 3, 1, 5, 4, 5, 2]].reshape(3, 3) / BAR
    mine = parity.Results(found["energy"], found["energies"], found["forces"], stress, None)
    exact = parity.Results(out["energy"][0], out["energies"], out["forces"], out["virial"][0] / found["volume"], None)
    parity.assert_parity(mine, exact, tight=True)


REFUSED = {
    "without charges": "use atom_style charge",
    "charges of zero": "all charges are zero",
    "exclusion": "neigh_modify exclude takes pairs out",
}


@pytest.mark.parametrize("name,words", REFUSED.items())
def test_refused(numbers, name, words):
    assert words in numbers[name]["error"]


@pytest.mark.parametrize("wrapper,style", (("ewald", "kspace_style ewald 1e-9"), ("pme", "kspace_style pppm 1e-7\nkspace_modify order 7")))
def test_equals_kspace(folder, wrapper, style):
    """LAMMPS's own Ewald sum and PPPM, with lj/cut/coul/long whose Lennard-Jones part is zero."""
    pair = f"pair_style lj/cut/coul/long 9.0\npair_coeff * * 0 1\npair_modify table 0\n{style}"
    setup = f"units metal\natom_style charge\nread_data {folder / 'melt.data'}\nmass * 20"
    theirs = decks({"melt": Deck(setup, pair, outputs="")}, 1, cwd=folder)["melt"]
    model = DistributedModel(coulomb.WRAPPERS[wrapper]())
    out = {k: v.numpy() * QQR2E / coulomb.KE for k, v in model(Batch.from_atoms(melt())).items()}
    assert abs(theirs.thermo["pe"] / out["energy"][0] - 1) < 1e-6
    assert np.abs(theirs.forces - out["forces"]).max() < 5e-6 * np.abs(out["forces"]).max()
