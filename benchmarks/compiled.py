"""Compiled forwards beside eager ones: time, force difference and how often a graph was made.

    python benchmarks/compiled.py --cells 4x4x4,7x8x8                                  # one GPU
    torchrun --nproc-per-node 2 benchmarks/compiled.py --cells 4x4x4,7x8x8,11x11x11    # several, each beside one
    python benchmarks/compiled.py --device cpu --cells 2x2x2 --hidden 8x0e+8x1o --backends eager,inductor

Alpha-quartz with the MACE of `mace_scaling.py` (random weights), whole steps from positions on the host, in float32.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
sys.path.insert(0, str(Path(__file__).parent))
from mace_scaling import bare_model, build_model, quartz, timed  # noqa: E402


def measured(wrapper, comm, atoms, compile, arguments):
    """Seconds of a step, forces (N, 3) of all atoms, seconds of the first three steps, graphs made."""
    from nvdd import Batch, DistributedModel, DomainConfig

    model = DistributedModel(wrapper, DomainConfig(mesh=comm, compile=compile))
    batch = Batch.from_atoms(atoms)
    start = time.perf_counter()
    for _ in range(3):  # traced, compiled, captured
        float(model(batch)["energy"])
    first = time.perf_counter() - start
    seconds, out = timed(lambda: model(batch), comm.device, arguments.warm_up, arguments.repeats)
    forces = torch.zeros(len(atoms), 3, dtype=torch.float64)
    forces[out.ids.cpu()] = out["forces"].cpu()
    parts = comm.all_gather_object((forces, seconds))
    traces = model._compiled[0].n_traces if compile else 0
    return max(s for _, s in parts), sum(f for f, _ in parts), first, traces


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default="4x4x4,7x8x8", help="repeats of the 9-atom cell (%(default)s)")
    parser.add_argument("--hidden", default="128x0e + 128x1o")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64"))
    parser.add_argument("--backends", default="cudagraphs,inductor,inductor+cudagraphs")
    parser.add_argument("--warm-up", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--alone", action="store_true", help="also each backend on one rank by itself")
    arguments = parser.parse_args()

    from nvdd.communicator import Communicator
    from nvdd.models.mace import MACEWrapper

    rank, size, local = (int(os.environ.get(k, v)) for k, v in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    device = torch.device("cuda", local) if arguments.device == "cuda" else torch.device("cpu")
    group = None
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if size > 1:
        nccl = device.type == "cuda"
        dist.init_process_group("nccl" if nccl else "gloo", **({"device_id": device} if nccl else {}))
        group = dist.group.WORLD
    dtype = getattr(torch, arguments.dtype)
    wrapper = MACEWrapper(build_model(arguments.hidden, dtype).to(device)).requires_grad_(False)
    backends: list = [False, *(b for b in arguments.backends.split(",") if b)]
    for text in arguments.cells.split(","):
        atoms = quartz(tuple(int(n) for n in text.split("x")))
        bare = bare_model(wrapper, atoms, device, dtype, arguments) if rank == 0 else None
        for compile in backends:
            for n in ([1, size] if size > 1 and (arguments.alone or not compile) else [size]):
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                if n == 1 and rank:
                    continue
                comm = Communicator(group if n > 1 else None, device)
                try:
                    seconds, forces, first, traces = measured(wrapper, comm, atoms, compile, arguments)
                except Exception as error:  # one that is on all ranks; the other rows are still wanted
                    if rank == 0:
                        print(f"{len(atoms)} atoms, {n} ranks, {compile}: {type(error).__name__}: {error}"[:600], flush=True)
                    continue
                if rank == 0:
                    row = {
                        "atoms": len(atoms), "ranks": n, "compile": compile, "ms": round(1e3 * seconds, 3),
                        "bare_ms": round(1e3 * bare[0], 3), "speed_up": round(bare[0] / seconds, 3),
                        "dF": float((forces - bare[1]).abs().max()), "F": float(forces.abs().max()),
                        "first_s": round(first, 1), "traces": traces,
                    }  # fmt: skip
                    print(json.dumps(row), flush=True)
    if group is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
