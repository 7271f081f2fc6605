"""Bytes and time of a step under each strategy, side by side: domains in space, runs along a curve, blocks with all rows.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/strategies.py
    python benchmarks/strategies.py --count 2,4,8 --cells 8x8x8      # rows alone, no model and no ranks
    python benchmarks/strategies.py --count 4 --cells 2x2x2 --systems 6  # of a batch of six
    torchrun --nproc-per-node 2 benchmarks/strategies.py --device cuda --cells 4x4x4,7x8x8 --hidden 128x0e+128x1o

MACE of `mace_scaling.py` (2 layers, r_max 6 A, random weights). "shuffled" is the same crystal with atoms listed in random
order, "droplet" a ball of it in a large empty box. Strategies take turns, so that a busy machine slows all of them alike.
Bytes are the largest that a rank sends in the exchanges of a step; time is the median of the slowest rank.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
import warnings

import numpy as np
import torch
import torch.distributed as dist
from mace_scaling import build_model, quartz

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

STRATEGIES = {
    "halo": {},
    "graph, curve": {"strategy": "graph", "graph_plan": "curve"},
    "graph, blocks": {"strategy": "graph", "graph_plan": "blocks"},
}


def shuffled(atoms):
    return atoms[np.random.default_rng(0).permutation(len(atoms))]


def droplet(atoms):
    """A ball in a corner region of a box of four times its extent."""
    off = np.linalg.norm(atoms.positions - atoms.positions.mean(0), axis=1)
    ball = atoms[off < np.sort(off)[len(atoms) // 2]]
    ball.set_cell(np.diag(4 * np.ptp(ball.positions, axis=0)))
    ball.positions -= ball.positions.min(0) - 1.0
    return ball


def systems(text: str):
    crystal = quartz(tuple(int(n) for n in text.split("x")))
    return ("crystal", crystal), ("shuffled", shuffled(crystal)), ("droplet", droplet(crystal))


def count(arguments) -> None:
    """Most atoms of a rank, and the most rows that one reads of others, within 6 A and a skin of 0.5 A."""
    from nvdd import IndexPartitioner, SpatialPartitioner
    from nvdd.neighbors import edges_within

    print(f"{'system':>9} {'atoms':>6} {'ranks':>5} {'strategy':>14} {'most owned':>10} {'most read':>9}")
    for text in arguments.cells.split(","):
        for name, atoms in systems(text):
            n_atoms, k = len(atoms), arguments.systems
            cell, pbc = np.tile(atoms.cell.array, (k, 1, 1)), np.tile(np.array(atoms.pbc), (k, 1))
            edges = edges_within(atoms.positions, atoms.cell.array, np.array(atoms.pbc), 6.5)
            first = n_atoms * np.arange(k)[:, None]  # copies of one system, one after the other
            receiver, sender = (first + edges.receiver).ravel(), (first + edges.sender).ravel()
            members, total = [f + np.arange(n_atoms) for f in first[:, 0]], k * n_atoms
            for n in (int(n) for n in arguments.count.split(",")):
                partitioners = SpatialPartitioner(n), IndexPartitioner(n, "curve"), IndexPartitioner(n, "blocks")
                for strategy, partitioner in zip(STRATEGIES, partitioners, strict=True):
                    owner = partitioner.divide(np.tile(atoms.positions, (k, 1)), cell, pbc, members)
                    owned = np.bincount(owner, minlength=n)
                    reader, of = np.divmod(np.unique(owner[receiver] * total + sender), total)
                    read = np.bincount(reader[owner[of] != reader], minlength=n)
                    if getattr(partitioner, "reads_all", False):
                        read = total - owned
                    print(f"{name:>9} {total:6d} {n:5d} {strategy:>14} {owned.max():10d} {read.max():9d}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--cells", default="4x4x4", help="repeats of the unit cell, 9 atoms each")
    parser.add_argument("--hidden", default="16x0e+16x1o")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--count", help="numbers of ranks for which to count rows in one process, for example 2,4,8")
    parser.add_argument("--systems", type=int, default=1, help="with --count, copies of the system in one batch")
    arguments = parser.parse_args()
    if arguments.count:
        count(arguments)
        return

    from nvdd import Batch, DistributedModel, DomainConfig, dispatch_trace
    from nvdd.communicator import Communicator
    from nvdd.models.mace import MACEWrapper

    cuda = arguments.device == "cuda"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", **({"device_id": device} if cuda else {}))
    comm = Communicator(dist.group.WORLD, device)
    wrapper = MACEWrapper(build_model(arguments.hidden, torch.float32).to(device))
    if comm.rank == 0:
        print(f"{comm.size} ranks, {torch.cuda.get_device_name() if cuda else 'CPU'}, torch {torch.__version__}, {arguments.hidden}")
        print(f"{'system':>9} {'atoms':>6} {'strategy':>14} {'most owned':>10} {'rows read':>9} {'kB sent':>8} {'ms':>8} {'exch. ms':>8}")
    for text in arguments.cells.split(","):
        for name, atoms in systems(text):
            batch = Batch.from_atoms(atoms)
            models = {s: DistributedModel(wrapper, DomainConfig(mesh=comm, **o)) for s, o in STRATEGIES.items()}
            seconds: dict[str, list[float]] = {s: [] for s in STRATEGIES}
            mine = {}
            for _ in range(2 + arguments.repeats):
                for strategy, model in models.items():
                    comm.all_reduce(torch.zeros(1, device=device))  # start together
                    if cuda:
                        torch.cuda.synchronize()
                    start = time.perf_counter()
                    with dispatch_trace() as trace:
                        out = model(batch)
                        float(out["forces"].sum())  # waits for a GPU
                    seconds[strategy].append(time.perf_counter() - start)
                    mine[strategy] = (len(out.ids), out.n_halo, trace.bytes_sent, trace.seconds)
            times = {s: float(np.median(values[2:])) for s, values in seconds.items()}
            ranks = comm.all_gather_object((mine, times))
            if comm.rank:
                continue
            for strategy in STRATEGIES:
                owned, read, sent, exchange = (max(r[0][strategy][k] for r in ranks) for k in range(4))
                slowest = max(r[1][strategy] for r in ranks)
                print(f"{name:>9} {len(atoms):6d} {strategy:>14} {owned:10d} {read:9d} {sent / 1e3:8.0f} {1e3 * slowest:8.0f} "
                      f"{1e3 * exchange:8.1f}", flush=True)  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
