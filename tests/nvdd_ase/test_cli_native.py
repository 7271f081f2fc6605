"""`nvdd md --engine native`."""

from __future__ import annotations

import csv
from pathlib import Path

import ase.io
import numpy as np
import pytest
from ase.build import bulk
from typer.testing import CliRunner

from nvdd_ase.cli import app

LJ = [
    "--model",
    "lj",
    "--option",
    "epsilon=0.0104",
    "--option",
    "sigma=3.4",
    "--option",
    "cutoff=7.0",
    "--engine",
    "native",
]


@pytest.fixture
def argon(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    atoms = bulk("Ar", cubic=True, a=5.3).repeat(2)
    atoms.rattle(0.05, seed=1)
    atoms.write("ar.extxyz")
    return atoms


def nvdd(*arguments: object, code: int = 0):
    result = CliRunner().invoke(app, ["md", "ar.extxyz", *LJ, *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


def test_a_run_and_its_restart_are_one_run(argon):
    options = [
        "--ensemble", "npt", "--npt-mode", "aniso", "--temperature", 50, "--timestep", 4, "--tau-t", 200, "--tau-p", 2000,
        "--seed", 3, "--interval", 5,
    ]  # fmt: skip
    first = nvdd(*options, "--steps", 10, "--checkpoint", "run.ckpt", "--plot", "run.png").stdout
    assert "velocities  drawn at 50 K with seed 3" in first and "checkpoint  run.ckpt" in first
    assert Path("run.png").stat().st_size > 1000
    again = nvdd(*options, "--steps", 10, "--restart", "run.ckpt").stdout
    assert "restart     run.ckpt, step 10" in again
    nvdd(*options, "--steps", 20, "-o", "whole.h5")
    frames = ase.io.read("ar-md.extxyz", ":")
    assert [frame.info["step"] for frame in frames] == [0, 5, 10, 15, 20]
    with open("ar-md.csv", newline="") as file, open("whole.csv", newline="") as whole:
        mine, expected = list(csv.DictReader(file)), list(csv.DictReader(whole))
    assert [line["step"] for line in mine] == [line["step"] for line in expected]
    for name in ("etot_eV", "conserved_eV", "temperature_K", "pressure_GPa", "volume_A3"):
        np.testing.assert_allclose(
            [float(a[name]) for a in mine], [float(b[name]) for b in expected], rtol=1e-9, atol=1e-12
        )


def test_a_restart_without_a_seed_takes_the_checkpoint_s(argon):
    """The noise goes on as if the run had never ended."""
    options = ["--ensemble", "langevin", "--temperature", 50, "--timestep", 4, "--interval", 2]
    nvdd(*options, "--seed", 3, "--steps", 2, "--checkpoint", "run.ckpt")
    nvdd(*options, "--steps", 2, "--restart", "run.ckpt")
    nvdd(*options, "--seed", 3, "--steps", 4, "-o", "whole.extxyz")
    end, expected = ase.io.read("ar-md.extxyz"), ase.io.read("whole.extxyz")
    assert end.info["step"] == expected.info["step"] == 4
    assert np.abs(end.positions - expected.positions).max() < 1e-7


MISTAKES = {
    "engine": (["--engine", "lammps"], "unknown --engine 'lammps'; choose one of ase, native"),
    "ase with a checkpoint": (["--engine", "ase", "--checkpoint", "x"], "--checkpoint: only with --engine native"),
    "ensemble": (["--ensemble", "nvtt"], "unknown ensemble 'nvtt'; choose one of nve, langevin, nvt, csvr, npt, nph"),
    "mode": (["--ensemble", "npt", "--npt-mode", "shear"], "mode"),
    "no restart": (["--restart", "none.ckpt"], "--restart none.ckpt: no such file"),
    "format": (["-o", "run.traj"], "must end in one of .extxyz, .xyz, .h5, .h5md"),
    "interval": (["--checkpoint-interval", "0"], "--checkpoint-interval must be at least 1"),
    "tau": (["--tau-p", "100"], "pressure, tau_p and npt_mode belong to ensembles npt and nph, not nve"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(argon, name):
    arguments, message = MISTAKES[name]
    lines = nvdd(*arguments, code=2).stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0]
