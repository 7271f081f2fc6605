"""Reshapes, reductions, norms and picks along other dimensions than rows; see `ops`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ops


@torch.no_grad()
def _network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(3, 8), nn.SiLU(), nn.LayerNorm(8), nn.Dropout(0.5), nn.Linear(8, 3), nn.BatchNorm1d(3)
    ).double().eval()


NETWORK = _network()

CASES = {
    "atoms": {
        "view": lambda w: w.v.view(-1, 6).reshape(w.n, 2, 3).flatten(1),
        "view -1": lambda w: w.x.view(w.n, -1, 1).squeeze(-1),
        "reshape to more": lambda w: w.x.reshape(-1, 1, 3, 1),
        "unflatten": lambda w: w.v.flatten(-2).unflatten(1, (2, 3)),
        "view_as plain": lambda w: w.v.flatten(1)[:, :3].view_as(torch.zeros(w.n, 3)),
        "unsqueeze and squeeze": lambda w: w.x.unsqueeze(-1).unsqueeze(1).squeeze(3).squeeze(1),
        "None": lambda w: w.x[:, None][..., None],
        "expand": lambda w: w.x.unsqueeze(1).expand(-1, 4, -1) * w.x[:, :1, None],
        "expand_as": lambda w: w.x[:, :1].expand_as(w.x) + w.s[w.batch][:, None].expand(w.n, 3),
        "plain expand_as rows": lambda w: w.table[:1].expand_as(w.x) * w.x,
        "system expand_as rows": lambda w: w.sv.sum(0).expand_as(w.x) * w.x,
        "repeat features": lambda w: w.x.repeat(1, 2) + w.x[:, :1].repeat(1, 6),
        "repeat_interleave features": lambda w: w.x.repeat_interleave(2, dim=1) + w.x.repeat_interleave(2, -1),
        "transpose": lambda w: w.v.transpose(1, 2).mT.swapaxes(-1, -2).permute(0, 2, 1),
        "transpose there and back": lambda w: w.x.T.t() + w.x.transpose(0, 1).permute(1, 0) + w.x.movedim(1, 0).movedim(0, 1),
        "sum": lambda w: w.v.sum(-1) + w.v.sum((1, 2))[:, None] + w.v.sum(dim=2, keepdim=True).squeeze(-1),
        "sum keepdim": lambda w: w.x.sum(1, True) + w.x.sum(1, keepdim=True) + w.x.sum(axis=1, keepdims=True),
        "mean": lambda w: w.x - w.x.mean(-1, keepdim=True),
        "moments": lambda w: w.x.var(1) + w.x.std(-1, False) + w.x.var(1, True, True)[:, 0] + w.x.std(dim=1, correction=0),
        "extrema": lambda w: w.x.amax(1) + w.x.amin(-1) + w.x.max(1).values + w.x.min(dim=1)[0],
        "places": lambda w: w.x.argmax(1) + w.x.max(-1).indices + w.x.argmin(dim=1) + w.x.topk(2).indices[:, 1],
        "sorted features": lambda w: w.x.sort(-1).values + w.x.sort(dim=1, descending=True)[0] + w.x.topk(3, dim=1).values,
        "order of features": lambda w: w.x.argsort(1),
        "norms": lambda w: w.x.norm(dim=1) + w.v.norm(dim=(1, 2)) + torch.linalg.norm(w.x, dim=-1) + torch.linalg.vector_norm(w.x, 3, -1),
        "norm keepdim": lambda w: w.x / w.x.norm(2, 1, True) + w.x / torch.norm(w.x, dim=1, keepdim=True),
        "products": lambda w: w.x.prod(1) + w.v.prod(-1).prod(1, keepdim=True)[:, 0],
        "logsumexp": lambda w: w.x.logsumexp(1) + w.v.logsumexp((1, 2)),
        "bools": lambda w: (w.x > 0).any(1) | (w.x > 1).all(-1),
        "softmax": lambda w: F.softmax(w.x, -1) + torch.softmax(w.x, dim=1) + w.x.log_softmax(1) + F.softmin(w.x, dim=1),
        "normalize": lambda w: F.normalize(w.x) + F.normalize(w.v, dim=-1).sum(-1) + F.normalize(w.x, p=1.0, dim=1),
        "cumulative": lambda w: w.x.cumsum(1) + w.x.cumprod(dim=-1),
        "flip": lambda w: w.x.flip(1) + w.x.flip((1,)) + w.v.flip(1, 2).sum(-1),
        "roll": lambda w: w.x.roll(1, 1) + torch.roll(w.x, shifts=2, dims=-1),
        "diff": lambda w: w.x.diff() + w.x.diff(dim=1),
        "glu": lambda w: F.glu(w.v, -1),
        "cross": lambda w: torch.cross(w.x, w.t, dim=1) + torch.linalg.cross(w.x, w.t) + torch.linalg.cross(w.x, w.table[0][None]),
        "cosine": lambda w: F.cosine_similarity(w.x, w.t + 5) + F.cosine_similarity(w.x, w.table[:1], dim=-1),
        "pick columns": lambda w: w.x[:, 0] + w.x[:, -1] * w.x[..., 1] + w.x.select(1, 2) + w.x.narrow(1, 0, 2).sum(1),
        "pick lists": lambda w: w.x[:, [2, 0]] + w.x[:, torch.tensor([0, 1])] + w.x.index_select(1, torch.tensor([1, 1])),
        "pick by a mask of features": lambda w: w.x[:, torch.tensor([True, False, True])],
        "pick slices": lambda w: w.x[:, 1:] + w.x[: w.n, :2] + w.x[0 : w.n, ::2] + w.x[:][:, :-1],
        "pick between": lambda w: w.v[:, 0, None, :] + w.v[..., None, 0],
        "pick one of each row": lambda w: w.x[torch.arange(w.n), w.z.clamp(max=2)] + w.v[torch.arange(w.n), torch.zeros(w.n, dtype=torch.int64)].sum(1),
        "gather features by species": lambda w: w.x.gather(1, w.z.clamp(max=2)[:, None]) + w.x.take_along_dim(w.z[:, None] % 3, 1),
        "gather features": lambda w: w.x.gather(-1, w.x.argsort(1)) + torch.gather(w.x, 1, torch.zeros(w.n, 3, dtype=torch.int64)),
        "split": lambda w: w.x.split([1, 2], dim=1)[1] + torch.chunk(w.x, 3, -1)[0] + w.x.unbind(1)[2][:, None] + w.x.tensor_split(3, dim=1)[1],
        "one_hot": lambda w: F.one_hot(w.z, 4) + F.one_hot(w.z, num_classes=4),
        "one_hot of systems": lambda w: F.one_hot(w.batch, w.n_systems) * w.x,
        "layer_norm": lambda w: F.layer_norm(w.x, (3,)) + F.layer_norm(w.v, [3, 2], eps=1e-3).sum(-1) + F.rms_norm(w.x, (3,)),
        "group_norm": lambda w: F.group_norm(w.v, 3).sum(-1) + F.instance_norm(w.v).sum(-1),
        "dropout off": lambda w: F.dropout(w.x, 0.3, False) + F.dropout(w.x, p=0.0) + F.alpha_dropout(w.x) + F.dropout(w.x, training=False),
        "a network": lambda w: NETWORK(w.x),
        "pad": lambda w: F.pad(w.x, (0, 2)) + F.pad(w.x, (1, 1), value=2.0),
        "atleast_2d": lambda w: torch.atleast_2d(w.x) + torch.atleast_1d(w.x[:, 0])[:, None],
        "contiguous": lambda w: w.x.T.contiguous().T.contiguous(),
    },
    "atoms 1": {
        "rows second": lambda w: w.x.T,
        "None before": lambda w: w.x[None],
        "unsqueeze before": lambda w: w.x.unsqueeze(0) + w.x[:, 0].expand(3, -1)[None, :, :].transpose(1, 2)[..., :1],
        "permuted": lambda w: w.v.permute(2, 0, 1),
        "sum before rows": lambda w: w.v.permute(1, 2, 0).sum(0) + w.v.permute(1, 2, 0).amax(0, keepdim=True)[0],
        "argmax before rows": lambda w: w.v.permute(1, 2, 0).argmax(0) + w.v.permute(1, 2, 0).max(0)[1] + w.v.permute(1, 2, 0).argmax(0, True)[0],
        "var before rows": lambda w: w.v.permute(1, 2, 0).var(0, True, True)[0],
        "select before rows": lambda w: w.v.permute(1, 2, 0)[0] + w.v.movedim(0, -1).select(0, 1) + w.v.permute(1, 2, 0).unbind(0)[2],
        "stack before rows": lambda w: torch.stack([w.x[:, 0], w.x[:, 1]]),
    },
    "atoms 2": {
        "two before": lambda w: w.v.permute(1, 2, 0).view(3, 2, -1),
        "flattened before": lambda w: w.v.permute(1, 2, 0).reshape(1, 6, -1),
    },
    "edges": {
        "features of edges": lambda w: F.layer_norm(w.e, (3,)).view(-1, 3, 1).sum(-1) + NETWORK(w.e),
        "unit vectors": lambda w: w.e / w.e.norm(dim=1, keepdim=True) + F.normalize(w.f + 0.5, dim=-1),
        "polynomials": lambda w: w.e.norm(dim=1)[:, None] ** torch.arange(4),
    },
    "systems": {
        "features of systems": lambda w: F.layer_norm(w.sv, (3,)) + w.sv.softmax(0) + w.sv.cumsum(0) + w.sv.flip(0),
        "picked": lambda w: w.sv[0] + w.sv[-1] + w.sv.select(0, 1),
        "masked edges": lambda w: _masked_edges(w),
    },
}  # fmt: skip


def _masked_edges(w):
    """Edges dropped by a mask: index and features alike."""
    near = w.e[:, 0] < 0.3
    pair, feature = w.edge_index[:, near], w.e[near]
    return w.zeros(w.n, 3).index_add(0, pair[1], feature * w.x[pair[0]]).sum(0) + feature.mean(0)


REFUSED = {
    "rows merged": (lambda w: w.x.view(-1), "view"),
    "rows merged by reshape": (lambda w: w.v.reshape(-1, 2), "reshape"),
    "rows merged by flatten": (lambda w: w.v.flatten(), "flatten"),
    "rows merged after a permutation": (lambda w: w.v.permute(1, 0, 2).reshape(-1, 2), "reshape"),
    "softmax over atoms": (lambda w: F.softmax(w.x, 0), "softmax"),
    "softmax over atoms, negative": (lambda w: w.x.softmax(dim=-2), "softmax"),
    "normalize over atoms": (lambda w: F.normalize(w.x, dim=0), "normalize"),
    "sort": (lambda w: w.x.sort(0), "sort"),
    "sort by keyword": (lambda w: torch.sort(w.x, dim=0, descending=True), "sort"),
    "sort of a column": (lambda w: w.x[:, 0].sort(), "sort"),
    "argsort": (lambda w: w.x[:, 0].argsort(), "argsort"),
    "topk": (lambda w: w.x[:, 0].topk(1), "topk"),
    "topk dim": (lambda w: torch.topk(w.x, 1, 0), "topk"),
    "cumsum": (lambda w: w.x.cumsum(0), "cumsum"),
    "cumsum by keyword": (lambda w: torch.cumsum(w.x, dim=-2), "cumsum"),
    "cumprod": (lambda w: w.x[:, 0].cumprod(0), "cumprod"),
    "flip atoms": (lambda w: w.x.flip(0), "flip"),
    "flip atoms too": (lambda w: w.x.flip(1, 0), "flip"),
    "roll atoms": (lambda w: w.x.roll(1, 0), "roll"),
    "roll without a dimension": (lambda w: w.x.roll(1), "roll"),
    "diff of atoms": (lambda w: w.x.diff(dim=0), "diff"),
    "cross without a dimension": (lambda w: torch.cross(w.x.T, w.t.T, dim=0).sum() + torch.cross(w.x, w.t), "cross"),
    "split of atoms": (lambda w: w.x.split(1), "split"),
    "chunks of atoms": (lambda w: w.x.chunk(1), "chunk"),
    "atoms one by one": (lambda w: [x for x in w.x], "unbind"),
    "atoms of each system": (lambda w: w.x.split(w.n_atoms_per_system.tolist()), "split"),
    "repeated atoms": (lambda w: w.x.repeat(2, 1), "repeat"),
    "repeat_interleave of atoms": (lambda w: w.x.repeat_interleave(2, 0), "repeat_interleave"),
    "one_hot without classes": (lambda w: F.one_hot(w.z), "one_hot"),
    "gather of atoms by plain rows": (lambda w: w.x.gather(0, torch.zeros(1, 3, dtype=torch.int64)), "gather"),
    "a list of rows that is not all": (lambda w: w.x[torch.arange(w.n).flip(0), w.z.clamp(max=2)] if w.n > 1 else w.x[0], "getitem"),
    "dropout": (lambda w: F.dropout(w.x), "dropout"),
    "dropout module": (lambda w: nn.Dropout(0.1)(w.x), "dropout"),
    "alpha dropout": (lambda w: F.alpha_dropout(w.x, training=True), "alpha_dropout"),
    "batch norm in training": (lambda w: nn.BatchNorm1d(3).double()(w.x), "batch_norm"),
    "batch norm without statistics": (lambda w: nn.BatchNorm1d(3, track_running_stats=False).double().eval()(w.x), "batch_norm"),
    "layer norm over atoms": (lambda w: F.layer_norm(w.x.T, (w.n,)), "layer_norm"),
    "group norm over atoms": (lambda w: F.group_norm(w.x.T[None], 1), "group_norm"),
    "pad atoms": (lambda w: F.pad(w.x, (0, 0, 0, 1)), "pad"),
    "edges by a slice": (lambda w: w.e[:5], "getitem"),
    "half of the edges": (lambda w: w.e[: w.n_edges // 2 + 1] if w.n_edges > 1 else w.e[:3], "getitem"),
    "edges by a plain mask": (lambda w: w.e[torch.arange(w.n_edges) < 5], "getitem"),
}  # fmt: skip


@pytest.mark.parametrize("kind,name", [(kind, name) for kind in CASES for name in CASES[kind]])
def test_same_as_one_process(ranks, kind, name):
    ops.check(ranks, __file__, kind, name)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(ranks, name):
    ops.check_refused(ranks, __file__, name)
