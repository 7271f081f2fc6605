"""One ASE script and one LAMMPS deck with every family that is installed: nothing changes but the model.

The script is examples/any_model.py, the deck examples/lammps/in.swap, the system water. A family takes part with the first
of its cases in tests/support/family_<name>.py. The reference is the family's own calculator: ASE's dynamics with it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from ase import Atoms, units
from ase.io import read
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution
from ase.md.verlet import VelocityVerlet

import families
from lammps_runs import BIN, environment, launch
from nvdd.models import registry

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"
NAMES = sorted(file.stem.removeprefix("family_") for file in SUPPORT.glob("family_*.py"))
WATER = ROOT / "examples" / "lammps" / "water.data"
STEPS = 5
# each starts ranks of its own, and imports a package there
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(params=NAMES)
def name(request):
    """A family whose package is here and whose model knows hydrogen and oxygen."""
    family = registry.families()[request.param]
    if not family.installed():
        pytest.skip(f"{family.package} is not installed: `./dev family {request.param}`")
    known = families.case(request.param).wrapper().model_config.elements
    assert known is None or {1, 8} <= known, f"family_{request.param}: the first case must know H and O, for the swap test"
    return request.param


def water():
    """As both start from it."""
    given = read(WATER, format="lammps-data", units="metal", atom_style="atomic")
    return Atoms(np.where(given.arrays["type"] == 1, 1, 8), given.positions, cell=given.cell, pbc=True)


@cache
def trajectory(name: str) -> list[tuple[float, float]]:
    """Potential and total energy of each step by the family's own calculator."""
    atoms = water()
    atoms.calc = families.calculator(name)
    MaxwellBoltzmannDistribution(atoms, temperature_K=100, rng=np.random.default_rng(0))
    run, found = VelocityVerlet(atoms, timestep=0.2 * units.fs), []
    for _ in run.irun(STEPS):
        found.append((float(atoms.get_potential_energy()), float(atoms.get_total_energy())))
    return found


def tolerance(name: str) -> float:
    """Of energies, eV: rounding in float64; in float32 of each atom's energy."""
    energy = abs(trajectory(name)[0][0])
    return 1e-11 * energy if families.case(name).tight else 3e-6 * energy + 1e-4


@pytest.mark.parametrize("strategy", families.STRATEGIES)
def test_ase(name, strategy, tmp_path):
    case = families.case(name)
    if strategy not in case.strategies:
        pytest.skip(f"{name} has no strategy {strategy!r}")
    model, options = case.write(tmp_path)
    assert not options, "the script has no options of models"
    water().write(tmp_path / "water.traj")  # all digits
    command = [sys.executable, str(ROOT / "examples" / "any_model.py"), model, "--structure", "water.traj", "--ranks", "2",
               "--strategy", strategy, "--steps", str(STEPS)]  # fmt: skip
    command += ["--dtype", case.dtype_name] if case.dtype_name else []
    done = subprocess.run(command, cwd=tmp_path, env=environment(OMP_NUM_THREADS="1"), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    # packages print what they like between the script's lines
    rows = re.findall(r"^ *(\d+) +(\S+) +(\S+)$", done.stdout, flags=re.MULTILINE)
    assert [int(step) for step, *_ in rows] == list(range(STEPS + 1))
    found = [(float(potential), float(total)) for _, potential, total in rows]
    assert np.ptp([potential for potential, _ in found]) > 10 * tolerance(name), "nothing has happened"
    np.testing.assert_allclose(found, trajectory(name), rtol=0, atol=tolerance(name))


def test_lammps(name, tmp_path):
    from nvdd_lammps import export_model

    case = families.case(name)
    model, options = case.write(tmp_path)
    export_model(model, tmp_path / "model.nvdd", options=options, dtype=case.dtype, allow_pickle=case.pickled)
    for file in ("in.swap", "water.lmp", "water.data"):
        shutil.copy(ROOT / "examples" / "lammps" / file, tmp_path)
    variables = {"model": "model.nvdd", "system": "water.lmp", "elements": "H O", "steps": "10"}
    words = [word for key, value in variables.items() for word in ("-var", key, value)]
    done = launch([str(BIN / "lmp"), "-in", "in.swap", *words], 2, cwd=tmp_path, limit=280)
    assert done.code == 0, done.out + done.err
    step, _, potential, *_ = re.search(r"Step .*\n *(.*)\n", done.out)[1].split()
    assert step == "0"
    # eight digits and more are printed
    assert abs(float(potential) - trajectory(name)[0][0]) <= 1e-7 * abs(trajectory(name)[0][0])
    assert re.search(r"drift with model\.nvdd: -?[\d.]+ meV per atom over 10 steps", done.out)
