"""Reductions over all atoms, edges and systems' indices: global counts, ties, empty ranks; see `ops`."""

from __future__ import annotations

import pytest
import torch

import ops

norm = torch.linalg.vector_norm
INF = float("inf")


def _forms(rows):
    """Reductions of ``w.x`` (atoms) or ``w.e`` (edges) over rows."""
    x = lambda w: getattr(w, rows)
    tied = lambda w: w.t if rows == "x" else w.f
    return {
        f"{rows}.sum()": lambda w: x(w).sum(),
        f"{rows}.sum(0)": lambda w: x(w).sum(0),
        f"{rows}.sum(-2, keepdim)": lambda w: x(w).sum(-2, keepdim=True),
        f"{rows}.sum(0, True)": lambda w: x(w).sum(0, True),
        f"{rows}.sum(dim=(0, 1))": lambda w: x(w).sum(dim=(0, 1)),
        f"{rows}.sum((0, -1), keepdim)": lambda w: x(w).sum((0, -1), keepdim=True),
        f"{rows}.sum(axis=0, keepdims)": lambda w: x(w).sum(axis=0, keepdims=True),
        f"torch.sum(input={rows})": lambda w: torch.sum(input=x(w), dim=0),
        f"{rows}.sum(dim=[])": lambda w: x(w).sum(dim=[]),
        f"{rows}.sum(dtype)": lambda w: x(w).float().sum(0, dtype=torch.float64),
        f"{rows}.nansum": lambda w: torch.where(x(w) > 0, x(w), float("nan")).nansum(0),
        f"{rows}.mean()": lambda w: x(w).mean(),
        f"{rows}.mean(0)": lambda w: x(w).mean(0),
        f"{rows}.mean(dim=0, keepdim)": lambda w: x(w).mean(dim=0, keepdim=True),
        f"{rows}.mean((0, 1))": lambda w: x(w).mean((0, 1)),
        f"{rows}.mean(dtype)": lambda w: x(w).float().mean(0, dtype=torch.float64),
        f"{rows}.var(0)": lambda w: x(w).var(0),
        f"{rows}.var(0, False)": lambda w: x(w).var(0, False),
        f"{rows}.var(0, True, True)": lambda w: x(w).var(0, True, True),
        f"{rows}.var(correction=0)": lambda w: x(w).var(0, correction=0, keepdim=True),
        f"{rows}.var(unbiased=False)": lambda w: x(w).var(unbiased=False),
        f"{rows}.var(False)": lambda w: torch.var(x(w), False),
        f"{rows}.var((0, 1))": lambda w: x(w).var((0, 1), correction=2),
        f"{rows}.std()": lambda w: x(w).std(),
        f"{rows}.std(0)": lambda w: torch.std(x(w), 0, keepdim=True),
        f"{rows}.std(0, False, True)": lambda w: torch.std(x(w), 0, False, True),
        f"{rows}.std of equal values": lambda w: (x(w) * 0.0 + 3.0).std(0, correction=0) + x(w).mean(0),
        f"{rows}.amax(0)": lambda w: x(w).amax(0),
        f"{rows}.amax() with ties": lambda w: tied(w).amax(),
        f"{rows}.amax((0, 1), keepdim) with ties": lambda w: tied(w).amax((0, 1), keepdim=True),
        f"{rows}.amin(dim=-2) with ties": lambda w: tied(w).amin(dim=-2),
        f"{rows}.max() with ties": lambda w: tied(w).max(),
        f"torch.min({rows}) with ties": lambda w: torch.min(tied(w)),
        f"{rows}.amax of masked values": lambda w: x(w).masked_fill(x(w) < 0, -INF).amax(0),
        f"{rows}.amin of masked values": lambda w: x(w).masked_fill(x(w) < 0, INF).amin(0),
        f"{rows}.amax where all are masked": lambda w: x(w).masked_fill(x(w) > -INF, -INF).amax(0),
        f"{rows}.norm()": lambda w: x(w).norm(),
        f"{rows}.norm(dim=0)": lambda w: x(w).norm(dim=0),
        f"{rows}.norm(2, 0, True)": lambda w: x(w).norm(2, 0, True),
        f"{rows}.norm(p=1, dim=(0, 1))": lambda w: torch.norm(x(w), p=1, dim=(0, 1)),
        f"{rows}.norm(p=3, dim=0)": lambda w: x(w).norm(p=3, dim=0, keepdim=True),
        f"{rows}.norm(inf) with ties": lambda w: tied(w).norm(p=INF, dim=0),
        f"{rows}.norm(-inf) with ties": lambda w: norm(tied(w) + 3, -INF, 0),
        f"{rows}.norm(0)": lambda w: tied(w).detach().norm(p=0, dim=0) * x(w).sum(0),
        f"{rows}.norm(0.5)": lambda w: norm(x(w), 0.5, dim=0),
        f"{rows}.norm of zeros, once": lambda w: (x(w) * 0.0).norm(dim=0) + x(w).sum(0),
        f"vector_norm({rows})": lambda w: norm(x(w)),
        f"vector_norm({rows}, ord, dim)": lambda w: norm(x(w), ord=4, dim=0, keepdim=True),
        f"linalg.norm({rows}, dim=0)": lambda w: torch.linalg.norm(x(w), dim=0),
        f"linalg.norm({rows})": lambda w: torch.linalg.norm(x(w)),
        f"{rows}.norm('fro')": lambda w: torch.norm(x(w), p="fro"),
        f"{rows}.prod(0)": lambda w: (x(w) + 2).prod(0),
        f"{rows}.prod()": lambda w: (x(w)[:, 0] * 0.3 + 1.5).prod(),
        f"{rows}.prod(0, keepdim) with zeros": lambda w: tied(w).prod(0, keepdim=True),
        f"{rows}.prod with one zero": lambda w: (x(w) - x(w).detach().amax(0)).prod(0),
        f"any {rows}": lambda w: (x(w) > 2.2).any(0),
        f"all {rows}": lambda w: (x(w) > -9).all(),
        f"all {rows}, keepdim": lambda w: (x(w) > 0).all(dim=0, keepdim=True),
        f"count_nonzero {rows}": lambda w: torch.count_nonzero(tied(w), dim=0),
        f"sum of bools {rows}": lambda w: (x(w) > 0).sum(0),
        f"mean of a column of {rows}": lambda w: x(w)[:, 1].mean(),
        f"centred {rows}": lambda w: ((x(w) - x(w).mean(0)) ** 3).sum(0),
        f"scaled {rows}": lambda w: (x(w) / x(w).std(0)).pow(3).mean(0),
    }


CASES = {
    "systems": {
        **_forms("x"),
        **_forms("e"),
        "v.sum((0, 2))": lambda w: w.v.sum((0, 2)),
        "v.mean((0, 2), keepdim)": lambda w: w.v.mean((0, 2), keepdim=True),
        "v.std((0, 1))": lambda w: w.v.std((0, 1)),
        "v.norm(dim=(0, 2))": lambda w: w.v.norm(dim=(0, 2)),
        "v.amax((2, 0))": lambda w: w.v.amax((2, 0)),
        "v.T rows last": lambda w: w.v.permute(1, 2, 0).mean(-1),
        "x.T.sum(1)": lambda w: w.x.T.sum(1),
        "x.T.prod(1)": lambda w: (w.x.T + 2).prod(1),
        "x.T.amax(-1) with ties": lambda w: w.t.T.amax(-1),
        "integers": lambda w: w.z.sum(),
        "largest integer": lambda w: w.z.max(),
        "smallest integer": lambda w: w.z.amin(),
        "product of integers": lambda w: (w.z + 1).prod(),
        "largest species, as a number": lambda w: w.sv * int(w.z.max()),
        "number of systems": lambda w: w.sv * (int(w.batch.max()) + 1),
        "number of systems, amax": lambda w: w.sv * (w.batch.amax() + 1),
        "bincount of systems": lambda w: w.sv * torch.bincount(w.batch)[:, None],
        "bincount of systems, minlength": lambda w: w.batch.bincount(minlength=5),
        "bincount of edges' systems": lambda w: torch.bincount(w.batch[w.receivers], minlength=w.n_systems),
        "a reduction of a reduction": lambda w: (w.x.sum(0) ** 2).sum(),
        "a network of sums": lambda w: torch.tanh(w.x.sum(0) @ w.w) @ w.w.T,
        "a linear of per-system values": lambda w: torch.nn.functional.linear(w.sv, w.w.T).relu(),
        "a parameter times a system value": lambda w: w.sv * w.table[:3] + w.zeros(3, 3).index_add(0, w.batch, w.x),
        "a square of a parameter": lambda w: w.table.square().sum(0) * w.x.sum(0).detach() + w.sv,
    },
    "atoms": {
        "minus the mean": lambda w: w.x - w.x.mean(0),
        "standardised": lambda w: (w.x - w.x.mean(0, keepdim=True)) / w.x.std(0, keepdim=True),
        "over the norm": lambda w: w.x / w.x.norm(),
        "over the largest": lambda w: w.x / (w.t.abs().amax(0) + 1),
        "times a network of sums": lambda w: w.x @ w.w * torch.tanh(w.x.sum(0) @ w.w),
        "over the edges": lambda w: w.x * w.e.sum(0) - w.e.mean(),
        "sums over sums": lambda w: (w.x - w.x.mean(0)).pow(3).sum(0).sin() * w.x,
        "where a maximum is": lambda w: torch.where(w.x == w.x.amax(0), w.x, 0.0),
        "log of a product": lambda w: w.x * (w.x * 0.1 + 1).prod(0).log(),
    },
    "edges": {"edges over atoms": lambda w: w.e * w.x.mean(0) + w.x.std()},
}

REFUSED = {
    "argmax over atoms": (lambda w: w.x.argmax(0), "argmax"),
    "max with places": (lambda w: w.x.max(0), "max"),
    "min with places": (lambda w: torch.min(w.x, dim=0, keepdim=True), "min"),
    "median": (lambda w: w.x.median(), "median"),
    "logsumexp over atoms": (lambda w: w.x.logsumexp(0), "logsumexp"),
    "a matrix norm": (lambda w: torch.linalg.norm(w.x, ord=2), "linalg_norm"),
    "the nuclear norm": (lambda w: torch.norm(w.x, p="nuc"), "norm"),
    "var_mean": (lambda w: torch.var_mean(w.x, 0), "var_mean"),
    "quantile": (lambda w: w.x.quantile(0.5, dim=0), "quantile"),
    "an out argument": (lambda w: torch.sum(w.x.detach(), 0, out=w.zeros(3)), "sum"),
    "weighted bincount": (lambda w: torch.bincount(w.batch, w.zeros(w.n)), "bincount"),
    "bincount of species": (lambda w: torch.bincount(w.z), "bincount"),
    "rows as a list": (lambda w: w.z.tolist(), "tolist"),
    "rows as numpy": (lambda w: w.z.numpy(), "numpy"),
    "unique": (lambda w: torch.unique(w.batch), "unique"),
    "the last system index": (lambda w: w.batch[-1], "getitem"),
    "sum of the system index": (lambda w: w.batch.sum(), "sum"),
}


@pytest.mark.parametrize("kind,name", [(kind, name) for kind in CASES for name in CASES[kind]])
def test_same_as_one_process(ranks, kind, name):
    ops.check(ranks, __file__, kind, name)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(ranks, name):
    ops.check_refused(ranks, __file__, name)
