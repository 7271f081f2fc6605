"""What each rank does for `DistributedMD`: holds its atoms and the model, makes steps."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from nvdd.communicator import Communicator
from nvdd.config import DomainConfig
from nvdd.data import Batch
from nvdd.dynamics.checkpoint import save_checkpoint
from nvdd.dynamics.domain_parallel import DomainParallel
from nvdd.dynamics.failures import raise_together
from nvdd.dynamics.hooks import Observation
from nvdd.dynamics.logs import Speed, record
from nvdd.dynamics.state import DynamicsState
from nvdd.dynamics.velocities import draw_velocities
from nvdd.errors import InputError

# columns of the shared array "atoms", by which atoms come to rank 0 and go back
COLUMNS: dict[str, Any] = {"positions": slice(0, 3), "velocities": slice(3, 6), "masses": 6, "numbers": 7, "fixed": 8}
WIDTH = 9
_COMPARED = {"atomic_numbers": "numbers", "masses": "masses", "fixed": "fixed"}  # of a restart: name -> column
_SAME_STRUCTURE = "give the structure, and the settings of its centre of mass, from which that run began"


class MDEngine:
    """One rank's share of a `DistributedMD`.

    Args:
        comm: the ranks.
        arrays: ``atoms`` (N, 9) to read and write and ``forces`` (N, 3) to write, on rank 0.
        phase: told what the rank is doing.
        model, options, dtype, domain: as for `nvdd_ase.engine.Engine`.
        dynamics: the integrator.
        hooks: called on the ranks.
    """

    def __init__(
        self,
        comm: Communicator,
        arrays: Mapping[str, np.ndarray],
        phase: Callable[[str], None],
        *,
        model: Any,
        options: Mapping[str, Any],
        dtype: str | None,
        domain: Mapping[str, Any],
        dynamics: Any,
        hooks: Sequence[Any],
    ) -> None:
        from nvdd.runtime.model import DistributedModel

        self.comm, self.arrays, self._phase = comm, arrays, phase
        torch_dtype = getattr(torch, dtype) if dtype else None
        if isinstance(model, str):
            from nvdd.models import load

            wrapper = load(model, dtype=torch_dtype, **options)
        else:
            wrapper = copy.deepcopy(model)  # the user's own is not moved or cast
            wrapper = wrapper if torch_dtype is None else wrapper.to(torch_dtype)
        wrapper = wrapper.to(comm.device).eval()
        distributed = DistributedModel(wrapper, DomainConfig(mesh=comm, **domain), report_phase=phase)
        self.run_of = DomainParallel(dynamics, distributed, hooks=hooks)
        self._speed = Speed()

    def describe(self, _: Any = None) -> dict[str, Any]:
        """What `DistributedMD` must know of the model."""
        config = self.run_of.model.wrapper.model_config
        return {
            "elements": config.elements,
            "node_inputs": sorted(config.node_inputs),
            "system_inputs": sorted(config.system_inputs),
        }

    def begin(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Takes the atoms from rank 0's array, or from a checkpoint, and computes the first forces.

        Args:
            payload: ``restart`` (a path or None), ``cell``, ``pbc``, ``system_fields``, ``node_fields`` (names of shared
                arrays), ``fix_com``, ``draw`` (K and seed of velocities to draw, or None).
        """
        run = self.run_of
        self._phase("partition")
        if payload["restart"]:
            run.restart(payload["restart"])
            self._compare(payload)
        else:
            run.partition(self._state(payload) if self.comm.rank == 0 else None)
            if payload["draw"]:
                draw_velocities(run.state, run.evaluate, *payload["draw"])
        run.start()
        return {"step": run.state.step, **self.observe()}

    def _compare(self, payload: dict[str, Any]) -> None:
        """Raises InputError, on every rank, where rank 0's atoms are not those of the checkpoint."""
        run, failure = self.run_of, None
        rows = run.batch.gather_rows(["atomic_numbers", "masses", "fixed"])
        if rows is not None:
            table, path = self.arrays["atoms"], payload["restart"]
            given = {name: table[:, COLUMNS[column]] for name, column in _COMPARED.items()}
            failure = _difference(path, {name: rows[name].numpy() for name in given}, given)
            there = (run.state.pbc[0].tolist(), run.state.fix_com)
            here = (payload["pbc"].tolist(), payload["fix_com"])
            for name, then, now in zip(("pbc", "fix_com"), there, here, strict=True):
                if failure is None and then != now:
                    failure = InputError(
                        f"{path} was written of atoms with {name} = {then}, and these have {now}: {_SAME_STRUCTURE}"
                    )
        raise_together(self.comm, failure)

    def _state(self, payload: dict[str, Any]) -> DynamicsState:
        table = torch.from_numpy(self.arrays["atoms"])
        batch = Batch(
            positions=table[:, COLUMNS["positions"]],
            atomic_numbers=table[:, COLUMNS["numbers"]].to(torch.int64),
            cell=torch.from_numpy(payload["cell"])[None],
            pbc=torch.from_numpy(payload["pbc"])[None],
            node_fields={name: torch.from_numpy(self.arrays["input " + name]) for name in payload["node_fields"]},
            system_fields={k: torch.from_numpy(np.asarray(v))[None] for k, v in payload["system_fields"].items()},
        )
        fixed = table[:, COLUMNS["fixed"]] > 0
        velocities = table[:, COLUMNS["velocities"]]
        return DynamicsState.from_batch(batch, table[:, COLUMNS["masses"]], velocities, fixed, payload["fix_com"])

    def advance(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Makes ``steps`` steps, none for 0. Returns what `observe` does, and whether the run is over."""
        self._phase("dynamics")
        run = self.run_of
        target = run.state.step + payload["steps"]
        run.want_stress_at = target if payload["stress"] else None
        run.run(payload["steps"])
        if payload["stress"]:  # it may have ended before the target
            run.compute_stress()
        return {"step": run.state.step, "over": run.over, **self.observe()}

    def observe(self, _: Any = None) -> dict[str, Any]:
        """Totals over all atoms: a record as in the log, cell (3, 3), energy and stress (3, 3) or None."""
        run = self.run_of
        seen = Observation.of(run)
        values = record(seen, run.dynamics.timestep * run.dynamics.kinetic, self._speed.look(seen.step))[0]
        return {
            "record": values,
            "cell": run.state.cell[0].cpu().numpy(),
            "energy": float(seen.energy[0]),
            "stress": None if seen.stress is None else seen.stress[0].numpy(),
        }

    def collect(self, _: Any = None) -> None:
        """Puts positions, velocities and forces into rank 0's arrays, in the user's order."""
        self._phase("collect")
        rows = self.run_of.batch.gather_rows(["positions", "velocities", "forces"])
        if rows is not None:
            for name in ("positions", "velocities"):
                self.arrays["atoms"][:, COLUMNS[name]] = rows[name].numpy()
            self.arrays["forces"][:] = rows["forces"].numpy()

    def checkpoint(self, path: str) -> str | None:
        """Writes a checkpoint. Returns why it can't: an exception would end the ranks, and their run can go on."""
        self._phase("checkpoint")
        try:
            save_checkpoint(path, self.run_of.batch, self.run_of.dynamics.parameters())
        except InputError as error:
            return str(error)
        return None

    def report(self, _: Any = None) -> dict[str, Any]:
        """This rank's process, load and work."""
        run = self.run_of
        return {
            "pid": os.getpid(),
            "device": str(self.comm.device),
            "owned": run.batch.n_owned if run.batch else 0,
            "evaluations": run.evaluate.n_evaluations,
            "rebuilds": run.graph.n_builds,
            "arrived": run.migration.n_migrated,
            "rebalanced": run.migration.n_rebalanced,
            "waited_s": self.comm.waited,
        }

    def close(self, _: Any = None) -> None:
        """Closes the files."""
        self.run_of.close()


def _difference(path: str, there: dict[str, np.ndarray], here: dict[str, np.ndarray]) -> InputError | None:
    """What a checkpoint's atoms have, and those of the user have not."""
    for name, now in here.items():
        then = there[name]
        if len(then) != len(now):
            return InputError(f"{path} has {len(then)} atoms, and these are {len(now)}: {_SAME_STRUCTURE}")
        # masses have been through files of eight digits
        other = np.flatnonzero(~np.isclose(then, now, rtol=1e-6, atol=0.0))
        if len(other):
            first = other[0]
            return InputError(
                f"{path} was written of other atoms: {name} of atom {first} is {then[first]:g} there and {now[first]:g} "
                f"here, and {len(other)} differ: {_SAME_STRUCTURE}"
            )
    return None
