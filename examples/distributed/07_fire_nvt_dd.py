"""Relaxation by FIRE, then dynamics, with `DomainParallel` itself.

    python examples/distributed/07_fire_nvt_dd.py                               # one rank
    torchrun --nproc-per-node 2 examples/distributed/07_fire_nvt_dd.py          # two; rank 0 alone has all atoms

Rank 0 makes the structure; each rank gets its part, and nobody else ever has all of it. The relaxed atoms go from one
run to the next without leaving their ranks.
"""

from __future__ import annotations

import os
import warnings

import torch.distributed as dist
from ase.build import bulk
from torch.distributed.device_mesh import init_device_mesh

from nvdd import FIRE, Batch, DomainConfig, DomainParallel, NoseHoover, draw_velocities
from nvdd.dynamics.hooks import Callback, HookScope
from nvdd.dynamics.logs import CSVLog, Guard, TableLog
from nvdd.models import load

warnings.filterwarnings("ignore")
SHORT = "NVDD_EXAMPLES_SHORT" in os.environ
STEPS = 50 if SHORT else 2000


def crystal():
    """Argon with a vacancy, off its lattice sites."""
    atoms = bulk("Ar", "fcc", a=5.35, cubic=True).repeat(4)
    del atoms[17]
    atoms.rattle(0.2, seed=1)
    return atoms


def main() -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    mesh = init_device_mesh("cpu", (ranks,)) if ranks > 1 else None
    model = load("lj", epsilon=0.0104, sigma=3.4, cutoff=8.5)
    config = DomainConfig(mesh=mesh, balance="rcb")

    with DomainParallel(
        dynamics=FIRE(fmax=0.001), model=model, config=config, hooks=[TableLog(20, pressure=False)]
    ) as relax:
        relax.partition(Batch.from_atoms(crystal()) if relax.comm.rank == 0 else None)
        converged = relax.run(500)
    if relax.comm.rank == 0:
        print(f"FIRE {'converged' if converged else 'did not converge'} in {relax.state.step} steps")

    def load_of_this_rank(run, seen) -> None:
        print(f"  rank {run.comm.rank} has {run.batch.n_owned} of {run.batch.n_global} atoms", flush=True)

    hooks = [
        TableLog(STEPS // 5),
        CSVLog("nvt.csv", 10),
        Guard(10, max_temperature=500.0),
        Callback(load_of_this_rank, every=STEPS, scope=HookScope.LOCAL),
    ]
    with DomainParallel(dynamics=NoseHoover(4.0, temperature=40.0), model=model, config=config, hooks=hooks) as md:
        md.take(relax.batch)
        draw_velocities(md.state, md.evaluate, 40.0, seed=1)
        md.run(STEPS)
        final = md.gather()  # on rank 0
    if final is not None:
        print("gathered:", final.to_atoms()[0])
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
