"""Reading rows by index: each spelling against plain tensors, on 1 to 4 ranks; see `ops`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import ops

CASES = {
    "edges": {
        "x[senders]": lambda w: w.x[w.senders],
        "x[receivers]": lambda w: w.x[w.receivers],
        "x[senders, :]": lambda w: w.x[w.senders, :],
        "x[senders, 1]": lambda w: w.x[w.senders, 1],
        "x[senders, None, 1:]": lambda w: w.x[w.senders, None, 1:],
        "x[senders, ..., 0]": lambda w: w.v[w.senders, ..., 0],
        "index_select": lambda w: torch.index_select(w.x, 0, w.senders),
        "index_select keywords": lambda w: torch.index_select(input=w.x, dim=-2, index=w.senders),
        "method index_select, receivers": lambda w: w.v.index_select(0, w.receivers),
        "embedding": lambda w: F.embedding(w.senders, w.x),
        "embedding keywords": lambda w: F.embedding(input=w.receivers, weight=w.x),
        "gather expanded": lambda w: w.x.gather(0, w.senders[:, None].expand(-1, 3)),
        "gather expand_as": lambda w: torch.gather(w.x, -2, w.senders.view(-1, 1).expand_as(w.e)),
        "gather repeated": lambda w: torch.gather(w.x, 0, w.senders.unsqueeze(-1).repeat(1, 3)),
        "gather first columns": lambda w: torch.gather(w.x, 0, w.receivers.unsqueeze(-1).repeat(1, 2)),
        "take_along_dim": lambda w: torch.take_along_dim(w.x, w.senders[:, None], 0),
        "take_along_dim keyword": lambda w: w.x.take_along_dim(w.receivers[:, None].expand(-1, 3), dim=-2),
        "column 0 of neighbor_list": lambda w: w.x[w.neighbor_list[:, 0]] - w.x[w.neighbor_list[:, -1]],
        "unbind": lambda w: (lambda j, i: w.x[i] * w.x[j])(*w.edge_index),
        "one after another": lambda w: w.x[w.senders] * w.x[w.senders].sin() * w.v[w.senders].sum(-1),
        "after an in-place change": lambda w: w.x[w.senders] + w.x.mul_(2.0)[w.senders],
        "species of senders": lambda w: w.z[w.senders],
        "of a computed feature": lambda w: (w.x * 2).sin()[w.senders, 0],
        "first without a gradient": lambda w: _first_without_gradient(w),
        "detached": lambda w: w.x.detach()[w.senders] * w.x[w.senders],
        "system of a sender": lambda w: w.s[w.batch[w.senders]] * w.e[:, 0],
        "table by species of senders": lambda w: w.table[w.z[w.senders]],
        "table by two species": lambda w: torch.outer(w.table[:, 0], w.table[:, 1])[w.z[w.senders], w.z[w.receivers]],
        "a bool of the senders": lambda w: (w.x[:, 0] > 0)[w.senders],
        "a mask of edges": lambda w: torch.where((w.e[:, :1] > 0), w.x[w.senders], 0.0),
    },
    "edges 1": {
        "x[edge_index]": lambda w: w.x[w.edge_index],
        "embedding of the pair": lambda w: F.embedding(w.edge_index, w.x),
    },
    "atoms": {
        "s[batch]": lambda w: w.s[w.batch],
        "sv[batch]": lambda w: w.sv[w.batch] * w.x,
        "sv[batch, 1]": lambda w: w.sv[w.batch, 1],
        "sv.index_select": lambda w: w.sv.index_select(-2, w.batch) * w.x,
        "s.index_select(-1)": lambda w: w.s.index_select(-1, w.batch),
        "s.gather": lambda w: w.s.gather(0, w.batch),
        "sv.gather": lambda w: w.sv.gather(0, w.batch[:, None].expand(-1, 3)),
        "take_along_dim by system": lambda w: w.sv.take_along_dim(w.batch[:, None], 0),
        "embedding by system": lambda w: F.embedding(w.batch, w.sv),
        "a parameter by system": lambda w: w.table[w.batch] * w.x,
        "squares of a system value": lambda w: (w.s**2)[w.batch] * w.s[w.batch],
        "table[z]": lambda w: w.table[w.z],
        "table[z, :2]": lambda w: w.table[w.z, :2] * w.x[:, :2],
        "embedding of species": lambda w: F.embedding(w.z, w.table) * w.x,
        "table.index_select": lambda w: w.table.index_select(-2, w.z),
        "a per-system table by species": lambda w: w.sv[w.z.clamp(max=2)] * w.x,
        "atoms of its system": lambda w: w.x / w.n_atoms_per_system[w.batch][:, None],
    },
}  # fmt: skip


def _first_without_gradient(w):
    with torch.no_grad():
        largest = w.x[w.senders].abs()
    return w.x[w.senders] * largest


REFUSED = {
    "a feature dimension by senders": (lambda w: w.x.T[:, w.receivers], "getitem"),
    "index_select along columns": (lambda w: w.x.T.index_select(1, w.receivers), "index_select"),
    "rows of edges by receivers": (lambda w: w.e[w.receivers], "getitem"),
    "per-system rows by receivers": (lambda w: w.sv[w.receivers % 3], "remainder"),
    "per-atom rows by system": (lambda w: w.x[w.batch], "getitem"),
    "senders with other indices": (lambda w: w.x[w.senders, torch.zeros(w.n_edges, dtype=torch.int64)], "getitem"),
    "atoms by species": (lambda w: w.x[w.z], "getitem"),
    "one atom": (lambda w: w.x[0], "getitem"),
    "the first atoms": (lambda w: w.x[:2], "getitem"),
    "the last atoms": (lambda w: w.x[-2:], "getitem"),
    "every second atom": (lambda w: w.x[::2], "getitem"),
    "atoms by a list": (lambda w: w.x[[0]], "getitem"),
    "atoms by a plain mask": (lambda w: w.x[torch.ones(w.n, dtype=torch.bool)], "getitem"),
    "atoms by a mask": (lambda w: w.x[w.x[:, 0] > 0], "getitem"),
    "select": (lambda w: w.x.select(0, 0), "select"),
    "narrow": (lambda w: w.x.narrow(0, 0, 1), "narrow"),
    "index_select of atoms": (lambda w: w.x.index_select(0, torch.tensor([0])), "index_select"),
}


@pytest.mark.parametrize("kind,name", [(kind, name) for kind in CASES for name in CASES[kind]])
def test_same_as_one_process(ranks, kind, name):
    ops.check(ranks, __file__, kind, name)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(ranks, name):
    ops.check_refused(ranks, __file__, name)
