"""What `ewald` and `pme` share: charges, the pairs in real space, and the terms that are sums over all atoms.

Energy of point charges in a neutralising background, with conducting ("tin foil") surroundings::

    E = ke [ 1/2 sum' q_i q_j erfc(alpha r_ij) / r_ij          pairs with r < cutoff, images included
           + 2 pi / V sum_k exp(-k^2 / 4 alpha^2) / k^2 |S(k)|^2    `reciprocal` of the subclasses
           - alpha / sqrt(pi) sum q_i^2                        each smeared charge with itself
           - pi Q^2 / (2 V alpha^2)                            the background of a net charge Q
           + 2 pi / V (M^2 - Q sum q_i z_i^2 - Q^2 L^2 / 12) ] slabs only, M = sum q_i z_i

Sources: de Leeuw, Perram and Smith, Proc. R. Soc. A 373 (1980) 27; Yeh and Berkowitz, J. Chem. Phys. 111 (1999) 3155; the
slab term with a net charge: Ballenegger, Arnold and Cerda, J. Chem. Phys. 131 (2009) 094107.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nvdd.context import context_of
from nvdd.errors import InputError
from nvdd.model_config import ModelConfig, NeighborConfig
from nvdd.models.base import BaseModelMixin, Batch, ModelOutputs
from nvdd.models.ewald_parameters import COULOMB_CONSTANT, number, splitting, switch
from nvdd.models.slab import extended_cell
from nvdd.shard_tensor import to_local

_log = logging.getLogger("nvdd")
_NET_CHARGE = 1e-6  # e


@dataclass(frozen=True, eq=False)
class Lattice:
    """The cells in which waves are periodic.

    Attributes:
        cell: (n_systems, 3, 3) A; of a slab with a third vector along its normal.
        reciprocal: (n_systems, 3, 3) 1/A: the transposed inverse, without 2 pi.
        volume: (n_systems,) A^3.
        scaled: (n_atoms, 3) positions in cell vectors.
        z: (n_atoms,) A, along the normal of a slab from its middle; None without the slab correction.
    """

    cell: Tensor
    reciprocal: Tensor
    volume: Tensor
    scaled: Tensor
    z: Tensor | None


@dataclass(frozen=True, eq=False)
class Reciprocal:
    """What a subclass gives for the sum over waves.

    Attributes:
        energy: (n_systems,) of all atoms, in units of ke.
        potential: (n_atoms,) whose product with the charges sums to it.
        sums: (n_systems, m) sums over atoms that were made on the way.
    """

    energy: Tensor
    potential: Tensor
    sums: Tensor


class CoulombWrapper(torch.nn.Module, BaseModelMixin, ABC):
    """Base of the wrappers of Ewald sums; see them for the arguments."""

    family = "coulomb"
    options: dict[str, Any]

    def __init__(self, cutoff: Any, accuracy: Any, alpha: Any, slab: Any) -> None:
        super().__init__()
        who = self.family
        self.cutoff = number(who, "cutoff", cutoff, 0.0, math.inf, "A")
        self.accuracy = number(who, "accuracy", accuracy, 1e-15, 0.1)
        self.alpha = splitting(self.cutoff, self.accuracy) if alpha is None else number(who, "alpha", alpha, 0.0, math.inf, "1/A")
        self.slab = switch(who, "slab", slab)
        self._checked = False
        outputs = frozenset({"energy", "energies", "forces", "stress"})
        self.model_config = ModelConfig(
            outputs=outputs,
            autograd_outputs=frozenset({"forces", "stress"}),
            neighbor_config=NeighborConfig(cutoff=self.cutoff),
            node_inputs=frozenset({"charges"}),
            pbc=(True, True, not self.slab),
            differentiated="energy",
        )

    def extra_repr(self) -> str:
        """The options, for ``print(wrapper)``."""
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())

    @property
    def dtype(self) -> torch.dtype:
        """float64, whatever the type of other models: the sums cancel to a small part of their terms."""
        return torch.float64

    @abstractmethod
    def reciprocal(self, lattice: Lattice, charges: Tensor, more: Tensor, data: Batch) -> Reciprocal:
        """The sum over waves, and that of ``more`` (n_atoms, m) over the atoms of each system."""

    def forward(self, data: Batch) -> ModelOutputs:
        """``energy`` (n_systems,) and ``energies`` (n_atoms,) eV.

        Raises:
            InputError: no charges, or all of them zero; periodicity that the sum has no meaning for.
        """
        charges = self._charges(data)
        self._check_periodicity(data)
        lattice = self._lattice(data)
        own = self._pairs(data, charges) - self.alpha / math.sqrt(math.pi) * charges * charges
        columns = [own, charges * charges, charges]
        if lattice.z is not None:
            columns += [charges * lattice.z, charges * lattice.z * lattice.z]
        waves = self.reciprocal(lattice, charges, torch.stack(columns, 1), data)
        sums = waves.sums
        self._check_sums(sums, data, charges)
        net, system = sums[:, 2], data.batch
        background = -0.5 * math.pi / (lattice.volume * self.alpha**2)
        energy = sums[:, 0] + waves.energy + background * net * net
        energies = own + charges * (waves.potential + (background * net)[system])
        if lattice.z is not None:
            dipole, second, factor = sums[:, 3], sums[:, 4], 2.0 * math.pi / lattice.volume
            edge = net * lattice.cell[:, 2].square().sum(1) / 12.0
            energy = energy + factor * (dipole * dipole - net * (second + edge))
            by_z = lattice.z * (factor * dipole)[system] - 0.5 * lattice.z * lattice.z * (factor * net)[system]
            energies = energies + charges * (by_z - (factor * (0.5 * second + edge))[system])
        return ModelOutputs(energy=COULOMB_CONSTANT * energy, energies=COULOMB_CONSTANT * energies)

    # -- what is given

    def _charges(self, data: Batch) -> Tensor:
        try:
            charges = data.charges
        except AttributeError:
            raise InputError(f"{self.family}: the atoms have no charges; {_HOW}") from None
        if charges.dtype is not torch.float64:
            charges = charges.to(torch.float64)
        # as they are, inputs need no message to be read by edges
        return charges if charges.dim() == 1 else charges.reshape(-1)

    def _check_periodicity(self, data: Batch) -> None:
        for pbc in to_local(data.pbc).tolist():
            if self.slab and pbc != [True, True, False]:
                raise InputError(
                    f"{self.family}: slab=True is for periodicity along the first two cell vectors only, pbc (T, T, F); "
                    f"these atoms have {_letters(pbc)}"
                )
            if not self.slab and not all(pbc):
                raise InputError(
                    f"{self.family}: an Ewald sum needs periodicity along all three cell vectors; these atoms have pbc "
                    f"{_letters(pbc)}. For a surface, periodic along the first two, give slab=True; for molecules choose a "
                    "model that sums over pairs"
                )

    def _check_sums(self, sums: Tensor, data: Batch, charges: Tensor) -> None:
        """No charge at all is a mistake, unless they come from another model; a net charge is worth a word, once."""
        context, plain = context_of((data.positions,)), to_local(sums).detach()
        if self._checked and plain.device.type != "cpu":  # later steps don't wait for a GPU to tell
            return
        if not charges.requires_grad and (plain[:, 1] == 0).all():
            raise InputError(f"{self.family}: all charges are zero, so there is nothing to compute; {_HOW}")
        first, self._checked = not self._checked, True
        if first and (context is None or context.rank == 0) and float(plain[:, 2].abs().max()) > _NET_CHARGE:
            net = ", ".join(f"{q:+.6g}" for q in plain[:, 2].tolist())
            where = "the sum in two dimensions, without a background" if self.slab else "a uniform background that neutralises it"
            _log.warning("%s: the net charge is %s e; energies are those with %s", self.family, net, where)

    # -- terms

    def _pairs(self, data: Batch, charges: Tensor) -> Tensor:
        """(n_atoms,) half of each pair's energy in real space to each of its atoms, in units of ke."""
        r = torch.linalg.vector_norm(data.edge_vectors.to(torch.float64), dim=1)
        pair = charges[data.senders] * (torch.erfc(self.alpha * r) / r)
        return 0.5 * charges * torch.zeros_like(charges).index_add(0, data.receivers, pair)

    def _lattice(self, data: Batch) -> Lattice:
        cell, positions = data.cell.to(torch.float64), data.positions.to(torch.float64)
        z = None
        if self.slab:
            cell, normal, middle = extended_cell(cell, positions, data.batch, self.cutoff, self.accuracy)
            z = (positions * normal[data.batch]).sum(1) - middle[data.batch]
        a, b, c = cell[:, 0], cell[:, 1], cell[:, 2]
        cross = torch.linalg.cross
        faces = torch.stack([cross(b, c), cross(c, a), cross(a, b)], 1)
        determinant = (a * faces[:, 0]).sum(1)
        reciprocal = faces / determinant[:, None, None]
        scaled = torch.einsum("ni,nai->na", positions, reciprocal[data.batch])
        return Lattice(cell, reciprocal, determinant.abs(), scaled, z)


_HOW = (
    "give them by atoms.set_initial_charges(...) in ASE, a column initial_charges in a file, atom_style charge in LAMMPS, "
    "or from another model of a composed one"
)


def _letters(pbc: list[bool]) -> str:
    return "(" + ", ".join("T" if p else "F" for p in pbc) + ")"
