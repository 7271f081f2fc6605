"""Moving rows to ranks, and halos of a fixed width without a model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ase.build import bulk

from nvdd import Batch, ParticleHaloConfig, SpatialPartitioner, reshard_by_destination
from nvdd.communicator import Communicator
from nvdd.exchange import fetch

N = 17


def where(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rank that has each row, rank that it goes to; the last rank has none and gets some, rank 0 keeps some."""
    rng = np.random.default_rng(3)
    has = torch.from_numpy(rng.integers(0, max(1, size - 1), N))
    return has, torch.from_numpy(rng.integers(0, size, N))


def whole() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.arange(N * 2, dtype=torch.float64).reshape(N, 2) / 7
    return x, torch.arange(N)


def move(comm: Communicator):
    has, goes = where(comm.size)
    mine = (has == comm.rank).nonzero().squeeze(1)
    x, ids = whole()
    leaf = x[mine].requires_grad_(True)
    moved = reshard_by_destination({"x": leaf**2, "ids": ids[mine]}, goes[mine], comm)
    weights = torch.cos(moved["ids"].to(torch.float64)).unsqueeze(1)
    (first,) = torch.autograd.grad((weights * moved["x"] ** 2).sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad((first * x[mine].sin()).sum(), leaf)
    bad = {}
    for name, (rows, to) in {
        "rank": (leaf, torch.full((len(mine),), comm.size)), "length": (leaf, goes[:1].expand(len(mine) + 1)),
    }.items():  # fmt: skip
        try:
            if len(mine):
                reshard_by_destination(rows, to, comm)
        except ValueError as error:
            bad[name] = str(error)
    return moved["ids"], moved["x"].detach(), mine, first.detach(), second, bad


@pytest.mark.parametrize("size", [1, 2, 3])
def test_rows_move_and_gradients_come_back(ranks, size):
    has, goes = where(size)
    x, _ = whole()
    leaf = x.clone().requires_grad_(True)
    weights = torch.cos(torch.arange(N, dtype=torch.float64)).unsqueeze(1)
    (first,) = torch.autograd.grad((weights * (leaf**2) ** 2).sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad((first * x.sin()).sum(), leaf)
    for rank, (ids, moved, mine, one, two, bad) in enumerate(ranks.run(size, move)):
        order = [i for source in range(size) for i in range(N) if has[i] == source and goes[i] == rank]
        assert ids.tolist() == order
        torch.testing.assert_close(moved, x[order] ** 2, rtol=1e-14, atol=0)
        torch.testing.assert_close(one, first.detach()[mine], rtol=1e-13, atol=1e-15)
        torch.testing.assert_close(two, second[mine], rtol=1e-13, atol=1e-15)
        if len(mine):
            assert f"where there are the ranks 0 to {size - 1}" in bad["rank"]
            assert "one destination is needed for each row" in bad["length"]


WIDTH = 3.1


def crystal() -> Batch:
    atoms = bulk("Cu", cubic=True).repeat((3, 2, 1))
    atoms.rattle(0.1, seed=2)
    return Batch.from_atoms(atoms)


def halo(comm: Communicator):
    batch = crystal()
    config = ParticleHaloConfig(WIDTH, SpatialPartitioner(comm.size), comm)
    found = config.build(batch.positions, batch.cell[0], batch.pbc[0])
    padded = fetch(batch.positions[found.owned], found.plan)
    assert torch.equal(padded, batch.positions[found.rows])
    return found.owned, found.rows, found.neighbor_ranks


@pytest.mark.parametrize("size", [1, 2, 3])
def test_halo_of_a_width(ranks, size):
    batch = crystal()
    x, cell = batch.positions.numpy(), batch.cell[0].numpy()
    images = np.array([[i, j, k] for i in (-1, 0, 1) for j in (-1, 0, 1) for k in (-1, 0, 1)]) @ cell
    nearest = np.linalg.norm(x[:, None, None] - x[None, :, None] + images, axis=-1).min(-1)
    parts = ranks.run(size, halo)
    assert sorted(np.concatenate([owned for owned, _, _ in parts])) == list(range(len(x)))
    for owned, rows, neighbours in parts:
        near = (nearest[owned] < WIDTH).any(0)
        near[owned] = False
        assert sorted(rows[len(owned) :].tolist()) == np.flatnonzero(near).tolist()
        assert len(neighbours) == size - 1


def test_a_width_that_is_none():
    with pytest.raises(ValueError, match=r"ghost_width must be positive \(A\), got 0"):
        ParticleHaloConfig(0, SpatialPartitioner(1))
