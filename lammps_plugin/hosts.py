"""One face for the three LAMMPS hosts of ML-IAP: what differs between them is here and nowhere else.

* `PluginStep`: nvdd's own plugin, which knows tags, box, charges, units and MPI (``data.host``);
* `PythonStep`: a LAMMPS with the ML-IAP Python interface, which knows none of that: the deck must attach it;
* `KokkosStep`: the same with Kokkos, whose arrays may be on a GPU and whose exchange tells the owners of ghosts.

A step is valid during one call of ``compute_forces``: its arrays are views of memory that LAMMPS moves.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nvdd.errors import InputError
from nvdd_lammps.ranks import AgreedError, Handle

log = logging.getLogger("nvdd")

# eV and A in the units of a deck. LAMMPS's own number (utils.cpp), so that `units real` agrees with its conversions.
ENERGY_UNITS = {"metal": 1.0, "real": 23.060549}
_ENERGY_ATOM = 2  # LAMMPS's bit of eflag for energies per atom
_ATTACH = """add to the deck, before its first run:
    python nvdd_attach input 1 SELF format p here "def nvdd_attach(ptr):\\n import nvdd_lammps.hosts as h; h.attach(ptr)"
    python nvdd_attach invoke
or, in a script, nvdd_lammps.hosts.attach(lmp)"""

_attached: list[Any] = []


def attach(lmp: Any) -> None:
    """Tells nvdd which LAMMPS models compute for, where LAMMPS itself can't (hosts without nvdd's plugin).

    Args:
        lmp: a ``lammps.lammps``, or the pointer that LAMMPS's ``python`` command passes as SELF. The last one counts;
            None: none any more.
    """
    if lmp is None:
        _attached.clear()
        return
    if not hasattr(lmp, "extract_setting"):
        from lammps import lammps

        lmp = lammps(ptr=lmp)
    _attached[:] = [lmp]


def step_of(data: Any) -> PluginStep | PythonStep | KokkosStep:
    """The step behind ML-IAP's data object."""
    if getattr(data, "host", None) is not None:
        return PluginStep(data)
    lmp = next((lmp for lmp in _attached if getattr(lmp, "lmp", lmp) is not None), None)  # None: it has been closed
    return KokkosStep(data, lmp) if hasattr(data, "forward_exchange") else PythonStep(data, lmp)


class _Step:
    """What all hosts have.

    Attributes:
        n_list, n_total, n_pairs: list atoms of this rank, all atoms with ghosts, pairs.
        wants_atom_energies, wants_atom_virial: what LAMMPS needs on this step.
        sets_virial: whether forces that aren't pair forces can be handed over.
        excludes: whether pairs are left out of the list by ``neigh_modify exclude``.
    """

    sets_virial = excludes = False
    wants_atom_virial = False

    def __init__(self, data: Any) -> None:
        self.data = data
        self.n_list, self.n_total, self.n_pairs = int(data.nlistatoms), int(data.ntotal), int(data.npairs)
        self.n_local = int(data.nlocal)
        self.wants_atom_energies = bool(int(data.eflag) & _ENERGY_ATOM)

    def _array(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        # without pairs or atoms the property is None, or raises
        return np.empty(shape, dtype) if 0 in shape else np.asarray(getattr(self.data, name))[: shape[0]]

    def check(self) -> None:
        """Raises InputError if what LAMMPS tells on this rank can't belong together."""

    def list_atoms(self) -> np.ndarray:
        """(n_list,) LAMMPS's number of each atom in the list, in list order."""
        return self._array("iatoms", (self.n_list,), np.int32).astype(np.int64)

    def elements(self) -> np.ndarray:
        """(n_total,) of each atom, ghosts too, its place in ``element_types``; -1 for NULL."""
        return self._array("elems", (self.n_total,), np.int32)

    def pairs(self) -> tuple[Any, Any, Any]:
        """(n_pairs,) i and j as LAMMPS numbers atoms, and (n_pairs, 3) x_j - x_i."""
        n = self.n_pairs
        return (
            self._array("pair_i", (n,), np.int32),
            self._array("pair_j", (n,), np.int32),
            self._array("rij", (n, 3), np.float64),
        )

    def give_energy(self, energy: float, per_atom: Tensor | None) -> None:
        """Hands over this rank's energy, and (n_list,) per atom in list order; always, for LAMMPS keeps the last one."""
        if per_atom is not None and self.n_list:
            self.data.eatoms = np.ascontiguousarray(per_atom.cpu().numpy())
        self.data.energy = float(energy)

    def give_pair_forces(self, forces: Tensor) -> None:
        """Hands over (n_pairs, 3) float64, dE/dr_ij."""
        if self.n_pairs:
            self.data.update_pair_forces(np.ascontiguousarray(forces.cpu().numpy()))


class PluginStep(_Step):
    """A step of nvdd's plugin."""

    kind, sets_virial, knows_list = "plugin", True, True

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self.host = data.host
        self.wants_atom_energies = self.host.wanted.energy_atom
        self.wants_atom_virial = self.host.wanted.virial_atom
        self.units: str | None = self.host.units
        self.partitions = getattr(self.host, "npartitions", 1)
        self.excludes = getattr(self.host, "excludes", False)

    def world(self) -> Handle:
        """LAMMPS's world."""
        return Handle(self.host.world, self.host.me, self.host.nprocs)

    def generation(self) -> int:
        """Another number whenever LAMMPS has made its list anew; it does on all ranks at once."""
        return self.host.list_generation

    def tags(self) -> np.ndarray | None:
        """(n_total,) int64 ids of the atoms, None if they have none."""
        return self.host.tags

    def neighbors(self) -> np.ndarray | None:
        """Which atoms may become a j before the list is made anew; None: any ghost."""
        listed = getattr(self.host, "list_neighbors", None)
        return None if listed is None else np.asarray(listed(), np.int64)

    def positions(self) -> np.ndarray:
        """(n_total, 3) A."""
        return self.host.x

    def charges(self) -> np.ndarray | None:
        """(n_total,) e, None if the atom style has none."""
        return self.host.q

    def cell(self) -> tuple[np.ndarray, np.ndarray]:
        """(3, 3) cell vectors in rows, A, and (3,) periodicity."""
        lo, hi, xy, xz, yz, periodicity, _ = self.host.box()
        return _cell(lo, hi, xy, xz, yz), np.array(periodicity, bool)

    def element_of_type(self) -> list[str | None] | None:
        """The element of each type of the deck."""
        return self.host.element_of_type

    def give_forces(self, forces: np.ndarray, virial: np.ndarray) -> None:
        """Hands over forces that aren't pair forces, (n_list, 3), and (3, 3) dE/d(strain), this rank's share."""
        rows = np.zeros((self.n_local, 3))
        rows[self.list_atoms()] = forces
        self.host.add_forces(rows)
        self.host.set_virial(-virial[[0, 1, 2, 0, 0, 1], [0, 1, 2, 1, 2, 2]])  # LAMMPS: sum of r_i f_i


class _Attached(_Step):
    """What the hosts without the plugin ask a LAMMPS object for."""

    knows_list = False
    partitions = 1

    def __init__(self, data: Any, lmp: Any) -> None:
        super().__init__(data)
        self.lmp = lmp

    def check(self) -> None:
        """Raises InputError if the LAMMPS that was attached is not the one that computes; each rank sees its own."""
        if (lmp := self.lmp) is not None:
            there = lmp.extract_setting("nlocal"), lmp.extract_setting("nall")
            if there != (self.n_local, self.n_total):
                raise InputError(
                    f"the LAMMPS that was attached last has {there[0]} atoms and {there[1]} with ghosts on this rank, the one "
                    f"that computes {self.n_local} and {self.n_total}: attach the LAMMPS that runs, before each run"
                )

    @property
    def units(self) -> str | None:
        """``units`` of the deck; None if unknown."""
        return None if self.lmp is None else self.lmp.extract_global("units")

    def world(self) -> Handle:
        """LAMMPS's world, by the attached object or else by MPI."""
        if self.lmp is not None:
            rank, size = (self.lmp.extract_setting(name) for name in ("world_rank", "world_size"))
            return Handle(self.lmp.get_mpi_comm() if size > 1 else None, rank, size)
        try:
            from mpi4py import MPI
        except ImportError:
            return Handle(None, 0, 1)
        return Handle(MPI.COMM_WORLD, MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size())

    def _atoms(self, name: str, width: int) -> np.ndarray:
        array = self.lmp.numpy.extract_atom(name, nelem=self.n_total, dim=width)
        return np.empty((self.n_total, width)[: 1 + (width > 1)]) if array is None else array

    def neighbors(self) -> None:
        """Any ghost."""
        return None

    def positions(self) -> np.ndarray:
        """(n_total, 3) A."""
        return self._atoms("x", 3)

    def charges(self) -> np.ndarray | None:
        """(n_total,) e."""
        if self.lmp is None or not self.lmp.extract_setting("q_flag"):
            return None
        return self._atoms("q", 1)

    def cell(self) -> tuple[np.ndarray, np.ndarray]:
        """(3, 3) cell vectors in rows, A, and (3,) periodicity; without a LAMMPS object an open box of no size."""
        if self.lmp is None:
            return np.zeros((3, 3)), np.zeros(3, bool)
        lo, hi, xy, yz, xz, periodicity, _ = self.lmp.extract_box()
        return _cell(lo, hi, xy, xz, yz), np.array(periodicity, bool)

    def element_of_type(self) -> None:
        """Unknown."""
        return None


class PythonStep(_Attached):
    """A step of LAMMPS's own ML-IAP Python interface."""

    kind = "ML-IAP"

    def __init__(self, data: Any, lmp: Any) -> None:
        if lmp is None:
            raise AgreedError(
                "this LAMMPS does not tell models the ids of its atoms, without which ghosts have no owner: " + _ATTACH
            )
        super().__init__(data, lmp)

    def tags(self) -> np.ndarray | None:
        """(n_total,) int64 ids."""
        return self._atoms("id", 1).astype(np.int64) if self.lmp.extract_setting("tag_enable") else None


class KokkosStep(_Attached):
    """A step of LAMMPS's ML-IAP Python interface under Kokkos.

    ``eatoms`` can only be written into, the exchange takes torch tensors of float32 and float64 and, on the CPU, no
    more than three columns.
    """

    kind = "Kokkos"

    def __init__(self, data: Any, lmp: Any) -> None:
        super().__init__(data, lmp)
        self.on_gpu = bool(getattr(data, "dev", 0))
        if self.on_gpu:
            torch.cuda.synchronize()  # LAMMPS's stream is not torch's

    def device(self) -> str | None:
        """Where LAMMPS's arrays are, and so the model must be; None for the CPU."""
        return f"cuda:{torch.cuda.current_device()}" if self.on_gpu else None

    def _array(self, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        if not self.on_gpu:
            return super()._array(name, shape, dtype)
        if 0 in shape:
            return torch.empty(shape, dtype=torch.float64 if dtype is np.float64 else torch.int32, device=self.device())
        return torch.as_tensor(getattr(self.data, name), device=self.device())[: shape[0]]

    def list_atoms(self) -> np.ndarray:
        """(n_list,) LAMMPS's number of each atom in the list."""
        return _to_numpy(self._array("iatoms", (self.n_list,), np.int32)).astype(np.int64)

    def elements(self) -> np.ndarray:
        """(n_total,) place in ``element_types``."""
        return _to_numpy(self._array("elems", (self.n_total,), np.int32))

    def owners(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """(n_total,) rank and place in the list of each atom's owner; -1 for atoms that are in no list.

        Every rank calls it at once: LAMMPS carries what each atom's owner writes to its ghosts.
        """
        told = np.full((self.n_total, 2), -1.0)
        told[self.list_atoms()] = np.column_stack([np.full(self.n_list, rank), np.arange(self.n_list)])
        send = torch.from_numpy(told).to(self.device() or "cpu")
        recv = torch.full_like(send, -1.0)
        if self.on_gpu:
            torch.cuda.synchronize()
        self.data.forward_exchange(send, recv, 2)
        if self.on_gpu:
            torch.cuda.synchronize()
        heard = _to_numpy(recv).copy()
        heard[: self.n_local] = told[: self.n_local]  # what it does with the owned rows is not said
        return heard[:, 0].astype(np.int64), heard[:, 1].astype(np.int64)

    def give_energy(self, energy: float, per_atom: Tensor | None) -> None:
        """As the base; writes into the view of ``eatoms``."""
        if per_atom is not None and self.n_list:
            torch.as_tensor(self.data.eatoms)[: self.n_list].copy_(per_atom)
        self.data.energy = float(energy)

    def give_pair_forces(self, forces: Tensor) -> None:
        """As the base; on a GPU LAMMPS gets a raw pointer."""
        if not self.on_gpu:
            super().give_pair_forces(forces)
        elif self.n_pairs:
            import cupy

            array = cupy.from_dlpack(forces.contiguous())  # which all versions of LAMMPS know how to point to
            torch.cuda.synchronize()
            self.data.update_pair_forces(array)
            torch.cuda.synchronize()  # the tensor is gone after this


def _to_numpy(array: Any) -> np.ndarray:
    return array.cpu().numpy() if isinstance(array, Tensor) else np.asarray(array)


def _cell(lo: Any, hi: Any, xy: float, xz: float, yz: float) -> np.ndarray:
    x, y, z = np.asarray(hi, float) - np.asarray(lo, float)
    return np.array([[x, 0, 0], [xy, y, 0], [xz, yz, z]])
