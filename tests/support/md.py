"""Dynamics over ranks for tests: an integrator, systems, and runs of which each rank gives its part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from ase import units

import parity
from nvdd import Batch, DomainConfig
from nvdd.communicator import Communicator
from nvdd.dynamics.base import BaseDynamics
from nvdd.dynamics.domain_parallel import DomainParallel


class Verlet(BaseDynamics):
    """The shortest integrator."""

    def step(self, state, evaluate):
        state.velocities = state.velocities + 0.5 * self.dt * state.forces / state.masses.unsqueeze(1)
        state.positions = state.positions + self.dt * state.velocities
        evaluate(state)
        state.velocities = state.velocities + 0.5 * self.dt * state.forces / state.masses.unsqueeze(1)


def evaluate_on_rank(comm: Communicator, model: str, names: list[str], options: dict) -> list[dict[str, Any]]:
    """Runs on each rank: energy, forces and stress of named structures, from atoms that ranks own."""
    found = []
    for name in names:
        atoms = parity.structure(name).copy()
        atoms.set_masses(np.ones(len(atoms)))
        run = DomainParallel(Verlet(1.0), parity.wrapper(model), DomainConfig(mesh=comm, **options))
        batch = run.partition(Batch.from_atoms(atoms) if comm.rank == 0 else None)
        run.evaluate.want_stress = atoms.cell.rank == 3
        run.evaluate(batch.state)
        state = batch.state
        part = {"ids": state.ids.numpy(), "energy": state.energy.numpy(), "forces": state.forces.numpy()}
        part["energies"] = np.zeros(len(state.ids))
        if state.stress is not None:
            part["stress"] = state.stress.numpy()
        found.append(part)
    return found


def hot_argon(repeat=(3, 3, 4), temperature: float = 120.0, seed: int = 4) -> Any:
    """Argon that moves a lot: atoms cross domains all the time."""
    atoms = parity.STRUCTURES["argon"](repeat)
    spread = np.sqrt(units.kB * temperature / atoms.get_masses())[:, None]
    atoms.set_velocities(spread * np.random.default_rng(seed).normal(size=(len(atoms), 3)))
    return atoms


def run_on_rank(
    comm: Communicator,
    model: str,
    atoms: Any,
    dynamics: BaseDynamics,
    steps: int,
    options: dict,
    hooks: Sequence[Any] = (),
    **start: Any,
) -> dict:
    """Runs on each rank; all atoms come from rank 0 or a checkpoint (a path), positions and velocities go to rank 0."""
    run = DomainParallel(dynamics, parity.wrapper(model), DomainConfig(mesh=comm, **options), hooks)
    if isinstance(atoms, str):
        run.restart(atoms, **start)
    else:
        run.partition(Batch.from_atoms(atoms) if comm.rank == 0 else None, **start)
    largest = run.batch.n_owned
    with run:
        converged = run.run(steps)
    rows = run.batch.gather_rows(["positions", "velocities", "forces"])
    run_kinetic = run.evaluate.reduce(run.state, "kinetic_energy")["kinetic_energy"]
    return {
        **({k: v.numpy() for k, v in rows.items()} if rows else {}),
        "cell": run.state.cell.numpy(),
        "energy": run.state.energy.numpy(),
        "conserved": dynamics.conserved(run.state, run_kinetic).numpy(),
        "migrated": run.migration.n_migrated,
        "builds": run.graph.n_builds,
        "evaluations": run.evaluate.n_evaluations,
        "rebalanced": run.migration.n_rebalanced,
        "owned": max(largest, run.batch.n_owned),
        "now": run.batch.n_owned,
        "steps": run.state.step,
        "converged": converged,
    }


def models_on_rank(comm: Communicator, names: list[str], structures: list[str]) -> list[dict[str, Any]]:
    """Runs on each rank: other kinds of models, with several systems in one batch, beside the same on all atoms."""
    import bond_models
    import composed
    import sharded_models
    from nvdd import DistributedModel, DistributionSpec, HaloStoragePolicy, MLIPSpec

    found = []
    batch = Batch.from_atoms([parity.structure(name) for name in structures])
    for name in names:
        module = bond_models if hasattr(bond_models, name) else sharded_models
        make = getattr(module, name, None) or composed.PIPELINES.get(name) or (lambda name=name: parity.wrapper(name.split()[0]))
        model, spec = make(), None
        if name.endswith(" halo"):
            policy = HaloStoragePolicy(scatter_mode="halo_correction", gather_mode="halo_read")
            spec = MLIPSpec(DistributionSpec(policy), model.distribution_spec().outputs)
        run = DomainParallel(Verlet(1.0), DistributedModel(model, DomainConfig(mesh=comm, skin=0.8), spec))
        state = run.partition(batch, masses=torch.ones(batch.n_atoms)).state
        run.evaluate(state)
        alone = DistributedModel(make(), DomainConfig(mesh=Communicator(None)))(batch)
        ids = state.ids
        found.append(
            {
                "energy": float((state.energy - alone["energy"]).abs().max() / alone["energy"].abs().max()),
                "forces": _largest(state.forces - alone["forces"][ids]) / _largest(alone["forces"]),
                "owned": len(ids),
            }
        )
    return found


def _largest(values: torch.Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0
