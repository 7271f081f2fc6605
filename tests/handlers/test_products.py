"""Matrix products, einsum, cat and stack of operands with rows; see `ops`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import ops

CASES = {
    "atoms": {
        "linear": lambda w: F.linear(w.x, w.w.T) + F.linear(w.x, w.table, bias=w.table[0, :1].expand(4)),
        "linear of more dimensions": lambda w: F.linear(w.v.mT, w.w.T, w.w[0]).sum(1),
        "matmul": lambda w: w.x @ w.w + torch.matmul(w.x, w.w) + w.x.mm(w.w) + torch.mm(w.x, mat2=w.w),
        "matmul of a vector": lambda w: w.x @ w.table[0] + w.x.mv(w.table[1]) + w.v.mT @ w.table[2] @ w.w[0, :2],
        "matrices by atom": lambda w: w.v.mT @ w.v + torch.bmm(w.v.transpose(1, 2), w.v),
        "matrix and vector by atom": lambda w: (w.v.mT @ w.x[:, :, None]).squeeze(-1) + (w.x[:, None] @ w.v)[:, 0],
        "plain matrix on the left": lambda w: w.table @ w.v + torch.matmul(w.table[0], w.v)[:, None],
        "per-system matrices": lambda w: w.x[:, None] @ (w.sv[:, :, None] * w.table[0])[w.batch],
        "one system value in a product": lambda w: w.x @ (w.sv.T @ w.sv) @ w.w,
        "addmm": lambda w: torch.addmm(w.w[0], w.x, w.w) + torch.addmm(w.w[0], w.x, w.w, beta=0.5, alpha=2),
        "tensordot": lambda w: torch.tensordot(w.x, w.w, 1) + torch.tensordot(w.x, w.w, dims=([1], [0])) + torch.tensordot(w.v, w.w, dims=([1], [0])).sum(1),
        "einsum": lambda w: torch.einsum("ni,ij->nj", w.x, w.w) + torch.einsum("ij, ni -> nj", w.w, w.x),
        "einsum of two": lambda w: torch.einsum("ni,nij->nj", w.x, w.v) + torch.einsum("ni,nj->nij", w.x, w.t).sum(1)[:, :2],
        "einsum with dots": lambda w: torch.einsum("...i,ij->...j", w.x, w.w) + torch.einsum("n...,...->n...", w.x, w.table[0]) @ w.w,
        "einsum traces": lambda w: torch.einsum("nij,nij->n", w.v, w.v) + torch.einsum("nik,nil->nkl", w.v, w.v).sum((1, 2)),
        "einsum with a list": lambda w: torch.einsum("ni,nj,ij->n", [w.x, w.t, w.table[:3]]),
        "einsum, implicit": lambda w: torch.einsum("ai,ib", w.x, w.w),
        "einsum with a system value": lambda w: torch.einsum("ni,i->n", w.x, w.sv.sum(0)) + torch.einsum("ni,ij,n->n", w.x, w.sv, w.s[w.batch]),
        "cat features": lambda w: torch.cat([w.x, w.t, w.s[w.batch][:, None]], 1) + torch.cat((w.x, w.x[:, :1], w.t), dim=-1),
        "cat with plain rows": lambda w: torch.cat([torch.ones(w.n, 1, dtype=torch.float64), w.x], dim=1) + torch.hstack([w.x, w.x[:, :1]]),
        "concat": lambda w: torch.concat([w.x, w.t], dim=1) + torch.concatenate([w.x, w.t], axis=-1),
        "cat with one value of all systems": lambda w: torch.cat([w.x, w.sv.sum(0).expand_as(w.x)], 1),
        "stack": lambda w: torch.stack([w.x, w.t], 1).sum(1) + torch.stack((w.x, w.t), dim=-1).prod(-1) + torch.stack([w.x, w.t], 2)[..., 0],
        "outer by atom": lambda w: w.x.unsqueeze(2) * w.t.unsqueeze(1) @ w.table[0],
    },
    "atoms 1": {
        "stack before": lambda w: torch.stack([w.x, w.t]),
        "transposed": lambda w: w.w.T @ w.x.T,
        "einsum transposed": lambda w: torch.einsum("ni,ij->jn", w.x, w.w),
        "tensordot from the right": lambda w: torch.tensordot(w.w, w.x, dims=([0], [1])),
        "cat along rows' other side": lambda w: torch.cat([w.x.T, w.t.T]),
    },
    "edges": {
        "tensor product": lambda w: torch.einsum("eu,ev,uvw->ew", w.x[w.senders], w.e, w.table[:3, :, None] * w.w[None, :, :]),
        "edge matrices": lambda w: (w.e[:, None] @ w.v[w.senders] @ w.v[w.receivers].mT).squeeze(1),
        "cat of ends": lambda w: torch.cat([w.x[w.senders], w.x[w.receivers], w.e], -1) @ torch.cat([w.w, w.w, w.w]),
        "repeated cells": lambda w: torch.einsum("ei,eij->ej", w.e, (w.sv[:, :, None] * w.table[0])[w.batch[w.receivers]]),
    },
}  # fmt: skip

REFUSED = {
    "x.T @ x": (lambda w: w.x.T @ w.x, "matmul"),
    "x @ x.T": (lambda w: w.x @ w.x.T, "matmul"),
    "mm of transposed": (lambda w: torch.mm(w.x.t(), w.t), "mm"),
    "dot of columns": (lambda w: w.x[:, 0] @ w.x[:, 1], "matmul"),
    "dot": (lambda w: torch.dot(w.x[:, 0], w.t[:, 0]), "dot"),
    "outer": (lambda w: torch.outer(w.x[:, 0], w.t[:, 0]), "outer"),
    "a plain vector over atoms": (lambda w: torch.ones(w.n, dtype=torch.float64) @ w.x, "matmul"),
    "linear over atoms": (lambda w: F.linear(w.x.T, torch.ones(2, w.n, dtype=torch.float64)), "linear"),
    "addmm over atoms": (lambda w: torch.addmm(w.zeros(3, 3), w.x.T, w.x), "addmm"),
    "tensordot over atoms": (lambda w: torch.tensordot(w.x, w.t, dims=([0], [0])), "tensordot"),
    "einsum over atoms": (lambda w: torch.einsum("ni,nj->ij", w.x, w.t), "einsum"),
    "einsum over all pairs": (lambda w: torch.einsum("ni,mi->nm", w.x, w.t), "einsum"),
    "cdist": (lambda w: torch.cdist(w.x, w.x), "cdist"),
    "pdist": (lambda w: F.pdist(w.x), "pdist"),
    "inner": (lambda w: torch.inner(w.x, w.x), "inner"),
    "atoms one after another": (lambda w: torch.cat([w.x, w.x]), "cat"),
    "atoms stacked up": (lambda w: torch.vstack([w.x, w.t]), "vstack"),
    "hstack of columns": (lambda w: torch.hstack([w.x[:, 0], w.x[:, 1]]), "hstack"),
    "atoms and edges joined": (lambda w: torch.cat([w.x, w.e]), "cat"),
    "kron": (lambda w: torch.kron(w.x, w.t), "kron"),
    "attention": (lambda w: F.scaled_dot_product_attention(w.x[None], w.x[None], w.x[None]), "scaled_dot_product_attention"),
    "solve": (lambda w: torch.linalg.solve(w.table[:3].detach(), w.x.T), "linalg_solve"),
}  # fmt: skip


@pytest.mark.parametrize("kind,name", [(kind, name) for kind in CASES for name in CASES[kind]])
def test_same_as_one_process(ranks, kind, name):
    ops.check(ranks, __file__, kind, name)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(ranks, name):
    ops.check_refused(ranks, __file__, name)
