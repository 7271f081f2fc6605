"""nvdd's strategies beside fairchem's own graph parallelism, of one UMA model: bytes and time of a step.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/uma_strategies.py
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/uma_strategies.py --size small --cells 3x3x3
    torchrun --nproc-per-node 2 benchmarks/uma_strategies.py --size small --device cuda --cells 7x8x8,8x10x12 --only nvdd
    torchrun --nproc-per-node 1 benchmarks/uma_strategies.py --size small --device cuda --cells 7x8x8 --only nvdd    # beside it

The weights are random (`nvdd.models.uma_files.random_uma`), the same for all. fairchem divides the list of atoms: "allgather"
gathers all rows in each layer, "all_to_all" the rows that edges read; "spatial" cuts along the axes instead of the list.
Each makes its edges itself, nvdd keeps a list with a skin; the time that fairchem takes for its graph is a column of its
own, within the step. All take turns, so that a busy machine slows them alike. Bytes are the largest that a rank sends in a
step (of an all-gather to n ranks n - 1 times its rows, of an all-reduce 2 (n - 1) / n of its input); time is the median of the slowest
rank. Energies and forces must agree, or it stops. On GPUs each rank has its own, ranks talk by NCCL, and a column more has the most
memory of a rank in its steps; ``--only nvdd`` leaves fairchem's own out, ``--checkpointing`` computes edges again.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
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

    def __init__(self, size: str, task: str, dtype: torch.dtype, device: torch.device) -> None:
        from fairchem.core.models.base import HydraModelV2

        from nvdd.models.building import building
        from nvdd.models.uma_files import _made, random_config

        config = random_config("uma", size)
        config["backbone"].update(otf_graph=True, always_use_pbc=False, regress_stress=True)
        with building(dtype):
            torch.manual_seed(0)  # as `random_uma`
            parts = _made(config, task)
        parts.head.wrap_property = False
        self.model = HydraModelV2(parts.backbone, {"efs": parts.head}).eval().requires_grad_(False).to(device, dtype)
        self.task, self.dtype, self.device = task, dtype, device

    def batch(self, atoms: Atoms):
        from fairchem.core.datasets.atomic_data import AtomicData, atomicdata_list_to_batch

        atoms = atoms.copy()
        atoms.info.update(charge=0, spin=0)
        data = AtomicData.from_ase(atoms, r_edges=False, task_name=self.task, r_data_keys=["spin", "charge"], radius=6.0,
                                   target_dtype=self.dtype)  # fmt: skip
        return atomicdata_list_to_batch([data]).to(self.device)

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
        return {"energy": float(out["energy"]), "forces": out["forces"].detach().cpu().numpy(), "graph": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default="4x4x4", help="repeats of the unit cell of quartz, 9 atoms each")
    parser.add_argument("--size", default="tiny", help="tiny, or small for UMA-S's")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", default="", help="names that begin so: nvdd, nvdd halo, fairchem, ...")
    parser.add_argument("--checkpointing", action="store_true", help="of nvdd: less memory, more time")
    arguments = parser.parse_args()

    from fairchem.core.common import gp_utils

    from nvdd import Batch, DistributedModel, DomainConfig
    from nvdd.communicator import Communicator
    from nvdd.models.uma_files import random_uma

    cuda = arguments.device == "cuda"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    backend = "nccl" if cuda else "gloo"
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(backend, **({"device_id": device} if cuda else {}))
    rank, size = dist.get_rank(), dist.get_world_size()
    own = dist.new_group(list(range(size)), backend=backend)  # beside fairchem's
    comm = Communicator(own, device)
    names = [name for name in (*OURS, *THEIRS) if name.startswith(arguments.only) and not (size == 1 and name in THEIRS)]
    wrapper = random_uma("uma", "omat", size=arguments.size, charge=0, spin=0, checkpointing=arguments.checkpointing).to(device)
    fairchem = Fairchem(arguments.size, "omat", torch.float32, device) if set(names) & set(THEIRS) else None
    if rank == 0:
        machine = torch.cuda.get_device_name() if cuda else "CPU"
        print(f"{size} ranks, {machine}, torch {torch.__version__}, size {arguments.size}, float32")
        print(f"{'atoms':>6} {'':>28} {'kB sent':>9} {'messages':>8} {'ms':>8} {'graph ms':>8} {'GiB':>6}")

    def step(name: str, models: dict, batch, inputs, counting) -> dict:
        """Energy, forces of all atoms on the CPU, seconds of the step and of fairchem's graph in it."""
        given = None
        if name in THEIRS:
            given = inputs.clone()
            gp_utils.setup_graph_parallel_groups(size, backend)
        dist.barrier()
        start = time.perf_counter()
        with counting:
            if name in OURS:
                out, graph = models[name](batch, {"energy", "forces", "stress"}), 0.0
                energy = float(out["energy"])  # waits for a GPU
            else:
                out = fairchem(given, *THEIRS[name])
                energy, graph = out["energy"], out["graph"]
        took = time.perf_counter() - start
        if name in THEIRS:
            gp_utils.cleanup_gp()
            return {"energy": energy, "forces": torch.from_numpy(out["forces"]).double(), "took": took, "graph": graph}
        forces = torch.zeros(len(batch.positions), 3, dtype=torch.float64, device=device)
        forces[out.ids.to(device)] = out["forces"].to(device)
        dist.all_reduce(forces)
        return {"energy": energy, "forces": forces.cpu(), "took": took, "graph": graph}

    for text in arguments.cells.split(","):
        atoms = quartz(tuple(int(n) for n in text.split("x")))
        batch = Batch.from_atoms(atoms)
        inputs = fairchem.batch(atoms) if fairchem is not None else None
        models = {name: DistributedModel(wrapper, DomainConfig(mesh=comm, **OURS[name])) for name in names if name in OURS}
        seconds: dict[str, list] = {name: [] for name in names}
        sent: dict[str, tuple] = {}
        memory = dict.fromkeys(names, float("nan"))
        wanted = None
        for k in range(2 + arguments.repeats):  # plans are made, bytes counted, and then time is taken
            for name in names:
                if cuda:
                    torch.cuda.reset_peak_memory_stats()
                counting = Sent(size) if k == 1 else contextlib.nullcontext()
                found = step(name, models, batch, inputs, counting)
                if k == 1:
                    sent[name] = counting.bytes, counting.calls
                elif k > 1:
                    seconds[name].append((found["took"], found["graph"]))
                    if cuda:
                        memory[name] = torch.cuda.max_memory_allocated() / 2**30
                wanted = wanted or found
                error = float((found["forces"] - wanted["forces"]).abs().max() / wanted["forces"].abs().max())
                if not (math.isclose(found["energy"], wanted["energy"], rel_tol=1e-5) and error < 1e-4):
                    raise SystemExit(f"{name}: energy {found['energy']}, forces off by {error:.1e} of the largest")
        mine = {name: (*np.median(np.array(seconds[name]), axis=0), *sent[name], memory[name]) for name in names}
        ranks: list = [None] * size
        dist.all_gather_object(ranks, mine)
        if rank == 0:
            for name in mine:
                took, graph, n_bytes, calls, most = np.max([r[name] for r in ranks], axis=0)
                print(f"{len(atoms):6d} {name:>28} {n_bytes / 1e3:9.0f} {calls:8.0f} {1e3 * took:8.0f} {1e3 * graph:8.0f} {most:6.2f}",
                      flush=True)  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
