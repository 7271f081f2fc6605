"""Atoms as tensors: one system (`AtomicData`) and several of them in a row (`Batch`)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nvdd.errors import DistributedOpError
from nvdd.model_config import EdgeLayout, stored_name

# ASE names of per-atom arrays that have a place of their own in AtomicData
_OWN_ARRAYS = ("positions", "numbers")


@dataclass
class AtomicData:
    """One atomic system.

    Attributes:
        positions: (n_atoms, 3) float64, A; as the user gave them, never wrapped.
        atomic_numbers: (n_atoms,) int64.
        cell: (3, 3) float64, A, rows are the cell vectors; zero rows stand for absent vectors.
        pbc: (3,) bool.
        node_fields: further per-atom arrays by name, (n_atoms, ...).
        system_fields: further values of the system by name (charge, spin, ...), any shape.
        extras: what no model reads but a user wants back: constraints, celldisp, non-numeric info.

    Raises:
        ValueError: shapes that don't belong together.
    """

    positions: Tensor
    atomic_numbers: Tensor
    cell: Tensor
    pbc: Tensor
    node_fields: dict[str, Tensor] = field(default_factory=dict)
    system_fields: dict[str, Tensor] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.positions = torch.as_tensor(self.positions, dtype=torch.float64)
        self.atomic_numbers = torch.as_tensor(self.atomic_numbers, dtype=torch.int64)
        self.cell = torch.as_tensor(self.cell, dtype=torch.float64).reshape(3, 3)
        pbc = torch.as_tensor(self.pbc, dtype=torch.bool)
        self.pbc = pbc.expand(3).clone() if pbc.ndim == 0 else pbc
        n = self.atomic_numbers.shape[0]
        if self.positions.shape != (n, 3):
            raise ValueError(f"AtomicData: positions have shape {tuple(self.positions.shape)}, expected ({n}, 3)")
        for name, value in self.node_fields.items():
            if value.shape[:1] != (n,):
                raise ValueError(f"AtomicData: node field {name!r} has shape {tuple(value.shape)} for {n} atoms")

    @property
    def n_atoms(self) -> int:
        """Number of atoms."""
        return self.atomic_numbers.shape[0]

    @classmethod
    def from_atoms(cls, atoms) -> AtomicData:
        """Takes ``atoms``, an ``ase.Atoms``; `to_atoms` gives an equal one back (arrays, info, constraints, celldisp)."""
        node_fields, system_fields, other_arrays, other_info = {}, {}, {}, {}
        for name, array in atoms.arrays.items():
            if name in _OWN_ARRAYS:
                continue
            if array.dtype.kind in "fiub":
                node_fields[name] = torch.tensor(array)
            else:
                other_arrays[name] = array.copy()
        for name, value in atoms.info.items():
            numeric = isinstance(value, np.ndarray) and value.dtype.kind in "fiub"
            if numeric or type(value) in (bool, int, float):
                system_fields[name] = torch.tensor(np.asarray(value))  # a float is float64, as in ASE
            else:
                other_info[name] = copy.deepcopy(value)
        extras = {
            "arrays": other_arrays,
            "info": other_info,
            # the python type of the numbers in info, which a tensor alone does not keep
            "scalars": {k: type(v) for k, v in atoms.info.items() if type(v) in (bool, int, float)},
            "info_order": list(atoms.info),
            "constraints": copy.deepcopy(atoms.constraints),
            "celldisp": atoms.get_celldisp().copy(),
        }
        return cls(
            positions=torch.tensor(atoms.positions),
            atomic_numbers=torch.tensor(atoms.numbers, dtype=torch.int64),
            cell=torch.tensor(atoms.cell.array),
            pbc=torch.tensor(atoms.pbc),
            node_fields=node_fields,
            system_fields=system_fields,
            extras=extras,
        )

    def to_atoms(self):
        """The system as ``ase.Atoms``, with everything that `from_atoms` took."""
        from ase import Atoms

        extras = self.extras
        atoms = Atoms(
            numbers=self.atomic_numbers.cpu().numpy(),
            positions=self.positions.detach().cpu().numpy(),
            cell=self.cell.detach().cpu().numpy(),
            pbc=self.pbc.cpu().numpy(),
            celldisp=extras.get("celldisp"),
        )
        for name, value in self.node_fields.items():
            atoms.set_array(name, value.detach().cpu().numpy())
        for name, value in extras.get("arrays", {}).items():
            atoms.set_array(name, value)
        scalars = extras.get("scalars", {})
        info = {k: copy.deepcopy(v) for k, v in extras.get("info", {}).items()}
        for name, value in self.system_fields.items():
            array = value.detach().cpu().numpy()
            info[name] = scalars[name](array) if name in scalars else array
        order = extras.get("info_order", list(info))
        atoms.info = {k: info[k] for k in [*order, *(k for k in info if k not in order)]}
        atoms.set_constraint(copy.deepcopy(extras.get("constraints", [])))
        return atoms


class Batch:
    """One or several systems with their atoms in one row, as model wrappers read them.

    Attributes:
        positions: (n_atoms, 3), A.
        atomic_numbers: (n_atoms,) int64.
        cell: (n_systems, 3, 3), A, rows are the cell vectors.
        pbc: (n_systems, 3) bool.
        batch: (n_atoms,) int64, the system of each atom.
        n_systems: number of systems.
        neighbor_list: (E, 2) int64 rows of directed edges, in the columns of ``edge_layout``; None until set.
        neighbor_list_shifts: (E, 3) periodic image of each edge in cell vectors, with the sign of
            ``edge_layout``: ``edge_vector = sign (x_sender - x_receiver) + shift @ cell``.
        edge_layout: which column is the sender, and the sign of the vectors.
        edge_vectors: (E, 3) A, of each edge; None: from positions and shifts.
        n_atoms_per_system: (n_systems,) int64, counted from ``batch`` unless given.
        reverse_edges: (E,) row of each edge's reverse; with ``NeighborConfig(bonds=True)``, as the next two.
        bond_of_edge: (E,) row of each edge's undirected bond.
        edge_of_bond: (n_bonds,) the edge that stands for each bond.
        bonded_edges: (E',) rows of the edges with r < ``NeighborConfig.bond_cutoff``; the three before it are of these
            edges alone, and rows of edges in them are places in this. None: of all edges.
        edge_blocks: where `nvdd.sum_over_edges` has its edges from, of a model that takes them in blocks over ranks
            (``NeighborConfig(blocks=True)``), which then has no list of edges; else None.

    Further inputs (``charge``, ``charges``, ...) are attributes too; ``node_fields`` and ``system_fields`` list their
    names. ``charges`` are also ASE's ``initial_charges``. Under domain decomposition a wrapper gets a Batch of the atoms that its
    rank owns, with index tensors that carry the partition; its code is the same.
    """

    def __init__(
        self,
        *,
        positions: Tensor,
        atomic_numbers: Tensor,
        cell: Tensor,
        pbc: Tensor,
        batch: Tensor | None = None,
        n_systems: int | None = None,
        node_fields: dict[str, Tensor] | None = None,
        system_fields: dict[str, Tensor] | None = None,
        neighbor_list: Tensor | None = None,
        neighbor_list_shifts: Tensor | None = None,
        edge_vectors: Tensor | None = None,
        edge_layout: EdgeLayout | None = None,
        n_atoms_per_system: Tensor | None = None,
    ) -> None:
        self.positions = positions
        self.atomic_numbers = atomic_numbers
        self.cell = cell.reshape(-1, 3, 3) if type(cell) is Tensor else cell
        self.pbc = pbc.reshape(-1, 3)
        self.batch = torch.zeros_like(atomic_numbers) if batch is None else batch
        self.n_systems = self.cell.shape[0] if n_systems is None else n_systems
        self.node_fields = dict(node_fields or {})
        self.system_fields = dict(system_fields or {})
        self.neighbor_list = neighbor_list
        self.neighbor_list_shifts = neighbor_list_shifts
        self.edge_layout = edge_layout or EdgeLayout()
        self._edge_vectors = edge_vectors
        self._n_atoms_per_system = n_atoms_per_system
        self.reverse_edges: Tensor | None = None
        self.bond_of_edge: Tensor | None = None
        self.edge_of_bond: Tensor | None = None
        self.bonded_edges: Tensor | None = None
        self.edge_blocks: Any = None

    def __getattr__(self, name: str) -> Tensor:
        for fields in ("node_fields", "system_fields"):
            values = self.__dict__.get(fields, {})
            if (stored := stored_name(name, values)) is not None:
                return values[stored]
        raise AttributeError(
            f"this Batch has no field {name!r}; it has {sorted([*self.__dict__.get('node_fields', ()), *self.__dict__.get('system_fields', ())])}. "
            "A wrapper names the further inputs that it reads in ModelConfig(node_inputs=, system_inputs=)."
        )

    def __setattr__(self, name: str, value: Any) -> None:
        for fields in ("node_fields", "system_fields"):
            values = self.__dict__.get(fields, {})
            if stored_name(name, values) is not None:
                values[name] = value  # in front of what ASE calls it
                return
        super().__setattr__(name, value)

    @property
    def n_atoms(self) -> int:
        """Number of atoms (of this rank, under domain decomposition)."""
        return self.positions.shape[0]

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.atomic_numbers.device

    @property
    def n_atoms_per_system(self) -> Tensor:
        """(n_systems,) number of atoms of each system.

        Under domain decomposition all ranks' atoms when computed with (``energy / n_atoms_per_system``), this
        rank's rows when it lays out memory (``values.repeat_interleave(n_atoms_per_system)``).
        """
        if self._n_atoms_per_system is None:
            self._n_atoms_per_system = torch.bincount(self.batch, minlength=self.n_systems)
        return self._n_atoms_per_system

    @property
    def ptr(self) -> Tensor:
        """(n_systems + 1,) first row of each system, then the number of rows; this rank's layout."""
        from nvdd.shard_tensor import to_local

        counts = torch.bincount(to_local(self.batch), minlength=self.n_systems)
        return torch.cat([counts.new_zeros(1), counts.cumsum(0)])

    @property
    def edge_index(self) -> Tensor:
        """(2, E): the transpose of ``neighbor_list``."""
        return self._edges("neighbor_list").T

    @property
    def senders(self) -> Tensor:
        """(E,) row of each edge's sender (the neighbour)."""
        return self._edges("neighbor_list")[:, self.edge_layout.sender_column]

    @property
    def receivers(self) -> Tensor:
        """(E,) row of each edge's receiver (the centre)."""
        return self._edges("neighbor_list")[:, 1 - self.edge_layout.sender_column]

    @property
    def edge_vectors(self) -> Tensor:
        """(E, 3) vectors of the edges in A, with the sign of ``edge_layout``.

        Models should build on these: they are what the framework differentiates the energy by, so forces,
        virial and per-atom virial come from one derivative.
        """
        if self._edge_vectors is None:
            shifts, cell = self._edges("neighbor_list_shifts").to(self.positions.dtype), self.cell.to(self.positions.dtype)
            difference = self.positions[self.senders] - self.positions[self.receivers]
            if self.n_systems == 1:  # no cell for each edge
                images = shifts @ cell[0]
            else:
                images = torch.einsum("ei,eij->ej", shifts, cell[self.batch[self.receivers]])
            self._edge_vectors = self.edge_layout.sign * difference + images
        return self._edge_vectors

    def zero_positions(self, dtype: torch.dtype | None = None) -> Tensor:
        """(n_atoms, 3) zeros to give to a model that computes ``positions[j] - positions[i] + shifts`` itself.

        With ``edge_vectors`` as the shifts the expression is the edge vectors. Under domain decomposition the zeros
        are known to be zeros, so that no rank asks another one for them. ``dtype`` is that of the positions by default.
        """
        dtype = dtype or self.positions.dtype
        zeros = torch.zeros(self.positions.shape, dtype=dtype, device=self.device)
        role = getattr(self.positions, "_role", None)
        if role is None:
            return zeros
        from nvdd.roles import Role
        from nvdd.shard_tensor import promote

        return promote(zeros, Role.ANCHOR, getattr(self.positions, "_meta"), of="positions")  # noqa: B009

    def _edges(self, name: str) -> Tensor:
        value = self.__dict__[name]
        if value is None and self.edge_blocks is not None:
            raise DistributedOpError(  # an AttributeError from within a property would be lost
                f"this Batch has no {name}: its model takes edges in blocks, NeighborConfig(blocks=True); read them through "
                "nvdd.sum_over_edges, or leave blocks=True out"
            )
        if value is None:
            raise AttributeError(
                f"this Batch has no {name}; set it with nvdd.neighbors.attach_neighbors(batch, cutoff)"
            )
        return value

    @classmethod
    def from_data_list(cls, systems: Sequence[AtomicData]) -> Batch:
        """Puts systems in a row; fields that only some of them have are an error.

        Raises:
            ValueError: no systems, or systems with different fields.
        """
        if not systems:
            raise ValueError("Batch.from_data_list: no systems given")
        names = [(frozenset(s.node_fields), frozenset(s.system_fields)) for s in systems]
        if len(set(names)) > 1:
            raise ValueError(f"Batch.from_data_list: the systems have different fields: {names}")
        cat = lambda values: torch.cat(list(values))
        return cls(
            positions=cat(s.positions for s in systems),
            atomic_numbers=cat(s.atomic_numbers for s in systems),
            cell=torch.stack([s.cell for s in systems]),
            pbc=torch.stack([s.pbc for s in systems]),
            batch=cat(torch.full((s.n_atoms,), i) for i, s in enumerate(systems)),
            n_systems=len(systems),
            node_fields={k: cat(s.node_fields[k] for s in systems) for k in systems[0].node_fields},
            system_fields={k: torch.stack([s.system_fields[k] for s in systems]) for k in systems[0].system_fields},
        )

    @classmethod
    def from_atoms(cls, atoms) -> Batch:
        """From one ``ase.Atoms`` or a list of them."""
        many = [atoms] if hasattr(atoms, "numbers") else list(atoms)
        return cls.from_data_list([AtomicData.from_atoms(a) for a in many])

    def to_data_list(self) -> list[AtomicData]:
        """The systems one by one (without edges)."""
        out = []
        for i in range(self.n_systems):
            rows = self.batch == i
            out.append(
                AtomicData(
                    positions=self.positions[rows],
                    atomic_numbers=self.atomic_numbers[rows],
                    cell=self.cell[i],
                    pbc=self.pbc[i],
                    node_fields={k: v[rows] for k, v in self.node_fields.items()},
                    system_fields={k: v[i] for k, v in self.system_fields.items()},
                )
            )
        return out

    def to_atoms(self) -> list:
        """The systems as a list of ``ase.Atoms``."""
        return [data.to_atoms() for data in self.to_data_list()]

    def to(self, device: torch.device | str) -> Batch:
        """A copy with every tensor on ``device``."""
        move: Callable[[Any], Any] = lambda t: None if t is None else t.to(device)
        return Batch(
            positions=move(self.positions),
            atomic_numbers=move(self.atomic_numbers),
            cell=move(self.cell),
            pbc=move(self.pbc),
            batch=move(self.batch),
            n_systems=self.n_systems,
            node_fields={k: move(v) for k, v in self.node_fields.items()},
            system_fields={k: move(v) for k, v in self.system_fields.items()},
            neighbor_list=move(self.neighbor_list),
            neighbor_list_shifts=move(self.neighbor_list_shifts),
            edge_vectors=move(self._edge_vectors),
            edge_layout=self.edge_layout,
        )
