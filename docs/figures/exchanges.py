"""Counts the exchanges and bytes of one step of several models; prints the table of docs/how-it-works.md, draws
exchanges.png, what each exchange of a step sends.

    torchrun --nproc-per-node 2 docs/figures/exchanges.py

A step here gives energy and forces and rebuilds no neighbour list. MACE's weights are random: they don't change what
travels.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch.distributed as dist
from ase import Atoms
from ase.spacegroup import crystal
from matplotlib.figure import Figure

from nvdd import Batch, Communicator, DistributedModel, DomainConfig, dispatch_trace
from nvdd.models import load

sys.path.append(str(Path(__file__).parents[2] / "examples"))


def quartz() -> Atoms:
    """Alpha-quartz, 216 atoms; each moved a little."""
    atoms = crystal(
        ["Si", "O"],
        [(0.4697, 0, 2 / 3), (0.4135, 0.2669, 0.7858)],
        spacegroup=154,
        cellpar=[4.913, 4.913, 5.405, 90, 90, 120],
    ).repeat((3, 2, 4))
    atoms.rattle(0.05, seed=1)
    return Atoms(atoms.numbers, atoms.positions, cell=atoms.cell, pbc=True)


def mace(n_layers: int):
    """The wrapper of one with 32x0e+32x1o features, r_max 4.5 A, in float32."""
    from random_mace import random_mace

    from nvdd.models.mace import MACEWrapper

    return MACEWrapper(random_mace(n_layers=n_layers, hidden="32x0e+32x1o").float()).eval().requires_grad_(False)


COLOURS = {"fetch": "#4477aa", "fold": "#ee6677", "forces": "#228833"}
DRAWN = ("MACE, 3 layers", "SevenNet-0 (5 layers)")
MODELS = {
    "lj, one set of parameters": lambda: load("lj", epsilon=0.0104, sigma=2.2, cutoff=5.0),
    "lj, parameters by element": lambda: load("lj", epsilon="O:0.01,Si:0.01", sigma="O:2.2,Si:2.2", cutoff=5.0),
    "MACE, 2 layers": lambda: mace(2),
    "MACE, 3 layers": lambda: mace(3),
    "SevenNet-0 (5 layers)": lambda: load("sevenn:7net-0"),
}


def draw(steps: dict[str, list]) -> None:
    """A bar for each exchange of a step, in order: KiB that rank 0 sends."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    widths = [len(exchanges) + 2 for exchanges in steps.values()]
    for axes, (name, exchanges) in zip(figure.subplots(1, len(steps), width_ratios=widths), steps.items(), strict=True):
        kinds = [_kind(e.site) for e in exchanges]
        axes.bar(range(len(kinds)), [e.bytes_sent / 1024 for e in exchanges], color=[COLOURS[kind] for kind in kinds])
        axes.set_xticks(range(len(kinds)), kinds, rotation=60, ha="right", fontsize=8)
        axes.set_title(name, fontsize=10)
        axes.set_ylabel("KiB sent by rank 0")
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=110)


def _kind(site: str) -> str:
    """What an exchange is, from the place in the code that caused it."""
    return "forces" if site == "forces" else "fold" if site.startswith("fold") else "fetch"


def main() -> None:
    """Runs on every rank; rank 0 prints."""
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    comm = Communicator(dist.group.WORLD)
    batch, steps = Batch.from_atoms(quartz()), {}
    if comm.rank == 0:
        print(f"{batch.n_atoms} atoms on {comm.size} ranks; numbers of rank 0")
    for name, make in MODELS.items():
        model = DistributedModel(make(), DomainConfig(mesh=comm))
        model(batch, {"energy"})  # builds the neighbour list and the plan
        with dispatch_trace() as trace:
            out = model(batch, {"energy", "forces"})
        steps[name] = trace.exchanges
        if comm.rank == 0:
            print(f"\n{name}: {len(out.ids)} owned atoms, {out.n_halo} halo rows, {out.n_edges} edges")
            print(
                f"  {trace.n_exchanges} exchanges, {trace.bytes_sent} bytes sent, reductions {dict(trace.reductions)}"
            )
            for e in trace.exchanges:
                print(f"  {e.site}: {e.bytes_sent // max(e.rows_sent, 1)} bytes a row")
    if comm.rank == 0:
        draw({name: steps[name] for name in DRAWN})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
