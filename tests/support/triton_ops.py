"""A model whose messages are a Triton kernel behind a custom operation, and the same model in plain torch.

No `from __future__ import annotations`: Triton reads the annotations of a kernel as objects.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from nvdd import (
    SPEC_MPNN_HALO,
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

WIDTH, CUTOFF = 16, 4.5


@triton.jit
def _weighted_sum_kernel(x, weight, senders, receivers, out, width: tl.constexpr):
    edge = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, width)
    i, j = tl.load(receivers + edge), tl.load(senders + edge)
    row = tl.load(x + j * width + columns) * tl.load(weight + edge)
    tl.atomic_add(out + i * width + columns, row)


@triton.jit
def _dots_kernel(a, b, senders, receivers, out, width: tl.constexpr):
    edge = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, width)
    i, j = tl.load(receivers + edge), tl.load(senders + edge)
    total = tl.sum(tl.load(a + i * width + columns) * tl.load(b + j * width + columns), axis=0)
    tl.store(out + edge, total)


@torch.library.custom_op("nvddtest::triton_sum", mutates_args=())
def triton_sum(x: Tensor, weight: Tensor, senders: Tensor, receivers: Tensor, rows: int) -> Tensor:
    """(rows, WIDTH): sums over the edges into each receiver of the sender's row of ``x`` times the weight (E,)."""
    out = x.new_zeros(rows, x.shape[1])
    if len(senders):
        args = (t.contiguous() for t in (x, weight, senders, receivers))
        _weighted_sum_kernel[(len(senders),)](*args, out, x.shape[1])
    return out


@torch.library.custom_op("nvddtest::triton_dots", mutates_args=())
def triton_dots(a: Tensor, b: Tensor, senders: Tensor, receivers: Tensor) -> Tensor:
    """(E,): the product of the receiver's row of ``a`` with the sender's row of ``b``."""
    out = a.new_zeros(len(senders))
    if len(senders):
        args = (t.contiguous() for t in (a, b, senders, receivers))
        _dots_kernel[(len(senders),)](*args, out, a.shape[1])
    return out


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:4])


def _sum_backward(ctx, grad):
    x, weight, senders, receivers = ctx.saved_tensors
    dx = triton_sum(grad, weight, receivers, senders, x.shape[0])
    return dx, triton_dots(grad, x, senders, receivers), None, None, None


triton_sum.register_autograd(_sum_backward, setup_context=_keep)

ADAPTER = OpAdapter(
    op=torch.ops.nvddtest.triton_sum.default, arg_transforms={0: GatherInputs()}, output_roles={0: Role.OWNED}
)


class TritonWrapper(nn.Module, BaseModelMixin):
    """Two layers of messages.

    Args:
        plain: messages in plain torch, for comparison.
    """

    def __init__(self, plain: bool = False) -> None:
        super().__init__()
        self.plain = plain
        self.model_config = ModelConfig(neighbor_config=NeighborConfig(cutoff=CUTOFF))
        self.embedding = nn.Embedding(100, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.readout = nn.Linear(WIDTH, 1)

    def forward(self, data: Batch) -> ModelOutputs:
        weight = (1 - data.edge_vectors.square().sum(1) / CUTOFF**2) ** 3
        h = self.embedding(data.atomic_numbers)
        for layer in self.layers:
            x = layer(h).tanh()
            if self.plain:
                m = torch.zeros_like(x).index_add(0, data.receivers, x[data.senders] * weight[:, None])
            else:
                m = torch.ops.nvddtest.triton_sum(x, weight, data.senders, data.receivers, h.shape[0])
            h = h + m
        return ModelOutputs(energies=self.readout(h.tanh()).squeeze(1))

    @property
    def distribution_spec(self) -> MLIPSpec:
        return SPEC_MPNN_HALO.with_custom_ops(ADAPTER).with_name("triton")


def model(plain: bool = False) -> TritonWrapper:
    """Float64, with the same weights each time."""
    torch.manual_seed(5)
    return TritonWrapper(plain).double().eval()


class Undeclared(TritonWrapper):
    """What happens without the adapter."""

    @property
    def distribution_spec(self) -> MLIPSpec:
        return SPEC_MPNN_HALO


def undeclared() -> TritonWrapper:
    """The same model, its kernel undeclared."""
    torch.manual_seed(5)
    return Undeclared().double().eval()
