"""The largest system before memory runs out: all edges at once, `recompute`, `max_edges_per_chunk`; on one GPU and on two.

    python benchmarks/memory.py --ranks 1,2 --budget 1500                # GPUs
    python benchmarks/memory.py --device cpu --limit-gib 3 --hidden 16x0e+16x1o --chunk 20000 --start 9 --budget 300

The MACE and the quartz of mace_scaling.py, energy and forces. Each trial is a run of its own (torchrun), so that one that
runs out of memory leaves nothing behind. The number of atoms is doubled until a trial fails, then the gap is halved
--refine times. Peaks are of the rank that needs most; on a CPU they are of the whole process, and --limit-gib bounds its
data. Forces are compared with those of all edges at once, of the largest size of --start and its doubles that all hold.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

MODES = ("eager", "recompute", "chunked")


def repeats(cells: int) -> tuple[int, int, int]:
    """About so many cells, nearly a cube."""
    a = max(1, round(cells ** (1 / 3)))
    b = max(1, round((cells / a) ** 0.5))
    return a, b, max(1, round(cells / (a * b)))


# --- one trial, on each rank --------------------------------------------------------------------------------------


def trial(arguments: argparse.Namespace) -> None:
    """Two steps to warm up, two that count; rank 0 prints a line of JSON."""
    from mace_scaling import build_model, quartz

    from nvdd import Batch, Communicator, DistributedModel, DomainConfig
    from nvdd.models.mace import MACEWrapper

    rank, gpu = int(os.environ["LOCAL_RANK"]), arguments.device == "cuda"
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
        if arguments.limit_gib:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, arguments.limit_gib * 2**30 / total), device)
    elif arguments.limit_gib:
        resource.setrlimit(resource.RLIMIT_DATA, (int(arguments.limit_gib * 2**30),) * 2)
    comm = Communicator(None, device)
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("nccl" if gpu else "gloo")
        comm = Communicator(dist.group.WORLD, device)
    options = {"eager": {}, "recompute": {"recompute": True}, "chunked": {"max_edges_per_chunk": arguments.chunk}}
    wrapper = MACEWrapper(build_model(arguments.hidden, torch.float32)).to(device)
    model = DistributedModel(wrapper, DomainConfig(mesh=comm, **options[arguments.mode]))
    batch, seconds = Batch.from_atoms(quartz(repeats(arguments.trial))), []
    for _ in range(4):
        start = time.perf_counter()
        out = model(batch, ("energy", "forces"))
        if gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = comm.all_reduce(torch.tensor([peak / 2**30, min(seconds[2:]), float(out.n_edges)], device=device), "max", "trial")
    torch.save((out.ids.cpu(), out["forces"].cpu()), Path(arguments.folder, f"{arguments.mode}-{arguments.trial}-{rank}.pt"))
    if rank == 0:
        values = dict(zip(("gib", "seconds", "edges"), found.tolist(), strict=True))
        print("TRIAL " + json.dumps({"atoms": len(batch.atomic_numbers), **values}), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


# --- the search ---------------------------------------------------------------------------------------------------


class Search:
    """Trials of one mode on some ranks, within what is left of the time.

    Attributes:
        held: cells -> what a trial gave.
        ended: why the search ended.
    """

    def __init__(self, arguments: argparse.Namespace, mode: str, ranks: int, folder: str, deadline: float) -> None:
        self.arguments, self.mode, self.ranks, self.folder, self.deadline = arguments, mode, ranks, folder, deadline
        self.held: dict[int, dict] = {}
        self.ended = ""
        self._longest = 0.0

    def run(self) -> None:
        """Doubles, then halves the gap."""
        cells, failed = self.arguments.start, None
        while failed is None and cells <= self.arguments.most:
            result = self._try(cells)
            if result is None:
                return
            failed = cells if not result else None
            cells *= 2
        if failed is None:
            self.ended = "the largest size that was tried"
            return
        for _ in range(self.arguments.refine):
            cells = (max(self.held, default=0) + failed) // 2
            if cells in (failed, *self.held):
                break
            result = self._try(cells)
            if result is None:
                return
            failed = failed if result else cells
        self.ended = f"{9 * failed} atoms or a little more do not fit"

    def _try(self, cells: int) -> bool | None:
        """Whether so many cells fit; None if there is no time to find out."""
        left = self.deadline - time.monotonic()
        if left < 2 * self._longest or left < 5:
            self.ended = "out of time"
            return None
        passed = [f"--{name.replace('_', '-')}={getattr(self.arguments, name)}" for name in ("device", "hidden", "chunk", "limit_gib")]
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}", __file__, *passed,
            f"--mode={self.mode}", f"--trial={cells}", f"--folder={self.folder}",
        ]  # fmt: skip
        start = time.monotonic()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=left)
        except subprocess.TimeoutExpired:
            self.ended = "out of time"
            return None
        self._longest = max(self._longest, time.monotonic() - start)
        line = next((text for text in done.stdout.splitlines() if text.startswith("TRIAL ")), None)
        if line is not None and done.returncode == 0:
            self.held[cells] = json.loads(line.removeprefix("TRIAL "))
            return True
        if not any(word in done.stderr for word in ("out of memory", "OutOfMemory", "not enough memory", "can't allocate", "MemoryError", "bad_alloc")):
            sys.exit(f"{' '.join(command)} failed otherwise than for want of memory:\n{done.stderr[-3000:]}")
        return False


def forces_of(folder: str, mode: str, cells: int, ranks: int) -> torch.Tensor:
    """(n_atoms, 3) of a trial, in the order of the atoms."""
    parts = [torch.load(Path(folder, f"{mode}-{cells}-{rank}.pt")) for rank in range(ranks)]
    ids, forces = (torch.cat(values) for values in zip(*parts, strict=True))
    return forces[ids.argsort()]


def report(searches: list[Search], ranks: int, folder: str) -> None:
    """Rows of the table for these ranks."""
    common = sorted(set.intersection(*(set(s.held) for s in searches)))
    for search in searches:
        if not search.held:
            print(f"| {ranks} | {search.mode} | none | | | | | {search.ended} |")
            continue
        largest = search.held[max(search.held)]
        row = [ranks, search.mode, largest["atoms"], f"{largest['gib']:.2f}", f"{1e3 * largest['seconds']:.0f}"]
        if common:
            first = searches[0].held[common[-1]]
            own = search.held[common[-1]]
            reference = forces_of(folder, searches[0].mode, common[-1], ranks)
            off = (forces_of(folder, search.mode, common[-1], ranks) - reference).abs().max() / reference.abs().max()
            row += [f"{own['gib']:.2f} GiB and {own['seconds'] / first['seconds']:.2f}x the time at {own['atoms']} atoms", f"{off:.1e}"]
        else:
            row += ["", ""]
        print("| " + " | ".join(map(str, [*row, search.ended])) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--ranks", default="1", help="for example 1,2")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--hidden", default="128x0e+128x1o")
    parser.add_argument("--chunk", type=int, default=200_000, help="edges at a time, of the mode chunked")
    parser.add_argument("--limit-gib", type=float, default=0.0, help="memory of a rank; 0 for what there is")
    parser.add_argument("--start", type=int, default=200, help="cells of 9 atoms to begin with")
    parser.add_argument("--most", type=int, default=50_000, help="cells to stop at")
    parser.add_argument("--refine", type=int, default=2, help="how often the gap to the first failure is halved")
    parser.add_argument("--budget", type=float, default=1500.0, help="seconds of everything together")
    for name, kind in (("mode", str), ("trial", int), ("folder", str)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.trial is not None:
        trial(arguments)
        return
    modes = arguments.modes.split(",")
    if not set(modes) <= set(MODES):
        parser.error(f"--modes are among {', '.join(MODES)}")
    begun, shares = time.monotonic(), len(modes) * len(arguments.ranks.split(","))
    print("| ranks | mode | most atoms | peak GiB | ms/step | at a size that all hold | forces off by | the search ended |")
    print("|---" * 8 + "|", flush=True)
    for ranks in map(int, arguments.ranks.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            searches = []
            for mode in modes:
                left = arguments.budget - (time.monotonic() - begun)
                search = Search(arguments, mode, ranks, folder, time.monotonic() + left / shares)
                search.run()
                shares -= 1
                searches.append(search)
            report(searches, ranks, folder)


if __name__ == "__main__":
    main()
