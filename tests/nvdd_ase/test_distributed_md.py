"""`DistributedMD`: results in the user's atoms, restart after any death."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import numpy as np
import pytest
from ase import Atoms, units
from ase.build import bulk
from ase.constraints import FixAtoms, FixBondLength, FixCom
from ase.md.verlet import VelocityVerlet

from launching import MPIRUN, run
from nvdd import FIRE, NPT, NVE, InputError, Langevin, NoseHoover, NvddError, RankError
from nvdd.dynamics.logs import StopWhen
from nvdd_ase import DistributedMD, NVDDCalculator

LJ = {"epsilon": {"Ar": 0.0104, "Ne": 0.0031}, "sigma": {"Ar": 3.4, "Ne": 2.8}, "cutoff": 6.5, "mixing": "arithmetic"}


def crystal(temperature: float = 60.0) -> Atoms:
    atoms = bulk("Ar", "fcc", a=5.3, cubic=True).repeat((2, 2, 3))
    atoms.rattle(0.1, seed=1)
    atoms = atoms[np.random.default_rng(0).permutation(len(atoms))]
    atoms.numbers[::5] = 10
    spread = np.sqrt(units.kB * temperature / atoms.get_masses())[:, None]
    atoms.set_velocities(spread * np.random.default_rng(4).normal(size=(len(atoms), 3)))
    return atoms


def md(atoms: Atoms, ranks: int = 1, **options) -> DistributedMD:
    return DistributedMD(atoms, "lj", ranks, model_options=LJ, device="cpu", **options)


@pytest.mark.parametrize("ranks", [1, 2])
def test_results_are_in_the_user_s_atoms(ranks):
    atoms, expected = crystal(), crystal()
    atoms.set_constraint(FixAtoms([3, 8]))
    expected.set_constraint(FixAtoms([3, 8]))
    seen = []
    with md(atoms, ranks, timestep=2.0) as run:
        run.attach(lambda run: seen.append((run.step, run.atoms.positions[0].copy())), 10)
        assert run.run(25) is False
        assert run.record["step"] == 25 and len(run.report()) == ranks
    with NVDDCalculator("lj", model_options=LJ, device="cpu") as calculator:
        expected.calc = calculator
        VelocityVerlet(expected, 2.0 * units.fs).run(25)
        assert np.abs(atoms.positions - expected.positions).max() < 1e-10
        assert np.abs(atoms.get_velocities() - expected.get_velocities()).max() < 1e-10
        assert atoms.get_potential_energy() == pytest.approx(expected.get_potential_energy(), rel=1e-12)
        assert np.abs(atoms.get_forces() - expected.get_forces()).max() < 1e-12
        assert np.abs(atoms.get_stress() - expected.get_stress()).max() < 1e-14
    assert [step for step, _ in seen] == [10, 20] and not np.array_equal(seen[0][1], seen[1][1])


def test_velocities_are_drawn_alike_on_any_number_of_ranks():
    temperatures = []
    for ranks in (1, 2):
        atoms = crystal(0.0)
        with md(atoms, ranks, ensemble="langevin", temperature=80.0, seed=5, timestep=2.0) as run:
            run.run(5)
        temperatures.append(atoms.get_temperature())
    assert temperatures[0] == pytest.approx(temperatures[1], rel=1e-10) and 20 < temperatures[0] < 140


WORDS = {
    "nve": ({}, NVE(2.0)),
    "langevin": ({"temperature": 60.0, "seed": 2}, Langevin(2.0, 60.0, seed=2)),
    "nvt": ({"temperature": 60.0}, NoseHoover(2.0, 60.0)),
    "npt": ({"temperature": 60.0}, NPT(2.0, 60.0)),
}


@pytest.mark.parametrize("word", WORDS)
def test_a_word_and_its_object_treat_the_momentum_alike(word):
    """Of atoms that drift: ``nve`` keeps the drift, a thermostat or barostat of the whole takes it off."""
    options, integrator = WORDS[word]
    by_word, by_object = crystal(), crystal()
    drift = by_word.get_momenta().sum(0)
    with md(by_word, ensemble=word, timestep=2.0, **options) as run:
        run.run(2)
    with md(by_object, ensemble=integrator) as run:
        run.run(2)
    assert np.abs(by_word.get_momenta() - by_object.get_momenta()).max() < 1e-10
    left = np.abs(by_word.get_momenta().sum(0))
    if word == "nve":
        np.testing.assert_allclose(left, np.abs(drift), rtol=1e-9)
    else:
        assert (left < 1e-9).all() == (word != "langevin")


ENDS = {
    "without steps": ({}, 0, 0),
    "converged": ({"ensemble": FIRE(fmax=100.0)}, 5, 0),
    "stopped": ({"hooks": [StopWhen(lambda seen: seen.step >= 2)]}, 5, 2),
    "stopped at the last step": ({"hooks": [StopWhen(lambda seen: seen.step >= 2)]}, 2, 2),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_stress_is_there_however_a_run_ends(end):
    options, steps, done = ENDS[end]
    atoms = crystal()
    with md(atoms, **options) as run:
        assert run.run(steps) is (end != "without steps") and run.step == done
        expected = atoms.copy()
    with NVDDCalculator("lj", model_options=LJ, device="cpu") as calculator:
        expected.calc = calculator
        assert np.abs(atoms.get_stress() - expected.get_stress()).max() < 1e-14


def test_progress_and_observers_have_intervals_of_their_own():
    shown, attached = [], []
    with md(crystal()) as run:
        run.attach(lambda run: attached.append(run.step))
        run.run(2)
        run.run(12, lambda done, record: shown.append((done, record["step"])), every=5)
        with pytest.raises(InputError, match="every must be at least 1, got 0"):
            run.run(1, print, every=0)
    assert attached == list(range(1, 15)) and shown == [(5, 7), (10, 12), (12, 14)]


def test_a_checkpoint_that_can_t_be_written_is_an_error_and_the_run_goes_on(tmp_path):
    (tmp_path / "taken.ckpt" / "inside").mkdir(parents=True)
    with md(crystal(), 2) as run:
        with pytest.raises(InputError, match="can't be written: there is no folder"):
            run.save(tmp_path / "none" / "run.ckpt")
        with pytest.raises(InputError, match=r"no checkpoint can be written to .*taken.ckpt: .*directory"):
            run.save(tmp_path / "taken.ckpt")
        assert os.listdir(tmp_path) == ["taken.ckpt"]
        run.run(2)
        run.save(tmp_path / "run.ckpt")
        assert run.step == 2 and (tmp_path / "run.ckpt").is_file()
    with pytest.raises(NvddError, match="the ranks are closed"):
        run.save(tmp_path / "run.ckpt")


def test_what_is_refused():
    with pytest.raises(InputError, match="ensemble nvt needs a temperature"):
        md(crystal(), ensemble="nvt")
    with pytest.raises(InputError, match="unknown ensemble 'nvx'; choose one of nve, langevin"):
        md(crystal(), ensemble="nvx")
    with pytest.raises(InputError, match="pressure, tau_p and npt_mode belong to ensembles npt and nph"):
        md(crystal(), tau_p=100.0)
    with pytest.raises(InputError, match="tau_t belongs to ensembles nvt, csvr and npt"):
        md(crystal(), tau_t=100.0)
    atoms = crystal()
    atoms.set_constraint(FixBondLength(0, 1))
    with pytest.raises(InputError, match="constraint FixBondLengths is not known to nvdd's dynamics"):
        md(atoms)


def other(change: str) -> Atoms:
    atoms = crystal()
    if change == "numbers":
        atoms.numbers[7] = 10
    elif change == "masses":
        masses = atoms.get_masses()
        masses[3] = 40.5
        atoms.set_masses(masses)
    elif change == "pbc":
        atoms.pbc[2] = False
    elif change == "fixed":
        atoms.set_constraint(FixAtoms([2]))
    else:
        atoms.set_constraint(FixCom())
    return atoms


def test_another_structure_than_the_checkpoint_s(tmp_path):
    """Is refused on all ranks, before the files of the run are cut."""
    path, log = tmp_path / "run.ckpt", tmp_path / "run.csv"
    with md(crystal(), checkpoint=path, log=log, interval=1) as run:
        run.run(2)
    (tmp_path / "run.csv").write_text(text := log.read_text() + "999" + "," * 13 + "\n")
    with pytest.raises(InputError, match="has 48 atoms, and these are 47"):
        md(crystal()[:47], restart=path, log=log)
    for change, message in {
        "numbers": "atomic_numbers of atom 7 is 18 there and 10 here, and 1 differ: give the structure",
        "masses": "masses of atom 3 is 39.948 there and 40.5 here",
        "pbc": r"was written of atoms with pbc = \[True, True, True\], and these have \[True, True, False\]",
        "fixed": "fixed of atom 2 is 0 there and 1 here",
        "fix_com": "was written of atoms with fix_com = False, and these have True",
    }.items():
        with pytest.raises(InputError, match=message):
            md(other(change), 2 if change == "masses" else 1, restart=path, log=log)
    assert log.read_text() == text


def test_velocities_come_back_as_they_are():
    """ASE's constraints stand aside: FixCom would take the drift off that ``fix_com=False`` lets the atoms have."""
    atoms = crystal()
    drift = atoms.get_momenta().sum(0)
    atoms.set_constraint(FixCom())
    with md(atoms, fix_com=False) as run:
        run.run(1)
    np.testing.assert_allclose(atoms.get_momenta().sum(0), drift, rtol=1e-9)


LANGEVIN = {"ensemble": "langevin", "temperature": 60.0, "timestep": 2.0}


class Uninterrupted:
    """Positions after each step on one rank, computed as far as they are asked for."""

    def __init__(self) -> None:
        self.atoms = crystal()
        self.run = md(self.atoms, **LANGEVIN)
        self.found = [self.atoms.positions.copy()]

    def __getitem__(self, step: int) -> np.ndarray:
        while len(self.found) <= step:
            self.run.run(1)
            self.found.append(self.atoms.positions.copy())
        return self.found[step]


@pytest.fixture(scope="module")
def uninterrupted():
    whole = Uninterrupted()
    yield whole
    whole.run.close()


def killed_at_random(folder, number: int, ranks: int, expected: Uninterrupted) -> int:
    """Kills a rank at a random moment of a run that writes a checkpoint each step, and goes on from it."""
    dice, path = random.Random(number), folder / f"{number}.ckpt"
    run = md(crystal(), ranks, **LANGEVIN, checkpoint=path, checkpoint_interval=1)
    run.run(1)  # a first checkpoint
    pid = dice.choice(run.report())["pid"]
    timer = threading.Timer(dice.uniform(0.0, 0.4), os.kill, (pid, signal.SIGKILL))
    timer.start()
    with pytest.raises(RankError):
        run.run(1_000_000)
    run.close()
    timer.join()
    atoms = crystal()
    with md(atoms, **LANGEVIN, restart=path) as again:
        step = again.step
        assert np.abs(atoms.positions - expected[step]).max() < 1e-8, step
        again.run(2)
    assert step >= 1 and again.record["step"] == step + 2
    assert np.abs(atoms.positions - expected[step + 2]).max() < 1e-8, step
    return step


@pytest.mark.parametrize("number", range(3))
def test_kill_any_rank_and_go_on(tmp_path, uninterrupted, number):
    killed_at_random(tmp_path, number, 2, uninterrupted)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_kill_any_rank_fifty_times(tmp_path, uninterrupted):
    began = time.monotonic()
    steps = [killed_at_random(tmp_path, number, 3, uninterrupted) for number in range(100, 150)]
    print(f"50 kills in {time.monotonic() - began:.0f} s, after {min(steps)} to {max(steps)} steps")


SCRIPT = """
import numpy as np
from ase.io import read
from nvdd_ase import DistributedMD

atoms = read("start.traj")
with DistributedMD(atoms, "lj", model_options={options!r}, device="cpu", ensemble="langevin", temperature=60, timestep=2.0,
                   seed=3, log="md.csv", interval=10) as md:
    md.run(30)
    print("ranks", len(md.report()))
    np.save("end.npy", atoms.positions)
print("end")
"""


@pytest.mark.parametrize(
    "launcher",
    ["torchrun", "srun", pytest.param("mpirun", marks=pytest.mark.skipif(not MPIRUN.exists(), reason="needs mpich"))],
)
def test_launchers(tmp_path, launcher):
    """The script of one process, under a launcher: rank 0 runs it, the others serve."""
    crystal().write(tmp_path / "start.traj")
    (tmp_path / "script.py").write_text(SCRIPT.format(options=LJ))
    ended = run(launcher, 2, tmp_path / "script.py", cwd=tmp_path)
    assert set(ended.codes) == {0} and not ended.left, ended.out + ended.err
    assert ended.lines("ranks") == ["ranks 2"] and ended.lines("end") == ["end"]
    assert len((tmp_path / "md.csv").read_text().splitlines()) == 5  # names, steps 0 to 30
    atoms = crystal()
    with md(atoms, ensemble="langevin", temperature=60, timestep=2.0, seed=3) as one:
        one.run(30)
    assert np.abs(np.load(tmp_path / "end.npy") - atoms.positions).max() < 1e-9
