"""Stand-ins for what LAMMPS hands to a unified model, made from ASE structures; and a process that evaluates them.

`Subdomain` is what one rank of LAMMPS has: owned atoms, a ghost for every image within cutoff + skin, pairs. The data
objects over it have the traps of their hosts (properties that are None or raise, what can't be read, what can't be
set). `evaluate` runs cases on ranks that meet by MPI, as in LAMMPS.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

ELEMENTS = {"Si": 14, "Ne": 10, "O": 8, "Ar": 18}  # in an order that is no order of atomic numbers


class Subdomain:
    """What LAMMPS has on one rank.

    Args:
        atoms: the whole system.
        elements: symbols, the model's ``element_types``.
        rank, size: this rank, and how many there are.
        cutoff, skin: A.
        null: indices of atoms of a type that this model does not compute: they have ids and ghosts, and are in no list.
        far: ghosts beyond cutoff + skin are made up to this further distance, A.
    """

    def __init__(
        self, atoms: Any, elements: Sequence[str], rank: int, size: int, cutoff: float, skin: float = 1.0,
        null: Sequence[int] = (), far: float = 0.0,
    ) -> None:  # fmt: skip
        from nvdd.partition import SpatialPartitioner

        x, cell, pbc = atoms.positions, atoms.cell.array, atoms.pbc
        self.owner = SpatialPartitioner(size).assign(x, cell, pbc)
        self.atoms, self.rank, self.cell, self.pbc = atoms, rank, cell, pbc
        own = np.flatnonzero(self.owner == rank)
        reach = cutoff + skin + far
        shifts = self._shifts(atoms, reach)
        ids, positions = [own], [x[own]]
        for shift in shifts:
            moved = x + shift @ cell
            there = self._within(moved, x[own], reach)
            if not shift.any():
                there &= self.owner != rank
            ids.append(np.flatnonzero(there))
            positions.append(moved[there])
        self.index = np.concatenate(ids)  # which atom each is
        self.x = np.concatenate(positions)
        self.n_local = len(own)
        self.tags = self.index + 1
        self.element_of_type = list(elements)
        place = {ELEMENTS[symbol]: k for k, symbol in enumerate(elements)}
        self.elements = np.array([place[z] for z in atoms.numbers[self.index]], np.int32).reshape(-1)
        computed = ~np.isin(self.index, null)
        self.elements[~computed] = -1
        local = np.flatnonzero(computed[: self.n_local])
        self.listed = np.roll(local[::-1], 1).astype(np.int32)  # not in the order of local atoms
        pair_i, pair_j, rij, near = [], [], [], []
        for i in self.listed:
            away = self.x - self.x[i]
            r = np.sqrt((away**2).sum(1))
            listed = computed & (r < cutoff + skin)
            listed[i] = False
            near.append(np.flatnonzero(listed))
            j = np.flatnonzero(listed & (r < cutoff))
            pair_i.append(np.full(len(j), i))
            pair_j.append(j)
            rij.append(away[j])
        join = lambda parts, dtype, shape=(0,): np.concatenate([np.empty(shape, dtype), *parts]).astype(dtype)
        self.pair_i, self.pair_j = join(pair_i, np.int32), join(pair_j, np.int32)
        self.rij = join(rij, np.float64, (0, 3))
        self.neighbors = np.unique(join(near, np.int32))

    @staticmethod
    def _shifts(atoms: Any, reach: float) -> np.ndarray:
        cell = atoms.cell.complete().array
        heights = np.abs(np.linalg.det(cell)) / np.linalg.norm(np.cross(cell[[1, 2, 0]], cell[[2, 0, 1]]), axis=1)
        scaled = np.linalg.solve(cell.T, atoms.positions.T).T
        spread = np.ceil(np.ptp(scaled, axis=0)) if len(scaled) else np.zeros(3)
        n = [int(np.ceil(reach / h) + s) if p else 0 for h, s, p in zip(heights, spread, atoms.pbc, strict=True)]
        return np.array(list(itertools.product(*(range(-k, k + 1) for k in n))), float)

    @staticmethod
    def _within(points: np.ndarray, centres: np.ndarray, reach: float) -> np.ndarray:
        if not len(centres):
            return np.zeros(len(points), bool)
        return (((points[:, None] - centres[None]) ** 2).sum(2) < reach**2).any(1)


def _sized(name: str) -> property:
    """An array of ML-IAP's: None without pairs, as LAMMPS 2023 to 2025 has it, and an error where it has no atoms."""

    def get(self: Any) -> np.ndarray | None:
        if not self.nlistatoms:
            raise ValueError("Zero-sized array")
        return getattr(self, "_" + name) if self.npairs else None

    return property(get)


class HostData:
    """ML-IAP's data object of a LAMMPS on the host. ``given`` holds what the model has handed over."""

    pair_i, pair_j, rij = _sized("pair_i"), _sized("pair_j"), _sized("rij")
    jatoms = pair_j

    def __init__(self, sub: Subdomain) -> None:
        self.nlocal, self.ntotal, self.npairs = sub.n_local, len(sub.x), len(sub.pair_i)
        self.nlistatoms = self.natomneigh = len(sub.listed)
        self.eflag = self.vflag = 3
        self._sub, self._pair_i, self._pair_j, self._rij = sub, sub.pair_i.copy(), sub.pair_j.copy(), sub.rij.copy()
        self.given: dict[str, Any] = {"f": np.zeros((self.ntotal, 3)), "virial": np.zeros((3, 3))}

    @property
    def iatoms(self) -> np.ndarray:
        if not self.nlistatoms:
            raise ValueError("Zero-sized array")
        return self._sub.listed

    @property
    def elems(self) -> np.ndarray:
        if not self.ntotal:
            raise ValueError("Zero-sized array")
        return self._sub.elements

    def _set_energy(self, value: float) -> None:
        assert type(value) is float
        self.given["energy"] = value

    def _set_eatoms(self, values: np.ndarray) -> None:
        assert values.dtype == np.float64 and values.shape == (self.nlistatoms,) and values.flags.c_contiguous
        self.given["eatoms"] = values.copy()

    energy = property(fset=_set_energy)
    eatoms = property(fset=_set_eatoms)

    def update_pair_forces(self, fij: np.ndarray) -> None:
        assert fij.dtype == np.float64 and fij.shape == (self.npairs, 3) and fij.flags.c_contiguous
        np.add.at(self.given["f"], self._pair_i, fij)
        np.add.at(self.given["f"], self._pair_j, -fij)
        self.given["virial"] += self._rij.T @ fij


class FakeLammps:
    """The few queries of ``lammps.lammps`` that nvdd makes where LAMMPS tells models nothing."""

    def __init__(self, sub: Subdomain, comm: Any, units: str = "metal") -> None:
        self._sub, self._comm, self._units = sub, comm, units
        self.numpy = self

    def extract_setting(self, name: str) -> int:
        counts = {"nlocal": self._sub.n_local, "nall": len(self._sub.x)}
        return {"world_rank": self._comm.rank, "world_size": self._comm.size, "tag_enable": 1, "q_flag": 0, **counts}[name]

    def extract_global(self, name: str) -> str:
        return {"units": self._units}[name]

    def extract_atom(self, name: str, nelem: int, dim: int) -> np.ndarray | None:
        array = {"id": self._sub.tags.astype(np.int32), "x": self._sub.x}[name]
        assert len(array) == nelem
        return array if nelem else None

    def extract_box(self) -> tuple:
        cell = self._sub.cell
        return [0.0] * 3, np.diag(cell).tolist(), cell[1, 0], cell[2, 1], cell[2, 0], list(map(int, self._sub.pbc)), 0

    def get_mpi_comm(self) -> Any:
        return self._comm


def plugin_data(
    sub: Subdomain, comm: Any, units: str = "metal", charges: np.ndarray | None = None, generation: int = 1
) -> HostData:
    """With ``data.host``, as nvdd's plugin hands it over."""
    data = HostData(sub)
    given, cell = data.given, sub.cell
    wanted = SimpleNamespace(
        energy_global=True, energy_atom=True, virial_global=True, virial_atom=False, centroid=False
    )

    def add_forces(forces: np.ndarray) -> None:
        assert forces.shape == (sub.n_local, 3)
        given["f"][: sub.n_local] += forces

    def set_virial(w: np.ndarray) -> None:
        given["virial"] -= np.array([[w[0], w[3], w[4]], [w[3], w[1], w[5]], [w[4], w[5], w[2]]])

    from mpi4py import MPI

    data.host = SimpleNamespace(
        kind="plugin", tags=sub.tags.astype(np.int64), x=sub.x, q=charges, units=units, wanted=wanted, me=comm.rank,
        nprocs=comm.size, world=MPI._handleof(comm), npartitions=1,
        list_generation=generation, element_of_type=sub.element_of_type, list_neighbors=lambda: sub.neighbors,
        box=lambda: (np.zeros(3), np.diag(cell).copy(), cell[1, 0], cell[2, 0], cell[2, 1], tuple(sub.pbc), True),
        add_forces=add_forces, set_virial=set_virial,
    )  # fmt: skip
    return data


class KokkosData(HostData):
    """ML-IAP's data object under Kokkos: no numneighs, ``eatoms`` to be written into, an exchange for torch tensors."""

    dev = 0

    def __init__(self, sub: Subdomain, comm: Any) -> None:
        super().__init__(sub)
        self._comm = comm
        self.given["eatoms"] = np.full(self.nlistatoms, np.nan)

    @property
    def eatoms(self) -> np.ndarray:
        return self.given["eatoms"]

    def forward_exchange(self, send: Any, recv: Any, width: int) -> None:
        import torch

        for tensor in (send, recv):
            assert isinstance(tensor, torch.Tensor) and tensor.dtype in (torch.float32, torch.float64)
            assert tensor.shape == (self.ntotal, width) and tensor.is_contiguous()
        assert width <= 3, "the CPU route overruns its buffer"
        sub = self._sub
        told = {}
        for ids, rows in self._comm.allgather((sub.index[: sub.n_local], send[: sub.n_local].numpy())):
            told.update(zip(ids.tolist(), rows, strict=True))
        recv[: sub.n_local] = send[: sub.n_local]
        for ghost in range(sub.n_local, self.ntotal):
            recv[ghost] = torch.from_numpy(told[int(sub.index[ghost])])


# -- the process that evaluates cases ------------------------------------------------------------------------------


@dataclass
class Case:
    """One model on one structure in one host.

    Attributes:
        model: a name of parity.py, or ``"toy:name"`` of toys.py, ``"toy:charged"`` of lammps_models.py, ``"toy:bonds"`` and
            ``"toy:reverse"`` of bond_models.py.
        structure: a name of parity.py; or ``"nothing"``.
        host: ``"plugin"``, ``"python"`` or ``"kokkos"``.
        null: see `Subdomain`.
        far: see `Subdomain`.
        standard: rotates the structure so that its cell is LAMMPS's (a along x, b in the xy plane).
        options: ``units``, ``charges`` (per atom).
    """

    model: str
    structure: str
    host: str = "plugin"
    null: tuple[int, ...] = ()
    far: float = 0.0
    standard: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def evaluate(cases: Mapping[str, Case], n: int, limit: float = 280.0) -> dict[str, dict[str, Any]]:
    """What each case gives on ``n`` ranks: energy, and in the order of atoms energies, forces; virial; counts by rank."""
    from lammps_runs import launch

    with tempfile.TemporaryDirectory() as folder:
        given, found = Path(folder, "given"), Path(folder, "found")
        given.write_bytes(pickle.dumps({name: vars(case) for name, case in cases.items()}))
        run = launch([sys.executable, "-W", "ignore", __file__, str(given), str(found)], n, cwd=folder, limit=limit,
                     env={"OMP_NUM_THREADS": "1"})  # fmt: skip
        assert run.code == 0 and found.exists(), f"status {run.code}\n{run.out}\n{run.err}"
        return pickle.loads(found.read_bytes())


def structure(case: Case) -> Any:
    """The atoms of a case."""
    from ase import Atoms

    import parity

    if case.structure == "nothing":
        return Atoms(cell=[20, 20, 20], pbc=True)
    atoms = parity.structure(case.structure).copy()
    if case.standard:
        cell, rotation = atoms.cell.standard_form()
        atoms.positions[:] = atoms.positions @ rotation.T
        atoms.set_cell(cell)
        atoms.wrap()
    return atoms


def wrapper(name: str) -> Any:
    """The model of a case."""
    import parity
    import toys
    from bond_models import ReverseEdges, ShortBonds
    from lammps_models import Charged

    kind, _, rest = name.partition(":")
    if rest in ("bonds", "reverse"):
        return ShortBonds() if rest == "bonds" else ReverseEdges()
    return Charged() if rest == "charged" else toys.toy(rest) if kind == "toy" else parity.wrapper(name)


def _data(case: Case, sub: Subdomain, comm: Any, generation: int) -> HostData:
    from nvdd_lammps import hosts

    units = case.options.get("units", "metal")
    if case.host == "kokkos":
        hosts.attach(None)  # what an earlier case told
        return KokkosData(sub, comm)
    if case.host == "python":
        hosts.attach(FakeLammps(sub, comm, units))
        return HostData(sub)
    charges = case.options.get("charges")
    return plugin_data(sub, comm, units, None if charges is None else np.asarray(charges)[sub.index], generation)


def _run(case: Case, comm: Any) -> dict[str, Any]:
    from nvdd import dispatch_trace
    from nvdd_lammps.unified import NVDDUnified

    atoms = structure(case)
    model = wrapper(case.model)
    known = model.model_config.elements
    elements = [symbol for symbol, z in ELEMENTS.items() if known is None or z in known]
    unified = NVDDUnified(model, {"elements": elements})
    sub = Subdomain(atoms, elements, comm.rank, comm.size, 2 * unified.rcutfac, null=case.null, far=case.far)
    unified.compute_forces(_data(case, sub, comm, 1))
    data = _data(case, sub, comm, 1)
    with dispatch_trace() as trace:
        unified.compute_forces(data)
    given = data.given
    parts = comm.gather((sub.index, given["f"], sub.index[sub.listed], given.get("eatoms"), given["energy"], given["virial"], trace.n_exchanges,
                         dict(trace.setup), unified.domain.ghosts.plan.n_halo, unified.domain.n_builds))  # fmt: skip
    unified.close()
    if parts is None:
        return {}
    forces, energies = np.zeros((len(atoms), 3)), np.full(len(atoms), np.nan)
    for index, f, listed, e, *_ in parts:
        np.add.at(forces, index, f)
        if e is not None:
            energies[listed] = e
    column = lambda k: [part[k] for part in parts]
    return {
        "energy": sum(column(4)), "energies": energies, "forces": forces, "virial": sum(column(5)), "exchanges": column(6),
        "setup": column(7), "halo": column(8), "builds": column(9),
    }  # fmt: skip


def _main(given: str, found: str) -> None:
    from mpi4py import MPI

    comm, results = MPI.COMM_WORLD, {}
    for name, values in pickle.loads(Path(given).read_bytes()).items():
        if comm.rank == 0:
            print("case", name, flush=True)
        results[name] = _run(Case(**values), comm)
    if comm.rank == 0:
        Path(found).write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    with contextlib.suppress(ImportError):
        import mace  # noqa: F401  before e3nn
    _main(*sys.argv[1:])
