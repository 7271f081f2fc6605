"""What ranks do when one of them fails, in real LAMMPS; which devices and worlds are refused."""

from __future__ import annotations

import re
import time

import pytest

import lammps_models
from lammps_runs import lmp, script
from nvdd_lammps.ranks import AgreedError, check_size

# In the library an agreed error is an exception on every rank, and the script goes on.
LIBRARY = """
import sys
from lammps import lammps
from mpi4py import MPI
import lammps_models
for how in ("raise", "memory", "later"):
    for attempt in range(2):  # the second time with a new model, in a group of its own
        lmp = lammps(cmdargs=["-log", "none", "-screen", "none"])
        lmp.set_show_error(False)
        try:
            lmp.commands_string(lammps_models.DECK.format(model=how + "1.pkl") + "run 5")
            text = "no error"
        except Exception as error:
            text = str(error).replace(chr(10), " ")
        said = MPI.COMM_WORLD.gather(text)
        if said and attempt:
            print("SAID", how, said[0], "SAME" if len(set(said)) == 1 else said, flush=True)
        lmp.close()
# after an error the same instance goes on, once its model is given again
lmp = lammps(cmdargs=["-log", "none", "-screen", "none"])
lmp.set_show_error(False)
try:
    lmp.commands_string(lammps_models.DECK.format(model="raise1.pkl") + "run 5")
except Exception:
    lmp.command("run 3")
    sys.stdout.write(f"WENT ON {lmp.get_thermo('pe') < 0}\\n")
lmp.close()
"""


def seconds_to_end(run) -> float:
    """Between the fault and the end of the last process."""
    times = re.findall(r"^FAULT ([\d.]+)", run.err, re.MULTILINE)
    assert times, run.out + run.err
    return run.ended - float(times[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("faults")
    for how in ("raise", "memory", "later", "behind", "kill"):
        lammps_models.save(path, how, 1)
    lammps_models.save(path, "raise", 9)  # a rank that there is not
    return path


def test_agreed_in_the_library(folder):
    run = script(LIBRARY, 2, cwd=folder, limit=120)
    assert run.code == 0, run.out + run.err
    for how, what in (
        ("raise", "ArithmeticError: this rank has had enough"),
        ("memory", "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB"),
        ("later", "ArithmeticError: this rank has had enough"),
    ):
        assert re.search(rf"SAID {how} .*rank 1 of 2 failed in phase 'forward': {re.escape(what)}.* SAME", run.out), run.out
    assert run.out.count("WENT ON") == 2, run.out


@pytest.mark.parametrize("how", ("raise", "behind", "kill"))
def test_ends_all_ranks(folder, how):
    """In `lmp`: exit status, one message, within ten seconds."""
    start = time.time()
    run = lmp(lammps_models.DECK.format(model=f"{how}1.pkl") + "run 5", 2, cwd=folder, limit=90)
    run.ended = start + run.seconds
    assert run.code != 0, run.out + run.err
    assert seconds_to_end(run) < 10, run.out + run.err
    if how != "kill":
        assert "ArithmeticError: this rank has had enough" in run.out + run.err
        assert (run.out + run.err).count("ERROR") <= 2, run.out + run.err
    steps = re.findall(r"^ +(\d+) ", run.out, re.MULTILINE)
    assert "2" not in steps, "nothing goes on"


def test_singletons_are_refused():
    launched = {"PMI_RANK": "1", "PMI_SIZE": "4"}
    with pytest.raises(AgreedError, match="mpirun has started 4 processes, but LAMMPS sees one rank"):
        check_size(1, 1, launched)
    check_size(4, 1, launched)
    check_size(1, 4, launched)  # -partition 4x1
    check_size(1, 1, {})
    with pytest.raises(AgreedError, match="srun has started 2 processes"):
        check_size(1, 1, {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"})


def test_partitions_are_worlds_of_their_own(folder):
    """-partition 2x1 1: the groups of two worlds are made at once, of different sizes."""
    deck = "variable w world a b\n" + lammps_models.DECK.format(model="raise9.pkl") + 'run 5\nprint "PE $(pe:%.12g)" file pe.$w\n'
    run = lmp(deck, 3, "-partition", "2", "1", cwd=folder, limit=90)
    assert run.code == 0, run.out + run.err
    two, one = ((folder / f"pe.{w}").read_text().split()[1] for w in "ab")
    assert float(two) == pytest.approx(float(one), rel=1e-10)
    assert "nvdd: 2 rank(s)" in run.out and "nvdd: 1 rank(s)" in run.out
    assert "type 1 -> Ar (Z=18)" in run.out


def test_devices_are_checked(folder):
    run = lmp(lammps_models.DECK.format(model="raise9.pkl") + "run 0", 2, cwd=folder, limit=90, env={"NVDD_DEVICE": "cuda:7"})
    assert run.code != 0
    assert "device 'cuda:7': rank 0" in run.out + run.err and "sees no GPU there" in run.out + run.err
    assert "Traceback" not in run.err
