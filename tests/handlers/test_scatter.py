"""Writing rows by index: sums, means, extrema with ties and products, by receivers, senders and systems; see `ops`."""

from __future__ import annotations

import pytest
import torch

import ops

INF = float("inf")


def _wide(index, like):
    return index.view(-1, *[1] * (like.dim() - 1)).expand_as(like)


def _reduce(how, where, value, include_self=True, start=0.0, rows="e"):
    """scatter_reduce with an expanded index, from a start value."""

    def case(w):
        index, source = getattr(w, where), getattr(w, rows)
        n = w.n_systems if where == "batch" else w.n
        return w.zeros(n, 3, value=value).scatter_reduce(
            0, _wide(index, source), source + start, how, include_self=include_self
        )

    return case


def _kept(operation, n=None):
    """An in-place form whose return value is dropped."""

    def case(w):
        out = w.zeros(w.n if n is None else w.n_systems, 3)
        operation(w, out)
        return out

    return case


def _softmax(index, detached, shift):
    def case(w):
        where = getattr(w, index)
        logits = w.e.detach() if detached else w.e
        largest = w.zeros(w.n, 3, value=shift).scatter_reduce(0, _wide(where, w.e), logits, "amax", include_self=False)
        weight = (w.e - largest[where]).exp()
        return weight / w.zeros(w.n, 3).index_add(0, where, weight)[where]

    return case


def _forms(index):
    """One sum over edges, in every spelling."""
    at = lambda w: getattr(w, index)
    return {
        f"index_add by {index}": lambda w: w.zeros(w.n, 3).index_add(0, at(w), w.e),
        f"index_add alpha by {index}": lambda w: torch.index_add(w.x, 0, at(w), w.e, alpha=-0.5),
        f"index_add dim -2 by {index}": lambda w: w.x.index_add(dim=-2, index=at(w), source=w.e),
        f"index_add of one column by {index}": lambda w: w.x[:, 0].index_add(-1, at(w), w.e[:, 1]),
        f"scatter_add by {index}": lambda w: w.zeros(w.n, 3).scatter_add(0, _wide(at(w), w.e), w.e),
        f"scatter_add 1-D by {index}": lambda w: w.zeros(w.n).scatter_add(0, at(w), w.e[:, 0]),
        f"scatter_add keywords by {index}": lambda w: torch.scatter_add(w.x, dim=-2, index=_wide(at(w), w.e), src=w.e),
        f"scatter_add of fewer columns by {index}": lambda w: w.x.scatter_add(0, at(w)[:, None].expand(-1, 2), w.e[:, 1:]),
        f"scatter reduce=add by {index}": lambda w: w.zeros(w.n, 3).scatter(0, _wide(at(w), w.e), w.e.detach(), reduce="add") * w.x,
        f"scatter a number by {index}": lambda w: w.zeros(w.n).scatter(0, at(w), 1.0, reduce="add") + w.x[:, 0],
        f"scatter value= by {index}": lambda w: w.zeros(w.n).scatter(0, at(w), value=2.0, reduce="add") * w.x[:, 0],
        f"scatter_reduce sum by {index}": lambda w: w.x.scatter_reduce(0, _wide(at(w), w.e), w.e, "sum"),
        f"scatter_reduce sum without self by {index}": lambda w: w.x.scatter_reduce(0, _wide(at(w), w.e), w.e, reduce="sum", include_self=False),
        f"index_reduce mean by {index}": lambda w: w.x.index_reduce(0, at(w), w.e, "mean"),
        f"index_put by {index}": lambda w: w.zeros(w.n, 3).index_put((at(w),), w.e, accumulate=True),
        f"index_put of a number by {index}": lambda w: w.zeros(w.n).index_put([at(w)], torch.tensor(1.0, dtype=torch.float64), accumulate=True) * w.x[:, 0],
        f"index_put of one row by {index}": lambda w: w.x.index_put((at(w),), w.table[0], True),
        f"index_put of plain ones by {index}": lambda w: w.x.index_put((at(w),), torch.ones_like(w.e), True),
        f"three dimensions by {index}": lambda w: w.v.index_add(0, at(w), w.e[:, :, None] * w.e[:, None, :2]),
        f"three dimensions expanded by {index}": lambda w: w.v.scatter_add(0, _wide(at(w), w.e[:, :, None]).expand(-1, -1, 2), w.e[:, :, None] * w.e[:, None, :2]),
        f"repeated index by {index}": lambda w: w.zeros(w.n, 3).scatter_add_(0, at(w).unsqueeze(-1).repeat(1, 3), w.e),
        f"counts by {index}": lambda w: w.x / w.zeros(w.n).index_add(0, at(w), torch.ones(w.n_edges, dtype=torch.float64)).clamp(min=1)[:, None],
        f"integers by {index}": lambda w: w.z.index_add(0, at(w), torch.ones(w.n_edges, dtype=torch.int64)),
        f"in place, index_add_ by {index}": _kept(lambda w, out: out.index_add_(0, at(w), w.e)),
        f"in place, scatter_add_ by {index}": _kept(lambda w, out: out.scatter_add_(0, _wide(at(w), w.e), w.e)),
        f"in place, scatter_reduce_ by {index}": _kept(lambda w, out: out.scatter_reduce_(0, _wide(at(w), w.e), w.e, "sum")),
        f"in place, index_put_ by {index}": _kept(lambda w, out: out.index_put_((at(w),), w.e, accumulate=True)),
        f"in place, mean by {index}": _kept(lambda w, out: out.index_reduce_(0, at(w), w.e, "mean", include_self=False)),
        f"in place, twice by {index}": _kept(lambda w, out: (out.index_add_(0, at(w), w.e), out.index_add_(0, at(w), w.e**2))),
        f"in place, then a mean over atoms by {index}": _kept_then_mean(index),
        f"in place into a feature by {index}": lambda w: (w.x * 1.0).index_add_(0, at(w), w.e) * 2,
        f"in place, then read back by {index}": lambda w: _read_back(w, at(w)),
        f"mean by {index}": _reduce("mean", index, 0.5),
        f"mean without self by {index}": _reduce("mean", index, 0.5, include_self=False),
        f"amax by {index}": _reduce("amax", index, -0.3),
        f"amax without self by {index}": _reduce("amax", index, 0.0, include_self=False),
        f"amax from -inf by {index}": lambda w: _finite(_reduce("amax", index, -INF)(w)),
        f"amin from inf by {index}": lambda w: _finite(_reduce("amin", index, INF)(w)),
        f"amin without self by {index}": _reduce("amin", index, 7.0, include_self=False),
        f"amax with ties by {index}": _reduce("amax", index, 1.0, rows="f"),
        f"amax with ties, without self by {index}": _reduce("amax", index, -5.0, include_self=False, rows="f"),
        f"amin with ties and with the start by {index}": lambda w: w.t.scatter_reduce(0, _wide(at(w), w.f), w.f, "amin"),
        f"amax with ties and an excluded start by {index}": lambda w: w.t.scatter_reduce(0, _wide(at(w), w.f), w.f, "amax", include_self=False),
        f"amax by row by {index}": lambda w: w.t.index_reduce(0, at(w), w.f, "amax"),
        f"amin by row without self by {index}": lambda w: w.t.index_reduce(0, at(w), w.f, "amin", include_self=False),
        f"amax of masked values by {index}": lambda w: _finite(w.zeros(w.n, 3, value=-INF).scatter_reduce(0, _wide(at(w), w.e), w.e.masked_fill(w.e < 0, -INF), "amax")),
        f"amax of integers by {index}": lambda w: w.z.scatter_reduce(0, at(w), (w.f[:, 0] * 2).long(), "amax"),
        f"in place, amax by {index}": _kept(lambda w, out: out.scatter_reduce_(0, _wide(at(w), w.e), w.e, "amax")),
    }  # fmt: skip


def _finite(x):
    return torch.where(torch.isfinite(x), x, 0.0)


def _kept_then_mean(index):
    def case(w):
        out = w.zeros(w.n, 3)
        out.index_add_(0, getattr(w, index), w.e)
        return out - out.mean(0)

    return case


def _read_back(w, index):
    """What was written is read by senders: halo rows must be up to date."""
    out = w.zeros(w.n, 3)
    out.index_add_(0, index, w.e)
    return w.zeros(w.n, 3).index_add(0, w.receivers, out[w.senders].sin() * w.e)


CASES = {
    "atoms": {
        **_forms("receivers"),
        **_forms("senders"),
        "prod by receivers": _reduce("prod", "receivers", 1.0, start=2.0),
        "prod with include_self=False by receivers": _reduce("prod", "receivers", 3.0, include_self=False, start=2.0),
        "a mark on atoms with edges": lambda w: w.zeros(w.n).scatter(0, w.receivers, 1.0) * w.x[:, 0],
        "messages": lambda w: w.x.index_add(0, w.receivers, w.x[w.senders] * w.e),
        "messages back": lambda w: w.x.index_add(0, w.senders, w.x[w.receivers].tanh() * w.e),
        "two layers": lambda w: _layer(w, _layer(w, w.x)),
        "degree of senders": lambda w: w.x / w.zeros(w.n).index_add(0, w.senders, w.e[:, 0] ** 2).add(1)[:, None],
    },
    "edges": {
        f"softmax by {index}{', detached' if detached else ''}, from {shift}": _softmax(index, detached, shift)
        for index in ("receivers", "senders") for detached in (False, True) for shift in (0.0, -INF)
    },
    "atoms 1": {
        "along the second dimension": lambda w: w.x.T.scatter_add(1, w.receivers[None].expand(3, -1), w.e.T),
        "mean along the second dimension": lambda w: w.x.T.scatter_reduce(-1, w.receivers.expand(3, -1), w.e.T, "mean"),
    },
    "systems": {
        "sum by system": lambda w: w.zeros(w.n_systems, 3).index_add(0, w.batch, w.x),
        "sum of squares by system": lambda w: w.zeros(w.n_systems).index_add(0, w.batch, (w.x**2).sum(1)),
        "scatter_add by system": lambda w: w.sv.scatter_add(0, _wide(w.batch, w.x), w.x),
        "scatter_add by repeated system": lambda w: w.sv.scatter_add(-2, w.batch[:, None].repeat(1, 3), w.x),
        "index_put by system": lambda w: w.zeros(w.n_systems, 3).index_put((w.batch,), w.x, accumulate=True),
        "index_put of a number by system": lambda w: w.s.index_put((w.batch,), torch.tensor(1.0, dtype=torch.float64), accumulate=True),
        "index_add alpha by system": lambda w: w.sv.index_add(0, w.batch, w.x, alpha=3),
        "scatter a number by system": lambda w: w.s * w.zeros(w.n_systems).scatter(0, w.batch, 1.0, reduce="add"),
        "ones by system": lambda w: w.s / w.zeros(w.n_systems).index_add(0, w.batch, torch.ones(w.n, dtype=torch.float64)),
        "sum by system without self": _reduce("sum", "batch", 0.5, rows="x", include_self=False),
        "mean by system": _reduce("mean", "batch", 0.5, rows="x"),
        "mean by system without self": _reduce("mean", "batch", 0.5, rows="x", include_self=False),
        "amax by system": _reduce("amax", "batch", 0.5, rows="x"),
        "amax by system from -inf": _reduce("amax", "batch", -INF, rows="x"),
        "amin by system with ties": _reduce("amin", "batch", -1.0, rows="t"),
        "amax by system with ties, without self": _reduce("amax", "batch", 2.0, rows="t", include_self=False),
        "amax by system with ties with the start": lambda w: w.sv.round().scatter_reduce(0, _wide(w.batch, w.t), w.t, "amax") + w.sv,
        "amax by system by row": lambda w: w.sv.index_reduce(0, w.batch, w.t, "amax"),
        "prod by system": _reduce("prod", "batch", 2.0, rows="x"),
        "prod by system without self": _reduce("prod", "batch", 2.0, rows="x", include_self=False),
        "prod with zeros by system": lambda w: w.sv.scatter_reduce(0, _wide(w.batch, w.t), w.t, "prod"),
        "prod by system by row": lambda w: w.sv.index_reduce(0, w.batch, w.x, "prod"),
        "edges by system of the receiver": lambda w: w.zeros(w.n_systems, 3).index_add(0, w.batch[w.receivers], w.e),
        "edges by system of the sender": lambda w: w.zeros(w.n_systems, 3).index_add(0, w.batch[w.edge_index[0]], w.e),
        "mean of edges by system": lambda w: w.sv.scatter_reduce(0, _wide(w.batch[w.receivers], w.e), w.e, "mean"),
        "largest edge by system": lambda w: w.sv.scatter_reduce(0, _wide(w.batch[w.receivers], w.f), w.f, "amax", include_self=False),
        "integers by system": lambda w: torch.zeros(w.n_systems, dtype=torch.int64).index_add(0, w.batch, w.z),
        "in place by system": _kept(lambda w, out: out.index_add_(0, w.batch, w.x), n="systems"),
        "in place, mean by system": _kept(lambda w, out: out.scatter_reduce_(0, _wide(w.batch, w.x), w.x, "mean"), n="systems"),
        "in place, amax by system": _kept(lambda w, out: out.scatter_reduce_(0, _wide(w.batch, w.x), w.x, "amax"), n="systems"),
        "in place, prod by system": _kept(lambda w, out: out.add_(1.0).scatter_reduce_(0, _wide(w.batch, w.x), w.x, "prod"), n="systems"),
        "in place, prod into a system value": lambda w: (w.sv * 1.0).scatter_reduce_(0, _wide(w.batch, w.x), w.x, "prod"),
        "variance by system": lambda w: _variance(w),
    },
}  # fmt: skip
CASES["atoms"] |= {
    "charge equilibration": lambda w: _equilibrate(w),
    "in place, charge equilibration": lambda w: _equilibrate_in_place(w),
}


def _layer(w, h):
    m = torch.nn.functional.silu(h[w.senders] @ w.table[:3] + w.e)
    return h + w.zeros(w.n, 3).index_add(0, w.receivers, m).tanh()


def _variance(w):
    count = w.n_atoms_per_system[:, None]
    mean = w.zeros(w.n_systems, 3).index_add(0, w.batch, w.x) / count
    return w.zeros(w.n_systems, 3).index_add(0, w.batch, (w.x - mean[w.batch]) ** 2) / count


def _equilibrate(w):
    q = w.x[:, 0].sin()
    excess = (w.s - w.zeros(w.n_systems).scatter_add(0, w.batch, q)) / w.n_atoms_per_system
    return (q + excess[w.batch]) ** 2


def _equilibrate_in_place(w):
    q = w.x[:, 0].sin()
    total = w.zeros(w.n_systems)
    total.scatter_add_(0, w.batch, q)
    return (q + ((w.s - total) / w.n_atoms_per_system)[w.batch]) ** 2


REFUSED = {
    "prod by senders": (lambda w: w.x.index_reduce(0, w.senders, w.e, "prod"), "index_reduce"),
    "multiply by senders": (lambda w: w.x.scatter(0, _wide(w.senders, w.e), w.e, reduce="multiply"), "scatter"),
    "replace by senders": (lambda w: w.x.scatter(0, _wide(w.senders, w.e), w.e), "scatter"),
    "replace by systems": (lambda w: w.sv.scatter(0, _wide(w.batch, w.x), w.x), "scatter"),
    "a target of other length": (lambda w: w.zeros(200, 3).index_add(0, w.receivers, w.e), "index_add"),
    "a target of other length, senders": (lambda w: w.zeros(200, 3).index_add(0, w.senders, w.e), "index_add"),
    "a target of other length, systems": (lambda w: w.zeros(200, 3).index_add(0, w.batch, w.x), "index_add"),
    "atoms written by edges": (lambda w: w.x.index_add(0, w.receivers[: w.n_edges], w.zeros(w.n_edges, 3) + w.x.mean(0) if False else w.x[w.z]), "getitem"),
    "+= by receivers": (lambda w: _plus_equals(w, w.receivers), "setitem"),
    "+= by systems": (lambda w: _plus_equals(w, w.batch), "setitem"),
    "edges written into edges": (lambda w: w.e.index_add(0, w.receivers, w.e), "index_add"),
    "edges written into edges, senders": (lambda w: w.e.index_add(0, w.senders, w.e), "index_add"),
    "per-system values written to by receivers": (lambda w: torch.cat([w.sv] * 9).index_add(0, w.receivers, w.e), "index_add"),
    "by species": (lambda w: w.zeros(4, 3).index_add(0, w.z, w.x), "index_add"),
    "index_put with two indices": (lambda w: w.x.index_put((w.receivers, torch.zeros(w.n_edges, dtype=torch.int64)), w.e[:, 0], accumulate=True), "index_put"),
}  # fmt: skip
del REFUSED["atoms written by edges"]


def _plus_equals(w, index):
    out = w.zeros(w.n_systems if index is w.batch else w.n, 3)
    out[index] += 1.0


@pytest.mark.parametrize("kind,name", [(kind, name) for kind in CASES for name in CASES[kind]])
def test_same_as_one_process(ranks, kind, name):
    ops.check(ranks, __file__, kind, name)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(ranks, name):
    ops.check_refused(ranks, __file__, name)
