"""The same class in a LAMMPS with ML-IAP's Python interface: numbers of the plugin's host and of lj/cut.

Runs where tools/build_lammps.sh has built that LAMMPS (NVDD_NATIVE_LAMMPS, or lammps-native in nvdd's cache), with
LAMMPS's default ghost cutoff, on 1 and 2 ranks.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from nvdd_lammps import build, export_model

NATIVE = Path(os.environ.get("NVDD_NATIVE_LAMMPS") or build.cache_folder() / "lammps-native")
pytestmark = pytest.mark.skipif(
    not (NATIVE / "lib" / "complete").exists(),
    reason=f"no LAMMPS with ML-IAP's Python interface in {NATIVE}: tools/build_lammps.sh makes it",
)

SILICA = (Path(__file__).parents[2] / "examples" / "lammps" / "silica.lmp").read_text()
SETUP = "units metal\natom_style atomic\nnewton on\n" + SILICA + "displace_atoms all random 0.1 0.1 0.1 77 units box\n"
RUN = "velocity all create 600 4928 loop geom\nneigh_modify every 2 delay 0 check no\nfix 1 all nve\nrun 6 post no"

DRIVER = """
import sys
import numpy as np
from mpi4py import MPI
from lammps import lammps
host, potential, result = sys.argv[1:]
lmp = lammps(cmdargs=["-screen", "none", "-log", "none", "-var", "n", "1"])
if host == "native":
    from lammps.mliap import activate_mliappy
    import nvdd_lammps.hosts
    activate_mliappy(lmp)
    nvdd_lammps.hosts.attach(lmp)
for part in (open("setup.lmp").read(), open(potential).read(), open("run.lmp").read()):
    lmp.commands_string(part)
n = lmp.extract_setting("nlocal")
thermo = [lmp.get_thermo(name) for name in ("pe", "pxx", "pyy", "pzz", "pxy", "pxz", "pyz")]
parts = MPI.COMM_WORLD.allgather([np.array(lmp.numpy.extract_atom(name)[:n]) for name in ("x", "f")])
if MPI.COMM_WORLD.rank == 0:
    x, f = (np.concatenate([part[k] for part in parts]) for k in (0, 1))
    order = np.lexsort(np.round(x, 6).T)
    np.savez(result, thermo=thermo, x=x[order], f=f[order], version=lmp.version())
lmp.close()
"""


def run(folder: Path, host: str, potential: str, ranks: int) -> dict[str, np.ndarray]:
    from lammps_runs import launch

    (folder / "driver.py").write_text(DRIVER)
    (folder / "setup.lmp").write_text(SETUP)
    (folder / "run.lmp").write_text(RUN)
    (folder / "potential.lmp").write_text(potential)
    more = {}
    if host == "native":
        libraries = [NATIVE / "lib", Path(sys.prefix) / "lib"]
        more = {
            "PYTHONPATH": os.pathsep.join([str(NATIVE / "python"), str(Path(__file__).parents[1] / "support")]),
            "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries)),
        }
    done = launch(
        [sys.executable, "driver.py", host, "potential.lmp", "found.npz"], ranks, cwd=folder, limit=280, env=more
    )
    assert done.code == 0, done.out + done.err
    with np.load(folder / "found.npz") as found:
        assert (int(found["version"]) != 20260704) == (host == "plugin")
        return dict(found)


def assert_equal(found: dict, expected: dict, relative: float) -> None:
    np.testing.assert_allclose(found["x"], expected["x"], atol=1e-9)
    scale = np.abs(expected["f"]).max()
    assert np.abs(found["f"] - expected["f"]).max() <= 10 * relative * scale
    np.testing.assert_allclose(found["thermo"][0], expected["thermo"][0], rtol=relative)
    pressures, wanted = found["thermo"][1:], expected["thermo"][1:]
    assert np.abs(pressures - wanted).max() <= 10 * relative * np.abs(wanted).max()


def layers(folder: Path, n: int) -> str:
    """A MACE of so many layers, in float64."""
    from builders import random_mace

    pytest.importorskip("mace")
    torch.save(random_mace(n_layers=n, l_max=1, hidden="8x0e+8x1o"), folder / "my.model")
    export_model(f"mace:{folder / 'my.model'}", folder / "model.nvdd")
    return "pair_style mliap unified model.nvdd\npair_coeff * * Si O"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", (1, 2))
def test_lj(tmp_path, ranks):
    export_model(
        "lj", tmp_path / "lj.nvdd", options={"epsilon": 0.2, "sigma": 1.5, "cutoff": 4.5}, elements=["Si", "O"]
    )
    ours = "pair_style mliap unified lj.nvdd\npair_coeff * * Si O"
    found = run(tmp_path, "native", ours, ranks)
    expected = run(tmp_path, "native", "pair_style lj/cut 4.5\npair_coeff * * 0.2 1.5", ranks)
    assert_equal(found, expected, 1e-12)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("n", (2, 5))
def test_layers(tmp_path, n):
    """As the plugin on one rank, with ghosts no further out than LAMMPS has them by default."""
    potential = layers(tmp_path, n)
    expected = run(tmp_path, "plugin", potential, 1)
    for ranks in (1, 2):
        assert_equal(run(tmp_path, "native", potential, ranks), expected, 1e-12)
