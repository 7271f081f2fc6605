"""`nvdd scaling`: the table, JSON, the picture, mistakes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from ase.build import bulk
from typer.testing import CliRunner

from nvdd_ase import scaling
from nvdd_ase.cli import app
from nvdd_ase.scaling import ScalingRow

LJ = ["--model", "lj", "--option", "epsilon=0.0104", "--option", "sigma=3.4", "--option", "cutoff=6", "--device", "cpu"]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    bulk("Ar", "fcc", a=5.26, cubic=True).write("ar.extxyz")
    return tmp_path


def run(*arguments: str, code: int = 0):
    result = CliRunner().invoke(app, ["scaling", *arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


def test_one_and_two_ranks(folder):
    arguments = ["--repeat", "3,2,2", "--ranks", "1,2", "--steps", "2", "-o", "rows.json", "--plot", "s.png"]
    text = run("ar.extxyz", *LJ, *arguments).stdout
    assert "structure   ar.extxyz: 48 atoms" in text
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()[:1].isdigit()}
    assert lines["1"][2:6] == ["1.00", "1.00", "48/48", "0"] and sum(map(int, lines["2"][4].split("/"))) == 48
    found = json.loads((folder / "rows.json").read_text())
    assert [row["ranks"] for row in found["rows"]] == [1, 2] and all(row["agrees"] for row in found["rows"])
    assert found["atoms"] == 48 and found["model_options"]["sigma"] == 3.4
    assert (folder / "s.png").stat().st_size > 1000


def test_forces_that_differ_are_a_failure(folder, monkeypatch):
    good = ScalingRow(1, 1.0, 1.0, 1.0, (4,), (0,), (9,), 0.0, 1.0, 1e-8)
    bad = replace(good, ranks=2, owned=(2, 2), halo=(2, 2), edges=(5, 4), difference=1e-3)
    monkeypatch.setattr(scaling, "measure_scaling", lambda *_, **__: [good, bad])
    result = run("ar.extxyz", *LJ, "-o", "rows.json", code=1)
    assert "on 2 ranks a force differs by 1.0e-03 eV/A from that on 1" in result.stderr
    assert (folder / "rows.json").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["ar.extxyz", *LJ, "--ranks", "1;2"], "--ranks '1;2' must be positive whole numbers"),
        (["ar.extxyz", *LJ, "--steps", "0"], "--steps must be at least 1"),
        (["ar.extxyz", *LJ, "--repeat", "2,2"], "three positive whole numbers"),
        (["ar.extxyz", "--model", "no-such"], "unknown model family 'no-such'"),
        (["none.extxyz", *LJ], "no such file"),
        (["ar.extxyz", *LJ, "-o", "rows.txt"], "must end in one of .json"),
        (["ar.extxyz", *LJ, "--plot", "s.txt"], "must end in one of"),
    ],
)
def test_mistakes(folder, arguments, says):
    message = run(*arguments, code=2).stderr.strip()
    assert message.startswith("error: ") and says in message and "\n" not in message
