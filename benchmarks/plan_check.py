"""`nvdd plan` against what it predicts: steps of one and two local ranks, measured right after the calibration.

    OMP_NUM_THREADS=1 python benchmarks/plan_check.py                       # lj and a small random MACE, two CPU ranks
    OMP_NUM_THREADS=1 python benchmarks/plan_check.py --model mace --device cuda --cells 8,12,16

Predicted and measured steps are of the same kind, `DistributedModel` with energy and forces; measured ones are medians of
the slowest rank. Counts must be equal, and are asserted. On a busy machine the times of both sides scatter: `--rounds`
repeats calibration and measurement in turn, and rows have medians; `--clock cpu` compares the seconds that a rank computes,
without waiting, on both sides.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from ase.build import bulk

from nvdd.data import Batch
from nvdd.models import load
from nvdd.planning.estimate import estimate
from nvdd.planning.measure import calibrate
from nvdd.planning.probe import SERVICE
from nvdd.runtime.local_ranks import LocalRanks
from nvdd.validate.factory import FactoryRef

LJ = {"epsilon": 0.5, "sigma": 2.1, "cutoff": 6.0}


def small_mace() -> Any:
    """A MACE of random weights, made by each rank alike."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
    from random_mace import random_mace

    from nvdd.models.mace import MACEWrapper

    return MACEWrapper(random_mace()).requires_grad_(False)


MODELS = {"lj": functools.partial(load, "lj", **LJ), "mace": small_mace}


def main() -> None:
    """Prints a row for each number of ranks and size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="lj,mace", help="lj, mace or both")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cells", default="4,6,8", help="silicon cells of 8 atoms along each axis")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clock", default="wall", choices=("wall", "cpu"))
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sizes = [int(n) for n in given.cells.split(",")]
    cell = bulk("Si", "diamond", a=5.43, cubic=True)
    cell.rattle(0.02, seed=1)
    print(f"{'model':>6} {'ranks':>5} {'atoms':>7} {'halo':>6} {'predicted ms':>13} {'measured ms':>12} {'ratio':>6} {'of memory':>9}")
    for name in given.model.split(","):
        compare(name, cell, sizes, given.device, given.rounds, given.clock)


def compare(name: str, cell: Any, sizes: list[int], device: str, rounds: int, clock: str) -> None:
    """All sizes on one and two ranks, ``rounds`` times in turn with the calibration."""
    found: dict[tuple[int, int], list[tuple]] = {}
    for _ in range(rounds):
        calibration = calibrate(MODELS[name], cell, device, clock=clock)
        kwargs = {"factory": FactoryRef.of(MODELS[name]), "dtype": None, "clock": clock}
        with LocalRanks(2, SERVICE, kwargs, device=device) as ranks:
            for n in sizes:
                for plan in estimate(None, cell, (1, 2), repeat=(n, n, n), calibration=calibration).plans:
                    found.setdefault((plan.n_ranks, n), []).append(measure(ranks, plan, cell.repeat(n)))
    for (n_ranks, n), rows in sorted(found.items()):
        predicted, measured, ratio, memory, halo = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{name:>6} {n_ranks:>5} {8 * n**3:>7} {halo:>6.0f} {1e3 * predicted:>13.1f} {1e3 * measured:>12.1f} {ratio:>6.2f} {memory:>9.3f}", flush=True)  # fmt: skip


def measure(ranks: LocalRanks, plan: Any, atoms: Any) -> tuple[float, float, float, float, float]:
    """Predicted and measured seconds, their ratio, that of the memory, halo rows; counts are compared."""
    batch = Batch.from_atoms(atoms)
    if plan.n_ranks == 1:
        steps = [s for s in ranks.call("measure", {"batch": batch, "domain": {}, "together": False, "seconds": 2.0}) if s]
    else:
        steps = ranks.call("trace", {"batch": batch, "domain": {}})
        assert [s["halo"] for s in steps] == plan.loads.halo.tolist()
    assert [s["owned"] for s in steps] == plan.loads.owned.tolist()
    assert [s["edges"] for s in steps] == plan.loads.edges.tolist()
    seconds, most = max(s["seconds"] for s in steps), max(s["bytes"] for s in steps)
    return plan.seconds, seconds, plan.seconds / seconds, plan.memory / most, float(plan.loads.halo.max())


if __name__ == "__main__":
    main()
