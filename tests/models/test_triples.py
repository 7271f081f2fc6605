"""Pairs of edges at one atom, against a loop."""

from __future__ import annotations

import pytest
import torch

from nvdd.models.triples import pairs_at_atoms


@pytest.mark.parametrize("n_edges", (0, 1, 2, 40))
def test_pairs_at_atoms(n_edges):
    """Every ordered pair once, whatever the order of edges; atoms with one edge or none have no pair."""
    centre = torch.randint(0, 9, (n_edges,), generator=torch.Generator().manual_seed(n_edges))
    one, other = pairs_at_atoms(centre, 12)
    wanted = [(i, j) for i in range(n_edges) for j in range(n_edges) if i != j and centre[i] == centre[j]]
    assert sorted(zip(one.tolist(), other.tolist(), strict=True)) == wanted
    assert one.tolist() == sorted(one.tolist())
