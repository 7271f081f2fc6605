"""Unified objects for LAMMPS that check what they are given, hand back other things than pair forces, or fail."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np

from lammps_runs import LennardJones


class Checked(LennardJones):
    """Compares all that the plugin hands over, and raises where it isn't as promised."""

    generation = 0

    def compute_forces(self, data: Any) -> None:
        self._check_arrays(data)
        self._check_host(data, data.host)
        super().compute_forces(data)

    def _check_arrays(self, data: Any) -> None:
        x = data.host.x
        assert data.natomneigh == data.nlistatoms == len(data.iatoms) == len(data.ielems)
        assert data.elems.shape == (data.ntotal,) and data.f.shape == x.shape == (data.ntotal, 3)
        assert data.pair_i.shape == data.pair_j.shape == (data.npairs,) and data.rij.shape == (data.npairs, 3)
        assert (data.iatoms < data.nlocal).all() and len(set(data.iatoms.tolist())) == data.nlistatoms
        assert np.array_equal(data.elems[data.iatoms], data.ielems) and (data.ielems >= 0).all()
        assert np.array_equal(data.rij, x[data.pair_j] - x[data.pair_i])
        assert np.array_equal(data.jatoms, data.pair_j) and np.array_equal(data.jelems, data.elems[data.pair_j])
        # grouped by i, in list order, and exactly the pairs within the cutoff
        assert np.array_equal(np.repeat(data.iatoms, data.numneighs), data.pair_i)
        known = np.flatnonzero(data.elems >= 0)
        squared = ((x[known][None] - x[data.iatoms][:, None]) ** 2).sum(-1)
        within = squared < (2 * self.rcutfac) ** 2
        within[known[None] == data.iatoms[:, None]] = False
        assert np.array_equal(within.sum(1), data.numneighs)
        assert (np.diff(data.pair_j[np.lexsort((data.pair_j, data.pair_i))].astype(int)) != 0).all() or data.npairs < 2
        for name in ("energy", "eatoms"):  # can only be assigned
            try:
                getattr(data, name)
            except AttributeError:
                continue
            raise AssertionError(f"{name} was read")

    def _check_host(self, data: Any, host: Any) -> None:
        assert host.kind == "plugin" and host.units == "lj" and host.newton_pair and host.npartitions == 1
        assert host.types.shape == (data.ntotal,) and host.q is None
        assert [self.element_types.index(e) if e else -1 for e in host.element_of_type] == [
            int(data.elems[host.types == t + 1][0]) if (host.types == t + 1).any() else self.element_types.index(e) if e else -1
            for t, e in enumerate(host.element_of_type)
        ]  # fmt: skip
        assert host.tags.dtype == np.int64 and len(set(host.tags[: data.nlocal].tolist())) == data.nlocal
        lo, hi, *tilts, periodicity, triclinic = host.box()
        cell = np.array([[hi[0] - lo[0], 0, 0], [tilts[0], hi[1] - lo[1], 0], [tilts[1], tilts[2], hi[2] - lo[2]]])
        assert triclinic == any(tilts) and all(periodicity)
        # ghosts are images of atoms with the same id: whole cell vectors apart
        first = {tag: row for row, tag in reversed(list(enumerate(host.tags.tolist())))}
        apart = host.x - host.x[[first[tag] for tag in host.tags.tolist()]]
        shifts = apart @ np.linalg.inv(cell)
        assert np.abs(shifts - shifts.round()).max(initial=0) < 1e-9
        neighbors = host.list_neighbors()
        assert (np.diff(neighbors) > 0).all() and set(data.pair_j.tolist()) <= set(neighbors.tolist())
        if host.neigh_age == 0:
            assert host.list_generation > self.generation
        else:
            assert host.list_generation == self.generation
            assert np.array_equal(neighbors, self.neighbors)
        self.generation, self.neighbors = host.list_generation, neighbors.copy()


class Owned(LennardJones):
    """The same potential without pair forces: owned forces, and the virial of the whole."""

    def compute_forces(self, data: Any) -> None:
        epsilon, squared = self.epsilon[0, 0], (data.rij**2).sum(1)
        s6 = squared**-3.0
        energies = 2 * epsilon * (s6 * s6 - s6)
        pulls = (-24 * epsilon * (2 * s6 * s6 - s6) / squared)[:, None] * data.rij  # on i, by j
        forces = np.zeros((data.nlocal, 3))
        np.add.at(forces, data.pair_i, pulls)
        data.host.add_forces(forces)
        virial = -0.5 * data.rij.T @ pulls
        data.host.set_virial(virial[[0, 1, 2, 0, 0, 1], [0, 1, 2, 1, 2, 2]])
        data.energy = energies.sum()
        if data.host.wanted.energy_atom:
            data.eatoms = np.bincount(data.pair_i, energies, minlength=data.ntotal)[data.iatoms]


class Torch(LennardJones):
    """The same potential through torch and its autograd."""

    def compute_forces(self, data: Any) -> None:
        import torch

        vectors = torch.from_numpy(data.rij.copy()).requires_grad_(True)
        s6 = (vectors**2).sum(1) ** -3
        energy = (2 * (s6 * s6 - s6)).sum()
        (forces,) = torch.autograd.grad(energy, vectors)
        data.energy = energy.item()
        data.update_pair_forces(forces.numpy())


class Pairwise(LennardJones):
    """Energies by ML-IAP's `update_pair_energy`."""

    def compute_forces(self, data: Any) -> None:
        super().compute_forces(data)
        s6 = (data.rij**2).sum(1) ** -3
        data.update_pair_energy(4 * (s6 * s6 - s6))


class NoAtomEnergies(LennardJones):
    """Gives no energies per atom."""

    def compute_forces(self, data: Any) -> None:
        data.energy = 0.0


class WrongShape(LennardJones):
    """Hands back one pair force too many."""

    def compute_forces(self, data: Any) -> None:
        data.update_pair_forces(np.zeros((data.npairs + 1, 3)))


class Agreed(LennardJones):
    """Raises the same error on every rank."""

    def compute_forces(self, data: Any) -> None:
        from nvdd_lammps.ranks import AgreedError

        raise AgreedError("every rank says this")


class FailsOnOne(LennardJones):
    """Raises on the last rank while the others go on."""

    def compute_forces(self, data: Any) -> None:
        if data.host.me == data.host.nprocs - 1:
            raise ValueError("this rank alone is unwell")
        super().compute_forces(data)


class UnreadableOnOne(LennardJones):
    """Can't be loaded on rank 1 of two."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        from mpi4py import MPI

        if MPI.COMM_WORLD.rank == 1:
            raise OSError("this rank can't read it")
        self.__dict__.update(state)


class Closing(LennardJones):
    """Says when the pair style that has it goes away."""

    def close(self) -> None:
        sys.stdout.write("closed\n")


def save_all(folder: Path) -> None:
    """Writes a pickle of each class, named in small letters, those of `lammps_systems`, and what is none."""
    for kind in (
        Checked,
        Owned,
        Torch,
        Pairwise,
        NoAtomEnergies,
        WrongShape,
        Agreed,
        FailsOnOne,
        UnreadableOnOne,
        Closing,
    ):
        kind().save(folder / f"{kind.__name__.lower()}.pkl")
    LennardJones().save(folder / "lj.pkl")
    LennardJones(epsilon=0.5).save(folder / "half.pkl")
    LennardJones(["Ar", "Kr"], [[1.0, 0.8], [0.8, 0.6]], [[1.0, 0.95], [0.95, 0.9]]).save(folder / "two.pkl")
    (folder / "text.pkl").write_text("no pickle")
    (folder / "list.pkl").write_bytes(pickle.dumps([1, 2]))
