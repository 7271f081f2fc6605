"""A step of LAMMPS with a model on one rank, beside the model's own forward and derivative on the same atoms.

    OMP_NUM_THREADS=1 python benchmarks/lammps_model.py [--model mace] [--atoms 2000]

On one rank there is no halo and nothing is exchanged, and ghosts cost the model nothing: what a step takes longer
than the model alone is LAMMPS, the pair list and the hand-over. Interleaved, medians, with the list kept.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from overhead import interleaved, own_step, structure

warnings.filterwarnings("ignore")

DECK = """units metal
atom_style atomic
neighbor 1.0 bin
read_data {data}
pair_style mliap unified {file}
pair_coeff * * {elements}
neigh_modify delay 1000 every 1000 check no
fix 1 all nve
timestep 1e-6
thermo 1000
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mace")
    parser.add_argument("--atoms", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()

    import pickle

    from ase.calculators.lammps import Prism
    from ase.io import write
    from lammps import lammps

    import parity
    from nvdd import dispatch_trace
    from nvdd_lammps import NVDDUnified

    atoms = structure(arguments.model, arguments.atoms)
    wrapper = parity.wrapper(arguments.model)
    elements = list(dict.fromkeys(atoms.get_chemical_symbols()))
    with tempfile.TemporaryDirectory() as folder:
        data, file = Path(folder, "atoms.data"), Path(folder, "model.pkl")
        write(data, atoms, format="lammps-data", specorder=elements, masses=True, units="metal")
        file.write_bytes(pickle.dumps(NVDDUnified(wrapper, {"elements": elements})))
        instance = lammps(cmdargs=["-log", "none", "-screen", "none"])
        instance.commands_string(DECK.format(data=data, file=file, elements=" ".join(elements)))
        instance.command("run 0 post no")
        forces = np.array(instance.numpy.extract_atom("f"))[: len(atoms)]
        ids = np.array(instance.numpy.extract_atom("id"))[: len(atoms)]
        own, step = interleaved(
            [own_step(wrapper, atoms), lambda: instance.command("run 1 pre no post no")], arguments.repeats
        )
        with dispatch_trace() as trace:
            instance.command("run 1 pre no post no")
        instance.close()
    atoms.calc = parity.calculator(arguments.model)
    reference = atoms.get_forces()
    forces = Prism(atoms.cell.array).vector_to_ase(forces[np.argsort(ids)])  # LAMMPS turns the cell
    error = np.abs(forces - reference).max()
    print(
        f"{arguments.model}: {len(atoms)} atoms, {str(wrapper.dtype)[6:]}: own {1e3 * own:.1f} ms, a step of LAMMPS "
        f"{1e3 * step:.1f} ms, ratio {step / own:.3f}, {trace.n_exchanges} exchanges; max |dF| {error:.1e} of "
        f"{np.abs(reference).max():.2f} eV/A"
    )


if __name__ == "__main__":
    main()
