"""Bring your own model, 2: a graph transformer whose attention is two Warp kernels, with hand-written `OpAdapter`s.

    python examples/distributed/05_byo_graph_transformer.py              # two ranks on CPUs
    python examples/distributed/05_byo_graph_transformer.py cuda:0       # two ranks on one GPU; cuda: a GPU for each

PyTorch, and so nvdd, cannot see what a kernel does with the rows that it gets. The spec says it: which arguments the
kernel reads neighbours of, and what its results are. Nothing else in the model is about ranks. Exit code 1 if
`trace_and_validate` finds a difference between one process and two ranks.
"""
# No `from __future__ import annotations` here: Warp reads the annotations of kernels as objects.

import logging
import math
import sys
import tempfile
from pathlib import Path

import torch
import warp as wp
from ase import Atoms
from ase.build import bulk
from torch import Tensor, nn

from nvdd import (
    SPEC_MPNN_HALO,
    AsIs,
    BaseModelMixin,
    Batch,
    GatherInputs,
    MLIPSpec,
    ModelConfig,
    ModelOutputs,
    NeighborConfig,
    OpAdapter,
    Role,
)
from nvdd.validate import trace_and_validate

name, value = ("log_level", 30) if hasattr(wp.config, "log_level") else ("quiet", True)
setattr(wp.config, name, value)  # no notices of kernels that are loaded
wp.init()


# --- the kernels: nothing of nvdd ---------------------------------------------------------------------------------


@wp.kernel(enable_backward=False)
def _dot_kernel(
    q: wp.array2d(dtype=wp.float64), k: wp.array2d(dtype=wp.float64), senders: wp.array(dtype=wp.int64),
    receivers: wp.array(dtype=wp.int64), out: wp.array2d(dtype=wp.float64), width: int,
):  # fmt: skip
    edge, head = wp.tid()
    i, j = int(receivers[edge]), int(senders[edge])
    total = wp.float64(0.0)
    for d in range(width):
        total += q[i, head * width + d] * k[j, head * width + d]
    out[edge, head] = total


@wp.kernel(enable_backward=False)
def _sum_kernel(
    v: wp.array2d(dtype=wp.float64), weight: wp.array2d(dtype=wp.float64), senders: wp.array(dtype=wp.int64),
    receivers: wp.array(dtype=wp.int64), out: wp.array2d(dtype=wp.float64), width: int,
):  # fmt: skip
    edge, column = wp.tid()
    i, j = int(receivers[edge]), int(senders[edge])
    wp.atomic_add(out, i, column, weight[edge, column // width] * v[j, column])


def _launch(kernel, columns: int, inputs: list, width: int) -> None:
    edges, device = inputs[2].shape[0], inputs[0].device
    if edges == 0:
        return
    stream = wp.stream_from_torch(torch.cuda.current_stream(device)) if device.type == "cuda" else None
    arrays = [wp.from_torch(t.detach().contiguous()) for t in inputs]
    wp.launch(kernel, (edges, columns), [*arrays, width], device=wp.device_from_torch(device), stream=stream)


@torch.library.custom_op("nvdd_example::edge_dots", mutates_args=())
def edge_dots(q: Tensor, k: Tensor, senders: Tensor, receivers: Tensor, heads: int) -> Tensor:
    """(E, heads): in each head the product of the receiver's row of ``q`` with the sender's row of ``k``."""
    out = q.new_zeros(senders.shape[0], heads)
    _launch(_dot_kernel, heads, [q, k, senders, receivers, out], q.shape[1] // heads)
    return out


@torch.library.custom_op("nvdd_example::weighted_sum", mutates_args=())
def weighted_sum(v: Tensor, weight: Tensor, senders: Tensor, receivers: Tensor, rows: int) -> Tensor:
    """(rows, heads * width): sums over the edges into each receiver of the sender's row of ``v`` times the weight."""
    out = v.new_zeros(rows, v.shape[1])
    _launch(_sum_kernel, v.shape[1], [v, weight, senders, receivers, out], v.shape[1] // weight.shape[1])
    return out


# Each of the two is the other's derivative, so that derivatives of any order are there.


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:4])
    ctx.rows = inputs[0].shape[0]


def _dots_backward(ctx, grad):
    q, k, senders, receivers = ctx.saved_tensors
    dq = weighted_sum(k, grad, senders, receivers, q.shape[0])
    return dq, weighted_sum(q, grad, receivers, senders, k.shape[0]), None, None, None


def _sum_backward(ctx, grad):
    v, weight, senders, receivers = ctx.saved_tensors
    dv = weighted_sum(grad, weight, receivers, senders, ctx.rows)
    return dv, edge_dots(grad, v, senders, receivers, weight.shape[1]), None, None, None


edge_dots.register_autograd(_dots_backward, setup_context=_keep)
weighted_sum.register_autograd(_sum_backward, setup_context=_keep)


# --- the model: nothing of nvdd -----------------------------------------------------------------------------------


class Attention(nn.Module):
    """Multi-head attention of each atom over its neighbours, with weights that vanish at the cutoff."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, 1 / math.sqrt(width // heads)
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.distance = nn.Linear(4, heads)
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, h: Tensor, waves: Tensor, envelope: Tensor, senders: Tensor, receivers: Tensor) -> Tensor:
        n, x = h.shape[0], self.norm(h)
        ops = torch.ops.nvdd_example
        score = ops.edge_dots(self.query(x), self.key(x), senders, receivers, self.heads) * self.scale
        score = score + self.distance(waves)
        # softmax over the neighbours of each atom
        index = receivers.unsqueeze(1).expand(-1, self.heads)
        peak = score.new_zeros(n, self.heads).scatter_reduce(0, index, score.detach(), "amax")
        weight = torch.exp(score - peak[receivers]) * envelope
        total = score.new_zeros(n, self.heads).index_add(0, receivers, weight)
        weight = weight / (total + 1e-6)[receivers]
        return h + self.mix(ops.weighted_sum(self.value(x), weight, senders, receivers, n))


class GraphTransformer(nn.Module):
    """Embeds species, attends twice, reads energies off."""

    def __init__(self, width: int = 16, heads: int = 4, cutoff: float = 4.5) -> None:
        super().__init__()
        self.cutoff = cutoff
        self.embedding = nn.Embedding(100, width)
        self.layers = nn.ModuleList(Attention(width, heads) for _ in range(2))
        self.readout = nn.Linear(width, 1)

    def forward(self, numbers: Tensor, senders: Tensor, receivers: Tensor, vectors: Tensor) -> Tensor:
        r = vectors.norm(dim=1, keepdim=True)
        waves = torch.cat([torch.sin(n * math.pi * r / self.cutoff) / r for n in range(1, 5)], 1)
        envelope = (1 - (r / self.cutoff) ** 2) ** 3
        h = self.embedding(numbers)
        for layer in self.layers:
            h = layer(h, waves, envelope, senders, receivers)
        return self.readout(h).squeeze(1)


# --- the wrapper: what nvdd must know -----------------------------------------------------------------------------

KERNELS = (
    OpAdapter(
        op=torch.ops.nvdd_example.edge_dots.default,
        arg_transforms={0: AsIs(), 1: GatherInputs()},  # queries of receivers, which are here; keys of senders
        output_roles={0: Role.EDGE},
    ),
    OpAdapter(
        op=torch.ops.nvdd_example.weighted_sum.default,
        arg_transforms={0: GatherInputs()},  # values of senders
        output_roles={0: Role.OWNED},  # all edges into an atom are where it is owned, so its sum is complete
    ),
)


class TransformerWrapper(nn.Module, BaseModelMixin):
    """The model with its spec."""

    def __init__(self, model: GraphTransformer) -> None:
        super().__init__()
        self.model = model
        self.model_config = ModelConfig(neighbor_config=NeighborConfig(cutoff=model.cutoff))

    def forward(self, data: Batch) -> ModelOutputs:
        energies = self.model(data.atomic_numbers, data.senders, data.receivers, data.edge_vectors)
        return ModelOutputs(energies=energies)

    @property
    def distribution_spec(self) -> MLIPSpec:
        return SPEC_MPNN_HALO.with_custom_ops(*KERNELS).with_name("graph transformer")


class WithoutAdapters(TransformerWrapper):
    """What happens if the kernels are not declared."""

    @property
    def distribution_spec(self) -> MLIPSpec:
        return SPEC_MPNN_HALO


def model_factory(wrapper: type = TransformerWrapper) -> TransformerWrapper:
    """A fresh wrapper with the same weights each time."""
    torch.manual_seed(7)
    return wrapper(GraphTransformer()).double().eval()


def undeclared_factory() -> TransformerWrapper:
    """The same model, its kernels undeclared."""
    return model_factory(WithoutAdapters)


def sample() -> Atoms:
    """Quartz-like: two elements in a skewed cell."""
    atoms = bulk("NaCl", "rocksalt", a=5.0, cubic=True).repeat((2, 1, 2))
    atoms.rattle(0.1, seed=4)
    atoms.set_cell(atoms.cell.array @ [[1, 0.06, 0], [0, 1, 0.04], [0, 0, 1.02]], scale_atoms=True)
    return atoms


def main(device: str = "cpu") -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    print("kernels undeclared:")
    refused = trace_and_validate(undeclared_factory, sample(), world_size=2, device=device, md_steps=0)
    print(" ", refused.next_action.splitlines()[0])

    print("kernels declared:")
    report = trace_and_validate(model_factory, sample(), world_size=2, device=device)
    report.log_summary(logging.getLogger("validation"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph_transformer_spec.json"
        report.spec.save(path)
        same = MLIPSpec.load(path) == report.spec
    print(f"the spec with its {len(report.spec.distribution.custom_ops)} kernels is the same from its file: {same}")
    return 0 if report.ok and same and not refused.ok else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
