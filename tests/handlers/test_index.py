"""Taking edge indices apart, reshaping, casting and masking them; see `ops`."""

from __future__ import annotations

import pytest
import torch

import ops


def _message(w, senders, receivers):
    return w.zeros(w.n, 3).index_add(0, receivers, w.x[senders].sin() * w.e)


def _swapped(w, pair):
    """The pair the other way round: its first row is a receiver now, its second a sender."""
    return _message(w, pair[1], pair[0])


CASES = {
    "atoms": {
        "rows": lambda w: _message(w, w.edge_index[0], w.edge_index[1]),
        "negative rows": lambda w: _message(w, w.edge_index[-2], w.edge_index[-1]),
        "rows with slices": lambda w: _message(w, w.edge_index[0, :], w.edge_index[1, ...]),
        "columns": lambda w: _message(w, w.neighbor_list[:, 1], w.neighbor_list[..., 0]),
        "unpacking": lambda w: _message(w, *w.edge_index),
        "unbind": lambda w: _message(w, *w.neighbor_list.unbind(1)[::-1]),
        "unbind -1": lambda w: _message(w, *torch.unbind(w.neighbor_list.flip(-1), dim=-1)),
        "select": lambda w: _message(w, w.edge_index.select(0, 0), torch.select(w.neighbor_list, 1, 0)),
        "T": lambda w: _message(w, w.neighbor_list.T[1], w.neighbor_list.T[0]),
        "t": lambda w: _message(w, *w.edge_index.t().t()),
        "transpose": lambda w: _message(w, *w.neighbor_list.transpose(0, 1).transpose(1, 0).permute(1, 0).flip(0)),
        "flip": lambda w: _swapped(w, w.edge_index.flip(0)),
        "flip dims": lambda w: _swapped(w, torch.flip(w.edge_index, dims=(0,)).flip([0]).flip(-2)),
        "flipud": lambda w: _swapped(w, w.edge_index.flipud()),
        "casts": lambda w: _message(w, *w.edge_index.to(torch.int64).long().contiguous().clone().detach()),
        "int32": lambda w: _message(w, w.senders.int().long(), w.receivers.to(torch.int32).to(torch.int64)),
        "views": lambda w: _message(w, w.senders.view(-1).reshape(-1), w.receivers[:, None].squeeze(1).flatten()),
        "slices of all": lambda w: _message(w, w.senders[:], w.receivers[: w.n_edges]),
        "stack": lambda w: _message(w, *torch.stack([w.senders, w.receivers])),
        "stack dim 1": lambda w: _swapped(w, torch.stack((w.receivers, w.senders), dim=-1).T),
        "a mask of edges": lambda w: _masked(w, w.edge_index[:, w.e[:, 0] > 0], w.e[w.e[:, 0] > 0]),
        "a mask of a list": lambda w: _masked(w, w.neighbor_list[w.e[:, 0] > 0].T.flip(0), w.e[w.e[:, 0] > 0, :]),
        "masks of each": lambda w: _masked(w, (w.senders[w.e[:, 1] < 0], w.receivers[w.e[:, 1] < 0]), w.e[w.e[:, 1] < 0]),
        "a mask that keeps none": lambda w: w.x + _masked(w, w.edge_index[:, w.e[:, 0] > 99], w.e[w.e[:, 0] > 99]),
        "cat of senders": lambda w: w.zeros(w.n, 3).index_add(0, torch.cat([w.senders, w.senders]), torch.cat([w.e, w.e**2])),
        "lengths": lambda w: w.x * w.edge_index.shape[0] + w.x.new_zeros(w.senders.numel()).dim() + 0 * len(w.receivers) + w.edge_index.dim(),
        "like an index": lambda w: w.x * w.x.new_zeros(w.senders.shape).dim(),
    },
}  # fmt: skip


def _masked(w, pair, features):
    return w.zeros(w.n, 3).index_add(0, pair[1], w.x[pair[0]] * features)


REFUSED = {
    "single edge": (lambda w: w.senders[0], "getitem"),
    "single edge of the pair": (lambda w: w.edge_index[:, 0], "getitem"),
    "single entry": (lambda w: w.edge_index[0, 0], "getitem"),
    "one row of the list": (lambda w: w.neighbor_list[0], "getitem"),
    "iteration over edges": (lambda w: [row for row in w.neighbor_list], "unbind"),
    "first edges": (lambda w: w.edge_index[:, :5], "getitem"),
    "first half of the edges": (lambda w: w.edge_index[:, : w.n_edges // 2 + 1] if w.n_edges > 1 else w.edge_index[:, :5], "getitem"),
    "every second edge": (lambda w: w.senders[::2], "getitem"),
    "first senders": (lambda w: w.senders[:3], "getitem"),
    "edges by a plain list": (lambda w: w.senders[torch.tensor([0])], "getitem"),
    "edges of the pair by a plain list": (lambda w: w.edge_index[:, torch.tensor([0])], "getitem"),
    "edges by a plain mask": (lambda w: w.edge_index[:, torch.arange(w.n_edges) < 4], "getitem"),
    "select of an edge": (lambda w: w.edge_index.select(1, 0), "select"),
    "a flattened pair": (lambda w: w.edge_index.view(-1), "view"),
    "reversed edges": (lambda w: w.edge_index.flip(1), "flip"),
    "reversed both ways": (lambda w: w.edge_index.flip(0, 1), "flip"),
    "reversed senders": (lambda w: w.senders.flip(0), "flip"),
    "both directions": (lambda w: torch.cat([w.senders, w.receivers]), "cat"),
    "both directions of the pair": (lambda w: torch.cat([w.edge_index, w.edge_index.flip(0)], 1), "cat"),
    "with plain rows": (lambda w: torch.cat([w.senders, torch.zeros(1, dtype=torch.int64)]), "cat"),
    "stack of senders": (lambda w: torch.stack([w.senders, w.senders]), "stack"),
    "comparison with the number of atoms": (lambda w: w.edge_index < w.n, "lt"),
    "self loops": (lambda w: w.edge_index[0] != w.edge_index[1], "ne"),
    "half a list": (lambda w: w.senders < w.receivers, "lt"),
    "arithmetic": (lambda w: w.edge_index + w.n, "add"),
    "largest row": (lambda w: w.edge_index.max(), "max"),
    "number of rows": (lambda w: int(w.receivers.max()) + 1, "max"),
    "bincount": (lambda w: torch.bincount(w.receivers, minlength=w.n), "bincount"),
    "sorting by receiver": (lambda w: w.receivers.argsort(), "argsort"),
    "as numpy": (lambda w: w.senders.numpy(), "numpy"),
    "zeros like an index": (lambda w: torch.zeros_like(w.senders), "zeros_like"),
    "searchsorted": (lambda w: torch.searchsorted(w.receivers, torch.arange(w.n)), "searchsorted"),
    "one_hot": (lambda w: torch.nn.functional.one_hot(w.receivers, 50), "one_hot"),
    "as floats": (lambda w: w.receivers.double() * 2, "mul"),
}  # fmt: skip


@pytest.mark.parametrize("kind,name", [(kind, name) for kind in CASES for name in CASES[kind]])
def test_same_as_one_process(ranks, kind, name):
    ops.check(ranks, __file__, kind, name)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(ranks, name):
    ops.check_refused(ranks, __file__, name)
