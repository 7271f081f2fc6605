"""Memory and time of a rank against the number of ranks, under halo and graph partition: a table in docs/strategies.md.

    ./dev python benchmarks/strategy_scaling.py mace
    ./dev family uma python benchmarks/strategy_scaling.py uma
    ./dev python benchmarks/strategy_scaling.py mace --device cuda --ranks 1,2 --cells 12x13x13 --hidden 128x0e+128x1o

Each line is a run of its own by torchrun: alpha-quartz, random weights, float32; energy and forces. "memory" is what a rank's
process grew by in its steps, from after the model was made to its peak (on the CPU the most resident memory, as Linux counts it;
on a GPU the most that torch had), of the rank that grew most. Time is the median step of the slowest rank. Lines of other
models stay in the table.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "strategies.md"
BEGIN, END = "<!-- scaling: written by benchmarks/strategy_scaling.py -->", "<!-- scaling: end -->"
HEAD = (
    "| model | atoms | ranks | strategy | atoms owned | rows read | MB of memory | of one rank's | kB sent | a step (ms) | speed-up |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


def peak(device) -> float:
    """MB: most memory since `reset`, and before it what is in use."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e6
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024 / 1e6


def reset(device) -> None:
    """Begins the measurement of the peak anew."""
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def model_of(arguments, device):
    """A wrapper with random weights on the device."""
    import torch

    if arguments.model == "mace":
        from mace_scaling import build_model

        from nvdd.models.mace import MACEWrapper

        return MACEWrapper(build_model(arguments.hidden, torch.float32).to(device))
    from nvdd.models.uma_files import random_uma

    return random_uma("uma", "omat", size=arguments.size, charge=0, spin=0).to(device)


def measure(arguments) -> None:
    """A rank of one run; rank 0 writes what was found."""
    import numpy as np
    import torch
    import torch.distributed as dist
    from mace_scaling import quartz

    from nvdd import Batch, DistributedModel, DomainConfig, dispatch_trace
    from nvdd.communicator import Communicator

    cuda = arguments.device == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", **({"device_id": device} if cuda else {}))
    comm = Communicator(dist.group.WORLD, device)
    wrapper = model_of(arguments, device)
    warm, batch = quartz((2, 2, 2)), Batch.from_atoms(quartz(tuple(map(int, arguments.cells.split("x")))))
    make = lambda: DistributedModel(wrapper, DomainConfig(mesh=comm, strategy=arguments.strategy))
    make()(Batch.from_atoms(warm))  # libraries load, scripts compile
    model, seconds = make(), []
    reset(device)
    before = peak(device)
    for k in range(arguments.repeats + 2):
        comm.all_reduce(torch.zeros(1, device=device))  # start together
        start = time.perf_counter()
        with dispatch_trace() as trace:
            out = model(batch)
            float(out["forces"].sum())  # waits for a GPU
        if k > 1:
            seconds.append(time.perf_counter() - start)
    mine = [len(out.ids), out.n_halo, peak(device) - before, trace.bytes_sent / 1e3, 1e3 * float(np.median(seconds))]
    ranks = comm.all_gather_object((mine, float(out["energy"][0])))
    if comm.rank == 0:
        found = np.max([r[0] for r in ranks], axis=0).tolist()
        Path(arguments.out).write_text(json.dumps({"atoms": len(batch.positions), "energy": ranks[0][1], "found": found}))
    dist.destroy_process_group()


def rows(arguments) -> dict[tuple, str]:
    """Runs all numbers of ranks with both strategies; lines of the table."""
    lines, alone = {}, None
    for n in map(int, arguments.ranks.split(",")):
        for strategy in ("halo", "graph") if n > 1 else ("halo",):
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder, "out.json")
                words = ["--out", str(out), "--strategy", strategy, "--device", arguments.device, "--cells", arguments.cells,
                         "--hidden", arguments.hidden, "--size", arguments.size, "--repeats", str(arguments.repeats)]  # fmt: skip
                launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(n), __file__, arguments.model]
                subprocess.run([*launch, *words], check=True, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"})
                got = json.loads(out.read_text())
            owned, read, memory, sent, ms = got["found"]
            alone = alone or (memory, ms, got["energy"])
            if abs(got["energy"] / alone[2] - 1) > 1e-5:
                raise SystemExit(f"{n} ranks, {strategy}: energy {got['energy']} eV, of one rank {alone[2]} eV")
            what = {"mace": f"MACE {arguments.hidden}", "uma": f"UMA {arguments.size}"}[arguments.model]
            place = "" if arguments.device == "cpu" else ", GPU"
            name = "one rank" if n == 1 else strategy
            lines[what + place, got["atoms"], n, name] = (
                f"| {what}{place} | {got['atoms']} | {n} | {name} | {owned:.0f} | {read:.0f} | {memory:.0f} "
                f"| {memory / alone[0]:.2f} | {sent:.0f} | {ms:.0f} | {alone[1] / ms:.2f} |"
            )
            print(lines[what + place, got["atoms"], n, name], flush=True)
    return lines


def write(lines: dict[tuple, str]) -> None:
    """Puts the lines into the page; those of other models, sizes and numbers of ranks stay."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    old, _, after = rest.partition(END)
    kept = {}
    for line in old.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 11 and cells[1].isdigit():
            kept[cells[0], int(cells[1]), int(cells[2]), cells[3]] = line
    order = lambda key: (key[0], key[1], key[2], key[3] != "halo")
    merged = kept | lines
    PAGE.write_text("\n".join([before + BEGIN, "", HEAD, *(merged[key] for key in sorted(merged, key=order)), "", END + after]))


def main() -> None:
    """A rank where --out is given, else the whole table of a model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=("mace", "uma"))
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--cells", default="4x4x4", help="repeats of the unit cell, 9 atoms each")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--hidden", default="16x0e+16x1o", help="of MACE")
    parser.add_argument("--size", default="tiny", help="of UMA: tiny, or small for UMA-S's")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--strategy", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.out:
        measure(arguments)
    else:
        write(rows(arguments))


if __name__ == "__main__":
    main()
