"""What the LAMMPS plugin hands to a `unified` object: ML-IAP's data object, over the plugin's memory.

`StepData` has the names of ML-IAP's data object, `StepData.host` what only the plugin knows. Both are valid during
one call of ``compute_forces`` only: their arrays are views of memory that LAMMPS moves. `ModelStruct` and
`StepStruct` are the plain structs of src/bridge.h, which the pair style fills in.
"""

from __future__ import annotations

import ctypes as ct
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from nvdd.errors import InputError

PairArray = ct.CFUNCTYPE(ct.c_int, ct.c_void_p, ct.c_void_p)


class ModelStruct(ct.Structure):
    """nvdd::Model of src/bridge.h."""

    _fields_ = [
        ("handle", ct.c_int32),
        ("nelements", ct.c_int32),
        ("cutoff", ct.c_double),
        ("elements", ct.c_char * 2048),
    ]


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class StepStruct(ct.Structure):
    """nvdd::Step of src/bridge.h."""

    _fields_ = [
        *_fields(ct.c_int32, "handle tag_bytes nlocal ntotal nlistatoms npairs nlistneighbors"),
        *_fields(ct.c_int32, "eflag vflag want_energy want_eatom want_virial want_vatom ago newton_pair triclinic"),
        ("periodic", ct.c_int32 * 3),
        *_fields(ct.c_int32, "world me nprocs partition npartitions excludes"),
        *_fields(ct.c_int64, "timestep list_generation"),
        ("box", ct.c_double * 9),
        ("units", ct.c_char_p),
        *_fields(ct.c_void_p, "x f q tag type elems iatoms ielems pair_i pair_j listneighbors rij"),
        ("energy", ct.c_double),
        ("eatoms", ct.c_void_p),
        *_fields(ct.c_int32, "eatoms_set reserved"),
        ("self", ct.c_void_p),
        *_fields(PairArray, "pair_forces add_forces add_virial"),
        *_fields(ct.c_double, "seconds_build seconds_callback seconds_pair_forces"),
    ]


class _Memory:
    """Lets numpy see memory that isn't Python's; costs less than ctypes arrays and, unlike them, leaks no types."""

    __slots__ = ("__array_interface__",)

    def __init__(self, address: int, shape: tuple[int, ...], typestr: str) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": shape, "typestr": typestr, "version": 3}


def _view(address: int | None, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    if not address or 0 in shape:
        return np.empty(shape, dtype)
    return np.asarray(_Memory(address, shape, dtype))


class Box(NamedTuple):
    """LAMMPS's box: corners ``lo``, ``hi`` (3,), tilts, periodicity of x, y, z; lengths in the deck's units."""

    lo: np.ndarray
    hi: np.ndarray
    xy: float
    xz: float
    yz: float
    periodicity: tuple[bool, bool, bool]
    triclinic: bool


@dataclass(frozen=True)
class Wanted:
    """What LAMMPS needs on this step."""

    energy_global: bool
    energy_atom: bool
    virial_global: bool
    virial_atom: bool
    centroid: bool = False  # the pair style has no centroid virial; LAMMPS refuses the computes that ask for it


class PluginHost:
    """What only the plugin knows about a step.

    Attributes:
        kind: ``"plugin"``.
        element_of_type: the element given by ``pair_coeff`` for each type, None for NULL.
        neigh_age: steps since LAMMPS rebuilt its neighbour lists.
        list_generation: a number that rises whenever the pair style's own list was rebuilt.
        world: handle of LAMMPS's communicator, for ``mpi4py.MPI.Comm.fromhandle``; me, nprocs: rank and size in it.
        partition, npartitions: this world's place among those of ``-partition``.
        excludes: whether ``neigh_modify exclude`` leaves pairs out of the list.
        newton_pair: always True, since the pair style refuses ``newton off``.
    """

    kind = "plugin"

    def __init__(self, step: StepStruct, element_of_type: list[str | None]) -> None:
        self._step = step
        self.element_of_type = element_of_type
        self.neigh_age: int = step.ago
        self.list_generation: int = step.list_generation
        self.timestep: int = step.timestep
        self.world: int = step.world
        self.me: int = step.me
        self.nprocs: int = step.nprocs
        self.partition: int = step.partition
        self.npartitions: int = step.npartitions
        self.excludes = bool(step.excludes)
        self.units: str = step.units.decode()
        self.newton_pair = bool(step.newton_pair)
        self.wanted = Wanted(*map(bool, (step.want_energy, step.want_eatom, step.want_virial, step.want_vatom)))

    @property
    def x(self) -> np.ndarray:
        """Positions (ntotal, 3), ghosts behind the owned atoms."""
        return _view(self._step.x, (self._step.ntotal, 3), "<f8")

    @property
    def types(self) -> np.ndarray:
        """Atom types (ntotal,), from 1."""
        return _view(self._step.type, (self._step.ntotal,), "<i4")

    @property
    def tags(self) -> np.ndarray | None:
        """Atom ids (ntotal,), int64 (a copy where LAMMPS has 32 bits); None under ``atom_modify id no``."""
        if not self._step.tag:
            return None
        return _view(self._step.tag, (self._step.ntotal,), f"<i{self._step.tag_bytes}").astype(np.int64, copy=False)

    @property
    def q(self) -> np.ndarray | None:
        """Charges (ntotal,), None if the atom style has none."""
        return _view(self._step.q, (self._step.ntotal,), "<f8") if self._step.q else None

    def list_neighbors(self) -> np.ndarray:
        """The distinct neighbours in the whole list, skin included: ascending local indices, int32. Constant until
        `list_generation` rises."""
        return _view(self._step.listneighbors, (self._step.nlistneighbors,), "<i4")

    def box(self) -> Box:
        """The box of this step."""
        values = np.array(self._step.box)
        xy, xz, yz = values[6:].tolist()
        periodicity = tuple(bool(flag) for flag in self._step.periodic)
        return Box(values[:3], values[3:6], xy, xz, yz, periodicity, bool(self._step.triclinic))

    def add_forces(self, forces: np.ndarray) -> None:
        """Adds forces (nlocal, 3) of owned atoms that aren't pair forces; their virial must come by `set_virial`."""
        array = _as_doubles(forces, (self._step.nlocal, 3), "forces")
        self._step.add_forces(self._step.self, array.ctypes.data)

    def set_virial(self, virial: np.ndarray) -> None:
        """This rank's share of the virial of forces that aren't pair forces: xx yy zz xy xz yz, LAMMPS's sign
        (sum of r_i f_i), in units of energy. It is added to that of the pair forces.

        Raises:
            InputError: LAMMPS wants the virial per atom, which isn't known for such forces.
        """
        if self.wanted.virial_atom:
            raise InputError(
                "this model's forces are not pair forces, so it has no virial per atom: "
                "take out the compute stress/atom (or heat/flux) that asks for it"
            )
        array = _as_doubles(virial, (6,), "virial")
        self._step.add_virial(self._step.self, array.ctypes.data)

    def seconds(self) -> dict[str, float]:
        """Time since the pair style was made: finding pairs, in Python, and (a part of it) in adding pair forces."""
        step = self._step
        return {"build": step.seconds_build, "callback": step.seconds_callback, "pair_forces": step.seconds_pair_forces}


class StepData:
    """ML-IAP's data object of one force evaluation; see docs/lammps.md for its fields.

    Sizes are ints. Arrays: ``elems`` (ntotal,), ``iatoms``, ``ielems`` (nlistatoms,), ``pair_i``, ``pair_j``
    (npairs,), int32; ``rij`` (npairs, 3) = x_j - x_i and ``f`` (ntotal, 3), float64. Only atoms that this rank owns
    are list atoms, so ``natomneigh == nlistatoms``. ``energy`` and ``eatoms`` can only be assigned.
    """

    def __init__(self, step: StepStruct, element_of_type: list[str | None]) -> None:
        self._step = step
        self.host = PluginHost(step, element_of_type)
        self.nlocal: int = step.nlocal
        self.ntotal: int = step.ntotal
        self.nlistatoms: int = step.nlistatoms
        self.natomneigh: int = step.nlistatoms
        self.npairs: int = step.npairs
        self.eflag: int = step.eflag
        self.vflag: int = step.vflag

    elems = cached_property(lambda self: _view(self._step.elems, (self.ntotal,), "<i4"))
    iatoms = cached_property(lambda self: _view(self._step.iatoms, (self.nlistatoms,), "<i4"))
    ielems = cached_property(lambda self: _view(self._step.ielems, (self.nlistatoms,), "<i4"))
    pair_i = cached_property(lambda self: _view(self._step.pair_i, (self.npairs,), "<i4"))
    pair_j = cached_property(lambda self: _view(self._step.pair_j, (self.npairs,), "<i4"))
    rij = cached_property(lambda self: _view(self._step.rij, (self.npairs, 3), "<f8"))
    f = cached_property(lambda self: _view(self._step.f, (self.ntotal, 3), "<f8"))
    jatoms = property(lambda self: self.pair_j)  # ML-IAP has it under two names
    jelems = cached_property(lambda self: self.elems[self.pair_j])
    numneighs = cached_property(lambda self: np.bincount(self.pair_i, minlength=self.ntotal)[self.iatoms])

    def _set_energy(self, energy: float) -> None:
        self._step.energy = float(energy)

    def _set_eatoms(self, energies: np.ndarray) -> None:
        array = _as_doubles(energies, (self.nlistatoms,), "eatoms")
        _view(self._step.eatoms, (self.nlistatoms,), "<f8")[:] = array
        self._step.eatoms_set = 1

    energy = property(fset=_set_energy, doc="This rank's part of the energy; zero if not assigned.")
    eatoms = property(fset=_set_eatoms, doc="Energies of the list atoms, in list order.")

    def update_pair_forces(self, fij: np.ndarray) -> None:
        """Adds pair forces: f_i += fij and f_j -= fij, and their virial, global and per atom.

        Args:
            fij: (npairs, 3) float64, dE/dr_ij of the energy of this rank's list atoms.
        """
        array = _as_doubles(fij, (self.npairs, 3), "pair forces")
        if self.npairs:
            self._step.pair_forces(self._step.self, array.ctypes.data)

    def update_pair_energy(self, eij: np.ndarray) -> None:
        """Energies of directed pairs (npairs,): half of each goes to its atom i."""
        array = _as_doubles(eij, (self.npairs,), "pair energies")
        self.eatoms = np.bincount(self.pair_i, 0.5 * array, minlength=max(self.ntotal, 1))[self.iatoms]
        self.energy = 0.5 * array.sum()


def _as_doubles(values: Any, shape: tuple[int, ...], what: str) -> np.ndarray:
    array = np.ascontiguousarray(values, np.float64)
    if array.shape != shape:
        raise InputError(f"{what} of shape {array.shape} were handed to LAMMPS, where {shape} is expected")
    return array
