"""Row by row: arithmetic, functions, in-place forms, per-system values that meet rows; see `ops`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import ops

UNARY = (
    "abs", "acosh", "asinh", "atan", "ceil", "cos", "cosh", "deg2rad", "erf", "erfc", "exp", "expm1", "floor", "frac",
    "log1p", "logit", "neg", "reciprocal", "relu", "round", "rsqrt", "sgn", "sigmoid", "sign", "sin", "sinc", "sinh",
    "sqrt", "square", "tan", "tanh", "trunc", "positive", "nan_to_num", "lgamma", "digamma",
)  # fmt: skip
ACTIVATIONS = (
    "celu", "elu", "gelu", "hardswish", "hardtanh", "leaky_relu", "logsigmoid", "mish", "relu6", "selu",
    "silu", "softplus", "softsign", "tanhshrink", "hardshrink", "softshrink",
)  # fmt: skip


def _into(operation):
    def case(w):
        out = w.zeros(w.n, 3, value=0.5)
        operation(w, out)
        return out

    return case


CASES = {
    "atoms": {
        **{f"torch.{name}": lambda w, f=getattr(torch, name): f(w.x.sigmoid() * 0.8 + (1.05 if f is torch.acosh else 0.1)) for name in UNARY},
        **{f"F.{name}": lambda w, f=getattr(F, name): f(w.x) for name in ACTIVATIONS},
        **{f"method {name}": lambda w, name=name: getattr(w.x.sigmoid() + 0.1, name)() for name in ("exp", "log", "sqrt", "tanh_", "neg_")},
        "numbers on both sides": lambda w: 2 - (3 * w.x + 1) / 2 - (-w.x) ** 3 % 0.7 + 2.0**w.x + 1 / (w.x**2 + 1),
        "floor_divide": lambda w: (w.x.detach() // 0.3) * w.x,
        "in-place operators": lambda w: _operators(w),
        "add_ dropped": _into(lambda w, out: out.add_(w.x, alpha=2)),
        "mul_ dropped": _into(lambda w, out: out.mul_(w.x)),
        "copy_ dropped": _into(lambda w, out: out.copy_(w.x)),
        "+= dropped": _into(lambda w, out: out.__iadd__(w.x)),
        "add_ dropped, then a mean": lambda w: (lambda out: (out.add_(w.x), out - out.mean(0))[1])(w.zeros(w.n, 3)),
        "add out=": _into(lambda w, out: torch.add(w.x.detach(), 1.0, out=out)),
        "where": lambda w: torch.where(w.x > 0, w.x, -w.x * 2),
        "where with numbers": lambda w: torch.where(w.x > 0, w.x, 0.1) + torch.where(w.x > 0, 0.0, w.x),
        "where with a plain condition": lambda w: torch.where(torch.tensor([True, False, True]), w.x, w.table[0]),
        "method where": lambda w: w.x.where(w.x > w.s[w.batch][:, None], w.t),
        "masked_fill": lambda w: w.x.masked_fill(w.x > 0, 2.0).masked_fill_(w.z[:, None] == 1, 0.0),
        "clamp": lambda w: w.x.clamp(min=-0.5).clamp_max(0.7) + torch.clip(w.x, -1, 1),
        "maximum": lambda w: torch.maximum(w.x, w.t) + torch.minimum(w.x, torch.zeros(3, dtype=torch.float64)),
        "max of two": lambda w: torch.max(w.x, w.t) + torch.min(w.x, w.sv[w.batch]),
        "max with a plain tensor": lambda w: torch.max(w.x, w.table[0]) + w.x.min(torch.zeros((), dtype=torch.float64)),
        "lerp": lambda w: torch.lerp(w.x, w.t, 0.3).addcmul(w.x, w.t, value=2),
        "atan2": lambda w: torch.atan2(w.x, w.t + 3).hypot(w.x),
        "comparison": lambda w: ((w.x > 0) & ~(w.z > 1)[:, None] | (w.z == 0)[:, None]) * w.x,
        "broadcast over features": lambda w: w.x * w.x[:, :1] + w.x[:, None, 0],
        "broadcast to more dimensions": lambda w: (w.x[:, :, None] * w.x[:, None, :] + w.table[:3]).sum(-1),
        "broadcast_tensors": lambda w: (lambda a, b: a * b)(*torch.broadcast_tensors(w.x, w.x[:, 1:2])),
        "system: s[batch]": lambda w: w.x * w.s[w.batch][:, None],
        "system: of one value": lambda w: w.x * w.s.sum() + w.s.max(),
        "system: on the left": lambda w: w.s.mean() - w.x,
        "system: of features": lambda w: w.sv.sum(0) / (w.x**2 + 1),
        "system: squares": lambda w: (w.x * w.sv.prod(0)).sin() * w.sv.mean(),
        "system: where": lambda w: torch.where(w.x > w.sv.mean(0), w.x, w.sv.sum(0)),
        "system: in place": lambda w: (w.x * 1.0).mul_(w.sv.sum(0)).add_(w.s.sum()),
        "parameter": lambda w: w.x * w.table[0] + w.table.sum(),
        "casts": lambda w: w.x.float().double().to(torch.float64).type(torch.float32).type_as(w.x),
        "detach and data": lambda w: w.x * w.x.detach() + w.x.data + w.x.clone(),
        "plain to the type of rows": lambda w: torch.ones(3).type_as(w.x) * w.x + torch.ones(3).to(w.x),
        "zeros_like and the rest": lambda w: w.x + torch.zeros_like(w.x) + torch.ones_like(w.t) + torch.full_like(w.x, 2),
        "new_zeros": lambda w: w.x + w.x.new_zeros(w.x.shape) + w.x.new_ones(w.n, 1) + w.x.new_full((1, 3), 4.0),
        "new_tensor": lambda w: w.x * w.x.new_tensor([1.0, 2.0, 3.0]),
        "of the system index": lambda w: w.x * (w.batch == 1)[:, None] + (w.batch * 2)[:, None],
        "integers": lambda w: w.x * (w.z * 2 - 1).abs().clamp(max=3)[:, None] + (w.z >> 1)[:, None],
        "dtype and shape": lambda w: w.x * torch.finfo(w.x.dtype).eps + len(w.x.shape) + w.x.dim() + w.x.size(-1),
        "isnan": lambda w: torch.where(torch.isnan(w.x) | torch.isfinite(w.x), w.x, 0),
        "a type as text": lambda w: w.x * len(w.x.type()),
        "rrelu in eval": lambda w: F.rrelu(w.x, training=False),
        "prelu": lambda w: F.prelu(w.x, w.table[0, :1]),
    },
    "edges": {
        "edges and senders": lambda w: w.e * w.x[w.senders] - w.x[w.receivers],
        "edges and systems": lambda w: w.e * w.sv.mean(0) + w.s[w.batch[w.receivers]][:, None],
        "edges and one number": lambda w: (w.e + w.x.sum()) ** 2,
        "a cutoff": lambda w: w.e * (w.e[:, 0] < 0.5)[:, None].to(w.e.dtype),
    },
    "systems": {
        "functions": lambda w: torch.tanh(w.sv * 2 - 1).masked_fill(w.sv > 0, 0.5) + w.s[:, None],
        "in place": lambda w: (w.sv * 1.0).add_(w.s[:, None]).mul_(2),
        "joined": lambda w: torch.cat([w.sv, w.s[:, None]], 1) + torch.stack([w.s] * 4, 1),
        "repeated along features": lambda w: w.s[:, None].expand(-1, 3) + w.s[:, None].expand(3, 3) + w.s[:, None].repeat(1, 3)
        + w.sv[:, :1].tile((3,)) + w.sv[:, :1].expand_as(w.sv) + w.s[:, None].repeat_interleave(3, 1),
        "assignment where a condition holds": lambda w: _assigned(w.sv * 2) + _assigned(w.s * w.x.sum())[:, None],
        "branches on a value": lambda w: w.sv * 2 if w.s.sum() > 0 else w.sv * 3,
        "a Python number": lambda w: w.sv * float(w.x.sum()) + w.x.mean().item(),
    },
    "atoms 1": {"rows last": lambda w: w.x.T * torch.arange(3)[:, None] + w.z},
}  # fmt: skip


def _operators(w):
    x = w.x * 1.0
    x += w.t
    x -= 0.5
    x *= w.x
    x /= 2.0
    x **= 2
    return x


REFUSED = {
    "every pair of atoms": (lambda w: w.x[:, None] - w.x[None], "sub"),
    "every pair of numbers": (lambda w: w.z[:, None] == w.z[None, :], "eq"),
    "senders compared": (lambda w: w.senders < w.n, "lt"),
    "receivers compared": (lambda w: w.receivers != w.senders, "ne"),
    "pair compared": (lambda w: w.edge_index[0] == 0, "eq"),
    "senders computed with": (lambda w: w.senders * w.n + w.receivers, "mul"),
    "senders as numbers": (lambda w: w.senders.sum(), "sum"),
    "the largest receiver": (lambda w: w.receivers.max() + 1, "max"),
    "a list of senders": (lambda w: w.senders.tolist(), "tolist"),
    "senders sorted": (lambda w: torch.sort(w.senders), "sort"),
    "receivers counted": (lambda w: torch.unique(w.receivers, return_counts=True), "unique"),
    "equal": (lambda w: torch.equal(w.x, w.x), "equal"),
    "allclose": (lambda w: torch.allclose(w.x, w.x), "allclose"),
    "places of a mask": (lambda w: torch.where(w.x[:, 0] > 0), "where"),
    "nonzero": (lambda w: (w.x > 0).nonzero(), "nonzero"),
    "masked_select": (lambda w: w.x.masked_select(w.x > 0), "masked_select"),
    "random numbers like rows": (lambda w: torch.randn_like(w.x), "randn_like"),
    "random numbers into rows": (lambda w: (w.x * 1).detach().normal_(), "normal"),
    "bernoulli": (lambda w: torch.bernoulli(w.x.sigmoid()), "bernoulli"),
    "rrelu in training": (lambda w: F.rrelu(w.x, training=True), "rrelu"),
    "a system value repeated by hand": (lambda w: w.e + w.sv[:1].expand(w.n_edges, -1), "expand"),
    "a system value repeated": (lambda w: w.e + w.sv[:1].repeat(w.n_edges, 1), "repeat"),
    "a system value repeated to rows of zeros": (lambda w: w.e + w.sv[:1].expand_as(torch.zeros(w.n_edges, 3)), "expand_as"),
    "a system value repeated by name": (lambda w: w.e + w.sv[:1].repeat(repeats=(w.n_edges, 1)), "repeat"),
    "a system value repeated for each row": (lambda w: w.x + w.sv[:1].repeat_interleave(w.n, 0), "repeat_interleave"),
    "a mean repeated for each row": (lambda w: w.x + w.x.mean(0).expand(w.n, -1), "expand"),
    "a sum repeated for each row": (lambda w: w.x[:, 0] + w.x.sum().expand(w.n), "expand"),
    "a system value by a plain index": (lambda w: w.x + w.sv[torch.zeros(w.n, dtype=torch.int64)], "getitem"),
    "assignment into rows": (lambda w: w.x.detach().__setitem__((slice(None), 0), 1.0), "setitem"),
    "assignment of rows": (lambda w: w.zeros(w.n, 3).__setitem__((slice(None), 0), w.x[:, 0]), "setitem"),
}  # fmt: skip


def _assigned(value):
    value[value < 0.3] = 0.25
    return value


@pytest.mark.parametrize("kind,name", [(kind, name) for kind in CASES for name in CASES[kind]])
def test_same_as_one_process(ranks, kind, name):
    ops.check(ranks, __file__, kind, name)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(ranks, name):
    ops.check_refused(ranks, __file__, name)
