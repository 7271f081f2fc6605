"""`nvdd plan`: the table, JSON, the file of calibrations, mistakes."""

from __future__ import annotations

import json
import platform
from dataclasses import replace
from pathlib import Path

import pytest
from ase import Atoms
from ase.build import bulk
from typer.testing import CliRunner

from known_calibration import KNOWN
from nvdd.planning import measure
from nvdd.planning.calibration import load, save
from nvdd.planning.estimate import estimate
from nvdd_ase.cli import app

LJ = ["--model", "lj", "--option", "cutoff=6", "--device", "cpu"]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """argon in `ar.extxyz` and a calibration of lj in `known.json` of the working directory, which is a fresh folder."""
    monkeypatch.chdir(tmp_path)
    atoms = bulk("Ar", "fcc", a=5.26, cubic=True)
    atoms.write("ar.extxyz")
    save(replace(KNOWN, machine=platform.node(), model="lj cutoff=6"), "known.json")
    return tmp_path


def run(*arguments: str, code: int = 0):
    result = CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


def test_table_and_advice(folder):
    text = run("ar.extxyz", *LJ, "--calibration", "known.json", "--ranks", "1,8,64", "--repeat", "100,100,100").stdout
    assert "ar.extxyz repeated 100 x 100 x 100: 4000000 atoms" in text
    assert "2 exchanges and 2 sums a step, 512 + 12 bytes a halo row" in text
    assert "2 ranks over gloo on this machine: 100 us + bytes / 1 GB/s" in text
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()[:1].isdigit()}
    assert lines["8"][1:3] == ["2x2x2", "500000/500000/500000"]
    assert lines["64"][1] == "4x4x4"
    assert "advice      8 ranks: " in text


def test_json_has_the_numbers_of_the_library(folder):
    found = json.loads(run("ar.extxyz", *LJ, "--calibration", "known.json", "--ranks", "2", "--repeat", "9,8,7", "--json").stdout)
    direct = estimate(None, bulk("Ar", "fcc", a=5.26, cubic=True), (2,), repeat=(9, 8, 7), calibration=KNOWN)
    assert found["plans"] == direct.as_dict()["plans"]
    assert found["file"] == "ar.extxyz" and found["atoms"] == 2016


def test_a_cluster_and_options_of_the_network(folder):
    Atoms("Ar40", [[3.0 * i, 0, 0] for i in range(40)]).write("chain.xyz")
    given = ["--latency", "5", "--bandwidth", "20", "--memory", "0.5"]
    found = json.loads(run("chain.xyz", *LJ, "--calibration", "known.json", "--ranks", "4", *given, "--json").stdout)
    assert (found["latency_s"], found["bandwidth_bytes_per_s"]) == pytest.approx((5e-6, 2e10))
    assert found["memory_limit_bytes"] == 2**29
    assert found["plans"][0]["owned_atoms"] == {"min": 10, "mean": 10, "max": 10}
    assert found["plans"][0]["halo_atoms"]["max"] == 4  # two on either side within 6.5 A


def test_measures_and_keeps_what_it_has_measured(folder, monkeypatch):
    monkeypatch.setattr(measure, "_SPEND", 0.1)
    monkeypatch.setattr(measure, "_MOST", {"cpu": 200, "cuda": 200})
    arguments = ("ar.extxyz", *LJ, "--calibration", "new.json", "--ranks", "1,2", "--repeat", "5,5,5", "--dtype", "float32", "--json")
    first = json.loads(run(*arguments).stdout)
    kept = load("new.json", platform.node(), "cpu", "lj cutoff=6 dtype=float32", "halo")
    assert kept is not None and kept.dtype == "float32" and [e.site for e in kept.exchanges] == ["forces"]
    monkeypatch.setattr(measure, "calibrate", None)  # not called again
    assert json.loads(run(*arguments).stdout) == first


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["ar.extxyz", *LJ, "--ranks", "1;2"], "--ranks '1;2' must be positive whole numbers"),
        (["ar.extxyz", *LJ, "--ranks", "0"], "--ranks '0' must be positive"),
        (["ar.extxyz", *LJ, "--ranks", "5000"], "whole numbers from 1 to 4096, got [5000]"),
        (["ar.extxyz", *LJ, "--ranks", "8", "--calibration", "known.json"], "8 ranks are more than the 4 atoms"),
        (["ar.extxyz", *LJ, "--repeat", "2,2"], "three positive whole numbers"),
        (["ar.extxyz", *LJ, "--balance", "fair"], "unknown --balance 'fair'"),
        (["ar.extxyz", *LJ, "--memory", "-1"], "memory must be positive"),
        (["ar.extxyz", *LJ, "--latency", "-1"], "latency must be zero or positive"),
        (["ar.extxyz", "--model", "no-such"], "unknown model family 'no-such'"),
        (["none.extxyz", *LJ], "no such file"),
        (["empty.extxyz", *LJ], "without atoms"),
        (["ar.extxyz", *LJ, "--calibration", "ar.extxyz"], "must end in one of .json"),
        (["ar.extxyz", *LJ, "--plot", "plan.txt"], "must end in one of"),
    ],
)
def test_mistakes(folder, arguments, says):
    (folder / "empty.extxyz").write_text('0\npbc="F F F"\n')
    message = run(*arguments, code=2).stderr.strip()
    assert message.startswith("error: ") and says in message and "\n" not in message
