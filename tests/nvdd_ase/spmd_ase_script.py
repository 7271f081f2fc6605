"""A user's scripts, which test_spmd_calculator.py runs under launchers: ``spmd_ase_script.py <scenario> [arguments]``."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.build import bulk

from nvdd.errors import InputError, NvddError, RankError
from nvdd.model_config import ModelConfig, NeighborConfig
from nvdd.models.base import BaseModelMixin, Batch, ModelOutputs
from nvdd.shard_tensor import to_local
from nvdd.specs import SPEC_LJ_HALO, MLIPSpec
from nvdd_ase import NVDDCalculator

MODEL = "py:spmd_ase_script:Pairs"


class Pairs(torch.nn.Module, BaseModelMixin):
    """A soft pair potential in plain torch. ``atoms.info["fault"]``: what rank 1 does in its next forward."""

    def __init__(self, scale: float | None = 1.0) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(scale if scale else torch.rand(()), dtype=torch.float64))
        self.model_config = ModelConfig(
            neighbor_config=NeighborConfig(cutoff=4.5), system_inputs=frozenset({"fault"}), elements=frozenset({18})
        )

    def forward(self, data: Batch) -> ModelOutputs:
        fault = int(data.fault.reshape(-1)[0]) if "fault" in data.system_fields else 0
        if fault and int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", os.environ.get("PMI_RANK", 0)))) == 1:
            if fault == 1:
                raise ValueError("no good")
            os.kill(os.getpid(), {9: signal.SIGKILL, 19: signal.SIGSTOP}[fault])
        r = to_local(data.edge_vectors).norm(dim=1)
        energy = 0.01 * self.scale * (4.5 - r) ** 3
        receivers = to_local(data.receivers)
        return ModelOutputs(
            energies=energy.new_zeros(to_local(data.atomic_numbers).shape[0]).index_add(0, receivers, energy)
        )

    def distribution_spec(self, strategy: Any = None) -> MLIPSpec:
        return SPEC_LJ_HALO


def structure(seed: int = 0) -> Atoms:
    atoms = bulk("Ar", "fcc", a=5.3, cubic=True).repeat((3, 2, 2))
    atoms.rattle(0.1, seed=seed)
    return atoms


def calculator(**options: Any) -> NVDDCalculator:
    return NVDDCalculator(MODEL, device="cpu", start_timeout=60.0, **options)


def numbers(atoms: Atoms) -> list[float]:
    """Energy, two forces and the stress, as numbers that can be printed in full."""
    return [atoms.get_potential_energy(), *atoms.get_forces()[[0, -1]].ravel(), *atoms.get_stress()]


def say(word: str, value: Any = None) -> None:
    sys.stdout.write(f"{word} {json.dumps(value)}\n")  # at once: other ranks write too
    sys.stdout.flush()


def attempt(action: Any) -> Any:
    start = time.monotonic()
    try:
        return action()
    except (NvddError, InputError) as error:
        say("caught", [type(error).__name__, str(error), round(time.monotonic() - start, 1)])
        return error


def workflows() -> None:
    """Several calculators, copies, a band of images, with separate and with shared calculators."""
    import copy

    from ase.mep import NEB

    atoms = structure()
    atoms.calc = first = calculator()
    say("one", numbers(atoms))
    other = structure(1)
    other.calc = calculator(dtype="float64", grid=(1, 1, first.ranks))
    say("two", numbers(other))
    atoms.rattle(0.05, seed=3)
    say("again", numbers(atoms))
    duplicate = copy.deepcopy(atoms)
    duplicate.rattle(0.05, seed=4)
    say("copy", numbers(duplicate))
    first.close()
    say("after close", numbers(atoms))
    with calculator() as third:
        atoms.calc = third
        say("third", numbers(atoms))
    for shared in (False, True):
        images = [structure() for _ in range(4)]
        for k, image in enumerate(images):
            image.positions[0] += 0.2 * k
            image.calc = first if shared else calculator()
        band = NEB(images, allow_shared_calculator=shared)
        say(f"band {shared}", [float(np.abs(band.get_forces()).max()), *map(float, band.energies)])
    say("fewer atoms", numbers_of(structure()[:7], first))
    say("one atom", numbers_of(structure()[:1], first))


def numbers_of(atoms: Atoms, calc: Any) -> list[float]:
    atoms.calc = calc
    return [atoms.get_potential_energy(), *atoms.get_forces()[0], float(atoms.get_forces().sum())]


def files() -> None:
    """ASE's own parallel world, which mpi4py switches on, must not wait for ranks that serve."""
    import ase.io
    from ase import units
    from ase.md.langevin import Langevin
    from ase.optimize import BFGS
    from mpi4py import MPI  # noqa: F401

    atoms = structure()
    ase.io.write("begin.xyz", atoms)
    atoms = ase.io.read("begin.xyz")
    atoms.calc = calculator()
    ase.io.write("start.xyz", atoms)
    with Langevin(
        atoms,
        2 * units.fs,
        temperature_K=50,
        friction=0.01,
        rng=np.random.default_rng(1),
        logfile="md.log",
        fixcm=False,
    ) as dynamics:
        dynamics.run(3)
    BFGS(atoms, trajectory="opt.traj", logfile="opt.log").run(steps=3)
    say("frames", len(ase.io.read("opt.traj@:")))
    say("back", len(ase.io.read("start.xyz")))


def replicated() -> None:
    """Every rank runs this. At the end rank 1 goes its own way."""
    rank = int(os.environ.get("PMI_RANK", 0))
    atoms = structure()
    atoms.calc = calculator(spmd="replicated")
    for step in range(3):
        atoms.positions += 0.01 * np.random.default_rng(step).normal(size=(len(atoms), 3))
        say(f"step{step}", [rank, *numbers(atoms)])
    say("report", [rank, [load["owned"] for load in atoms.calc.report()]])
    atoms.positions += 0.01 * np.random.default_rng(rank).normal(size=(len(atoms), 3))
    attempt(atoms.get_forces)
    attempt(lambda: NVDDCalculator(Pairs(None), device="cpu", spmd="replicated"))  # weights of its own on each rank


def off() -> None:
    """Every process by itself."""
    atoms = structure()
    atoms.calc = calculator(spmd="off")
    say("alone", [atoms.calc.ranks, *numbers(atoms)])


def refusals() -> None:
    """Arguments that no rank accepts; all of them raise."""
    attempt(lambda: calculator(ranks=3))
    attempt(lambda: calculator(spmd="replicate"))
    atoms = structure()
    atoms.calc = calculator(ranks=2)
    say("ranks", atoms.calc.ranks)
    attempt(lambda: calculator(spmd="replicated"))
    attempt(lambda: NVDDCalculator("py:spmd_ase_script:Nothing", device="cpu"))
    say("still", numbers(atoms))


def faults() -> None:
    """An exception in rank 1's forward, which the script survives; then its death, which it does not."""
    atoms = structure()
    atoms.calc = calculator()
    say("one", numbers(atoms))
    atoms.info["fault"] = 1
    error = attempt(atoms.get_forces)
    say("fault", [getattr(error, "rank", None), getattr(error, "phase", None), getattr(error, "cause", None)])
    say("results", sorted(atoms.calc.results))
    atoms.info["fault"] = 0
    say("recovered", numbers(atoms))
    atoms.info["fault"] = 9
    error = attempt(atoms.get_forces)
    assert isinstance(error, RankError)
    atoms.info["fault"] = 0
    attempt(atoms.get_forces)


def stop() -> None:
    atoms = structure()
    atoms.calc = calculator(timeout=2.0)
    atoms.get_forces()
    atoms.info["fault"] = 19
    attempt(atoms.get_forces)


def own_group() -> None:
    """The script uses torch.distributed itself."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    atoms = structure()
    atoms.calc = calculator()
    say("one", numbers(atoms))
    say("group", [float(total), dist.is_initialized(), dist.get_world_size()])


def singletons() -> None:
    """srun without a working MPI, and a script that uses it."""
    from mpi4py import MPI  # noqa: F401

    calculator()


def guarded() -> None:
    """Only one of the ranks makes the calculator."""
    if int(os.environ.get("SLURM_PROCID", 0)) == 0:
        NVDDCalculator(MODEL, device="cpu", start_timeout=1.0)


if __name__ == "__main__":
    Path.cwd().joinpath(f"ran-{os.getpid()}").touch()
    globals()[sys.argv[1]](*sys.argv[2:])
    say("end")
