"""Not run: typed code of a user, which mypy checks against the public hints (./dev types)."""

from __future__ import annotations

import numpy as np
from ase import Atoms
from typing_extensions import assert_type

from nvdd import (
    NPT,
    NVE,
    SPEC_MPNN_HALO,
    Batch,
    DistributedModel,
    DomainConfig,
    ForceStrategy,
    MLIPSpec,
    Simulation,
    dispatch_trace,
)
from nvdd_ase import DistributedMD, NVDDCalculator
from nvdd_lammps import export_model, load_unified


def calculators(atoms: Atoms) -> NVDDCalculator:
    calculator = NVDDCalculator("sevenn:7net-0", ranks=2, device="cpu", dtype=None, grid=(2, 1, 1), timeout=60.0)
    assert_type(NVDDCalculator.from_calculator(calculator, ranks=2), NVDDCalculator)
    calculator.close()
    return calculator


def wrong_calls() -> None:
    NVDDCalculator("lj", ranks="2")  # type: ignore[arg-type]
    NVDDCalculator("lj", skin=None)  # type: ignore[arg-type]
    DomainConfig(skin="wide")  # type: ignore[arg-type]
    NVE(timestep="1 fs")  # type: ignore[arg-type]


def models(model: object, atoms: Atoms) -> None:
    batch = Batch.from_atoms([atoms])
    assert_type(batch, Batch)
    with dispatch_trace() as trace:
        DistributedModel(model)(batch, {"energy", "forces"})
    assert_type(trace.n_exchanges, int)
    assert_type(SPEC_MPNN_HALO.with_force_strategy(ForceStrategy.POSITIONS), MLIPSpec)
    assert_type(MLIPSpec.load("spec.json"), MLIPSpec)


def dynamics(model: object, atoms: Atoms) -> None:
    run = Simulation(atoms, model, NPT(timestep=1.0, temperature=300.0, pressure=0.0))
    assert_type(run.run(10), bool)
    assert_type(run.conserved, np.ndarray)
    DistributedMD(atoms, "lj", ranks=2, ensemble="nvt", temperature=300.0).run(5)


def lammps() -> None:
    export_model("lj", "lj.nvdd", elements=["Ar"])
    load_unified("lj.nvdd")
