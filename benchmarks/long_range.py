"""Time and bytes of a step of ewald and pme against the number of atoms, beside torch-pme in the same run.

    python benchmarks/long_range.py                              # one rank, and torch-pme
    torchrun --nproc-per-node 2 benchmarks/long_range.py         # two ranks: the whole mesh on each, or divided

Rattled rock salt, 1 000 to 50 000 ions, cutoff 9 A, float64; energy and forces. Seconds are those of the CPU that a rank
has used (of the clock on a GPU), so that waiting for others on a shared machine does not count; the best of some repeats.
A step of nvdd has its list of neighbours within the skin already and filters it, torch-pme is given its list.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from ase import Atoms

from nvdd import Batch, DistributedModel, DomainConfig, dispatch_trace
from nvdd.communicator import Communicator
from nvdd.mesh import n_points
from nvdd.models import EwaldModelWrapper, PMEModelWrapper
from nvdd.neighbors import edges_within

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
CUTOFF, SMALL = 9.0, 5000  # A; atoms up to which Ewald's sum is timed, too


def rock_salt(n: int) -> Atoms:
    """About ``n`` ions."""
    from ase.build import bulk

    atoms = bulk("NaCl", "rocksalt", a=5.64, cubic=True).repeat(max(1, round((n / 8) ** (1 / 3))))
    atoms.rattle(0.1, seed=1)
    atoms.set_initial_charges([1.0, -1.0] * (len(atoms) // 2))
    return atoms


def best(step: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds of the fastest repeat, after one to warm up."""
    clock, found = time.process_time, math.inf
    if device.type == "cuda":
        clock = lambda: (torch.cuda.synchronize(), time.perf_counter())[1]
    for k in range(repeats + 1):
        start = clock()
        step()
        found = min(found, clock() - start) if k else found
    return found


def torch_pme(atoms: Atoms, wrapper: PMEModelWrapper, device: torch.device) -> tuple[Callable, Callable]:
    """A step of torch-pme's P3M at our splitting and mesh, and its forces."""
    import torchpme

    edges = edges_within(atoms.positions, atoms.cell.array, atoms.pbc, CUTOFF)
    put = lambda array, dtype=torch.float64: torch.as_tensor(array, device=device).to(dtype)
    i, j, images = put(edges.receiver, torch.int64), put(edges.sender, torch.int64), put(edges.shift)
    cell, charges = put(atoms.cell.array), put(atoms.get_initial_charges())[:, None]
    potential = torchpme.CoulombPotential(smearing=1 / (math.sqrt(2) * wrapper.alpha))
    calculator = torchpme.P3MCalculator(potential, mesh_spacing=wrapper.mesh_spacing, interpolation_nodes=5, full_neighbor_list=True)
    calculator, pairs, x = calculator.to(device, torch.float64), torch.stack([i, j], 1), put(atoms.positions)

    def step() -> torch.Tensor:
        places = x.clone().requires_grad_(True)
        r = (places[j] - places[i] + images @ cell).norm(dim=1)
        value = calculator(charges=charges, cell=cell, positions=places, neighbor_indices=pairs, neighbor_distances=r)
        return -14.399645351950548 * torch.autograd.grad((charges * value).sum(), places)[0]

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--atoms", default="1000,4096,10648,21952,50000")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device(arguments.device, *([int(os.environ.get("LOCAL_RANK", 0))] if arguments.device == "cuda" else []))
    group = None
    if size > 1:
        dist.init_process_group("nccl" if arguments.device == "cuda" else "gloo")
        group = dist.group.WORLD
    comm = Communicator(group, device)
    if rank == 0:
        print(f"{size} rank(s), {arguments.device}, {torch.get_num_threads()} thread(s) each, torch {torch.__version__}")
        print("|  ions | model | mesh points or waves | s a step | us an ion | MB sent | MB reduced | largest force difference |")
        print("|---|---|---|---|---|---|---|---|", flush=True)
    for n in map(int, arguments.atoms.split(",")):
        atoms = rock_salt(n)
        batch = Batch.from_atoms(atoms)
        models = {"pme": PMEModelWrapper(CUTOFF, distributed_fft=False)}
        if size > 1:
            models["pme, mesh divided"] = PMEModelWrapper(CUTOFF, distributed_fft=True)
        if len(atoms) <= SMALL:
            models["ewald"] = EwaldModelWrapper(CUTOFF)
        reference = None
        for name, wrapper in models.items():
            model = DistributedModel(wrapper.to(device), DomainConfig(mesh=comm))
            seconds = best(lambda m=model, b=batch: m(b), device, arguments.repeats)
            with dispatch_trace() as trace:
                out = model(batch)
            forces = torch.zeros(len(atoms), 3, dtype=torch.float64, device=device)
            forces = comm.all_reduce(forces.index_copy(0, out.ids, out["forces"]), "sum", "forces of all")
            reference = forces if reference is None else reference
            points = n_points(wrapper._sizes(batch.cell)) if name != "ewald" else _waves(wrapper, batch)
            seconds = max(comm.all_gather_object(seconds))
            row = (points, seconds, trace.bytes_sent, trace.bytes_reduced, float((forces - reference).abs().max()))
            if rank == 0:
                _print(len(atoms), name, *row)
        if size == 1:
            step = torch_pme(atoms, models["pme"], device)
            seconds = best(step, device, arguments.repeats)
            _print(len(atoms), "torch-pme, P3M", 0, seconds, 0, 0, float((step() - reference).abs().max()))
    if group is not None:
        dist.destroy_process_group()


def _waves(wrapper: EwaldModelWrapper, batch: Batch) -> int:
    from nvdd.plane_waves import n_waves

    return n_waves(wrapper._sizes(batch.cell))


def _print(n: int, name: str, points: int, seconds: float, sent: float, reduced: float, error: float) -> None:
    print(f"| {n} | {name} | {points or ''} | {seconds:.3f} | {1e6 * seconds / n:.1f} | {sent / 1e6:.2f} | {reduced / 1e6:.2f} | {error:.1e} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
