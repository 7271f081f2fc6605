"""Sums of models in real LAMMPS, from .nvdd files and pickles, against each block in one process without nvdd's runtime."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from ase import Atoms

import composed
import lammps_parity
import parity
from builders import random_aimnet2, random_mace
from lammps_parity import Job
from nvdd.models import load
from nvdd.models.aimnet2 import AIMNet2Wrapper
from nvdd.models.pme import PMEModelWrapper
from nvdd_ase import NVDDCalculator
from nvdd_lammps import NVDDUnified, export_model
from nvdd_lammps.model_file import load_file, read_meta

BAR = 1.6021765e6  # LAMMPS's, from eV/A^3
LJ = {"epsilon": 0.02, "sigma": 1.8, "cutoff": 7.3, "shift": "smooth"}
NVE = "fix 1 all nve\nrun 6"
CHARGED = "set type 1 charge 0.8\nset type 2 charge -0.5\nfix 1 all nve\nrun 4"
# job -> the sum of `composed` that it must equal
JOBS = {
    "mace + lj": Job("mace + lj", "quartz unit", NVE),
    "mace + lj, NPT": Job("mace + lj", "quartz unit", "fix 1 all npt temp 300 300 0.1 tri 0 0 1\nrun 4"),
    "wired": Job("wired.pkl", "quartz unit", NVE),
    "mace + positions": Job("mace + positions.pkl", "quartz unit", NVE, stress_atom=False),
    "wired to two": Job("wired to two.pkl", "quartz unit", NVE, stress_atom=False),
    "direct + lj": Job("direct + lj.pkl", "quartz unit", NVE, stress_atom=False),
    "mace + d3": Job("mace + d3", "quartz unit", NVE),
    "mace + ewald, charges of atoms": Job("mace + ewald", "charged", CHARGED, style="charge", stress_atom=False),
}
# aimnet takes each process seconds to import
SLOW = {"aimnet2 + pme": Job("aimnet2 + pme.pkl", "quartz unit", NVE, stress_atom=False)}
composed.PIPELINES["aimnet2 + pme"] = lambda: composed.PipelineModelWrapper(
    [AIMNet2Wrapper(random_aimnet2(), charge=0.0), PMEModelWrapper(cutoff=6.0)], {"charges": (0, "charges")}
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sums")
    torch.save(random_mace(), folder / "mace.model")
    export_model(f"mace:{folder / 'mace.model'} + lj", folder / "mace + lj.nvdd", options=[None, LJ])
    export_model(f"mace:{folder / 'mace.model'} + ewald", folder / "mace + ewald.nvdd", options={"ewald.cutoff": 6.0})
    d3 = dict(parity.DFTD3["dftd3"])
    export_model(f"mace:{folder / 'mace.model'} + dftd3:{d3.pop('functional')}", folder / "mace + d3.nvdd", options=[None, d3])
    for job in JOBS.values():
        if job.model.endswith(".pkl"):
            write_pickle(folder, job)
    lammps_parity.write_data("quartz unit", folder / "quartz_unit.data")
    text = (folder / "quartz_unit.data").read_text()
    head, _, rows = text.partition("Atoms")
    lines = [line.split() for line in rows.splitlines()[1:] if line.strip()]
    charged = "\n".join(" ".join([*line[:2], "0.0", *line[2:]]) for line in lines)
    (folder / "charged.data").write_text(f"{head}Atoms # charge\n\n{charged}\n")
    return folder


@pytest.fixture(scope="module", params=(1, 2), ids="{} ranks".format)
def found(request, folder):
    return run(JOBS, request.param, folder)


def write_pickle(folder, job):
    unified = NVDDUnified(composed.pipeline(job.model.removesuffix(".pkl")), {"elements": ["O", "Si"]})
    (folder / job.model).write_bytes(pickle.dumps(unified))


def run(jobs, n, folder):
    for job in jobs.values():  # decks have no names with spaces
        for suffix in ("", ".nvdd"):
            file = folder / f"{job.model}{suffix}"
            if file.exists():
                file.with_name(file.name.replace(" ", "_")).write_bytes(file.read_bytes())
    jobs = {name: Job(**vars(job) | {"model": job.model.replace(" ", "_")}) for name, job in jobs.items()}
    return lammps_parity.run(jobs, n, folder)


@pytest.mark.parametrize("name", JOBS)
def test_equals_the_blocks(found, name):
    compare(found[name], JOBS[name])


@pytest.mark.slow
@pytest.mark.parametrize("n", (1, 2))
def test_predicted_charges(folder, n):
    """AIMNet2's charges in PME, in LAMMPS."""
    for job in SLOW.values():
        write_pickle(folder, job)
    found = run(SLOW, n, folder)
    for name, job in SLOW.items():
        compare(found[name], job)


def compare(result, job):
    assert "error" not in result, result["error"]
    numbers = np.array([14, 8])[result["type"] - 1]
    atoms = Atoms(numbers, result["x"], cell=result["cell"], pbc=result["pbc"])
    if job.style == "charge":
        atoms.set_array("charges", np.where(numbers == 14, 0.8, -0.5))
    expected = composed.plain(job.model.removesuffix(".pkl"), atoms)
    assert abs(result["energy"] - expected["energy"][0]) <= 1e-12 * abs(expected["energy"][0])
    largest = np.abs(expected["forces"]).max()
    assert largest > 1e-3 and np.abs(result["forces"] - expected["forces"]).max() <= 1e-10 * largest
    virial = -result["pressure"][[0, 3, 4, 3, 1, 5, 4, 5, 2]].reshape(3, 3) / BAR * result["volume"]
    assert np.abs(virial - expected["virial"]).max() <= 1e-10 * np.abs(expected["virial"]).max()
    assert abs(result["energies"].sum() - result["energy"]) <= 1e-11 * abs(result["energy"])


def test_the_file_makes_the_sum_again(folder):
    """Configuration and weights of each block, its type, and the wires; the ASE calculator gives the same."""
    again, meta = load_file(folder / "mace + lj.nvdd")
    assert not meta["pickled"] and meta["elements"] == ["O", "Si"] and meta["cutoff"] == 7.3
    assert {"mace-torch", "torch"} <= meta["packages"].keys()
    assert [type(b).__name__ for b in again.composed_of] == ["MACEWrapper", "LennardJonesModelWrapper"]
    atoms = composed.parity.structure("quartz unit").copy()
    energies = []
    for model, options in ((again, None), (f"mace:{folder / 'mace.model'} + lj", [None, LJ])):
        atoms.calc = NVDDCalculator(model, model_options=options)
        energies.append((atoms.get_potential_energy(), atoms.get_forces()))
    assert energies[0][0] == energies[1][0] and np.array_equal(energies[0][1], energies[1][1])


def test_wires_and_types_go_into_the_file(tmp_path):
    model = "py:exported_models:charges + py:exported_models:Charged"
    options = [None, {"wires": "charges=0.charges"}]
    export_model(model, tmp_path / "wired.nvdd", options=options)
    again, meta = load_file(tmp_path / "wired.nvdd")
    made = load(model, block_options=options)
    assert again.wires == made.wires and len(again.wires) == 1
    assert again.model_config.node_inputs == frozenset()
    assert [b.dtype for b in again.composed_of] == [torch.float32, torch.float64]
    assert read_meta(tmp_path / "wired.nvdd")["model"] == model and meta["dtype"] == "float64"
