"""What ASE's users do with a calculator, on 2 ranks: the numbers of ASE's own Lennard-Jones, step by step."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import ase.io
import numpy as np
import pytest
from ase import Atoms, units
from ase.build import bulk
from ase.calculators.fd import calculate_numerical_forces, calculate_numerical_stress
from ase.calculators.lj import LennardJones
from ase.calculators.mixing import LinearCombinationCalculator, SumCalculator
from ase.constraints import FixAtoms, FixCom, Hookean
from ase.filters import FrechetCellFilter
from ase.io.trajectory import Trajectory
from ase.md.langevin import Langevin
from ase.md.nose_hoover_chain import MTKNPT
from ase.md.npt import NPT
from ase.md.verlet import VelocityVerlet
from ase.mep import NEB
from ase.optimize import BFGS, FIRE, LBFGS

from builders import quartz
from nvdd.errors import NvddError
from nvdd_ase import NVDDCalculator

# smooth: so that the energy is conserved, and alike in both to the last bits
THEIRS = {"epsilon": 0.0104, "sigma": 3.4, "rc": 7.0, "ro": 5.0, "smooth": True}
LJ = {
    "model": "lj",
    "model_options": {"epsilon": 0.0104, "sigma": 3.4, "cutoff": 7.0, "shift": "smooth", "onset": 5.0},
}


def heat(atoms: Atoms, kelvin: float) -> Atoms:
    """Draws velocities."""
    noise = np.random.default_rng(5).normal(size=(len(atoms), 3))
    atoms.set_momenta(noise * np.sqrt(atoms.get_masses() * units.kB * kelvin)[:, None])
    return atoms


def argon() -> Atoms:
    """32 atoms, compressed, displaced and moving."""
    atoms = bulk("Ar", cubic=True, a=5.2).repeat(2)
    atoms.rattle(0.15, seed=4)
    return heat(atoms, 80)


def state(atoms: Atoms) -> dict[str, np.ndarray]:
    """Where a workflow has led."""
    return {
        "positions": atoms.positions.copy(),
        "cell": atoms.cell.array.copy(),
        "momenta": atoms.get_momenta(),
        "energy": np.array(atoms.get_potential_energy()),
        "forces": atoms.get_forces(),
        "stress": atoms.get_stress(),
    }


# -- optimisers, dynamics, constraints ---------------------------------------------------------------------------


def optimise(method):
    def run(atoms: Atoms) -> None:
        method(atoms, logfile=None).run(fmax=1e-3, steps=12)

    return run


def relax_cell(atoms: Atoms) -> None:
    FIRE(FrechetCellFilter(atoms), logfile=None).run(fmax=1e-4, steps=15)


def langevin(atoms: Atoms) -> None:
    noise = np.random.RandomState(6)
    friction = 0.01 / units.fs
    Langevin(atoms, 4 * units.fs, temperature_K=80, friction=friction, fixcm=False, rng=noise).run(12)


def npt_mtk(atoms: Atoms) -> None:
    MTKNPT(atoms, 4 * units.fs, 80, 0.1 * units.GPa, tdamp=100 * units.fs, pdamp=400 * units.fs).run(10)


def npt_melchionna(atoms: Atoms) -> None:
    pfactor = (75 * units.fs) ** 2 * 3 * units.GPa
    NPT(atoms, 2 * units.fs, temperature_K=80, externalstress=0.0, ttime=25 * units.fs, pfactor=pfactor).run(8)


def constrained(*constraints):
    def run(atoms: Atoms) -> None:
        atoms.set_constraint(list(constraints))
        VelocityVerlet(atoms, 4 * units.fs).run(10)

    return run


WORKFLOWS = {
    "BFGS": optimise(BFGS),
    "LBFGS": optimise(LBFGS),
    "FIRE": optimise(FIRE),
    "FrechetCellFilter": relax_cell,
    "VelocityVerlet": constrained(),
    "Langevin": langevin,
    "MTKNPT": npt_mtk,
    "NPT": npt_melchionna,
    "FixAtoms": constrained(FixAtoms([0, 3, 17])),
    "FixCom": constrained(FixCom()),
    "Hookean": constrained(Hookean(a1=0, a2=9, rt=2.0, k=0.05)),
}


@pytest.mark.filterwarnings("ignore:NPT thermostat has been moved:FutureWarning")
@pytest.mark.filterwarnings("ignore:NPT thermostat has been moved:DeprecationWarning")
@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflow(shared, name):
    found, expected = argon(), argon()
    found.calc, expected.calc = shared(**LJ, ranks=2), LennardJones(**THEIRS)
    for atoms in (found, expected):
        WORKFLOWS[name](atoms)
    assert np.abs(found.positions - argon().positions).max() > 1e-2, "it moved"
    expected = state(expected)
    for key, value in state(found).items():
        scale = np.abs(expected[key]).max()
        np.testing.assert_allclose(value, expected[key], rtol=0, atol=1e-9 * scale, err_msg=key)
    if name == "FixAtoms":
        assert (found.positions[[0, 3, 17]] == argon().positions[[0, 3, 17]]).all()
    if name == "FixCom":
        np.testing.assert_allclose(found.get_center_of_mass(), argon().get_center_of_mass(), atol=1e-12)
    if "NPT" in name or name == "FrechetCellFilter":
        assert np.abs(found.cell.array - argon().cell.array).max() > 1e-3, "the cell moved"


def test_relaxed_to_the_end(shared):
    atoms = argon()
    atoms.calc = shared(**LJ, ranks=2)
    assert BFGS(FrechetCellFilter(atoms), logfile=None).run(fmax=1e-4, steps=100)
    assert np.abs(atoms.get_forces()).max() < 1e-4 and np.abs(atoms.get_stress()).max() < 1e-5
    assert abs(atoms.get_volume() ** (1 / 3) / 2 - 5.2) > 0.02, "another lattice constant than at the start"


def test_derivatives_by_finite_differences(shared):
    atoms = argon()
    atoms.calc = shared(**LJ, ranks=2)
    numeric = calculate_numerical_forces(atoms, eps=1e-4, iatoms=[7])
    np.testing.assert_allclose(atoms.get_forces()[[7]], numeric, rtol=1e-6, atol=1e-9)
    numeric = calculate_numerical_stress(atoms, eps=1e-5)
    np.testing.assert_allclose(atoms.get_stress(), numeric, rtol=1e-6, atol=1e-9)


# -- several images ----------------------------------------------------------------------------------------------


def band(calculators, shared_one: bool) -> np.ndarray:
    """Energies along a vacancy's hop after some steps of a nudged elastic band with 3 moving images."""
    first = bulk("Ar", cubic=True, a=5.3).repeat(2)
    hole = first.positions[0].copy()
    del first[0]
    last = first.copy()
    neighbour = np.argmin(np.linalg.norm(last.positions - hole, axis=1))
    last.positions[neighbour] = hole
    images = [first, *(first.copy() for _ in range(3)), last]
    neb = NEB(images, climb=True, method="improvedtangent", allow_shared_calculator=shared_one)
    neb.interpolate()
    for image, calculator in zip(images, calculators, strict=True):
        image.calc = calculator
    FIRE(neb, logfile=None).run(fmax=1e-3, steps=6)
    return np.array([image.get_potential_energy() for image in images])


def test_neb(shared):
    expected = band([LennardJones(**THEIRS) for _ in range(5)], False)
    assert expected[2] - expected[0] > 0.01, "there is a barrier"
    two = shared(**LJ, ranks=2)
    np.testing.assert_allclose(band([two] * 5, True), expected, rtol=1e-10)
    separate = [two, *(shared(**LJ, ranks=1, skin=skin) for skin in (0.0, 0.3, 0.5, 0.7))]
    np.testing.assert_allclose(band(separate, False), expected, rtol=1e-10)


# -- mixing ------------------------------------------------------------------------------------------------------


def test_mixing(shared):
    options = {"epsilon": 0.003, "sigma": 3.0, "rc": 6.0, "ro": 4.0, "smooth": True}
    parts = []
    for calculator in (LennardJones(**THEIRS), LennardJones(**options)):
        atoms = argon()
        atoms.calc = calculator
        parts.append(state(atoms))
    first, second = shared(**LJ, ranks=2), LennardJones(**options)
    own = shared(
        "lj", ranks=1, model_options={"epsilon": 0.003, "sigma": 3.0, "cutoff": 6.0, "shift": "smooth", "onset": 4.0}
    )
    for calculator, weights in (
        (SumCalculator([first, second]), (1, 1)),
        (SumCalculator([first, own]), (1, 1)),
        (LinearCombinationCalculator([first, own], [2.0, -0.5]), (2.0, -0.5)),
    ):
        assert {"energy", "forces", "stress"} <= set(calculator.implemented_properties)
        atoms = argon()
        atoms.calc = calculator
        for name, get in (
            ("energy", atoms.get_potential_energy), ("forces", atoms.get_forces), ("stress", atoms.get_stress)
        ):  # fmt: skip
            expected = sum(w * part[name] for w, part in zip(weights, parts, strict=True))
            np.testing.assert_allclose(get(), expected, rtol=0, atol=1e-10 * np.abs(expected).max(), err_msg=name)


# -- the interface of ASE's calculators --------------------------------------------------------------------------


def test_calculation_required(shared):
    atoms = argon()
    calculator = atoms.calc = shared(**LJ, ranks=2)
    assert calculator.calculation_required(atoms, ["energy"])
    assert calculator.get_property("energy", atoms, allow_calculation=False) is None
    atoms.get_forces()
    assert not calculator.calculation_required(atoms, ["energy", "free_energy", "energies", "forces", "stress"])
    assert calculator.calculation_required(atoms, ["stresses"])
    assert calculator.get_property("stresses", atoms, allow_calculation=False) is None
    stresses = calculator.get_property("stresses", atoms)
    energies = calculator.get_property("energies", atoms, allow_calculation=False)
    theirs = argon()
    theirs.calc = LennardJones(**THEIRS)
    np.testing.assert_allclose(stresses, theirs.get_stresses(), rtol=0, atol=1e-12)
    np.testing.assert_allclose(energies, theirs.get_potential_energies(), rtol=0, atol=1e-12)
    assert not calculator.calculation_required(atoms, ["stresses"])
    moved = atoms.copy()
    moved.positions[0, 0] += 1e-6
    assert calculator.calculation_required(moved, ["energy"])
    assert calculator.check_state(moved) == ["positions"]


def test_small_things_of_the_interface(shared):
    atoms = argon()
    calculator = atoms.calc = shared(**LJ, ranks=2)
    atoms.get_forces()
    properties = calculator.export_properties()
    assert properties["natoms"] == 32 and set(properties) >= {"energy", "free_energy", "energies", "forces", "stress"}
    assert (properties["forces"] == atoms.get_forces()).all()
    assert calculator.name == "nvdd"
    assert calculator.get_atoms() == atoms and calculator.get_atoms().calc is calculator
    assert calculator.get_potential_energy() == atoms.get_potential_energy()
    calculator.set_label("folder/name")
    assert (calculator.directory, calculator.prefix, calculator.label) == ("folder", "name", "folder/name")
    calculator.set_label(None)
    assert calculator.label is None and calculator.get_spin_polarized() is False
    assert atoms.todict()["numbers"].tolist() == atoms.numbers.tolist()
    labelled = NVDDCalculator("lj", label="name", directory=".", atoms=atoms)
    assert atoms.calc is labelled and labelled.prefix == "name"


@pytest.mark.parametrize("suffix", ("extxyz", "traj", "json", "db"))
def test_files(shared, tmp_path, suffix):
    """What is written with the calculator attached is read back."""
    atoms = argon()
    atoms.calc = shared(**LJ, ranks=2)
    expected = state(atoms)
    path = tmp_path / f"atoms.{suffix}"
    ase.io.write(path, atoms)
    again = ase.io.read(path)
    tolerance = 1e-7 if suffix == "extxyz" else 0
    for name, value in (
        ("energy", again.get_potential_energy()), ("forces", again.get_forces()), ("stress", again.get_stress())
    ):  # fmt: skip
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=tolerance, err_msg=name)
    if suffix in ("extxyz", "traj"):
        np.testing.assert_allclose(again.get_potential_energies(), atoms.get_potential_energies(), atol=tolerance)
    if suffix == "traj":
        assert again.calc.name == "nvdd"
        assert again.calc.parameters == {"model": "lj", "dtype": "float64", "ranks": 2}


def test_trajectory_of_a_run(shared, tmp_path):
    atoms = argon()
    atoms.calc = shared(**LJ, ranks=2)
    seen = []
    with Trajectory(tmp_path / "run.traj", "w", atoms) as trajectory:
        dynamics = VelocityVerlet(atoms, 4 * units.fs)
        dynamics.attach(trajectory.write)
        dynamics.attach(lambda: seen.append((atoms.get_potential_energy(), atoms.get_forces())))
        dynamics.run(4)
    frames = ase.io.read(tmp_path / "run.traj", ":")
    assert len(frames) == len(seen) == 5 and len({energy for energy, _ in seen}) == 5
    for frame, (energy, forces) in zip(frames, seen, strict=True):
        assert frame.get_potential_energy() == energy and (frame.get_forces() == forces).all()


# -- copies ------------------------------------------------------------------------------------------------------


def pids(calculator: NVDDCalculator) -> set[int]:
    return {rank["pid"] for rank in calculator.report()}


def test_copy_of_atoms(shared):
    atoms = argon()
    atoms.calc = shared(**LJ, ranks=2)
    atoms.get_forces()
    assert atoms.copy().calc is None


@pytest.mark.parametrize(
    "how", (copy.deepcopy, lambda atoms: pickle.loads(pickle.dumps(atoms))), ids=("deep", "pickle")
)
def test_copies_are_independent(shared, how):
    """A copy has the results and starts ranks of its own when it first computes."""
    atoms = argon()
    calculator = atoms.calc = shared(**LJ, ranks=2)
    energy, forces, ranks = atoms.get_potential_energy(), atoms.get_forces(), pids(calculator)
    other = how(atoms)
    assert other.calc is not calculator
    assert other.get_potential_energy() == energy and (other.get_forces() == forces).all()
    with pytest.raises(NvddError, match="nothing to report"):
        other.calc.report()  # so far it needed none
    assert pids(calculator) == ranks

    other.positions[3] += 0.2
    with other.calc:
        moved = other.get_forces()
        assert len(pids(other.calc) - ranks) == 2 and not pids(other.calc) & ranks
        assert (atoms.get_forces() == forces).all()
        atoms.positions[5] += 0.2
        assert np.abs(atoms.get_forces() - forces).max() > 1e-3
        assert (other.get_forces() == moved).all()
    theirs = other.copy()
    theirs.calc = LennardJones(**THEIRS)
    np.testing.assert_allclose(moved, theirs.get_forces(), rtol=0, atol=1e-12)
    assert pids(calculator) == ranks, "the end of the copy is not the end of the first"


def test_pickle_for_another_process(shared, tmp_path):
    atoms = argon()
    atoms.calc = shared(**LJ, ranks=1)
    forces = atoms.get_forces()
    (tmp_path / "atoms.pkl").write_bytes(pickle.dumps(atoms))
    script = (
        "import pickle, numpy\n"
        "atoms = pickle.load(open('atoms.pkl', 'rb'))\n"
        "atoms.calc.reset()\n"
        "numpy.save('forces.npy', atoms.get_forces())\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=120)
    np.testing.assert_allclose(np.load(tmp_path / "forces.npy"), forces, rtol=0, atol=1e-15)


def test_copy_of_a_calculator_with_a_wrapper_object():
    atoms = argon()
    from nvdd.models.lj import LennardJonesModelWrapper

    with NVDDCalculator(LennardJonesModelWrapper(**LJ["model_options"])) as atoms.calc:
        forces = atoms.get_forces()
        other = copy.deepcopy(atoms)
    other.calc.reset()
    assert (other.get_forces() == forces).all()


# -- a real model ------------------------------------------------------------------------------------------------


def resident(calculator: NVDDCalculator) -> int:
    """Bytes of memory that the ranks (or this process) hold, the largest of them."""
    page = os.sysconf("SC_PAGE_SIZE")
    return max(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page for pid in pids(calculator))


def nve(
    calculator: NVDDCalculator, repeat: tuple[int, int, int], steps: int
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Positions (steps + 1, n, 3), total energies and memory at each step of 1 fs from 300 K."""
    atoms = heat(quartz(repeat, stdev=0.02), 300)
    atoms.calc = calculator
    positions, energies, memory = [], [], []

    def observe() -> None:
        positions.append(atoms.positions.copy())
        energies.append(atoms.get_total_energy())
        memory.append(resident(calculator))

    dynamics = VelocityVerlet(atoms, 1 * units.fs)
    dynamics.attach(observe)
    dynamics.run(steps)
    return np.array(positions), np.array(energies), memory


@pytest.mark.slow  # in CI: the demo has its dynamics on two ranks, test_calculator.py its forces
def test_nve_of_sevennet(shared):
    one, _, _ = nve(shared("sevenn:7net-0", ranks=1), (2, 2, 1), 5)
    two, _, _ = nve(shared("sevenn:7net-0", ranks=2), (2, 2, 1), 5)
    assert np.abs(one[-1] - one[0]).max() > 1e-2
    assert np.abs(two - one).max() < 1e-6


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory from /proc")
def test_long_nve_of_sevennet(shared):
    """200 steps on 72 atoms: the trajectory of 1 rank, the energy kept, and no growth of memory."""
    results = []
    for ranks in (1, 2):
        start = time.monotonic()
        results.append(nve(shared("sevenn:7net-0", ranks=ranks), (2, 2, 2), 200))
        print(f"{ranks} rank(s): {time.monotonic() - start:.0f} s")
    (one, e_one, _), (two, e_two, memory) = results
    apart = np.abs(two - one).max(axis=(1, 2))
    print(f"positions apart: {apart[50]:.1e} A after 50, {apart[100]:.1e} after 100, {apart[200]:.1e} after 200 steps")
    print(f"range of the total energy: {np.ptp(e_one):.1e} eV on 1 rank, {np.ptp(e_two):.1e} eV on 2 ranks")
    print(f"memory of the larger rank: {memory[0] / 2**20:.0f} MiB at step 0, {memory[20] / 2**20:.0f} MiB at 20, "
          f"{memory[100] / 2**20:.0f} MiB at 100, {memory[200] / 2**20:.0f} MiB at 200")  # fmt: skip
    assert apart.max() < 1e-3
    # of the integrator: it falls with the square of the time step
    assert np.ptp(e_two) < 0.05 and abs(np.ptp(e_two) - np.ptp(e_one)) < 1e-3
    # medians, since the allocator takes and returns some tens of MiB from step to step
    early, late = np.median(memory[20:70]) / 2**20, np.median(memory[150:]) / 2**20
    print(f"medians: {early:.0f} MiB over steps 20 to 69, {late:.0f} MiB over steps 150 to 200")
    assert late - early < 24
