"""nvdd beside nvalchemi-toolkit and the bare model: one MACE, one system, one dtype, the same ranks, in one run.

    torchrun --nproc-per-node 2 benchmarks/peers.py                                      # two GPUs
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/peers.py --device cpu --hidden 16x0e+16x1o --cells 4x4x8

The model and the structures of `mace_scaling.py`. Each step begins with positions in host memory and ends with forces and
energy on the device:

    bare                the model's own forward and backward on the first rank's device, with its graph given
    nvdd                `DistributedModel` on all ranks; with --compile also its compiled modes
    toolkit             nvalchemi-toolkit's ``DistributedModel`` on all ranks: positions into its ``ShardedBatch``, its
                        ``halo_exchange``, its forward. Its neighbour list is kept, without a skin: right here, where atoms
                        stand still, and less work than any step of dynamics, where it needs a skin's edges or a new list
    toolkit, new list   the same with its list built at each step, as without a skin; with --new-list
    toolkit, compiled   its ``compile=True``, list kept; with --toolkit-compile

The eager ones take turns: each is timed in every round; compiled ones, which hold memory, follow one after another. Between
its turns the toolkit's object is closed, because it changes methods of e3nn and MACE for the whole process while it is open.
A time is the median over steps of the slowest rank's time; with --processor-time of what it computed, without its waiting
for the others. What ranks send is counted in torch.distributed (`communication.py`), alike for both, in one eager step. Over
gloo nvdd announces each message by another of 64 bytes, and the toolkit runs with NVALCHEMI_HALO_P2P=1: by default it asks
for an all-to-all of lists, which gloo refuses where sizes differ. Over NCCL both run as they come.

nvalchemi-toolkit is optional (``pip install nvalchemi-toolkit``, Apache-2.0): without it, or on one rank, on which its
distributed model does not run, a line says why its rows are missing.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
sys.path.insert(0, str(Path(__file__).parent))
from communication import CommunicationCounter  # noqa: E402
from mace_scaling import CELLS, bare_step, build_model, quartz, step_times  # noqa: E402

Step = Callable[[torch.Tensor], torch.Tensor]  # positions (N, 3) on the host -> forces of this rank's atoms


class Run:
    """What all contenders share: ranks, device, dtype, model, and the structure of the moment."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.rank, self.size, local = (int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
        self.device = torch.device("cuda", local) if arguments.device == "cuda" else torch.device("cpu")
        self.dtype = getattr(torch, arguments.dtype)
        self.group = self.mesh = None
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        else:
            os.environ.setdefault("NVALCHEMI_HALO_P2P", "1")
        if self.size > 1:
            nccl = self.device.type == "cuda"
            dist.init_process_group("nccl" if nccl else "gloo", **({"device_id": self.device} if nccl else {}))
            self.group = dist.group.WORLD
            self.mesh = dist.device_mesh.init_device_mesh(self.device.type, (self.size,), mesh_dim_names=("domain",))
        self.clock = time.process_time if arguments.processor_time else time.perf_counter
        self.atoms = None

    def module(self) -> torch.nn.Module:
        """A MACE of its own for each contender: the same weights."""
        return build_model(self.arguments.hidden, self.dtype).to(self.device)

    def gathered(self, value) -> list:
        """The ``value`` of every rank."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values


class Bare:
    """The model's own forward and backward, on the first rank."""

    name = "bare"

    def __init__(self, run: Run) -> None:
        from nvdd.models.mace import MACEWrapper

        self.run, self.wrapper = run, MACEWrapper(run.module()).requires_grad_(False)
        self.step, self.atoms = None, None

    @contextmanager
    def opened(self) -> Iterator[tuple[Step, torch.Tensor] | None]:
        """A step, and which atoms' forces it gives; None on the other ranks."""
        if self.run.rank:
            yield None
            return
        if self.atoms is not self.run.atoms:  # its graph is made once a structure
            self.atoms = self.run.atoms
            self.step, _ = bare_step(self.wrapper, self.atoms, self.run.device, self.run.dtype)
        yield self.step, torch.arange(len(self.atoms))


class Nvdd:
    """nvdd's `DistributedModel`."""

    def __init__(self, run: Run, compile: str = "") -> None:
        from nvdd.models.mace import MACEWrapper

        self.run, self.compile = run, compile
        self.name = f"nvdd, {compile}" if compile else "nvdd"
        self.wrapper = MACEWrapper(run.module()).requires_grad_(False)

    @contextmanager
    def opened(self) -> Iterator[tuple[Step, torch.Tensor]]:
        from nvdd import Batch, DistributedModel, DomainConfig
        from nvdd.communicator import Communicator

        comm = Communicator(self.run.group, self.run.device)
        model = DistributedModel(self.wrapper, DomainConfig(mesh=comm, compile=self.compile or False))
        batch = Batch.from_atoms(self.run.atoms)

        def step(positions: torch.Tensor) -> torch.Tensor:
            batch.positions.copy_(positions)
            return model(batch)["forces"]

        try:
            yield step, model(batch).ids.cpu()
        finally:
            model.close()


class Toolkit:
    """nvalchemi-toolkit's ``DistributedModel``.

    Raises:
        ImportError: it, or a package that it needs, is missing.
        RuntimeError: there is one rank.
    """

    def __init__(self, run: Run, compile: bool = False, new_list: bool = False) -> None:
        import nvalchemi.distributed.particle_halo  # noqa: F401  what is missing is said at once
        from nvalchemi.models.mace import MACEWrapper

        if run.size == 1:
            raise RuntimeError("its distributed model does not run on one rank: torchrun --nproc-per-node 2")
        self.run, self.compile, self.new_list = run, compile, new_list
        self.name = "toolkit, compiled" if compile else "toolkit, new list" if new_list else "toolkit"
        self.wrapper = MACEWrapper(run.module())

    @contextmanager
    def opened(self) -> Iterator[tuple[Step, torch.Tensor]]:
        from nvalchemi.data import AtomicData, Batch
        from nvalchemi.distributed import DistributedModel, DomainConfig, ParticleHaloConfig, ShardedBatch
        from nvalchemi.distributed.particle_halo import halo_exchange

        run, atoms = self.run, self.run.atoms
        positions = torch.tensor(atoms.positions, dtype=run.dtype, device=run.device)
        data = AtomicData(
            positions=positions,
            atomic_numbers=torch.tensor(atoms.numbers, device=run.device),
            cell=torch.tensor(atoms.cell.array, dtype=run.dtype, device=run.device)[None],
            pbc=torch.tensor(atoms.pbc, device=run.device)[None],
        )
        config = DomainConfig(cutoff=self.wrapper.cutoff, mesh=run.mesh, compile=self.compile)
        # it sets this for the process, nvdd's compiled modes included
        with torch._dynamo.config.patch(force_parameter_static_shapes=True):
            model = DistributedModel(self.wrapper, config, compile=self.compile)
            sharded = ShardedBatch.from_batch(None if run.rank else Batch.from_data_list([data]), run.mesh, config)
            halo = ParticleHaloConfig(config.effective_ghost_width(), sharded.partitioner, run.mesh)
            # atoms of a rank keep their order
            ids = torch.where(sharded.partitioner.assign_atoms_to_ranks(positions) == run.rank)[0].cpu()

            def step(positions: torch.Tensor) -> torch.Tensor:
                sharded.positions.to_local().copy_(positions[ids])
                if self.new_list:
                    sharded.invalidate_padded_view()
                halo_exchange(sharded, halo, compute_forces=True)
                return model(sharded)["forces"]

            try:
                yield step, ids
            finally:
                model.close()


def measured(run: Run, contender, rounds: int, warm_up: int) -> dict:
    """Times of steps, forces (N, 3) of all atoms and messages, or ``{"failed": why}``; the same on every rank."""
    repeats = -(-run.arguments.repeats // rounds)
    positions = torch.tensor(run.atoms.positions)
    own = {"forces": torch.zeros(len(run.atoms), 3, dtype=torch.float64), "owned": 0, "sent": (0, 0, 0), "failed": ""}
    if run.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        with contender.opened() as opened:
            if opened is not None:
                step, ids = opened
                own["seconds"], out = step_times(lambda: step(positions), run.device, warm_up, repeats, run.clock)
                own["forces"][ids], own["owned"] = out.detach().double().cpu(), len(ids)
                if getattr(contender, "compile", ""):  # a replayed graph calls no function for what it sends
                    own["sent"] = (float("nan"),) * 3
                else:
                    with CommunicationCounter() as counter:
                        step(positions)
                    own["sent"] = (counter.bytes_sent, counter.exchanges, counter.collectives)
    except Exception as error:  # memory on one device, or what all ranks meet alike; the other rows are still wanted
        own["failed"] = f"{type(error).__name__}: {error}"[:300]
    own["gib"] = torch.cuda.max_memory_allocated() / 2**30 if run.device.type == "cuda" else float("nan")
    parts = run.gathered(own)
    if failed := next((p["failed"] for p in parts if p["failed"]), ""):
        return {"failed": failed}
    sent = [max(p["sent"][k] for p in parts) for k in range(3)]
    return {
        "seconds": np.max([p["seconds"] for p in parts if "seconds" in p], axis=0).tolist(),
        "forces": sum(p["forces"] for p in parts), "owned": [p["owned"] for p in parts],
        "gib": max(p["gib"] for p in parts), "mb": sent[0] / 1e6, "exchanges": sent[1], "collectives": sent[2],
    }  # fmt: skip


def compared(run: Run, groups: list[list], report: Callable[[dict], None]) -> None:
    """Times each group of contenders in turns, and reports a row for each, beside that of the bare model."""
    reference = (float("nan"), torch.tensor(float("nan")))  # where the bare model does not fit
    for group in groups:
        rounds = run.arguments.rounds if len(group) > 1 else 1
        results: dict[str, dict] = {}
        for k in range(rounds):
            for contender in group:
                before = results.get(contender.name, {})
                if "failed" in before:
                    continue
                one = measured(run, contender, rounds, run.arguments.warm_up if k == 0 else 2)
                if "failed" not in one:
                    one["seconds"] += before.get("seconds", [])
                results[contender.name] = one
        for name, one in results.items():
            row = {"atoms": len(run.atoms), "ranks": run.size, "name": name, **one}
            if "failed" not in one:
                forces, row["ms"] = row.pop("forces"), 1e3 * float(np.median(one["seconds"]))
                row["spread_ms"] = [round(1e3 * float(s), 2) for s in np.quantile(row.pop("seconds"), (0.1, 0.9))]
                if name == "bare":
                    reference = (row["ms"], forces)
                row |= {"speed_up": reference[0] / row["ms"], "F": float(forces.abs().max())}
                row["dF"] = float((forces - reference[1]).abs().max())
            report(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default=CELLS, help="repeats of the 9-atom cell (%(default)s)")
    parser.add_argument("--hidden", default="128x0e + 128x1o")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64"))
    parser.add_argument("--compile", default="", help="nvdd's modes too, for example cudagraphs,inductor+cudagraphs")
    parser.add_argument("--toolkit-compile", action="store_true", help="the toolkit's compile=True too")
    parser.add_argument("--new-list", action="store_true", help="the toolkit with a new neighbour list at each step too")
    parser.add_argument("--warm-up", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=12, help="timed steps of each, over all rounds")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each eager contender")
    parser.add_argument("--processor-time", action="store_true", help="not wall time: for CPUs that others use as well")
    parser.add_argument("--json", help="append one line for each row to this file")
    arguments = parser.parse_args()
    if arguments.processor_time and arguments.device != "cpu":
        parser.error("--processor-time is of CPUs: a process does not see a GPU's time; leave it out, or --device cpu")

    run = Run(arguments)
    say = print if run.rank == 0 else lambda *a, **k: None
    where = torch.cuda.get_device_name() if run.device.type == "cuda" else "CPU"
    eager, compiled = [Bare(run), Nvdd(run)], [Nvdd(run, mode) for mode in arguments.compile.split(",") if mode]
    version = "without nvalchemi-toolkit"
    try:
        eager += [Toolkit(run)] + [Toolkit(run, new_list=True)] * arguments.new_list
        compiled += [Toolkit(run, compile=True)] * arguments.toolkit_compile
        from importlib.metadata import version as version_of

        version = f"nvalchemi-toolkit {version_of('nvalchemi-toolkit')}"
    except (ImportError, RuntimeError) as error:
        say(f"nvalchemi-toolkit: {error}")
    say(f"{run.size} ranks, {where}, torch {torch.__version__}, {version}, {arguments.dtype}, {arguments.hidden}")
    say(f"{'atoms':>7} {'':24} {'ms':>9} {'speed-up':>8} {'MB sent':>8} {'exch.':>5} {'coll.':>5} {'GiB':>6} "
        f"{'max |dF|':>9} {'max |F|':>8}", flush=True)  # fmt: skip

    def report(row: dict) -> None:
        if "failed" in row:
            say(f"{row['atoms']:7d} {row['name']:24} {row['failed']}", flush=True)
        else:
            say(f"{row['atoms']:7d} {row['name']:24} {row['ms']:9.2f} {row['speed_up']:8.3f} {row['mb']:8.2f} "
                f"{row['exchanges']:5.0f} {row['collectives']:5.0f} {row['gib']:6.2f} {row['dF']:9.1e} {row['F']:8.4f}", flush=True)  # fmt: skip
        if arguments.json and run.rank == 0:
            with open(arguments.json, "a") as file:
                file.write(json.dumps(row) + "\n")

    for text in arguments.cells.split(","):
        run.atoms = quartz(tuple(int(n) for n in text.split("x")))
        compared(run, [eager, *([c] for c in compiled)], report)
    if run.group is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
