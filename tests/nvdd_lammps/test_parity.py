"""The whole way in real LAMMPS: .nvdd files through the plugin, MD with reneighbouring, on 1 to 4 ranks.

The lj model against LAMMPS's lj/cut at the same positions, for all systems of lammps_systems (in units metal). Other
models against their own ASE calculators, at the positions to which LAMMPS has brought the atoms.
"""

from __future__ import annotations

import pickle
import re
from functools import cache

import numpy as np
import pytest
import torch
from ase import Atoms

import lammps_parity
import parity
import toys
from builders import random_mace
from lammps_models import Charged
from lammps_parity import Job
from lammps_runs import Deck, assert_same, decks
from lammps_systems import SYSTEMS
from nvdd import Batch, DistributedModel
from nvdd_lammps import NVDDUnified, export_model

# -- lj against lj/cut -----------------------------------------------------------------------------------------------

EV = 11604.5  # K
CHECKS_THE_PLUGIN = {name for name in SYSTEMS if name.startswith("checked") or name == "energies of pairs"}
LJ_SYSTEMS = [name for name in SYSTEMS if name not in CHECKS_THE_PLUGIN]
FEW = [
    "nve", "triclinic", "two atoms in a box smaller than the cutoff", "one atom", "empty rank", "rank without ghosts",
    "hybrid with NULL", "NPT, triclinic", "tiled and rcb", "minimize", "type swaps", "all atoms leave a rank",
]  # fmt: skip


COMPILED = ("nve", "empty rank", "NPT, triclinic", "all atoms leave a rank")


def in_metal(deck: str) -> str:
    """A deck of units lj with epsilon = 1 eV, sigma = 1 A, mass 1; our models for the pickles."""
    deck = deck.replace("units lj", "units metal\ntimestep 0.00005").replace("lattice fcc 0.8442", "lattice fcc 1.6795962")
    deck = re.sub(r"velocity all create (\S+)", lambda m: f"velocity all create {float(m[1]) * EV}", deck)
    deck = re.sub(r"npt temp 1 1 1 (\w+) 0 0 5", rf"npt temp {EV} {EV} 0.01 \1 0 0 0.05", deck)
    return deck.replace(".pkl", ".nvdd")


@pytest.fixture(scope="module")
def lj_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lj")
    export_model("lj", folder / "lj.nvdd", options={"cutoff": 2.5}, elements=["Ar"])
    export_model("lj", folder / "compiled.nvdd", options={"cutoff": 2.5}, elements=["Ar"], compile="eager")
    export_model("lj", folder / "half.nvdd", options={"cutoff": 2.5, "epsilon": 0.5}, elements=["Ar"])
    two = {"epsilon": "Ar:1,Kr:0.6", "sigma": "Ar:1,Kr:0.9", "cutoff": 2.5, "pair_coeffs": "Ar-Kr:0.8:0.95"}
    export_model("lj", folder / "two.nvdd", options=two, elements=["Ar", "Kr"])
    return folder


# on more than two ranks those in which these may meet something new
LJ_BY_RANKS = {1: LJ_SYSTEMS, 2: LJ_SYSTEMS, 3: FEW, 4: FEW}


def lj_in_ci(ranks: int, name: str) -> bool:
    """All on two ranks; few on one and three; four take two cores long, and are to LAMMPS as three."""
    return ranks == 2 or (ranks < 4 and name in FEW)


def by_ranks(names_by_ranks: dict, in_ci) -> list:
    """(number of ranks, name); slow unless ``in_ci(ranks, name)``."""
    return [
        pytest.param(ranks, name, marks=() if in_ci(ranks, name) else pytest.mark.slow)
        for ranks, names in names_by_ranks.items()
        for name in names
    ]


@pytest.fixture(scope="module")
def lj_numbers(lj_folder):
    """By ours; by ours and then, at the same positions, by LAMMPS's; by LAMMPS's alone; in one run for each number of ranks.

    The slow ones are in a run of their own.
    """

    @cache
    def run(ranks: int, often: bool) -> dict:
        jobs = {}
        for name in LJ_BY_RANKS[ranks]:
            if lj_in_ci(ranks, name) != often:
                continue
            setup, theirs, ours, action = map(in_metal, SYSTEMS[name])
            jobs[name, "ours"] = Deck(setup, ours, action)
            there = "suffix off\n" + theirs[theirs.rindex("pair_style") :]
            jobs[name, "theirs there"] = Deck(setup, ours, f"{action}\n{there}")
            jobs[name, "theirs"] = Deck(setup, theirs, action)
            if name in COMPILED:
                jobs[name, "compiled"] = Deck(setup, ours.replace("lj.nvdd", "compiled.nvdd"), action)
        return decks(jobs, ranks, cwd=lj_folder)

    return lambda ranks, name: run(ranks, lj_in_ci(ranks, name))


@pytest.mark.parametrize(("ranks", "name"), by_ranks(LJ_BY_RANKS, lj_in_ci))
def test_equals_lj_cut(lj_numbers, ranks, name):
    found = lj_numbers(ranks, name)
    ours = found[name, "ours"]
    assert_same(ours, found[name, "theirs there"])
    # rounding grows along a trajectory; what it must not do is to take another path
    assert_same(ours, found[name, "theirs"], relative=1e-8, force=1e-7)


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("ranks", (1, 2))
def test_compiled_equals_eager(lj_numbers, ranks, name):
    found = lj_numbers(ranks, name)
    assert_same(found[name, "compiled"], found[name, "ours"])


# -- against ASE -----------------------------------------------------------------------------------------------------

REAL, ATM = 23.060549, 68568.415  # LAMMPS's kcal/mol and, from kcal/mol/A^3, atm
BAR = 1.6021765e6  # LAMMPS's, from eV/A^3
JOBS = {
    "MACE, NVE": Job("mace-zbl", "quartz"),
    "MACE, an old list": Job("mace-zbl", "quartz unit", "fix 1 all nve\nrun 10"),
    "MACE, elements in another order": Job("mace-zbl", "quartz unit", "fix 1 all nve\nrun 8", elements="O Si"),
    "MACE, cell smaller than the cutoff": Job("mace-zbl", "quartz unit", "fix 1 all nve\nrun 20"),
    "MACE, NPT": Job("mace-zbl", "quartz unit", "fix 1 all npt temp 300 300 0.1 tri 0 0 1\nrun 8"),
    "MACE, tiled": Job("mace-zbl", "quartz", "comm_style tiled\nbalance 1.0 rcb\nfix 1 all nve\nrun 5"),
    "MACE, minimize": Job("mace-zbl", "quartz unit", "minimize 0 1e-8 3 10"),
    "MACE, units real": Job("mace-zbl", "quartz unit", "fix 1 all nve\nrun 8", units="real"),
    "7net-0": Job("7net-0", "quartz unit", "fix 1 all nve\nrun 6"),
    "D3": Job("dftd3", "quartz", "fix 1 all nve\nrun 6"),
    "D3, cell smaller than the cutoff": Job("dftd3", "quartz unit", "fix 1 all npt temp 300 300 0.1 tri 0 0 1\nrun 6"),
    "energy of positions": Job("positions.pkl", "quartz", "fix 1 all nve\nrun 8", stress_atom=False),
    "forces of their own": Job("direct.pkl", "quartz", "fix 1 all nve\nrun 8", stress_atom=False),
}
REFUSED = {
    "units electron": (Job("mace-zbl", "quartz unit", "run 0", units="electron"), "use units metal, or units real"),
    "wrong element": (Job("mace-zbl", "quartz unit", "run 0", elements="Si Xe"), "element Xe of atom type 2 is not known"),
    "stress/atom of other forces": (Job("direct.pkl", "quartz unit", "run 0"), "it has no virial per atom"),
    "charges": (Job("charged.pkl", "quartz unit", "run 0"), "use atom_style charge"),
}


@pytest.fixture(scope="module")
def ase_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ase")
    torch.save(random_mace(**parity.MACE["mace-zbl"]), folder / "mace-zbl.model")
    export_model(f"mace:{folder / 'mace-zbl.model'}", folder / "mace-zbl.nvdd")
    export_model("sevenn:7net-0", folder / "7net-0.nvdd")
    functional, *options = parity.DFTD3["dftd3"].items()
    export_model(f"dftd3:{functional[1]}", folder / "dftd3.nvdd", options=dict(options))
    for name, model in (("positions", toys.toy("positions")), ("direct", toys.toy("direct")), ("charged", Charged())):
        (folder / f"{name}.pkl").write_bytes(pickle.dumps(NVDDUnified(model, {"elements": ["O", "Si"]})))
    for name in ("quartz", "quartz unit"):
        lammps_parity.write_data(name, folder / f"{name.replace(' ', '_')}.data")
    return folder


# In CI all of them on two ranks; on one, each model; on three, what is new to a third rank. Each job loads a network.
IN_CI = {
    1: {"MACE, NVE", "MACE, cell smaller than the cutoff", "7net-0", "D3", "energy of positions", "forces of their own"},
    2: {*JOBS, *REFUSED},
    3: {"MACE, an old list", "MACE, tiled", "D3, cell smaller than the cutoff", "energy of positions", "wrong element"},
}


def in_ci(ranks: int, name: str) -> bool:
    return name in IN_CI[ranks]


@pytest.fixture(scope="module")
def ase_numbers(ase_folder):
    """Of a job on a number of ranks; those of CI in one run, the slow ones in another."""

    @cache
    def run(ranks: int, often: bool) -> dict:
        jobs = {name: job for name, (job, _) in REFUSED.items()} | JOBS
        chosen = {name: job for name, job in jobs.items() if in_ci(ranks, name) == often}
        return lammps_parity.run(chosen, ranks, ase_folder)

    return lambda ranks, name: run(ranks, in_ci(ranks, name))[name]


def by_ase(job: Job, atoms: Atoms) -> parity.Results:
    """The model's own calculator; of D3 and toys the core on one rank."""
    if job.model.endswith(".pkl") or job.model in parity.DFTD3:
        model = parity.wrapper(job.model) if job.model in parity.DFTD3 else toys.toy(job.model.removesuffix(".pkl"))
        out = DistributedModel(model)(Batch.from_atoms(atoms), {"energy", "energies", "forces", "stress"})
        value = lambda key: out[key].numpy()
        return parity.Results(float(value("energy")[0]), value("energies"), value("forces"), value("stress")[0], None)
    atoms.calc = calc = parity.calculator(job.model)
    energy, forces, stress = atoms.get_potential_energy(), atoms.get_forces().astype(float), atoms.get_stress(voigt=False)
    noise, energies = 0.0, np.asarray(calc.results["energies"], float)
    if job.model in parity.SEVENN:
        order = np.random.default_rng(0).permutation(len(atoms))
        permuted = atoms[order]
        permuted.calc = calc
        noise = float(np.abs(permuted.get_forces() - forces[order]).max())
    return parity.Results(energy, energies, forces, stress, None, noise)


@pytest.mark.parametrize(("ranks", "name"), by_ranks(dict.fromkeys(IN_CI, JOBS), in_ci))
def test_equals_the_ase_calculator(ase_numbers, ranks, name):
    job, found = JOBS[name], ase_numbers(ranks, name)
    assert "error" not in found, found["error"]
    energy_unit, pressure_unit = (REAL, ATM * REAL) if job.units == "real" else (1.0, BAR)
    numbers = np.array([{"Si": 14, "O": 8}[symbol] for symbol in job.elements.split()])[found["type"] - 1]
    atoms = Atoms(numbers, found["x"], cell=found["cell"], pbc=found["pbc"])
    wanted = by_ase(job, atoms)
    stress = -found["pressure"][[0, 3, 4, 3, 1, 5, 4, 5, 2]].reshape(3, 3) / pressure_unit
    mine = parity.Results(found["energy"] / energy_unit, found["energies"] / energy_unit, found["forces"] / energy_unit, stress, None)
    assert np.abs(wanted.forces).max() > 1e-3
    parity.assert_parity(mine, wanted, tight=job.model not in parity.SEVENN)
    if job.stress_atom:
        scale = np.abs(found["pressure"]).max()
        assert np.abs(-found["stresses"].sum(0) / found["volume"] - found["pressure"]).max() <= 1e-11 * scale


@pytest.mark.parametrize(("ranks", "name"), by_ranks(dict.fromkeys(IN_CI, REFUSED), in_ci))
def test_refused(ase_numbers, ranks, name):
    assert REFUSED[name][1] in ase_numbers(ranks, name)["error"]

