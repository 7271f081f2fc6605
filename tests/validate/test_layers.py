"""The first module that differs, in atom and edge order."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from nvdd.validate.layers import LayerOutput, first_divergence, record_layers

EDGES = np.array([[0, 1, 0, 0, 0], [1, 0, 0, 0, 0], [1, 2, 0, 0, 0], [2, 1, 0, 0, 0], [3, 2, 0, 0, 0], [2, 3, 0, 0, 0]])
IDS = [np.array([0, 2]), np.array([1, 3])]  # no contiguous blocks
PARTS = [np.flatnonzero(np.isin(EDGES[:, 0], ids))[::-1] for ids in IDS]
ATOMS, ON_EDGES = np.arange(8.0).reshape(4, 2), np.arange(6.0).reshape(6, 1) + 1


def ranks(atoms=ATOMS, edges=ON_EDGES, names=("a", "b")):
    return [
        (ids, EDGES[part], [LayerOutput(names[0], "atoms", atoms[ids]), LayerOutput(names[1], "edges", edges[part])])
        for ids, part in zip(IDS, PARTS, strict=True)
    ]


REFERENCE = [LayerOutput("a", "", ATOMS), LayerOutput("b", "", ON_EDGES)]


def test_equal_whatever_the_order():
    assert first_divergence(REFERENCE, EDGES, ranks(), 1e-9) is None


def test_names_module_and_rows():
    wrong = ON_EDGES.copy()
    wrong[3] += 1e-3
    found = first_divergence(REFERENCE, EDGES, ranks(edges=wrong), 1e-9)
    assert found.module == "b" and "1 of 6 rows of edges (3)" in str(found) and found.crossing
    wrong = ATOMS.copy()
    wrong[2, 1] = np.nan
    assert first_divergence(REFERENCE, EDGES, ranks(atoms=wrong), 1e-9).module == "a"


def test_another_order_of_calls():
    assert "calls c" in str(first_divergence(REFERENCE, EDGES, ranks(names=("a", "c")), 1e-9))


def test_records_each_call():
    model = nn.Sequential(nn.Linear(2, 3), nn.SiLU())
    with record_layers(model) as records:
        model(torch.ones(4, 2))
        model(torch.ones(4, 2))
    assert [r.name for r in records] == ["0", "1", "0 (2)", "1 (2)"]
    n = len(records)
    model(torch.ones(4, 2))
    assert len(records) == n
