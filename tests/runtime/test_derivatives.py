"""Second derivatives and training over ranks against one process: relative 1e-9, to all orders by the same adjoints."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import parity
import toys
from nvdd import Batch, DistributedModel, DomainConfig, ForceStrategy
from nvdd.communicator import Communicator
from nvdd.neighbors import attach_neighbors

# (model, structure): a nonlinear sum over each system in each layer, ties and softmax over ranks, parameters that act
# on what all ranks have alike, functions of positions and volume, an e3nn MACE
MODELS = [
    ("charge equilibration", "several"), ("charge equilibration", "pair"), ("edges attended by both ends", "several"), ("attention over senders, from -inf", "several"),
    ("statistics, std", "slab"), ("statistics, amax by system", "several"), ("statistics, prod", "gas"),
    ("energy only, network", "several"), ("energy only, network", "pair"), ("energy share", "several"),
    ("positions", "several"), ("own vectors, einsum, sender first", "slab"), ("unguarded", "pair"), ("mace", "quartz unit"),
]  # fmt: skip


SMALL_MACE = {"hidden": "4x0e+4x1o", "n_layers": 2, "l_max": 2}


def model_of(name: str) -> Any:
    """A model whose parameters may be changed."""
    if name == "mace":
        from builders import random_mace
        from nvdd.models.mace import MACEWrapper

        return MACEWrapper(random_mace(**SMALL_MACE))
    return toys.toy(name)


def batch_of(structure: str) -> Batch:
    if structure in toys.STRUCTURES:
        return toys.batch_of(structure)
    return Batch.from_atoms(parity.structure(structure))


def direction(shape: tuple[int, ...], phase: float) -> Tensor:
    """Fixed numbers, the same in every process."""
    return torch.sin(torch.arange(int(np.prod(shape)), dtype=torch.float64) * 1.7 + phase).reshape(shape)


def plain_outputs(model: Any, batch: Batch, create_graph: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Positions, energy, forces and virial in one process, with their graphs."""
    positions = batch.positions.clone().requires_grad_(True)
    strain = torch.zeros(batch.n_systems, 3, 3, dtype=torch.float64, requires_grad=True)
    symmetric = 0.5 * (strain + strain.transpose(1, 2))
    attach_neighbors(batch, model.model_config.neighbor_config.cutoff, model.edge_layout)
    batch.positions = positions + torch.einsum("ni,nij->nj", positions, symmetric[batch.batch])
    batch.cell = batch.cell + batch.cell @ symmetric
    raw = model(batch)
    if "energy" in raw:
        energy = raw["energy"]
    else:
        energy = torch.zeros(batch.n_systems, dtype=torch.float64).index_add(0, batch.batch, raw["energies"])
    gradient, virial = torch.autograd.grad(energy.sum(), (positions, strain), create_graph=create_graph)
    return positions, energy, -gradient, virial


def distributed_outputs(comm: Communicator, model: Any, policy: str, batch: Batch) -> Any:
    spec = toys.replace_policy(model.distribution_spec(), policy)
    distributed = DistributedModel(model, DomainConfig(mesh=comm, skin=0.4), spec=spec)
    return distributed(batch, {"energy", "forces", "virial"}, create_graph=True)


# --- Hessian-vector products ------------------------------------------------------------------------------------


def products(energy: Tensor, forces: Tensor, virial: Tensor, positions: Tensor, v: Tensor) -> dict[str, Tensor]:
    """Derivatives by positions of energy, of forces along v, and of the virial along another direction."""
    grad = lambda value: torch.autograd.grad(value, positions, retain_graph=True)[0].numpy()
    return {
        "energy": grad((energy * direction(energy.shape, 0.1)).sum()),
        "hessian": grad((forces * v).sum()),
        "virial": grad((virial * direction(virial.shape, 0.3)).sum()),
    }


def products_on_rank(comm: Communicator, models: list[tuple[str, str]], policy: str) -> list[dict[str, np.ndarray]]:
    found = []
    for name, structure in models:
        batch = batch_of(structure)
        batch.positions.requires_grad_(True)
        out = distributed_outputs(comm, model_of(name), policy, batch)
        v = direction(tuple(batch.positions.shape), 0.0)[out.ids]
        found.append(products(out["energy"], out["forces"], out["virial"], batch.positions, v))
    return found


@pytest.mark.parametrize("policy", toys.POLICIES)
@pytest.mark.parametrize("world_size", (2, 3))
def test_hessian_vector_products(ranks, world_size, policy):
    """Every rank gets the whole product, since every rank has all positions."""
    parts = ranks.run(world_size, products_on_rank, MODELS, policy)
    for k, (name, structure) in enumerate(MODELS):
        batch = batch_of(structure)
        positions, energy, forces, virial = plain_outputs(model_of(name), batch)
        expected = products(energy, forces, virial, positions, direction(tuple(positions.shape), 0.0))
        assert np.abs(expected["hessian"]).max() > 1e-6, f"{name}: without a second derivative nothing is tested"
        for part in parts:
            for what, value in expected.items():
                assert_close(part[k][what], value, 1e-9, f"{name}, {structure}: {what}")


def test_hessian_by_finite_differences(ranks):
    """Independent of autograd's second order: forces at displaced positions."""
    name, structure = "charge equilibration", "several"
    v, h = direction(tuple(batch_of(structure).positions.shape), 0.0), 1e-4
    numeric = 0.0
    for steps, weight in ((1, 8 / 12), (-1, -8 / 12), (2, -1 / 12), (-2, 1 / 12)):
        batch = batch_of(structure)
        batch.positions += steps * h * v
        numeric += weight / h * plain_outputs(model_of(name), batch, create_graph=False)[2].detach().numpy()
    for part in ranks.run(2, products_on_rank, [(name, structure)], "halo_fetch"):
        assert_close(part[0]["hessian"], numeric, 1e-8, "finite differences")


def test_hessian_of_mace_itself(ranks):
    """Against the Hessian that mace-torch computes, row by row, without nvdd."""
    from mace.calculators import MACECalculator

    from builders import random_mace

    atoms = parity.structure("quartz unit")
    calculator = MACECalculator(models=random_mace(**SMALL_MACE), device="cpu", default_dtype="float64")
    hessian = calculator.get_hessian(atoms).reshape(3 * len(atoms), 3 * len(atoms))
    v = direction((len(atoms), 3), 0.0)
    expected = -(hessian @ v.numpy().reshape(-1)).reshape(-1, 3)
    for part in ranks.run(3, products_on_rank, [("mace", "quartz unit")], "halo_fetch"):
        assert_close(part[0]["hessian"], expected, 1e-9, "MACECalculator.get_hessian")


# --- training ---------------------------------------------------------------------------------------------------


def loss_of(energy: Tensor, forces: Tensor, virial: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """What all ranks have alike, and this rank's share."""
    return (energy - 0.3).square().sum() + 0.1 * (virial - 0.2).square().sum(), (forces - target).square().sum()


def train_on_rank(comm: Communicator, models: list[tuple[str, str]], policy: str) -> list[dict[str, Any]]:
    """Two steps of an optimiser; gradients of parameters are summed over ranks as a DDP hook would."""
    found = []
    for name, structure in models:
        model = fresh(name)
        optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
        losses, gradients = [], []
        for _ in range(2):
            batch = batch_of(structure)
            out = distributed_outputs(comm, model, policy, batch)
            alike, mine = loss_of(
                out["energy"], out["forces"], out["virial"], direction((batch.n_atoms, 3), 0.5)[out.ids]
            )
            optimiser.zero_grad()
            (alike + mine).backward()
            for p in model.parameters():
                p.grad = comm.all_reduce(torch.zeros_like(p) if p.grad is None else p.grad, "sum", "gradients")
            gradients.append([p.grad.numpy().copy() for p in model.parameters()])
            losses.append(float(alike.detach() + comm.all_reduce(mine.detach())))
            optimiser.step()
        found.append({"losses": losses, "gradients": gradients, "weights": weights(model)})
    return found


def train_plain(name: str, structure: str) -> dict[str, Any]:
    model = fresh(name)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses, gradients = [], []
    for _ in range(2):
        batch = batch_of(structure)
        _, energy, forces, virial = plain_outputs(model, batch)
        loss = sum(loss_of(energy, forces, virial, direction((batch.n_atoms, 3), 0.5)))
        optimiser.zero_grad()
        loss.backward()
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        gradients.append([p.grad.numpy().copy() for p in model.parameters()])
        losses.append(float(loss.detach()))
        optimiser.step()
    return {"losses": losses, "gradients": gradients, "weights": weights(model)}


def fresh(name: str) -> Any:
    """A model of its own, with the weights that it starts with."""
    if name == "mace":
        import copy

        return copy.deepcopy(model_of(name)).requires_grad_(True)
    return {**toys.TOYS, **toys.ONLY_WITH_NEIGHBOURS}[name]()


def weights(model: Any) -> list[np.ndarray]:
    return [p.detach().numpy().copy() for p in model.parameters()]


@pytest.mark.parametrize("policy", toys.POLICIES)
@pytest.mark.parametrize("world_size", (2, 3))
def test_training_step(ranks, world_size, policy):
    """Gradients of all parameters, and the parameters after the steps."""
    models = [m for m in MODELS if m != ("unguarded", "pair")]  # a phantom's 0 * inf is NaN in weights: see the docs
    parts = ranks.run(world_size, train_on_rank, models, policy)
    for k, (name, structure) in enumerate(models):
        expected = train_plain(name, structure)
        label = f"{name}, {structure}"
        assert expected["losses"][1] != expected["losses"][0]
        for part in parts:
            np.testing.assert_allclose(part[k]["losses"], expected["losses"], rtol=1e-10, err_msg=label)
            for step in range(2):
                scale = max(np.abs(g).max() for g in expected["gradients"][step])
                for found, value in zip(part[k]["gradients"][step], expected["gradients"][step], strict=True):
                    assert np.abs(found - value).max() <= 1e-9 * scale, f"{label}: gradient in step {step}"
            for found, value, before in zip(part[k]["weights"], expected["weights"], weights(fresh(name)), strict=True):
                assert_close(found - before, value - before, 1e-5, f"{label}: change of the weights")


def assert_close(found: np.ndarray, expected: np.ndarray, relative: float, label: str) -> None:
    scale = np.abs(expected).max()
    error = np.abs(found - expected).max()
    assert error <= relative * scale + 1e-13, f"{label}: differ by {error}, largest {scale}"


def test_strategies_are_covered():
    """Both leaves: edge vectors and positions."""
    found = {model_of(name).distribution_spec().force_strategy for name, _ in MODELS}
    assert {ForceStrategy.EDGE_VECTORS, ForceStrategy.POSITIONS} <= found
