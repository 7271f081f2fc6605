"""`Domain`: LAMMPS's subdomain on one rank, as the graph that the core computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nvdd.communicator import Communicator
from nvdd.data import Batch
from nvdd.errors import CommunicationError, InputError
from nvdd.runtime.graph import LocalGraph, Topology
from nvdd_lammps.bond_rows import BondRows
from nvdd_lammps.ghosts import GhostMap
from nvdd_lammps.hosts import KokkosStep, PluginStep, PythonStep
from nvdd_lammps.ranks import AgreedError

_SAME_IMAGE = 1e-6  # A by which a ghost may miss a whole cell vector
_GROWTH = 1.25


class Domain:
    """Keeps the map of ghosts and the exchange plan while LAMMPS keeps its list, and makes the graph of each step.

    Args:
        comm: the ranks.
        numbers: atomic number of each of the model's ``element_types``.
        positions: whether the model reads positions, not edge vectors alone.
        charges: names of the per-atom inputs that get LAMMPS's charges.
        bonds: within which distance pairs have reverse edges or bonds that the model reads, A; None if it reads none.

    Attributes:
        n_builds: how often the map was made.
        ghosts: the map, None before the first step.
    """

    def __init__(
        self,
        comm: Communicator,
        numbers: Sequence[int],
        positions: bool,
        charges: Sequence[str],
        bonds: float | None = None,
    ) -> None:
        self.comm, self.reads_positions, self.charges, self.bonds = comm, positions, tuple(charges), bonds
        self._bond_rows: BondRows | None = None
        self._number_of_element = np.array([*numbers, 0], np.int64)  # NULL is -1
        self.n_builds = 0
        self.ghosts: GhostMap | None = None
        self._topology: Topology | None = None
        self._key: Any = None
        self._elements = np.empty(0, np.int32)
        self._row_of_atom = self._image_of_atom = torch.empty(0)
        self._pinned: dict[str, Tensor] = {}

    def update(self, step: PluginStep | PythonStep | KokkosStep) -> tuple[Batch, LocalGraph]:
        """Inputs and graph of this step; every rank calls it at once.

        Raises:
            AgreedError, InputError: atoms have no ids, or not distinct ones; the model wants charges and there are none.
            CommunicationError: the ghosts don't fit the atoms of the other ranks.
        """
        elements = step.elements()
        rebuilt = self._map_ghosts(step)
        if rebuilt:
            self._build(step, elements)
        elif not np.array_equal(elements, self._elements):  # types change without a new list (fix atom/swap)
            self._topology = replace(self._topology, atomic_numbers=self._numbers(elements))
        self._elements = elements.copy()
        i, j, vectors = (self._put(n, a) for n, a in zip(("i", "j", "rij"), step.pairs(), strict=True))
        pair = torch.empty(2, step.n_pairs, dtype=torch.int64, device=self.comm.device)
        for rows, atoms in zip(pair, (i, j), strict=True):
            torch.index_select(self._row_of_atom, 0, atoms, out=rows)
        if rebuilt:
            self._check(pair)
        topology = self._topology
        if self.reads_positions:
            topology = replace(topology, shift=self._image_of_atom.index_select(0, j))
        bonds = None if self._bond_rows is None else self._bond_rows.update(i, j, pair, vectors)
        return self._batch(step, topology), LocalGraph(topology, None, pair, vectors, bonds)

    # -- who owns what

    def _map_ghosts(self, step: Any) -> bool:
        """Brings `ghosts` up to date; whether it was made anew."""
        if isinstance(step, PluginStep):  # LAMMPS's own word, the same on all ranks
            key = step.generation()
            if self.ghosts is not None and key == self._key:
                return False
        else:
            key = self._evidence(step)
            same = self.ghosts is not None and all(map(np.array_equal, key, self._key))
            flag = torch.tensor([not same], dtype=torch.int32, device=self._message_device())
            if not self.comm.all_reduce(flag, "max", "have ghosts changed"):
                return False
        self.ghosts = self._key = None  # if making it fails, nothing old is used
        if isinstance(step, KokkosStep):
            rank, row, list_atoms = key
            ghosts = GhostMap.by_owners(self.comm, rank, row, list_atoms, step.n_local)
        else:
            tags, list_atoms = self._tags(step), step.list_atoms()
            ghosts = GhostMap.by_tags(self.comm, tags, list_atoms, step.n_local, step.neighbors())
        self.ghosts, self._key = ghosts, key
        return True

    def _evidence(self, step: PythonStep | KokkosStep) -> tuple[np.ndarray, ...]:
        """What the map depends on. Equal counts would prove nothing."""
        if isinstance(step, KokkosStep):
            return *step.owners(self.comm.rank), step.list_atoms()
        return self._tags(step), step.list_atoms()

    @staticmethod
    def _tags(step: Any) -> np.ndarray:
        tags = step.tags()
        if tags is None:
            raise AgreedError("atoms have no ids, without which ghosts have no owner: take out `atom_modify id no`")
        return np.array(tags, np.int64)

    def _message_device(self) -> Any:
        return self.comm.device if self.comm.backend == "nccl" else "cpu"

    # -- what stays until LAMMPS makes its list anew

    def _build(self, step: Any, elements: np.ndarray) -> None:
        ghosts, device = self.ghosts, self.comm.device
        listed = elements[step.list_atoms()]
        if (listed < 0).any():
            raise InputError("an atom of a type that pair_coeff maps to NULL is in this model's neighbour list")
        if self.n_builds == 0:
            ghosts.verify(elements)
        n_rows = ghosts.plan.n_padded
        total = torch.tensor([step.n_list], dtype=torch.int64, device=self._message_device())
        self._row_of_atom = torch.from_numpy(ghosts.row_of_atom).to(device)
        self._topology = Topology(
            ids=torch.arange(step.n_list, device=device),
            rows=torch.arange(n_rows, device=device),
            n_phantom=ghosts.n_phantom,
            candidates=torch.empty(2, 0, dtype=torch.int64, device=device),
            shift=torch.empty(0, 3, dtype=torch.float64, device=device),
            shift_vector=torch.empty(3, 0, dtype=torch.float64, device=device),
            system=torch.zeros(n_rows, dtype=torch.int64, device=device),
            atomic_numbers=self._numbers(elements),
            atoms_per_system=self.comm.all_reduce(total, "sum", "number of atoms").to(device),
            plan=ghosts.plan,
            edge_rows=None,
        )
        if self.reads_positions or self.bonds is not None:
            self._image_of_atom = torch.from_numpy(self._images(step)).to(device)
        if self.bonds is not None:
            self._bond_rows = BondRows(ghosts.plan, self._image_of_atom, self.bonds)
        self.n_builds += 1

    def _numbers(self, elements: np.ndarray) -> Tensor:
        rows = self._number_of_element[self.ghosts.values(elements, 0)]
        return torch.from_numpy(rows).to(self.comm.device)

    def _images(self, step: Any) -> np.ndarray:
        """(n_total, 3) whole cell vectors from the owner's place of each atom to where LAMMPS has it."""
        ghosts, plan = self.ghosts, self.ghosts.plan
        x, (cell, _) = step.positions(), step.cell()
        owned = torch.from_numpy(np.ascontiguousarray(ghosts.values(x, 0.0)[: ghosts.n_owned]))
        send = owned.to(self._message_device()).index_select(0, plan.send_index.to(self._message_device()))
        halo = plan.comm.exchange(send, plan.send_counts, plan.recv_counts, "images of ghosts", setup=True)
        at_owner = torch.cat([owned, halo.cpu()]).numpy()
        images = np.zeros((len(x), 3))
        atoms = np.flatnonzero(ghosts.row_of_atom >= 0)
        away = x[atoms] - at_owner[ghosts.row_of_atom[atoms]]
        images[atoms] = np.rint(away @ np.linalg.inv(cell))
        off = np.abs(images[atoms] @ cell - away).max(initial=0.0)
        if off > _SAME_IMAGE:
            raise CommunicationError(f"a ghost is {off:.2g} A away from every periodic image of its owner's atom")
        return images

    def _check(self, pair: Tensor) -> None:
        """That a pair names no atom without a row, which would be read as the last one."""
        if pair.shape[1] and (bool((pair < 0).any()) or int(pair[0].max()) >= self.ghosts.n_owned):
            raise CommunicationError("LAMMPS's pairs name an atom that no rank has in this model's neighbour list")

    # -- this step

    def _batch(self, step: Any, topology: Topology) -> Batch:
        values = self.ghosts.values
        cell, periodic = step.cell()
        fields = {}
        if self.charges:
            charges = step.charges()
            if charges is None:
                raise AgreedError("the model reads charges, which atoms of this atom_style don't have: use atom_style charge")
            fields = dict.fromkeys(self.charges, self._put("q", values(charges, 0.0)))
        where = self._put("x", values(step.positions(), 0.0)) if self.reads_positions else topology.shift_vector.T
        return Batch(
            positions=where,
            atomic_numbers=topology.atomic_numbers,
            cell=torch.from_numpy(cell)[None],
            pbc=torch.from_numpy(periodic)[None],
            batch=topology.system,
            n_systems=1,
            node_fields=fields,
        )

    def _put(self, name: str, array: Any) -> Tensor:
        """The array on this rank's device; to a GPU through page-locked memory, without waiting for it."""
        if isinstance(array, Tensor):  # is there already
            return array
        rows = torch.from_numpy(np.ascontiguousarray(array))
        if self.comm.device.type != "cuda":
            return rows
        staging = self._pinned.get(name)
        if staging is None or staging.numel() < rows.numel():
            staging = torch.empty(int(rows.numel() * _GROWTH) + 1, dtype=rows.dtype, pin_memory=True)
            self._pinned[name] = staging
        # results were read since the last step, so the last copy out of this buffer is over
        staging = staging[: rows.numel()].view(rows.shape).copy_(rows)
        return staging.to(self.comm.device, non_blocking=True)
