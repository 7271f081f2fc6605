"""What one step costs beside the model itself: one rank against the model's own forward, and the parts of a step.

    OMP_NUM_THREADS=1 python benchmarks/overhead.py                  # ranks 1, and the split on 2 ranks
    OMP_NUM_THREADS=1 python benchmarks/overhead.py --models mace,lj --atoms 1000

"own" is the wrapper in one process, with its edges given: vectors, energies, and by autograd forces and stress. "kernel"
is a part of that: its forward and the derivative by edge vectors. "nvdd" adds the check of the skin, the choice of edges,
dispatch and results. Interleaved calls, medians of processor time; the accuracy beside the speed is against the model's own
calculator.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import torch

warnings.filterwarnings("ignore")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

OUTPUTS = ("energy", "energies", "forces", "stress")
PHASES = ("partition", "plan", "edges", "forward", "backward", "consolidate")


def structure(model: str, n_atoms: int):
    """About ``n_atoms`` atoms that the model knows."""
    from builders import quartz
    from structures import argon

    if model == "lj":
        side = round((n_atoms / 4) ** (1 / 3))
        return argon((side, side, side), 0.1)
    side = max(1, round((n_atoms / 9) ** (1 / 3)))
    return quartz((side, side, max(1, round(n_atoms / 9 / side**2))), 0.05)


def own_step(wrapper, atoms):
    """A function that evaluates the model alone, with its graph given."""
    from nvdd import Batch
    from nvdd.neighbors import attach_neighbors

    batch = attach_neighbors(Batch.from_atoms(atoms), wrapper.model_config.neighbor_config.cutoff, wrapper.edge_layout)
    vectors = batch.edge_vectors.to(wrapper.dtype)

    def step():
        leaf = vectors.clone().requires_grad_(True)
        batch._edge_vectors = leaf
        return torch.autograd.grad(wrapper(batch)["energies"].sum(), leaf)

    return step


def own_evaluation(wrapper, atoms):
    """A function that gives energy, forces and stress by the model alone, with its graph given."""
    from nvdd import Batch
    from nvdd.neighbors import attach_neighbors

    layout = wrapper.edge_layout
    batch = attach_neighbors(Batch.from_atoms(atoms), wrapper.model_config.neighbor_config.cutoff, layout)
    shifts, identity = batch.neighbor_list_shifts.to(torch.float64), torch.eye(3, dtype=torch.float64)

    def evaluate():
        positions = batch.positions.clone().requires_grad_(True)
        strain = torch.zeros(3, 3, dtype=torch.float64, requires_grad=True)
        deformation = identity + 0.5 * (strain + strain.T)
        x, cell = positions @ deformation, batch.cell[0] @ deformation
        between = x.index_select(0, batch.senders) - x.index_select(0, batch.receivers)
        batch._edge_vectors = (layout.sign * between + shifts @ cell).to(wrapper.dtype)
        energies = wrapper(batch)["energies"]
        forces, virial = torch.autograd.grad(energies.sum(), (positions, strain))
        return energies.sum(), -forces, virial / batch.cell[0].det().abs()

    return evaluate


def interleaved(functions, repeats: int, clock=time.perf_counter) -> list[float]:
    """Median seconds of each function, called in turn so that a busy machine slows all alike."""
    for f in functions:
        f()
        f()
    seconds = [[] for _ in functions]
    for _ in range(repeats):
        for f, times in zip(functions, seconds, strict=True):
            start = clock()
            f()
            times.append(clock() - start)
    return [statistics.median(t) for t in seconds]


def split_on_ranks(wrapper, atoms, ranks: int, steps: int) -> str:
    """Parts of a step on rank 0 of ``ranks``, in ms, and of the first one, which builds list and plan."""
    from nvdd_ase import NVDDCalculator

    atoms = atoms.copy()
    with NVDDCalculator(wrapper, ranks=ranks, device="cpu") as atoms.calc:
        atoms.get_forces()
        first = atoms.calc.report()[0]["seconds"]
        parts = []
        for _ in range(steps):
            atoms.positions += 1e-4
            atoms.get_forces()
            parts.append(atoms.calc.report()[0]["seconds"])
        atoms.calc = None
    median = {k: statistics.median(p.get(k, 0.0) for p in parts) for k in PHASES}
    built = {k: 1e3 * first.get(k, 0.0) for k in ("partition", "plan")}
    steady = ", ".join(f"{k} {1e3 * v:.2f}" for k, v in median.items() if v)
    return f"{steady}; when the list is rebuilt: partition {built['partition']:.2f}, neighbours and plan {built['plan']:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="mace,7net-0,lj")
    parser.add_argument("--atoms", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=2, help="for the split of a step")
    arguments = parser.parse_args()

    import parity
    from nvdd import Batch, DistributedModel, dispatch_trace

    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, CPU")
    for name in arguments.models.split(","):
        atoms = structure(name, arguments.atoms)
        wrapper = parity.wrapper(name)
        model, batch = DistributedModel(wrapper), Batch.from_atoms(atoms)
        steps = [own_step(wrapper, atoms), own_evaluation(wrapper, atoms), lambda m=model, b=batch: m(b, OUTPUTS)]
        kernel, own, ours = interleaved(steps, arguments.repeats, time.process_time)
        with dispatch_trace() as trace:
            out = model(batch, OUTPUTS)
        parity.STRUCTURES["benchmark"] = lambda a=atoms: a
        parity.structure.cache_clear()
        parity.reference.cache_clear()
        reference = parity.reference(name, "benchmark")
        error = np.abs(out["forces"].numpy() - reference.forces).max()
        print(f"{name}: {len(atoms)} atoms, {out.n_edges} edges, {str(wrapper.dtype)[6:]}: own {1e3 * own:.1f} ms, "
              f"kernel {1e3 * kernel:.1f} ms, "
              f"nvdd on one rank {1e3 * ours:.1f} ms, ratio {ours / own:.3f}, {trace.n_exchanges} exchanges; "
              f"max |dF| {error:.1e} of {np.abs(reference.forces).max():.2f} eV/A")  # fmt: skip
        print(
            f"    ms a step on rank 0 of {arguments.ranks}: {split_on_ranks(wrapper, atoms, arguments.ranks, 5)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
