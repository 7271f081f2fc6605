"""Capacities that only grow, and fill that adds nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import parity
from builders import random_aimnet2
from nvdd import Batch, COOPadder, DenseBatchPadder, DensePadder, GraphPadder, InputError, resolve_cap
from nvdd.neighbors import attach_neighbors
from nvdd.padding import filled, padder_at


class TestResolveCap:
    def test_grows_with_slack_to_a_multiple(self):
        assert resolve_cap(1000, slack=0.1, multiple=64) == 1152
        assert resolve_cap(64, slack=0.0, multiple=64) == 64

    def test_stays_while_it_suffices(self):
        assert resolve_cap(10, 1000) == 1000
        assert resolve_cap(1000, 1000) == 1000
        assert resolve_cap(0, 1000) == 1000
        assert resolve_cap(1001, 1000, slack=0.1, multiple=2) == 1302, "three times the slack where it was too small"

    @pytest.mark.parametrize("count", (0, 1, 2))
    def test_is_never_a_size_that_torch_compiles_apart(self, count):
        assert resolve_cap(count, multiple=2) >= 2

    @pytest.mark.parametrize("arguments", ((-1, 0), (1, -1)))
    def test_negative_numbers(self, arguments):
        with pytest.raises(InputError, match="must not be negative"):
            resolve_cap(*arguments)

    @pytest.mark.parametrize("options", ({"slack": -0.1}, {"multiple": 1}))
    def test_bad_rules(self, options):
        with pytest.raises(InputError, match="slack must be at least 0 and multiple at least 2"):
            resolve_cap(1, **options)

    @pytest.mark.parametrize("world_size", (2, 3))
    def test_ranks_agree_on_the_largest(self, ranks, world_size):
        found = ranks.run(world_size, caps_on_rank)
        assert len({tuple(caps) for caps in found}) == 1
        first, second, third = found[0]
        assert first >= 100 * world_size and second == first and third >= 1000


def caps_on_rank(comm) -> list[int]:
    first = resolve_cap(100 * (comm.rank + 1), comm=comm)
    second = resolve_cap(3, first if comm.rank == 0 else 2, comm=comm)  # a rank that joins with a smaller one
    return [first, second, resolve_cap(1000 if comm.rank == 1 else 1, second, comm=comm)]


def test_more_rows_than_capacity():
    with pytest.raises(InputError, match="5 rows do not fit in a capacity of 4"):
        filled(torch.zeros(5, 3), 4, 0)


def lj_energy(batch: Batch) -> torch.Tensor:
    return parity.wrapper("lj")(batch)["energies"]


def test_edges_that_fill_up_add_exactly_nothing():
    """The model by itself on a padded batch: energies and gradients of the real atoms are bit for bit the same."""
    batch = attach_neighbors(Batch.from_atoms(parity.structure("argon")), 8.5, parity.wrapper("lj").edge_layout)
    n, edges = batch.n_atoms, batch.neighbor_list.shape[0]
    vectors = batch.edge_vectors.detach().requires_grad_()
    layout = parity.wrapper("lj").edge_layout
    pair = batch.neighbor_list.T if layout.sender_column == 1 else batch.neighbor_list.T.flip(0)
    graph = {"pair": pair, "vectors": vectors, "shift": batch.neighbor_list_shifts}
    padder = COOPadder(cutoff=8.5)
    padded = padder.pad(graph, first=n, last=n + 1)
    assert padder.cap >= edges and padded["pair"].shape == (2, padder.cap)

    def evaluate(rows: int, graph: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = torch.cat([batch.atomic_numbers, batch.atomic_numbers[:1].expand(rows - n)])
        ends = graph["pair"] if layout.sender_column == 1 else graph["pair"].flip(0)
        given = Batch(
            positions=torch.zeros(rows, 3, dtype=torch.float64), atomic_numbers=numbers, cell=batch.cell, pbc=batch.pbc,
            neighbor_list=ends.T, neighbor_list_shifts=graph["shift"], edge_vectors=graph["vectors"], edge_layout=layout,
        )  # fmt: skip
        energies = lj_energy(given)[:n]
        return energies.detach(), torch.autograd.grad(energies.sum(), vectors)[0]

    (plain, gradient), (filled_up, same) = evaluate(n, graph), evaluate(n + 2, padded)
    assert torch.equal(plain, filled_up) and torch.equal(gradient, same)


def test_a_matrix_of_neighbours_keeps_its_width():
    padder = DensePadder(slack=0.0, multiple=8)
    matrix = torch.tensor([[1, 2], [0, 3], [0, 3], [3, 3]])
    first = padder.pad({"neighbor_matrix": matrix, "neighbor_matrix_shifts": torch.ones(4, 2, 3)}, 3, 3)
    assert first["neighbor_matrix"].shape == (4, 8) and torch.equal(first["neighbor_matrix"][:, :2], matrix)
    assert (first["neighbor_matrix"][:, 2:] == 3).all()
    assert first["neighbor_matrix_shifts"].shape == (4, 8, 3) and not first["neighbor_matrix_shifts"][:, 2:].any()
    again = padder.pad({"neighbor_matrix": matrix[:, :1]}, 3, 3)
    assert again["neighbor_matrix"].shape == (4, 8)


def test_a_padded_batch_gives_the_numbers_of_the_batch():
    """AIMNet2's own model on its dense layout, of which the last row stands for no neighbour."""
    atoms = parity.structure("silane-like")
    batch = Batch.from_atoms(atoms)
    n = batch.n_atoms
    distance = (batch.positions[:, None] - batch.positions[None]).norm(dim=2) + 100.0 * torch.eye(n)
    near = distance < 5.0
    width = int(near.sum(1).max())
    order = torch.argsort(~near, dim=1, stable=True)[:, :width]
    matrix = torch.where(near.gather(1, order), order, torch.full_like(order, n))
    padder = DenseBatchPadder(slack=0.5)
    padded, filled_matrix, counts = padder.pad_batch(batch, matrix)
    assert padder.rows > n and counts.sum() == n and counts[:n].all()
    assert filled_matrix.shape == (padder.rows, padder.cap)

    model = random_aimnet2()

    def energy(batch: Batch, matrix: torch.Tensor, system: torch.Tensor) -> torch.Tensor:
        rows = len(matrix)
        data = {
            "coord": batch.positions, "numbers": batch.atomic_numbers, "charge": torch.zeros(2, dtype=torch.float64),
            "mult": torch.ones(2, dtype=torch.float64), "nbmat": matrix, "mol_idx": system,
        }  # fmt: skip
        assert len(system) == rows
        return model(data)["energy"]

    # what fills up is a system of its own, as is the row that a model by itself adds
    alone = Batch(
        positions=torch.cat([batch.positions, batch.positions[:1]]), cell=batch.cell, pbc=batch.pbc,
        atomic_numbers=torch.cat([batch.atomic_numbers, batch.atomic_numbers.new_zeros(1)]),
    )  # fmt: skip
    matrix = torch.cat([matrix, torch.full((1, width), n)])
    expected = energy(alone, matrix, torch.tensor([0] * n + [1]))[0]
    found = energy(padded, filled_matrix, (~counts).long())[0]
    np.testing.assert_allclose(found.detach(), expected.detach(), rtol=1e-13)
    again, wider, _ = padder.pad_batch(batch, matrix[:n, :2])
    assert again.n_atoms == padded.n_atoms and wider.shape == filled_matrix.shape


class TestPadderAt:
    def test_default(self):
        padder = padder_at(None, 5.0)
        assert type(padder) is COOPadder and padder.cutoff == 5.0 and isinstance(padder, GraphPadder)

    def test_one_of_the_users(self):
        assert padder_at("nvdd:COOPadder", 4.0).cutoff == 4.0

    def test_of_matrices(self):
        with pytest.raises(InputError, match=r"no subclass of nvdd\.COOPadder"):
            padder_at("nvdd:DensePadder", 4.0)

    def test_the_fill_is_inside_the_cutoff_and_at_no_special_direction(self):
        vector = COOPadder(cutoff=6.0).fill_vector(torch.zeros(1, dtype=torch.float64))
        assert 1.0 < vector.norm() < 6.0 and vector.abs().min() > 0
