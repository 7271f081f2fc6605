"""Numbers of atoms: everybody's where they are computed with, this rank's where they lay out memory; see `ops`."""

from __future__ import annotations

import pytest
import torch

import ops
from nvdd.handlers.count import rows_per_system

count = lambda w: w.n_atoms_per_system
systems = lambda w: torch.arange(w.n_systems)
edges = lambda w: rows_per_system(w.batch[w.receivers], w.n_systems)

CASES = {
    "systems": {
        "division": lambda w: w.s / count(w) + w.sv.sum(1) / count(w).to(torch.float64),
        "mean energy": lambda w: w.zeros(w.n_systems).index_add(0, w.batch, w.x[:, 0]) / count(w).clamp(min=1),
        "unsqueezed": lambda w: w.sv / count(w).unsqueeze(-1) + w.sv * count(w)[:, None] - w.sv / count(w).view(-1, 1),
        "casts": lambda w: w.s * count(w).double().sqrt() + w.s * count(w).type_as(w.s) + w.s / count(w).float().double(),
        "numbers": lambda w: w.s * count(w).sum() + w.s * (count(w) > 3) + w.s * count(w).max() + count(w).to(w.s).mean(),
        "clone": lambda w: w.s * count(w).clone().detach().contiguous().reshape(-1).long(),
        "its shape": lambda w: w.s + torch.zeros_like(count(w)) + torch.ones_like(count(w)) + count(w).shape[0] + count(w).new_ones(3),
        "of one system": lambda w: w.sv / count(w)[0] + w.sv * count(w).select(0, 1),
        "itself": lambda w: count(w) + 0,
        "where": lambda w: torch.where(count(w) > 3, w.s, -w.s),
        "total": lambda w: w.s / int(count(w).sum()),
        "sums by repeated numbers of systems": lambda w: w.zeros(3, 3).index_add(0, systems(w).repeat_interleave(count(w)), w.x),
        "edges": lambda w: w.s / edges(w) + w.zeros(3, 3).index_add(0, systems(w).repeat_interleave(edges(w)), w.e).sum(1),
    },
    "atoms": {
        "gathered": lambda w: w.x / count(w)[w.batch][:, None] + w.x / count(w).index_select(0, w.batch).unsqueeze(1),
        "repeat_interleave": lambda w: w.x * w.s.repeat_interleave(count(w))[:, None],
        "repeat_interleave of a vector": lambda w: w.x * torch.repeat_interleave(w.sv, count(w), dim=0),
        "repeat_interleave with output_size": lambda w: w.x * torch.repeat_interleave(w.sv, repeats=count(w), dim=0, output_size=w.n),
        "repeat_interleave of a parameter": lambda w: w.x * w.table[:3].repeat_interleave(count(w), dim=0),
        "repeat_interleave by edges": lambda w: w.x + w.zeros(w.n, 3).index_add(
            0, w.receivers, w.e * w.sv.repeat_interleave(edges(w), 0)
        ),
        "other numbers than those of systems": lambda w: w.x * torch.tensor([1, 0, 2]).repeat_interleave(count(w))[:, None],
        "repeat_interleave of a sum": lambda w: w.x - (w.zeros(3, 3).index_add(0, w.batch, w.x) / count(w)[:, None]).repeat_interleave(count(w), 0),
        "over the number of all atoms": lambda w: w.x / count(w).sum() - w.x.sum(0) / count(w).sum(),
        "times the number of atoms of a system": lambda w: w.x * count(w).sum() + w.x * count(w).prod(),
    },
}  # fmt: skip

REFUSED = {
    "per-atom rows repeated": (lambda w: w.x.repeat_interleave(torch.ones(w.n, dtype=torch.int64), 0), "repeat_interleave"),
    "along another dimension": (lambda w: w.sv.repeat_interleave(count(w), 1), "repeat_interleave"),
    "cumulative sums": (lambda w: count(w).cumsum(0), "cumsum"),
}


@pytest.mark.parametrize("kind,name", [(kind, name) for kind in CASES for name in CASES[kind]])
def test_same_as_one_process(ranks, kind, name):
    ops.check(ranks, __file__, kind, name)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(ranks, name):
    ops.check_refused(ranks, __file__, name)


def _layout(comm, policy):
    part = ops.Part(comm, ops.POLICIES[policy])
    w = part.world()
    return count(w).tolist(), [int(count(w).select(0, 0)), part.meta.n_rows]


@pytest.mark.parametrize("world_size,policy", ops.SETUPS)
def test_lists_are_this_ranks(ranks, world_size, policy):
    """``tolist`` lays out memory: its sum is the number of rows here."""
    for layout, (first, n_rows) in ranks.run(world_size, _layout, policy):
        assert sum(layout) == n_rows
        assert first == 6  # a number computed with is everybody's
