"""`DynamicsState`: the atoms at hand, as an integrator or optimiser sees and changes them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from nvdd.data import Batch
from nvdd.errors import InputError

FS = 0.09822694788464063  # ASE's unit of time is A (amu/eV)^(1/2); 1 fs in it
BOLTZMANN = 8.617330337217213e-05  # eV/K, as ase.units.kB
GPA = 0.006241509125883258  # eV/A^3, as ase.units.GPa

# per-atom tensors beside those in dictionaries
_PER_ATOM = ("positions", "velocities", "forces", "masses", "atomic_numbers", "ids", "system", "fixed")


@dataclass(eq=False)
class DynamicsState:
    """Atoms of one rank (of one process: all of them) and what all ranks have alike of their systems.

    Units are eV, A, amu and ASE's time, A (amu/eV)^(1/2). Tensors of one process and of one rank of many look the
    same; only the number of rows differs, which may be zero.

    Attributes:
        positions: (n, 3) float64 A; never wrapped.
        velocities: (n, 3) float64 A/time; zero for fixed atoms.
        masses: (n,) float64 amu.
        atomic_numbers: (n,) int64.
        ids: (n,) int64 global ids.
        system: (n,) int64, the system of each atom.
        fixed: (n,) bool, atoms that don't move; the forces that an integrator sees on them are zero.
        cell: (n_systems, 3, 3) A, rows are the cell vectors.
        pbc: (n_systems, 3) bool.
        n_atoms, n_fixed: (n_systems,) int64 atoms, and fixed ones, of all ranks.
        total_mass: (n_systems,) float64 amu of the atoms that move, of all ranks.
        fix_com: whether the centre of mass of each system is at rest.
        forces: (n, 3) eV/A.
        energy: (n_systems,) eV.
        stress: (n_systems, 3, 3) eV/A^3, potential part, positive = tension; None if it was not asked for.
        step: steps done so far.
        time: fs, of all steps so far, which may have had different lengths.
        node_fields, system_fields: further inputs of the model.
        node_state: per-atom tensors (n, ...) of the integrator: they move with their atoms and are checkpointed.
        system_state: per-system tensors (n_systems, ...) of the integrator (thermostat chains, cell momenta), the same
            on all ranks to the last bit because they are computed from reduced totals alone; checkpointed. After a
            restart they are on the device of the atoms, see `nvdd.dynamics.host`.
    """

    positions: Tensor
    velocities: Tensor
    masses: Tensor
    atomic_numbers: Tensor
    ids: Tensor
    system: Tensor
    fixed: Tensor
    cell: Tensor
    pbc: Tensor
    n_atoms: Tensor
    n_fixed: Tensor
    total_mass: Tensor
    forces: Tensor
    energy: Tensor
    stress: Tensor | None = None
    fix_com: bool = False
    step: int = 0
    time: float = 0.0
    node_fields: dict[str, Tensor] = field(default_factory=dict)
    system_fields: dict[str, Tensor] = field(default_factory=dict)
    node_state: dict[str, Tensor] = field(default_factory=dict)
    system_state: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def from_batch(
        cls,
        batch: Batch,
        masses: Tensor,
        velocities: Tensor | None = None,
        fixed: Tensor | None = None,
        fix_com: bool = False,
    ) -> DynamicsState:
        """All atoms of ``batch`` in one process; forces and energy are zero until they are evaluated.

        Args:
            batch: positions, numbers, cells.
            masses: (n,) amu.
            velocities: (n, 3) A/time; None for zero.
            fixed: (n,) bool; None for no atom.
            fix_com: hold the centre of mass of each system.

        Raises:
            InputError: shapes don't fit, a mass is not positive, or there are fixed atoms and ``fix_com``.
        """
        n, f64 = batch.n_atoms, torch.float64
        device = batch.positions.device
        masses = masses.to(device, f64)
        velocities = torch.zeros(n, 3, dtype=f64, device=device) if velocities is None else velocities.to(device, f64)
        fixed = torch.zeros(n, dtype=torch.bool, device=device) if fixed is None else fixed.to(device, torch.bool)
        for name, value, shape in (
            ("masses", masses, (n,)),
            ("velocities", velocities, (n, 3)),
            ("fixed", fixed, (n,)),
        ):
            if value.shape != shape:
                raise InputError(f"{name} have shape {tuple(value.shape)} for {n} atoms; they must have shape {shape}")
        if n and not bool((masses > 0).all() & masses.isfinite().all()):
            raise InputError(f"every mass must be positive (amu); the smallest is {float(masses.min())!r}")
        if fix_com and bool(fixed.any()):
            raise InputError("fix_com with fixed atoms: those hold the system already; leave out one of the two")
        count = lambda values: torch.zeros(batch.n_systems, dtype=values.dtype, device=device).index_add(
            0, batch.batch, values
        )
        return cls(
            positions=batch.positions.detach().to(f64).clone(),
            velocities=velocities * (~fixed).unsqueeze(1),
            masses=masses,
            atomic_numbers=batch.atomic_numbers.clone(),
            ids=torch.arange(n, device=device),
            system=batch.batch.clone(),
            fixed=fixed,
            cell=batch.cell.detach().to(f64).clone(),
            pbc=batch.pbc.clone(),
            n_atoms=count(torch.ones_like(batch.batch)),
            n_fixed=count(fixed.to(torch.int64)),
            total_mass=count(masses * ~fixed),
            forces=torch.zeros(n, 3, dtype=f64, device=device),
            energy=torch.zeros(batch.n_systems, dtype=f64, device=device),
            fix_com=fix_com,
            node_fields=dict(batch.node_fields),
            system_fields=dict(batch.system_fields),
        )

    @property
    def n_systems(self) -> int:
        """Number of systems, of all ranks."""
        return self.cell.shape[0]

    @property
    def free(self) -> Tensor:
        """(n, 1) float64: 1 for atoms that move, 0 for fixed ones."""
        return (~self.fixed).to(torch.float64).unsqueeze(1)

    @property
    def degrees_of_freedom(self) -> Tensor:
        """(n_systems,) float64: 3 for each atom that moves, less 3 if the centre of mass is at rest; at least 1."""
        freedom = 3 * (self.n_atoms - self.n_fixed) - (3 if self.fix_com else 0)
        return freedom.clamp(min=1).to(torch.float64)

    @property
    def volume(self) -> Tensor:
        """(n_systems,) A^3."""
        return torch.linalg.det(self.cell).abs()

    def fresh(self) -> DynamicsState:
        """A copy at step 0 without what an integrator has put into it."""
        copied = {f.name: getattr(self, f.name) for f in fields(self)}
        copied = {name: value.clone() if isinstance(value, Tensor) else value for name, value in copied.items()}
        empty = {"node_state": {}, "system_state": {}, "step": 0, "time": 0.0, "stress": None}
        own = {"node_fields": dict(self.node_fields), "system_fields": dict(self.system_fields)}
        return DynamicsState(**(copied | empty | own))

    def sum_systems(self, values: Tensor) -> Tensor:
        """(n, ...) per-atom values -> (n_systems, ...): sums over the atoms at hand, this rank's share."""
        if self.n_systems == 1:
            return values.sum(0, keepdim=True)
        return values.new_zeros(self.n_systems, *values.shape[1:]).index_add(0, self.system, values)

    def of_atoms(self, values: Tensor) -> Tensor:
        """(n_systems, ...) per-system values -> (n, ...): that of each atom's system."""
        if self.n_systems == 1:
            return values.expand(self.system.shape[0], *values.shape[1:])
        return values.index_select(0, self.system)

    def per_atom(self) -> dict[str, Tensor]:
        """Everything that belongs to an atom and moves with it, by name; `node_fields` as ``node_fields.x`` and so on."""
        rows = {name: getattr(self, name) for name in _PER_ATOM}
        rows |= {f"node_fields.{name}": value for name, value in self.node_fields.items()}
        return rows | {f"node_state.{name}": value for name, value in self.node_state.items()}

    def set_per_atom(self, rows: dict[str, Tensor]) -> None:
        """Puts other atoms in place; the counterpart of `per_atom`."""
        for name, value in rows.items():
            where, _, key = name.partition(".")
            if key:
                getattr(self, where)[key] = value
            else:
                setattr(self, where, value)
