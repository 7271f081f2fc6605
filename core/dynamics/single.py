"""Dynamics of a structure in this process: the loop around an integrator, without ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nvdd.data import Batch
from nvdd.dynamics.base import BaseDynamics
from nvdd.dynamics.domain_parallel import DomainParallel
from nvdd.dynamics.hooks import Hook
from nvdd.dynamics.state import DynamicsState
from nvdd.dynamics.velocities import draw_velocities, temperature
from nvdd.errors import InputError
from nvdd.model_config import ModelConfig, stored_name

if TYPE_CHECKING:
    from ase import Atoms


class Simulation:
    """Runs an integrator or optimiser on structures in this process.

    ::

        run = Simulation(atoms, load("lj", epsilon=0.0104, sigma=3.4), NVE(timestep=2.0))
        run.draw_velocities(300.0, seed=1)
        run.run(1000)
        run.temperature, run.conserved  # one number for each system
        relaxed = run.to_atoms()[0]

    Args:
        systems: one ``ase.Atoms`` or several, which then run side by side and don't feel each other. They are not
            changed. Their masses, velocities and constraints (FixAtoms, FixCom) are taken.
        model: a wrapper, or a `DistributedModel` of one rank.
        dynamics: an integrator or optimiser.
        hooks: logs, trajectories and so on, as for `DomainParallel`.

    Raises:
        InputError: another constraint, or some systems hold their centre of mass and some don't.
    """

    def __init__(
        self, systems: Atoms | Sequence[Atoms], model: Any, dynamics: BaseDynamics, hooks: Sequence[Hook] = ()
    ) -> None:
        one = hasattr(systems, "numbers")  # an Atoms, which is a sequence too
        self._systems: list[Any] = [systems] if one else list(systems)
        self.dynamics = dynamics
        self._run = DomainParallel(dynamics, model, hooks=hooks)
        config = self._run.model.wrapper.model_config
        batch = Batch.from_atoms([_read_by(config, atoms) for atoms in self._systems])
        self._run.partition(batch, **motion_of(self._systems))

    @property
    def state(self) -> DynamicsState:
        """The atoms as they are now."""
        return self._run.state

    def draw_velocities(self, temperature: float, seed: int = 0, **options: Any) -> None:
        """As `nvdd.dynamics.velocities.draw_velocities`: ``temperature`` K, and its ``options`` ``zero_momentum``, ``exact``."""
        draw_velocities(self.state, self._run.evaluate, temperature, seed, **options)

    def run(self, steps: int, on_step: Callable[[Simulation], Any] | None = None) -> bool:
        """Up to ``steps`` steps.

        Args:
            steps: most steps to take.
            on_step: called after each.

        Returns:
            Whether an optimiser has converged, with which the run ends, as it does when a hook stops it.
        """
        if on_step is None:
            return self._run.run(steps)
        self._run.start()
        for _ in range(steps):
            if self._run.over:
                break
            self._run.step()
            on_step(self)
        return self._run.run(0)

    @property
    def kinetic_energy(self) -> np.ndarray:
        """(n_systems,) eV."""
        return self._kinetic().cpu().numpy()

    @property
    def temperature(self) -> np.ndarray:
        """(n_systems,) K."""
        return temperature(self.state, self._kinetic()).cpu().numpy()

    @property
    def conserved(self) -> np.ndarray:
        """(n_systems,) eV, what the dynamics conserves."""
        self._run.start()
        return self.dynamics.conserved(self.state, self._kinetic()).cpu().numpy()

    def _kinetic(self) -> Tensor:
        return self._run.evaluate.reduce(self.state, "kinetic_energy")["kinetic_energy"]

    def to_atoms(self) -> list[Atoms]:
        """Copies of the user's structures at the present positions, velocities and cells."""
        state, out = self.state, []
        for number, system in enumerate(self._systems):
            mine, atoms = (state.system == number).cpu(), system.copy()
            atoms.set_cell(state.cell[number].cpu().numpy())
            atoms.set_positions(state.positions.cpu()[mine].numpy(), apply_constraint=False)
            if self.dynamics.kinetic:
                velocities = state.velocities.cpu()[mine].numpy()
                atoms.set_momenta(velocities * atoms.get_masses()[:, None], apply_constraint=False)
            out.append(atoms)
        return out

    def close(self) -> None:
        """Ends the hooks: files are complete and closed."""
        self._run.close()

    def __enter__(self) -> Simulation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read_by(config: ModelConfig, atoms: Atoms) -> Atoms:
    """A copy with those arrays and info that the model reads; others may differ from system to system."""
    copy = atoms.copy()
    read = {stored_name(name, copy.arrays) for name in config.node_inputs}
    for name in set(copy.arrays) - {"positions", "numbers", *read}:
        del copy.arrays[name]
    copy.info = {name: value for name, value in copy.info.items() if name in config.system_inputs}
    return copy


def motion_of(systems: Sequence[Atoms]) -> dict[str, Any]:
    """Masses, velocities and constraints of ``ase.Atoms``, as `DomainParallel.partition` takes them."""
    constraints = [constraints_of(atoms) for atoms in systems]
    held = {fix_com for _, fix_com in constraints}
    if len(held) > 1:
        raise InputError("some systems hold their centre of mass (FixCom) and some don't; run them one by one")
    velocities = np.concatenate([atoms.get_velocities() for atoms in systems])
    if not np.isfinite(velocities).all():
        raise InputError("the structure's velocities are not all finite numbers; repair or remove them")
    return {
        "masses": torch.from_numpy(np.concatenate([atoms.get_masses() for atoms in systems])),
        "velocities": torch.from_numpy(velocities),
        "fixed": torch.from_numpy(np.concatenate([fixed for fixed, _ in constraints])),
        "fix_com": held.pop(),
    }


def constraints_of(atoms: Atoms) -> tuple[np.ndarray, bool]:
    """(N,) bool of the atoms that ASE's FixAtoms holds, and whether its FixCom holds the centre of mass.

    Raises:
        InputError: another kind of constraint.
    """
    from ase.constraints import FixAtoms, FixCom

    fixed, fix_com = np.zeros(len(atoms), bool), False
    for constraint in atoms.constraints:
        if type(constraint) is FixAtoms:
            fixed[constraint.index] = True
        elif type(constraint) is FixCom:
            fix_com = True
        else:
            raise InputError(
                f"constraint {type(constraint).__name__} is not known to nvdd's dynamics, which has FixAtoms and FixCom; "
                "remove it, or use ASE's dynamics with NVDDCalculator"
            )
    return fixed, fix_com
