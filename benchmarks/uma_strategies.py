"""nvdd's strategies beside fairchem's own graph parallelism, of one UMA model: bytes and time of a step.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/uma_strategies.py
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/uma_strategies.py --size small --cells 3x3x3

The weights are random (`nvdd.models.uma_files.random_uma`), the same for all. fairchem divides the list of atoms: "allgather"
gathers all rows in each layer, "all_to_all" the rows that edges read; "spatial" cuts along the axes instead of the list.
Each makes its edges itself, nvdd keeps a list with a skin; the time that fairchem takes for its graph is a column of its
own, within the step. All take turns, so that a busy machine slows them alike. Bytes are the largest that a rank sends in a
step (of an all-gather to n ranks n - 1 times its rows, of an all-reduce 2 (n - 1) / n of its input); time is the median of the slowest
rank. Energies and forces must agree, or it stops.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import time
import warnings

import numpy as np
import torch
import torch.distributed as dist
from ase import Atoms
from ase.spacegroup import crystal
from torch.utils._python_dispatch import TorchDispatchMode

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

OURS = {
    "nvdd halo": {},
    "nvdd graph, curve": {"strategy": "graph", "graph_plan": "curve"},
    "nvdd graph, blocks": {"strategy": "graph", "graph_plan": "blocks"},
}
THEIRS = {
    "fairchem allgather": ("allgather", "index_split"),
    "fairchem all_to_all, index": ("all_to_all", "index_split"),
    "fairchem all_to_all, spatial": ("all_to_all", "spatial"),
}


class Sent(TorchDispatchMode):
    """Counts the bytes that torch's collectives send from this rank, forward and backward."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.bytes, self.calls, self.size = 0.0, 0, size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, n = func._schema.name, self.size
        share = next((s for key, s in {
            "all_gather": n - 1, "allgather": n - 1, "all_reduce": 2 * (n - 1) / n, "allreduce": 2 * (n - 1) / n,
            "all_to_all": 1, "alltoall": 1, "reduce_scatter": (n - 1) / n, "c10d::send": 1,
        }.items() if key in name), None)  # fmt: skip
        if share is not None:
            inputs = args[1] if "c10d::allgather" in name or "c10d::alltoall" in name else args[0]
            tensors = [inputs] if isinstance(inputs, torch.Tensor) else [t for t in inputs if isinstance(t, torch.Tensor)]
            self.bytes += share * sum(t.numel() * t.element_size() for t in tensors)
            self.calls += 1
        return func(*args, **(kwargs or {}))


def quartz(repeat: tuple[int, ...]) -> Atoms:
    atoms = crystal(["Si", "O"], [(0.4697, 0, 2 / 3), (0.4135, 0.2669, 0.7858)], spacegroup=154,
                    cellpar=[4.913, 4.913, 5.405, 90, 90, 120])  # fmt: skip
    atoms = Atoms(atoms.numbers, atoms.positions, cell=atoms.cell, pbc=True).repeat(repeat)
    atoms.rattle(0.05, seed=1)
    return atoms


class Fairchem:
    """fairchem's model and, while it runs, its graph parallelism in one of its modes."""

    def __init__(self, size: str, task: str, dtype: torch.dtype) -> None:
        from fairchem.core.models.base import HydraModelV2

        from nvdd.models.building import building
        from nvdd.models.uma_files import _made, random_config

        config = random_config("uma", size)
        config["backbone"].update(otf_graph=True, always_use_pbc=False, regress_stress=True)
        with building(dtype):
            torch.manual_seed(0)  # as `random_uma`
            parts = _made(config, task)
        parts.head.wrap_property = False
        self.model = HydraModelV2(parts.backbone, {"efs": parts.head}).eval().requires_grad_(False).to(dtype)
        self.task, self.dtype = task, dtype

    def batch(self, atoms: Atoms):
        from fairchem.core.datasets.atomic_data import AtomicData, atomicdata_list_to_batch

        atoms = atoms.copy()
        atoms.info.update(charge=0, spin=0)
        data = AtomicData.from_ase(atoms, r_edges=False, task_name=self.task, r_data_keys=["spin", "charge"], radius=6.0,
                                   target_dtype=self.dtype)  # fmt: skip
        return atomicdata_list_to_batch([data])

    def __call__(self, batch, mode: str, partition: str) -> dict:
        from fairchem.core.common import gp_utils

        gp_utils.set_gp_config(gp_utils.GraphParallelConfig(dist.get_world_size(), mode, partition))
        graph, seconds = self.model.backbone._generate_graph, 0.0

        def timed(data):
            nonlocal seconds
            start = time.perf_counter()
            made = graph(data)
            seconds += time.perf_counter() - start
            return made

        self.model.backbone._generate_graph = timed  # of this instance
        try:
            out = self.model(batch)["efs"]
        finally:
            del self.model.backbone._generate_graph
        return {"energy": float(out["energy"]), "forces": out["forces"].detach().numpy(), "graph": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default="4x4x4", help="repeats of the unit cell of quartz, 9 atoms each")
    parser.add_argument("--size", default="tiny", help="tiny, or small for UMA-S's")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()

    from fairchem.core.common import gp_utils

    from nvdd import Batch, DistributedModel, DomainConfig
    from nvdd.communicator import Communicator
    from nvdd.models.uma_files import random_uma

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    own = dist.new_group(list(range(size)), backend="gloo")  # beside fairchem's
    comm = Communicator(own)
    wrapper = random_uma("uma", "omat", size=arguments.size, charge=0, spin=0)
    fairchem = Fairchem(arguments.size, "omat", torch.float32)
    if rank == 0:
        print(f"{size} ranks, CPU, torch {torch.__version__}, size {arguments.size}, float32")
        print(f"{'atoms':>6} {'':>28} {'kB sent':>9} {'messages':>8} {'ms':>8} {'graph ms':>8}")
    for text in arguments.cells.split(","):
        atoms = quartz(tuple(int(n) for n in text.split("x")))
        batch, inputs = Batch.from_atoms(atoms), fairchem.batch(atoms)
        models = {name: DistributedModel(wrapper, DomainConfig(mesh=comm, **options)) for name, options in OURS.items()}
        seconds: dict[str, list] = {}
        sent: dict[str, tuple] = {}
        energies: dict[str, float] = {}
        for k in range(2 + arguments.repeats):  # plans are made, bytes counted, and then time is taken
            for name in (*OURS, *THEIRS):
                given = inputs.clone()
                if name in THEIRS:
                    gp_utils.setup_graph_parallel_groups(size, "gloo")
                dist.barrier()
                counting = Sent(size) if k == 1 else contextlib.nullcontext()
                start = time.perf_counter()
                with counting:
                    if name in OURS:
                        out, graph = models[name](batch, {"energy", "forces", "stress"}), 0.0
                    else:
                        out = fairchem(given, *THEIRS[name])
                        graph = out["graph"]
                took = time.perf_counter() - start
                energies[name] = float(out["energy"])
                if name in OURS:
                    forces = torch.zeros(len(atoms), 3, dtype=torch.float64)
                    forces[out.ids] = out["forces"]
                    dist.all_reduce(forces)
                else:
                    forces = torch.from_numpy(out["forces"]).double()
                    gp_utils.cleanup_gp()
                if k == 1:
                    sent[name] = counting.bytes, counting.calls
                elif k > 1:
                    seconds.setdefault(name, []).append((took, graph))
                if name == "nvdd halo":
                    wanted = forces
                error = float((forces - wanted).abs().max() / wanted.abs().max())
                if not (math.isclose(energies[name], energies["nvdd halo"], rel_tol=1e-5) and error < 1e-4):
                    raise SystemExit(f"{name}: energy {energies[name]}, forces off by {error:.1e} of the largest")
        mine = {name: (*np.median(np.array(seconds[name]), axis=0), *sent[name]) for name in seconds}
        ranks: list = [None] * size
        dist.all_gather_object(ranks, mine)
        if rank == 0:
            for name in mine:
                took, graph, n_bytes, calls = np.max([r[name] for r in ranks], axis=0)
                print(f"{len(atoms):6d} {name:>28} {n_bytes / 1e3:9.0f} {calls:8.0f} {1e3 * took:8.0f} {1e3 * graph:8.0f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
