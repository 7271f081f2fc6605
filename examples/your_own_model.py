"""A model of your own over ranks: a small message-passing network in plain torch, its wrapper, its spec.

    python examples/your_own_model.py

Read it from the top: the network knows nothing of nvdd, the wrapper says what it reads and returns, `make` builds
it. At the end the same forces three times: by plain torch, on one rank, and on two. The exit code is 1 if they differ.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.build import bulk
from torch import Tensor, nn

from nvdd import SPEC_MPNN_HALO, BaseModelMixin, Batch, DistributedModel, ModelConfig, ModelOutputs, NeighborConfig
from nvdd.neighbors import attach_neighbors
from nvdd_ase import NVDDCalculator

ELEMENTS = (29, 79)  # Cu, Au


class SmallNet(nn.Module):
    """Message passing over edges. Energies depend on distances and, through summed directions, on angles."""

    def __init__(self, width: int = 16, n_layers: int = 2, n_radial: int = 6, cutoff: float = 4.5) -> None:
        super().__init__()
        self.cutoff = cutoff
        self.embedding = nn.Embedding(100, width)
        self.register_buffer("frequencies", torch.arange(1, n_radial + 1) * torch.pi / cutoff)
        self.radial = nn.ModuleList(nn.Linear(n_radial, 2 * width, bias=False) for _ in range(n_layers))
        self.update = nn.ModuleList(
            nn.Sequential(nn.Linear(3 * width, width), nn.SiLU(), nn.Linear(width, width)) for _ in range(n_layers)
        )
        self.readout = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, numbers: Tensor, senders: Tensor, receivers: Tensor, vectors: Tensor) -> Tensor:
        """Energies of the atoms, (n_atoms,) eV.

        Args:
            numbers: (n_atoms,) atomic numbers.
            senders, receivers: (E,) rows of the neighbour and of the centre of each edge.
            vectors: (E, 3) from centre to neighbour, A.
        """
        r = vectors.norm(dim=1, keepdim=True)
        direction = vectors / r
        smooth = 0.5 * (1 + torch.cos(torch.pi * r / self.cutoff))  # zero at the cutoff
        waves = smooth * torch.sin(r * self.frequencies) / r
        h = self.embedding(numbers)
        for radial, update in zip(self.radial, self.update, strict=True):
            scalar, vector = radial(waves).chunk(2, dim=1)
            neighbour = h[senders]  # over ranks this line fetches the remote rows
            summed = torch.zeros_like(h).index_add(0, receivers, scalar * neighbour)
            axes = [
                torch.zeros_like(h).index_add(0, receivers, vector * neighbour * direction[:, k : k + 1])
                for k in range(3)
            ]
            h = h + update(torch.cat([h, summed, axes[0] ** 2 + axes[1] ** 2 + axes[2] ** 2], dim=1))
        return self.readout(h).squeeze(1)


class SmallNetWrapper(nn.Module, BaseModelMixin):
    """What nvdd must know of `SmallNet`."""

    def __init__(self, net: SmallNet) -> None:
        super().__init__()
        self.net = net
        self.model_config = ModelConfig(neighbor_config=NeighborConfig(cutoff=net.cutoff), elements=frozenset(ELEMENTS))

    def forward(self, data: Batch) -> ModelOutputs:
        """``{"energies": (n_atoms,)}``; nvdd makes energy, forces and stress of them."""
        return self.adapt_output(self.net(**self.adapt_input(data)), data)

    def adapt_input(self, data: Batch, **kwargs: Any) -> dict[str, Any]:
        """The network's arguments. The default edge layout is the network's: vectors from centre to neighbour."""
        return {
            "numbers": data.atomic_numbers,
            "senders": data.senders,
            "receivers": data.receivers,
            "vectors": data.edge_vectors.to(self.dtype),
            **kwargs,
        }

    def adapt_output(self, raw: Tensor, data: Batch) -> ModelOutputs:
        """Per-atom energies by name."""
        return ModelOutputs(energies=raw)

    def distribution_spec(self, strategy: Any = None):
        """Owned rows, remote ones fetched where senders are gathered: right for message passing."""
        return SPEC_MPNN_HALO


def make(width: int = 16) -> SmallNetWrapper:
    """The factory behind ``"py:your_own_model:make"``; keyword arguments come from ``model_options``.

    Every rank calls it, and all must get the same weights: here from a seed, usually from a file.
    """
    torch.manual_seed(0)
    return SmallNetWrapper(SmallNet(width).double())


def plain_torch(atoms: Atoms, wrapper: SmallNetWrapper) -> tuple[float, np.ndarray]:
    """Energy and forces without any of nvdd's ranks: a gradient by the positions."""
    batch = Batch.from_atoms(atoms)
    batch.positions.requires_grad_(True)
    attach_neighbors(batch, wrapper.net.cutoff)
    energy = wrapper(batch)["energies"].sum()
    (gradient,) = torch.autograd.grad(energy, batch.positions)
    return float(energy.detach()), -gradient.numpy()


def main() -> int:
    """Three ways to the same forces."""
    atoms = bulk("Cu", "fcc", a=3.8, cubic=True).repeat((4, 3, 3))
    atoms.numbers[::4] = 79
    atoms.rattle(0.1, seed=1)
    options = {"width": 32}

    energy, forces = plain_torch(atoms, make(**options))
    print(f"{len(atoms)} atoms; plain torch: energy {energy:.6f} eV, largest force {np.abs(forces).max():.6f} eV/A")

    one_rank = DistributedModel(make(**options))
    out = one_rank(Batch.from_atoms(atoms), {"energy", "forces", "stress"})
    results = {"1 rank": (float(out["energy"]), out["forces"].numpy())}

    # the ranks import this file as the module your_own_model: it must lie on Python's path, as the folder of the
    # script that runs does
    with NVDDCalculator("py:your_own_model:make", ranks=2, model_options=options) as calculator:
        atoms.calc = calculator
        results["2 ranks"] = (atoms.get_potential_energy(), atoms.get_forces())
        stress = atoms.get_stress(voigt=False)
        for rank, load in enumerate(calculator.report()):
            print(f"rank {rank}: {load['owned']} atoms of its own, {load['halo']} remote rows, {load['edges']} edges")

    right = True
    for name, (e, f) in results.items():
        errors = abs(e / energy - 1), np.abs(f - forces).max() / np.abs(forces).max()
        right &= max(errors) <= 1e-11
        print(f"{name:8s} energy differs by {errors[0]:.1e}, forces by {errors[1]:.1e} (relative, allowed 1e-11)")
    error = np.abs(stress - out["stress"][0].numpy()).max() / np.abs(stress).max()
    right &= bool(error <= 1e-11)
    print(f"{'stress':8s} of 2 ranks differs from 1 rank by {error:.1e}")
    print("the same" if right else "NOT THE SAME")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
