"""The `nvdd` command: every command's numbers against a direct calculation, every mistake's message and exit code."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import ase.io
import numpy as np
import pytest
from ase import Atoms, units
from ase.build import bulk
from ase.calculators.calculator import Calculator
from ase.constraints import FixAtoms
from rich.console import Console
from typer.testing import CliRunner

import nvdd_ase
from nvdd.errors import NvddError, RankError
from nvdd_ase.cli import app
from nvdd_ase.cli_input import parse_options
from nvdd_ase.cli_progress import step_progress
from nvdd_ase.md import MDSettings, make_integrator, prepare_velocities, run_md

OPTIONS = {"epsilon": 0.0104, "sigma": 3.4, "cutoff": 7.0, "shift": "smooth"}  # smooth: so that energy is conserved
LJ = ["--model", "lj", *(f"--option={key}={value}" for key, value in OPTIONS.items())]
COLUMNS = ["step", "time_fs", "epot_eV", "ekin_eV", "etot_eV", "temperature_K", "pressure_GPa", "ns_per_day"]


@pytest.fixture
def argon(tmp_path, monkeypatch) -> Atoms:
    """108 argon atoms in `ar.extxyz` of the working directory, which is a fresh folder."""
    monkeypatch.chdir(tmp_path)
    atoms = bulk("Ar", cubic=True, a=5.3).repeat(3)
    atoms.rattle(0.05, seed=1)
    atoms.write("ar.extxyz")
    return ase.io.read("ar.extxyz")


def nvdd(*arguments: object, code: int = 0):
    """Runs the command in this process and checks its exit code."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


def refused(*arguments: object) -> str:
    """The one-line message of a command that must fail with exit code 2."""
    result = nvdd(*arguments, code=2)
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), result.output
    return lines[0]


def calculate(atoms: Atoms) -> Atoms:
    """The same structure with results of a calculator that is made directly."""
    atoms = atoms.copy()
    with nvdd_ase.NVDDCalculator("lj", model_options=OPTIONS) as calculator:
        atoms.calc = calculator
        atoms.get_forces()
        if atoms.cell.rank == 3:
            atoms.get_stress()
    return atoms


def read_log(path: str) -> list[dict[str, float | None]]:
    with open(path) as file:
        return [{k: float(v) if v else None for k, v in row.items()} for row in csv.DictReader(file)]


# -- start-up ----------------------------------------------------------------------------------------------------


def test_help_and_typing_errors_load_no_heavy_package():
    code = (
        "import sys; from typer.testing import CliRunner; from nvdd_ase.cli import app\n"
        "for words in (['--help'], ['md', '--help'], ['--version'], ['md', 'x', '--model', 'lj', '--option', 'y']):\n"
        "    print(CliRunner().invoke(app, words).exit_code)\n"
        "print([m for m in ('torch', 'ase.io', 'scipy', 'matplotlib', 'warp') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split("\n")[:5] == ["0", "0", "0", "2", "[]"]


def test_version():
    assert nvdd("--version").stdout.strip() == f"nvdd {__import__('nvdd').__version__}"


def test_no_command_shows_help():
    result = CliRunner().invoke(app, [])
    assert all(name in result.output for name in ("md", "relax", "single", "models", "handlers"))


# -- single ------------------------------------------------------------------------------------------------------


def test_single_json_equals_a_direct_call(argon):
    out = nvdd("single", "ar.extxyz", *LJ, "-o", "out.json").stdout
    got, want = json.loads(Path("out.json").read_text()), calculate(argon)
    assert got["n_atoms"] == 108 and got["formula"] == "Ar108" and got["model_options"] == OPTIONS
    assert got["energy_eV"] == want.get_potential_energy()
    assert got["energy_per_atom_eV"] == want.get_potential_energy() / 108
    np.testing.assert_array_equal(got["forces_eV_per_A"], want.get_forces())
    np.testing.assert_array_equal(got["energies_eV"], want.get_potential_energies())
    np.testing.assert_array_equal(got["stress_eV_per_A3"], want.get_stress())
    np.testing.assert_allclose(got["stress_GPa"], want.get_stress() * 160.21766208, rtol=1e-6)
    assert got["pressure_GPa"] == pytest.approx(-np.mean(got["stress_GPa"][:3]))
    lengths = np.linalg.norm(want.get_forces(), axis=1)
    assert (got["max_force_eV_per_A"], got["max_force_atom"]) == (lengths.max(), lengths.argmax())
    for number in (got["energy_eV"], got["max_force_eV_per_A"], got["pressure_GPa"], *got["stress_GPa"]):
        assert f"{number:.6f}" in out


@pytest.mark.parametrize("divided", ((), ("--strategy", "graph"), ("--strategy", "graph", "--graph-plan", "blocks")))
def test_single_extxyz_on_two_ranks_equals_one(argon, divided):
    nvdd("single", "ar.extxyz", *LJ, "--ranks", 2, "--skin", 1, "-o", "out.extxyz", *divided)
    got, want = ase.io.read("out.extxyz"), calculate(argon)
    assert got.get_potential_energy() == pytest.approx(want.get_potential_energy(), abs=1e-10)
    np.testing.assert_allclose(got.get_forces(), want.get_forces(), atol=1e-8)  # the file has eight decimals
    np.testing.assert_allclose(got.get_stress(), want.get_stress(), atol=1e-10)
    np.testing.assert_array_equal(got.positions, argon.positions)


def test_single_of_several_frames(argon):
    frames = [argon.copy() for _ in range(4)]
    for number, frame in enumerate(frames):
        frame.rattle(0.02, seed=number)
    ase.io.write("many.traj", frames)
    out = nvdd("single", "many.traj", *LJ, "--index", "::2", "-o", "out.json").stdout
    got = json.loads(Path("out.json").read_text())
    assert [result["energy_eV"] for result in got] == [calculate(f).get_potential_energy() for f in frames[::2]]
    assert f"{got[1]['energy_eV']:.6f}" in out
    nvdd("single", "many.traj", *LJ, "--index", 1, "-o", "one.extxyz")
    assert ase.io.read("one.extxyz").get_potential_energy() == calculate(frames[1]).get_potential_energy()


def test_single_of_a_molecule_has_no_stress(argon):
    Atoms("Ar2", [[0, 0, 0], [3.9, 0, 0]]).write("dimer.xyz")
    out = nvdd("single", "dimer.xyz", *LJ, "-o", "out.json").stdout
    got = json.loads(Path("out.json").read_text())
    assert "not periodic" in out and "stress_GPa" not in got
    assert got["energy_eV"] == pytest.approx(4 * 0.0104 * ((3.4 / 3.9) ** 12 - (3.4 / 3.9) ** 6), abs=1e-9)


# -- md ----------------------------------------------------------------------------------------------------------


def test_nve_conserves_energy_and_logs_what_it_wrote(argon):
    arguments = ["--temperature", 40, "--timestep", 4, "--steps", 205, "--interval", 20, "--seed", 3]
    out = nvdd("md", "ar.extxyz", *LJ, *arguments, "-o", "run.extxyz", "--plot", "run.png").output
    log, frames = read_log("run.csv"), ase.io.read("run.extxyz", ":")
    assert list(log[0]) == COLUMNS
    assert [row["step"] for row in log] == [*range(0, 201, 20), 205]
    assert [frame.info["step"] for frame in frames] == [row["step"] for row in log]
    assert [row["time_fs"] for row in log] == [row["step"] * 4 for row in log]
    total = np.array([row["etot_eV"] for row in log])
    assert np.ptp([row["epot_eV"] for row in log]) > 0.1
    assert np.ptp(total) < 1e-3
    for row, frame in zip(log, frames, strict=True):
        assert frame.get_potential_energy() == pytest.approx(row["epot_eV"], abs=1e-9)
        assert frame.get_kinetic_energy() == pytest.approx(row["ekin_eV"], abs=1e-5)
        assert frame.get_temperature() == pytest.approx(row["temperature_K"], abs=1e-2)
        assert abs(frame.get_momenta().sum(0)).max() < 1e-4
    last = calculate(frames[-1])
    np.testing.assert_allclose(frames[-1].get_forces(), last.get_forces(), atol=1e-6)
    pressure = -last.get_stress(include_ideal_gas=True)[:3].mean() / units.GPa
    assert log[-1]["pressure_GPa"] == pytest.approx(pressure, abs=1e-6)
    assert log[0]["ns_per_day"] is None and log[-1]["ns_per_day"] > 0
    assert "drawn at 40 K with seed 3" in out and "nve 205/205" in out
    assert Path("run.png").read_bytes().startswith(b"\x89PNG")


def test_md_keeps_the_order_the_info_and_the_velocities_of_the_file(argon):
    argon.numbers[::3] = 10
    argon.info["origin"] = "test"
    argon.arrays["label"] = np.arange(108)
    argon.set_momenta(np.random.default_rng(0).normal(size=(108, 3)))
    argon.write("mixed.extxyz")
    mixed = ["--model", "lj", "--option", "epsilon=Ar:0.0104,Ne:0.0031", "--option", "sigma=Ar:3.4,Ne:2.75"]
    out = nvdd("md", "mixed.extxyz", *mixed, "--steps", 2, "--interval", 1, "-o", "run.extxyz").output
    assert "taken from the file" in out
    frames = ase.io.read("run.extxyz", ":")
    assert len(frames) == 3
    for frame in frames:
        assert (frame.numbers == argon.numbers).all() and (frame.arrays["label"] == np.arange(108)).all()
        assert frame.info["origin"] == "test"
    np.testing.assert_allclose(frames[0].positions, argon.positions, atol=1e-8)
    drift = argon.get_momenta().sum(0) / argon.get_masses().sum()
    np.testing.assert_allclose(frames[0].get_velocities(), argon.get_velocities() - drift, atol=1e-6)


def test_same_seed_same_trajectory_on_any_number_of_ranks(argon):
    arguments = ["--ensemble", "langevin", "--temperature", 40, "--steps", 20, "--interval", 20]
    for name, seed, ranks in (("a", 5, 1), ("b", 5, 2), ("c", 6, 1)):
        nvdd("md", "ar.extxyz", *LJ, *arguments, "--seed", seed, "--ranks", ranks, "-o", f"{name}.traj")
    a, b, c = (ase.io.read(f"{name}.traj").positions for name in "abc")
    np.testing.assert_allclose(a, b, atol=1e-9)
    assert abs(a - c).max() > 1e-3


def test_a_drawn_seed_is_printed_and_reproduces_the_run(argon):
    out = nvdd("md", "ar.extxyz", *LJ, "--steps", 1, "-o", "a.traj").stdout
    seed = out.split("with seed ")[1].split(",")[0]
    nvdd("md", "ar.extxyz", *LJ, "--steps", 1, "--seed", seed, "-o", "b.traj")
    np.testing.assert_array_equal(ase.io.read("a.traj").positions, ase.io.read("b.traj").positions)


@pytest.mark.parametrize("ensemble", ["langevin", "nvt"])
def test_thermostats_reach_their_temperature(argon, ensemble):
    arguments = ["--temperature", 40, "--timestep", 4, "--steps", 800, "--friction", 0.01, "--seed", 1]
    nvdd("md", "ar.extxyz", *LJ, "--ensemble", ensemble, *arguments, "-o", "run.traj")
    temperature = [row["temperature_K"] for row in read_log("run.csv")][30:]
    assert np.mean(temperature) == pytest.approx(40, rel=0.12)
    drift = ase.io.read("run.traj").get_center_of_mass() - argon.get_center_of_mass()
    assert abs(drift).max() < 1e-6


@pytest.mark.parametrize("flexible", [False, True])
def test_npt_compresses_under_pressure(argon, flexible):
    arguments = ["--temperature", 40, "--timestep", 4, "--steps", 300, "--pressure", 0.5, "--seed", 1]
    shape = ["--cell"] if flexible else []
    nvdd("md", "ar.extxyz", *LJ, "--ensemble", "npt", *shape, *arguments, "-o", "run.traj")
    cell = ase.io.read("run.traj").cell
    assert cell.volume < 0.98 * argon.cell.volume
    cubic = np.allclose(cell.lengths(), cell.lengths()[0]) and np.allclose(cell.angles(), 90)
    assert cubic is not flexible


def test_units_reach_ase(argon):
    settings = {"temperature": 77.0, "timestep": 2.5}
    integrator = make_integrator(argon.copy(), MDSettings("langevin", friction=0.02, **settings))
    assert integrator.dt == 2.5 * units.fs
    assert integrator.fr == 0.02 / units.fs and integrator.temp == 77.0 * units.kB
    integrator = make_integrator(argon.copy(), MDSettings("npt", pressure=1.5, **settings))
    assert integrator.todict()["md-type"] == "IsotropicMTKNPT"
    assert integrator._pressure_au == 1.5 * units.GPa and integrator._kT == 77.0 * units.kB


def test_nvt_and_npt_conserve_their_energy(argon):
    """The quantity that each integrator conserves holds only if time step, temperature and pressure fit."""
    for settings in (MDSettings("nvt", 40, timestep=4), MDSettings("npt", 40, pressure=0.1, timestep=4)):
        atoms = argon.copy()
        with nvdd_ase.NVDDCalculator("lj", model_options=OPTIONS) as calculator:
            atoms.calc = calculator
            prepare_velocities(atoms, settings)
            integrator = make_integrator(atoms, settings)
            conserved = [integrator.get_conserved_energy() for _ in integrator.irun(100)]
        assert np.ptp(conserved) < 2e-3, settings


def test_md_with_fixed_atoms(argon):
    argon.set_constraint(FixAtoms([0, 1]))
    argon.write("fixed.traj")
    out = nvdd("md", "fixed.traj", *LJ, "--ensemble", "langevin", "--steps", 5, "-o", "run.traj").stdout
    assert "constraints" in out
    last = ase.io.read("run.traj")
    np.testing.assert_array_equal(last.positions[:2], argon.positions[:2])
    assert abs(last.positions[2:] - argon.positions[2:]).max() > 1e-3


def test_md_of_a_cluster_has_no_pressure(argon):
    Atoms("Ar3", [[0, 0, 0], [3.8, 0, 0], [1.9, 3.3, 0]]).write("cluster.xyz")
    nvdd("md", "cluster.xyz", *LJ, "--temperature", 5, "--steps", 3, "--interval", 1, "--plot", "p.svg")
    assert [row["pressure_GPa"] for row in read_log("cluster-md.csv")] == [None] * 4
    assert len(ase.io.read("cluster-md.extxyz", ":")) == 4 and "<svg" in Path("p.svg").read_text()[:500]


def test_zero_steps_write_the_start(argon):
    nvdd("md", "ar.extxyz", *LJ, "--steps", 0)
    assert len(ase.io.read("ar-md.extxyz", ":")) == 1 and len(read_log("ar-md.csv")) == 1


def test_a_running_trajectory_is_readable_and_an_interrupt_keeps_it(argon):
    command = [sys.executable, "-m", "nvdd_ase.cli", "md", "ar.extxyz", *LJ, "--steps", "1000000", "--interval", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline, seen = time.monotonic() + 120, 0
        while seen < 20 and time.monotonic() < deadline and process.poll() is None:
            if Path("ar-md.extxyz").exists() and Path("ar-md.extxyz").stat().st_size:
                frames = ase.io.read("ar-md.extxyz", ":")
                assert all(len(frame) == 108 for frame in frames)
                seen = len(frames)
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130 and "interrupted" in err and "Traceback" not in err
    frames = ase.io.read("ar-md.extxyz", ":")
    assert seen >= 20 and [frame.info["step"] for frame in frames] == list(range(len(frames)))
    assert abs(len(read_log("ar-md.csv")) - len(frames)) <= 1


class _Diverging(Calculator):
    """Energy is not a number from the third evaluation on."""

    implemented_properties = ("energy", "forces")
    evaluations = 0

    def calculate(self, atoms=None, properties=("energy",), system_changes=()):
        super().calculate(atoms, properties, system_changes)
        self.evaluations += 1
        energy = float("nan") if self.evaluations > 2 else 0.0
        self.results = {"energy": energy, "forces": np.zeros((len(atoms), 3))}


def test_md_stops_where_the_energy_is_no_number(tmp_path):
    atoms = Atoms("Ar2", [[0, 0, 0], [4, 0, 0]], calculator=_Diverging())
    settings = MDSettings("langevin", temperature=300, seed=1)
    prepare_velocities(atoms, settings)
    with pytest.raises(NvddError, match=r"step 2: the potential energy is nan.*timestep below 1 fs"):
        run_md(atoms, settings, 10, trajectory=tmp_path / "run.extxyz")
    assert len(ase.io.read(tmp_path / "run.extxyz", ":")) == 2
    assert not atoms.constraints  # the held centre of mass is let go


def test_a_failed_start_leaves_old_files_alone(argon):
    Path("ar-md.extxyz").write_text("precious")
    argon.positions[7, 2] = float("nan")
    argon.write("bad.traj")
    assert "not finite" in refused_after_start("md", "bad.traj", *LJ, "--steps", 1, "-o", "ar-md.extxyz")
    assert Path("ar-md.extxyz").read_text() == "precious"


def refused_after_start(*arguments: object) -> str:
    return nvdd(*arguments, code=2).stderr


# -- relax -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["fire", "lbfgs", "bfgs"])
def test_relax_reaches_fmax(argon, optimizer):
    arguments = ["--optimizer", optimizer, "--fmax", 0.002]
    out = nvdd("relax", "ar.extxyz", *LJ, *arguments, "-o", "out.extxyz", "--plot", "r.pdf").stdout
    relaxed = ase.io.read("out.extxyz")
    forces = calculate(relaxed).get_forces()
    assert np.linalg.norm(forces, axis=1).max() < 0.002
    assert relaxed.get_potential_energy() < calculate(argon).get_potential_energy() - 0.05
    np.testing.assert_array_equal(relaxed.cell, argon.cell)
    assert "converged" in out and Path("r.pdf").stat().st_size > 1000


@pytest.mark.parametrize("pressure", [0.0, 0.5])
def test_relax_of_the_cell_meets_the_pressure(argon, pressure):
    arguments = ["--cell", "--pressure", pressure, "--fmax", 1e-4, "--optimizer", "lbfgs"]
    nvdd("relax", "ar.extxyz", *LJ, *arguments, "-o", "out.cif")
    relaxed = ase.io.read("out.cif")
    assert abs(relaxed.cell.lengths() - argon.cell.lengths()).max() > 0.01
    stress = calculate(relaxed).get_stress() / units.GPa
    np.testing.assert_allclose(stress[:3], -pressure, atol=3e-3)
    np.testing.assert_allclose(stress[3:], 0, atol=3e-3)


def test_relax_that_does_not_converge_says_so_and_keeps_the_structure(argon):
    result = nvdd("relax", "ar.extxyz", *LJ, "--fmax", 1e-6, "--steps", 3, code=1)
    assert "not converged" in result.stderr and "ar-relaxed.extxyz" in result.stderr
    assert "converged   in" not in result.stdout
    assert calculate(ase.io.read("ar-relaxed.extxyz")).get_potential_energy() < calculate(argon).get_potential_energy()


# -- models and handlers -----------------------------------------------------------------------------------------


def test_models_lists_every_family():
    from nvdd.models.registry import families

    out = " ".join(nvdd("models").stdout.split())
    for family in families().values():
        assert family.name in out
        assert all(name in out for name in (family.options or {}))
        assert all(name in out for name in family.checkpoints)
    assert "installed" in out and "MIT" in out


def test_handlers_lists_the_dispatch_table():
    from nvdd.dispatch import handler_table

    rows = [line.split("\t") for line in nvdd("handlers").stdout.splitlines()]
    assert all(len(row) == 4 for row in rows)
    handlers = handler_table()
    assert len(handlers) > 20
    for handler in handlers:
        mine = [row for row in rows if row[0] == handler.family and row[2:] == [handler.when, handler.does]]
        assert any(str(handler.op) in row[1].split(", ") for row in mine), handler


# -- mistakes ----------------------------------------------------------------------------------------------------

MISTAKES = {
    "option without =": (["md", "--option", "cutoff"], "--option 'cutoff' is not KEY=VALUE"),
    "option without key": (["single", "--option", "=3"], "--option '=3' is not KEY=VALUE"),
    "option twice": (["relax", "--option", "sigma=3", "--option", "sigma=4"], "--option sigma is given twice"),
    "ensemble": (["md", "--ensemble", "nvtt"], "unknown ensemble 'nvtt'; choose one of nve, langevin, nvt, npt"),
    "negative temperature": (["md", "--temperature", "-5"], "temperature must not be negative, but is -5 K"),
    "temperature nan": (["md", "--temperature", "nan"], "temperature must be a finite number"),
    "nvt at 0 K": (["md", "--ensemble", "nvt", "--temperature", "0"], "needs a temperature above 0 K"),
    "negative timestep": (["md", "--timestep", "-1"], "timestep must be positive, but is -1 fs"),
    "no timestep": (["md", "--timestep", "0"], "timestep must be positive, but is 0 fs"),
    "negative friction": (["md", "--friction", "-1"], "friction must not be negative"),
    "negative seed": (["md", "--seed", "-1"], "seed must not be negative"),
    "negative steps": (["md", "--steps", "-1"], "--steps must be at least 0"),
    "interval": (["md", "--interval", "0"], "--interval must be at least 1"),
    "nve with pressure": (["md", "--pressure", "1"], "belong to ensemble npt, not nve"),
    "ranks": (["single", "--ranks", "0"], "--ranks must be at least 1, but is 0"),
    "dtype": (["single", "--dtype", "float16"], "unknown --dtype 'float16'; choose one of float32, float64"),
    "strategy": (["single", "--strategy", "sharded"], "unknown --strategy 'sharded'; choose one of halo, graph"),
    "graph plan": (["relax", "--graph-plan", "ring"], "unknown --graph-plan 'ring'; choose one of curve, blocks"),
    "native graph": (["md", "--engine", "native", "--strategy", "graph"], "--engine native divides atoms in space"),
    "skin": (["single", "--skin", "-1"], "--skin must be a length of 0 A or more"),
    "trajectory format": (["md", "-o", "run.dcd"], "must end in one of .extxyz, .xyz, .traj"),
    "folder": (["md", "-o", "nowhere/run.traj"], "the folder nowhere does not exist"),
    "input as output": (["md", "-o", "ar.extxyz"], "would replace the input file"),
    "plot format": (["md", "--plot", "plot.xls"], "must end in one of .png, .pdf, .svg"),
    "results format": (["single", "-o", "out.txt"], "must end in one of .json, .extxyz, .xyz"),
    "index": (["single", "--index", "last"], "--index 'last' is neither a number nor a range"),
    "no such frame": (["single", "--index", "7"], "ar.extxyz has no frame 7"),
    "empty range": (["single", "--index", "5:9"], "ar.extxyz has no frame 5:9"),
    "range for md": (["md", "--index", ":"], "this command starts from one frame"),
    "optimizer": (["relax", "--optimizer", "cg"], "unknown optimizer 'cg'; choose one of fire, lbfgs, bfgs"),
    "fmax": (["relax", "--fmax", "0"], "fmax must be positive, but is 0 eV/A"),
    "pressure of a fixed cell": (["relax", "--pressure", "1"], "relax the cell too (--cell)"),
    "structure format": (["relax", "-o", "out.nothing"], "ASE has no format for that name"),
}


@pytest.fixture
def no_calculator(monkeypatch):
    """Fails the test if a calculator is started."""

    def start(*_, **__):
        raise AssertionError("the calculator was started")

    monkeypatch.setattr(nvdd_ase, "NVDDCalculator", start, raising=False)


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named_before_anything_starts(argon, no_calculator, name):
    (command, *rest), message = MISTAKES[name]
    assert message in refused(command, "ar.extxyz", *LJ, *rest)


@pytest.mark.parametrize("command", ["md", "relax", "single"])
def test_files_that_cannot_be_read(argon, no_calculator, command):
    assert "no such file: nofile.cif" in refused(command, "nofile.cif", *LJ)
    Path("notes.txt").write_text("not a structure\n")
    assert "cannot read notes.txt as a structure" in refused(command, "notes.txt", *LJ)
    Path("broken.extxyz").write_text("5\n\nAr 0 0 0\n")
    assert "broken.extxyz" in refused(command, "broken.extxyz", *LJ)
    Path("empty.xyz").write_text("0\n\n")
    assert "empty.xyz" in refused(command, "empty.xyz", *LJ)


def test_what_a_structure_cannot_do(argon, no_calculator):
    argon.pbc = (True, True, False)
    argon.write("slab.traj")
    assert "pbc is [True, True, False]" in refused("md", "slab.traj", *LJ, "--ensemble", "npt")
    assert "pbc is [True, True, False]" in refused("relax", "slab.traj", *LJ, "--cell")
    argon.pbc = True
    argon.set_constraint(FixAtoms([0]))
    argon.write("fixed.traj")
    assert "constraints (FixAtoms)" in refused("md", "fixed.traj", *LJ, "--ensemble", "nvt")


def test_no_matplotlib(argon, no_calculator, monkeypatch):
    monkeypatch.setattr("nvdd_ase.plots.find_spec", lambda name: None)
    assert "pip install matplotlib" in refused("md", "ar.extxyz", *LJ, "--plot", "p.png")


def test_missing_model_and_mistyped_numbers_are_usage_errors(argon, no_calculator):
    assert "--model" in nvdd("md", "ar.extxyz", code=2).stderr
    assert "--steps" in nvdd("md", "ar.extxyz", *LJ, "--steps", "many", code=2).stderr
    assert "No such command" in nvdd("mdd", code=2).stderr


def test_unknown_model_and_unknown_option(argon):
    assert "unknown model family 'lennard'" in refused("single", "ar.extxyz", "--model", "lennard")
    assert "sigmaa" in refused("single", "ar.extxyz", *LJ, "--option", "sigmaa=3")


def test_errors_of_a_rank_are_one_line_and_debug_adds_the_traceback(argon, monkeypatch):
    def start(*_, **__):
        raise RankError(1, "forward", "out of memory [at last]", "Traceback of the rank")

    monkeypatch.setattr(nvdd_ase, "NVDDCalculator", start, raising=False)
    where = "docs/troubleshooting.md#rank-failed, or: nvdd explain rank-failed"
    message = f"error: rank 1 failed in phase 'forward': out of memory [at last] [{where}]"
    assert refused("single", "ar.extxyz", *LJ) == message
    shown = nvdd("single", "ar.extxyz", *LJ, "--debug", code=2).stderr
    assert shown.strip().endswith(message)
    assert "Traceback (most recent call last)" in shown and "Traceback of the rank" in shown


def test_a_bug_is_not_dressed_up(argon, monkeypatch):
    def start(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr(nvdd_ase, "NVDDCalculator", start, raising=False)
    with pytest.raises(ZeroDivisionError):
        nvdd("single", "ar.extxyz", *LJ)


# -- parts -------------------------------------------------------------------------------------------------------


def test_option_values_are_numbers_booleans_or_strings():
    texts = ["a=3", "b=-2.5e-3", "c=TRUE", "d=false", "e=PBE", "f=", "g=x=y", "h=1_0", "i=nan", " j = 4. "]
    got = parse_options(texts)
    assert got == {
        "a": 3, "b": -0.0025, "c": True, "d": False, "e": "PBE", "f": "", "g": "x=y", "h": "1_0", "i": "nan", "j": 4.0,
    }  # fmt: skip
    assert [type(got[key]) for key in "abcd"] == [int, float, bool, bool]


@pytest.mark.parametrize("terminal", [False, True])
def test_progress(terminal):
    text = StringIO()
    console = Console(file=text, force_terminal=terminal, width=160)
    with step_progress("nve", 3, console) as report:
        for step in range(4):
            report(step, f"T {step} K")
            time.sleep(0.01)
    shown = text.getvalue()
    assert "nve" in shown and "3/3" in shown and "steps/s" in shown and "T 3 K" in shown
    if not terminal:
        assert shown.splitlines()[0] == "nve 0/3  T 0 K" and os.linesep.join(shown.splitlines()[1:]).count("nve") == 1


def test_explain():
    out = nvdd("explain", "nvdd: the periodic cell vectors are linearly dependent").stdout
    assert "remedy      give three independent vectors" in out and out.endswith("docs/troubleshooting.md#dependent\n")
    assert nvdd("explain", "dependent").stdout == out
    assert "no entry" in nvdd("explain", "a text about something else altogether", code=1).stderr


def test_errors_name_their_entry(tmp_path):
    assert refused("single", tmp_path / "none.xyz", *LJ).endswith("[docs/troubleshooting.md#cli-file, or: nvdd explain cli-file]")
