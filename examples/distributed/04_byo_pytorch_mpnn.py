"""Bring your own model, 1: a Behler-Parrinello potential in plain PyTorch, from nothing to a validated spec.

    python examples/distributed/04_byo_pytorch_mpnn.py              # two ranks on CPUs
    python examples/distributed/04_byo_pytorch_mpnn.py cuda:0       # two ranks on one GPU; cuda: a GPU for each

The network knows nothing of nvdd. Its wrapper picks a preset, `SPEC_MPNN_HALO`; `trace_and_validate` runs it in one
process and on two ranks, in many geometries, and the spec that passes is saved and used. Exit code 1 if anything differs.
"""

from __future__ import annotations

import logging
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from ase import Atoms
from ase.build import bulk
from torch import Tensor, nn

from nvdd import (
    SPEC_MPNN_HALO,
    BaseModelMixin,
    Batch,
    DistributedModel,
    MLIPSpec,
    ModelConfig,
    ModelOutputs,
    NeighborConfig,
)
from nvdd.validate import trace_and_validate

ELEMENTS = (29, 79)  # Cu, Au


class BPModel(nn.Module):
    """Energies of atoms from symmetry functions of their neighbourhoods (Behler and Parrinello, PRL 98, 146401, 2007).

    Radial functions sum Gaussians of the distance. Angular ones sum powers of cos(theta) over pairs of neighbours,
    which needs no list of pairs: sum_jk f_j f_k cos(theta_jk) = |sum_j f_j u_j|^2 with the unit vectors u, and the
    same with outer products for cos^2. Each element has its own network.
    """

    def __init__(self, feat_dim: int = 24, cutoff: float = 4.5, n_radial: int = 6) -> None:
        super().__init__()
        self.cutoff = cutoff
        self.register_buffer("centres", torch.linspace(1.5, cutoff, n_radial))
        n_symmetry = 3 * n_radial * len(ELEMENTS)
        self.networks = nn.ModuleList(
            nn.Sequential(nn.Linear(n_symmetry, feat_dim), nn.Tanh(), nn.Linear(feat_dim, 1)) for _ in ELEMENTS
        )

    def forward(self, species: Tensor, senders: Tensor, receivers: Tensor, vectors: Tensor) -> Tensor:
        """Energies, (n_atoms,) eV.

        Args:
            species: (n_atoms, n_elements) one-hot.
            senders, receivers: (E,) rows of the neighbour and of the centre of each edge.
            vectors: (E, 3) from centre to neighbour, A.
        """
        r = vectors.norm(dim=1, keepdim=True)
        unit = vectors / r
        smooth = 0.5 * (1 + torch.cos(math.pi * r / self.cutoff))
        radial = smooth * torch.exp(-2.0 * (r - self.centres) ** 2)  # (E, n_radial)
        # one set of functions for each element of the neighbour: over ranks, this is where remote rows are read
        by_element = (species[senders].unsqueeze(2) * radial.unsqueeze(1)).flatten(1)

        def summed(per_edge: Tensor) -> Tensor:
            rows = torch.zeros(species.shape[0], *per_edge.shape[1:], dtype=per_edge.dtype, device=per_edge.device)
            return rows.index_add(0, receivers, per_edge)

        first = summed(by_element.unsqueeze(2) * unit.unsqueeze(1))
        second = summed(by_element[:, :, None, None] * (unit.unsqueeze(2) * unit.unsqueeze(1)).unsqueeze(1))
        symmetry = torch.cat([summed(by_element), (first**2).sum(2), (second**2).sum((2, 3))], 1)
        energies = torch.cat([network(symmetry) for network in self.networks], 1)
        return (energies * species).sum(1)


class BPWrapper(nn.Module, BaseModelMixin):
    """What nvdd must know of `BPModel`: cutoff, inputs, outputs, spec."""

    def __init__(self, model: BPModel) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("elements", torch.tensor(ELEMENTS))
        self.model_config = ModelConfig(
            neighbor_config=NeighborConfig(cutoff=model.cutoff), elements=frozenset(ELEMENTS)
        )

    def adapt_input(self, data: Batch, **kwargs: Any) -> dict[str, Any]:
        vectors = data.edge_vectors.to(self.dtype)
        species = (data.atomic_numbers.unsqueeze(1) == self.elements).to(vectors.dtype)
        return {"species": species, "senders": data.senders, "receivers": data.receivers, "vectors": vectors, **kwargs}

    def forward(self, data: Batch) -> ModelOutputs:
        return ModelOutputs(energies=self.model(**self.adapt_input(data)))

    @property
    def distribution_spec(self) -> MLIPSpec:
        return SPEC_MPNN_HALO


def model_factory() -> BPWrapper:
    """A fresh wrapper; each rank makes its own, and all must get the same weights: hence the seed."""
    torch.manual_seed(123)
    return BPWrapper(BPModel()).double().eval()


def sample() -> Atoms:
    """A small alloy, rattled."""
    atoms = bulk("Cu", "fcc", a=3.8, cubic=True).repeat((3, 2, 2))
    atoms.numbers[::3] = 79
    atoms.rattle(0.08, seed=1)
    return atoms


def main(device: str = "cpu") -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    report = trace_and_validate(model_factory, sample(), world_size=2, device=device)
    report.log_summary(logging.getLogger("validation"))
    if not report.ok:
        print(report.next_action)
        return 1

    # The spec is what a deployment needs beside the checkpoint.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bp_model_spec.json"
        report.spec.save(path)
        spec = MLIPSpec.load(path)
    assert spec == report.spec
    model = DistributedModel(model_factory(), spec=spec)
    out = model(Batch.from_atoms(sample()), {"energy", "forces", "stress"})
    print(f"with the spec from its file: energy {float(out['energy']):.6f} eV, {len(out['forces'])} forces, stress")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
