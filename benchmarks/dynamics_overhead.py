"""What a step of dynamics costs beside the model: the loop of `DomainParallel` against the bare forward, and ASE's loop.

    OMP_NUM_THREADS=1 python benchmarks/dynamics_overhead.py                 # lj, 1 000 and 10 000 atoms, 1 rank
    OMP_NUM_THREADS=1 python benchmarks/dynamics_overhead.py --models lj,mace --atoms 1000 --device cuda

"own" is the wrapper's forward and its derivative by edge vectors, with the edges given. "loop" is a step of NVE with
migration and searches for neighbours, without hooks; "ase" the same of ASE's VelocityVerlet with `NVDDCalculator`.
Medians of interleaved calls. "waits" are the operations of a step that make the host wait for a GPU's numbers, counted
in a step that searches no neighbours; on a CPU the same code runs, with `nonzero` in the place of one of them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

warnings.filterwarnings("ignore")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).parent))

_WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique", "_unique2")


class CountWaits(TorchDispatchMode):
    """Counts operations whose result the host must see: scalars, sizes that depend on values, copies to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        if name in _WAITS or (name == "_to_copy" and self._to_host(args, kwargs)):
            self.found[name] = self.found.get(name, 0) + 1
        return function(*args, **(kwargs or {}))

    @staticmethod
    def _to_host(args, kwargs) -> bool:
        return args[0].is_cuda and torch.device((kwargs or {}).get("device", "cuda")).type == "cpu"


def measure(functions: dict, repeats: int, device: str) -> dict[str, float]:
    """Median seconds of each, called in turn."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for k in range(repeats + 2):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if device == "cuda":
                torch.cuda.synchronize()
            if k >= 2:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def benchmark(model: str, n_atoms: int, repeats: int, device: str) -> str:
    """A line of the table."""
    from ase import units
    from ase.md.velocitydistribution import thermalize_momenta
    from ase.md.verlet import VelocityVerlet
    from overhead import own_step, structure

    import parity
    from nvdd import NVE, Batch, Communicator, DomainConfig, DomainParallel
    from nvdd_ase import NVDDCalculator

    atoms = structure(model, n_atoms)
    thermalize_momenta(atoms, temperature_K=60.0 if model == "lj" else 300.0)
    wrapper = parity.wrapper(model).to(device)
    timestep = 2.0 if model == "lj" else 0.5
    run = DomainParallel(NVE(timestep), wrapper, DomainConfig(mesh=Communicator(None, device)))
    run.partition(Batch.from_atoms(atoms))
    run.run(3)
    waits = CountWaits()
    with waits:
        run.step()
    calculator = NVDDCalculator(parity.wrapper(model), device=device)
    atoms.calc = calculator
    ase = VelocityVerlet(atoms, timestep * units.fs)
    ase.run(3)
    functions = {"own": own_step(wrapper, structure(model, n_atoms)), "loop": run.step, "ase": lambda: ase.run(1)}
    if device == "cuda":
        del functions["own"]
    before = run.graph.n_builds
    seconds = measure(functions, repeats, device)
    searched = run.graph.n_builds - before
    own = seconds.get("own", float("nan"))
    share = f"{100 * (seconds['loop'] / own - 1):+6.1f} %"
    return (
        f"{model:8s} {len(atoms):7d}  own {own * 1e3:9.2f} ms  loop {seconds['loop'] * 1e3:9.2f} ms ({share})  "
        f"{1 / seconds['loop']:8.2f} steps/s  ase {1 / seconds['ase']:8.2f} steps/s  waits {dict(waits.found)}  "
        f"searches {searched} in {repeats + 2} steps"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="lj")
    parser.add_argument("--atoms", default="1000,10000")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    for model in options.models.split(","):
        for n_atoms in map(int, options.atoms.split(",")):
            print(benchmark(model, n_atoms, options.repeats, options.device), flush=True)


if __name__ == "__main__":
    main()
