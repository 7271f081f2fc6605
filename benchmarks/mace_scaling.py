"""Time per step, speed-up and memory of a MACE over ranks, beside the bare model on one device, and parity.

    torchrun --nproc-per-node 2 benchmarks/mace_scaling.py                # two GPUs
    torchrun --nproc-per-node 2 benchmarks/mace_scaling.py --device cpu --cells 2x2x1 --hidden 16x0e+16x1o

Alpha-quartz, 9 atoms a cell, about 73 edges an atom at r_max 6 A; random weights, float32, eager. The bare model
is timed on rank 0 with its graph given (eager, whatever --compile says); the distributed step includes the check of the skin, filtering edges,
exchanges, forces and energies. Prints a table, and JSON lines with --json.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
import warnings

import numpy as np
import torch
import torch.distributed as dist

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

CELLS = "4x4x4,5x5x8,7x8x8,11x11x11,12x13x13"


def build_model(hidden: str, dtype: torch.dtype, elements: tuple[int, int] = (8, 14)):
    """The MACE of the table, the same on every rank."""
    import mace  # noqa: F401  before e3nn
    from e3nn import o3
    from mace import modules

    torch.set_default_dtype(dtype)
    torch.manual_seed(0)
    blocks = modules.interaction_classes
    model = modules.ScaleShiftMACE(
        r_max=6.0,
        num_bessel=8,
        num_polynomial_cutoff=5,
        max_ell=3,
        interaction_cls=blocks["RealAgnosticResidualInteractionBlock"],
        interaction_cls_first=blocks["RealAgnosticInteractionBlock"],
        num_interactions=2,
        num_elements=2,
        hidden_irreps=o3.Irreps(hidden),
        MLP_irreps=o3.Irreps("16x0e"),
        atomic_energies=np.array([-1.0, -2.0]),
        avg_num_neighbors=60.0,
        atomic_numbers=list(elements),
        correlation=3,
        gate=torch.nn.functional.silu,
        radial_type="bessel",
        atomic_inter_scale=1.0,
        atomic_inter_shift=0.0,
    )
    return model.eval().requires_grad_(False)


def quartz(repeat: tuple[int, int, int]):
    """Rattled alpha-quartz."""
    from ase.spacegroup import crystal

    sites = [(0.4697, 0, 2 / 3), (0.4135, 0.2669, 0.7858)]
    atoms = crystal(["Si", "O"], sites, spacegroup=154, cellpar=[4.913, 4.913, 5.405, 90, 90, 120]) * repeat
    atoms.rattle(0.05, seed=1)
    return atoms


def step_times(function, device: torch.device, warm_up: int, repeats: int, clock=time.perf_counter):
    """Seconds of each call, and the last one's result; TorchScript's first calls are ten times slower."""
    sync = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    seconds = []
    for k in range(warm_up + repeats):
        sync()
        start = clock()
        out = function()
        sync()
        if k >= warm_up:
            seconds.append(clock() - start)
    return seconds, out


def timed(function, device: torch.device, warm_up: int, repeats: int):
    """Median seconds of a call, and its last result."""
    seconds, out = step_times(function, device, warm_up, repeats)
    return float(np.median(seconds)), out


def bare_step(wrapper, atoms, device, dtype):
    """The model's own forward and backward with the graph given, positions (N, 3) on the host -> forces (N, 3); edges."""
    from nvdd import Batch
    from nvdd.neighbors import attach_neighbors

    batch = attach_neighbors(Batch.from_atoms(atoms), 6.0, wrapper.edge_layout)
    module = wrapper.model
    numbers = torch.tensor(atoms.numbers, device=device)
    cell = batch.cell[0].to(device, dtype)
    shifts = (batch.neighbor_list_shifts @ batch.cell[0]).to(device, dtype)
    data = {
        "edge_index": batch.edge_index.to(device).contiguous(),
        "shifts": shifts,
        "unit_shifts": batch.neighbor_list_shifts.to(device, dtype),
        "cell": cell,
        "node_attrs": torch.stack([numbers == 8, numbers == 14], 1).to(dtype),
        "batch": torch.zeros_like(numbers),
        "ptr": torch.tensor([0, len(numbers)], device=device),
    }

    def step(positions: torch.Tensor) -> torch.Tensor:
        return module({**data, "positions": positions.to(device, dtype, copy=True)}, compute_force=True)["forces"]

    return step, batch.neighbor_list.shape[0]


def bare_model(wrapper, atoms, device, dtype, arguments):
    """Seconds, forces and peak memory of the model's own forward and backward with the graph given."""
    step, n_edges = bare_step(wrapper, atoms, device, dtype)
    positions = torch.tensor(atoms.positions).to(device, dtype)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds, forces = timed(lambda: step(positions), device, arguments.warm_up, arguments.repeats)
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else float("nan")
    return seconds, forces.double().cpu(), memory, n_edges


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default=CELLS, help="repeats of the 9-atom cell, for example 4x4x4,7x8x8")
    parser.add_argument("--hidden", default="128x0e + 128x1o")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64"))
    parser.add_argument("--share-gpu", action="store_true", help="all ranks on GPU 0, through gloo")
    parser.add_argument("--halo-correction", action="store_true", help="the mode with padded rows")
    parser.add_argument("--balance", default=None, help="grid, rcb or auto")
    parser.add_argument("--compile", default="", help="eager, cudagraphs, inductor or inductor+cudagraphs")
    parser.add_argument("--cueq", action="store_true", help="cuEquivariance's kernels, in both models")
    parser.add_argument("--warm-up", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", help="append one line for each size to this file")
    arguments = parser.parse_args()

    from nvdd import (
        Batch,
        DistributedModel,
        DistributionSpec,
        DomainConfig,
        HaloStoragePolicy,
        MLIPSpec,
        dispatch_trace,
    )
    from nvdd.communicator import Communicator
    from nvdd.models.mace import MACEWrapper

    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local = 0 if arguments.share_gpu else int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local) if arguments.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    nccl = device.type == "cuda" and not arguments.share_gpu
    group = None
    if size > 1:
        dist.init_process_group("nccl" if nccl else "gloo", **({"device_id": device} if nccl else {}))
        group = dist.group.WORLD
    comm = Communicator(group, device)
    dtype = getattr(torch, arguments.dtype)
    module = build_model(arguments.hidden, dtype).to(device)
    if arguments.cueq:
        from nvdd.models.mace_cueq import convert

        module = convert(module)
    wrapper = MACEWrapper(module).requires_grad_(False)
    spec = wrapper.distribution_spec()
    balance = {} if arguments.balance is None else {"balance": arguments.balance}
    if arguments.halo_correction:
        policy = HaloStoragePolicy(scatter_mode="halo_correction", gather_mode="halo_read")
        spec = MLIPSpec(DistributionSpec(policy), spec.outputs)
    if rank == 0:
        name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        print(f"{size} ranks, {name}, {comm.backend}, torch {torch.__version__}, {arguments.dtype}, {arguments.hidden}")
        print(f"{'atoms':>7} {'edges':>9} {'bare ms':>9} {'nvdd ms':>9} {'speed-up':>8} {'GiB bare':>8} {'GiB':>6} "
              f"{'exch.':>5} {'MB sent':>8} {'max |dF|':>9} {'max |F|':>8}", flush=True)  # fmt: skip
    for text in arguments.cells.split(","):
        atoms = quartz(tuple(int(n) for n in text.split("x")))
        bare = (float("nan"), None, float("nan"), 0)
        if rank == 0:
            try:
                bare = bare_model(wrapper, atoms, device, dtype, arguments)
            except torch.OutOfMemoryError:
                print(f"{len(atoms)} atoms: the bare model does not fit on one device", flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        model = DistributedModel(wrapper, DomainConfig(mesh=comm, compile=arguments.compile or False, **balance), spec=spec)
        batch = Batch.from_atoms(atoms)
        seconds, out = timed(lambda m=model, b=batch: m(b), device, arguments.warm_up, arguments.repeats)
        split = dict(model.timings)
        memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else float("nan")
        forces = torch.zeros(len(atoms), 3, dtype=torch.float64)
        forces[out.ids.cpu()] = out["forces"].cpu()
        model.close()
        if arguments.compile:  # what a replayed graph sends is not counted
            model = DistributedModel(wrapper, DomainConfig(mesh=comm, **balance), spec=spec)
        with dispatch_trace() as trace:
            model(batch)
        parts = comm.all_gather_object((forces, seconds, memory, trace.bytes_sent, len(out.ids), out.n_halo))
        if rank == 0:
            forces = sum(p[0] for p in parts)
            seconds, memory = max(p[1] for p in parts), max(p[2] for p in parts)
            error = float((forces - bare[1]).abs().max()) if bare[1] is not None else float("nan")
            row = {
                "ranks": size, "atoms": len(atoms), "edges": bare[3], "bare_ms": 1e3 * bare[0], "nvdd_ms": 1e3 * seconds,
                "speed_up": bare[0] / seconds, "bare_gib": bare[2], "gib": memory, "exchanges": trace.n_exchanges,
                "mb_sent": max(p[3] for p in parts) / 1e6, "dF": error, "F": float(forces.abs().max()),
                "owned": [p[4] for p in parts], "halo": [p[5] for p in parts],
                "split_ms": {k: round(1e3 * v, 2) for k, v in split.items()},
            }  # fmt: skip
            print(f"{row['atoms']:7d} {row['edges']:9d} {row['bare_ms']:9.2f} {row['nvdd_ms']:9.2f} {row['speed_up']:8.3f} "
                  f"{row['bare_gib']:8.2f} {row['gib']:6.2f} {row['exchanges']:5d} {row['mb_sent']:8.2f} {error:9.1e} "
                  f"{row['F']:8.3f}", flush=True)  # fmt: skip
            if arguments.json:
                with open(arguments.json, "a") as file:
                    file.write(json.dumps(row) + "\n")
    if group is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
