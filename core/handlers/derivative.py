"""Derivatives that a model takes inside its forward: ``torch.autograd.grad(energy, data.positions)``.

The adjoints of exchanges and sums make them complete: the gradient of an owned row has every rank's share in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nvdd.dispatch import Call, register
from nvdd.exchange import correct
from nvdd.roles import Role
from nvdd.shard_tensor import ShardTensor, like, to_local


def _is_autograd(call: Call) -> bool:
    return call.func is torch.autograd.grad


@register(
    "grad", when="torch.autograd.grad in a forward", does="complete gradients of owned rows", predicate=_is_autograd
)
def autograd_grad(call: Call):
    outputs, inputs = _many(call.arg(0, "outputs")), _many(call.arg(1, "inputs"))
    seeds = call.arg(2, "grad_outputs")
    for output in outputs:
        role = getattr(output, "_role", None)
        if role is not Role.SYSTEM and not (role is not None and role.has_rows):
            raise call.refuse(
                "what is differentiated is not known to be summed over ranks",
                "Sum per-atom energies by data.batch (index_add, scatter_add) or with .sum() first",
            )
    for leaf in inputs:
        role = getattr(leaf, "_role", None)
        if role is Role.ANCHOR:
            raise call.refuse("positions, cell and shifts are stand-ins under ForceStrategy.EDGE_VECTORS")
        if role is Role.SYSTEM:
            raise call.refuse("a gradient by a per-system value inside the forward", "Let the framework derive stress")
        if role is None and tuple(leaf.shape[-2:]) != (3, 3):  # of a strain a model may take its share, and declare it
            raise call.refuse(
                "the gradient by a tensor that has no rows of atoms or edges would be this rank's share",
                "Differentiate by positions or per-atom values, or let the framework derive by parameters",
            )
    if seeds is not None:
        seeds = [_counted(seed, output) for seed, output in zip(_many(seeds), outputs, strict=True)]
    rest = {k: v for k, v in call.kwargs.items() if k not in ("outputs", "inputs", "grad_outputs")}
    grads = call.run(outputs, inputs, seeds, *call.args[3:], **rest)

    def with_role(grad, leaf):
        if grad is None or not isinstance(leaf, ShardTensor):
            return grad
        if leaf._role is Role.PADDED:
            grad = correct(to_local(grad), leaf._meta.plan, "gradient of padded rows")
        return like(grad, leaf)

    return tuple(map(with_role, grads, inputs))


def _many(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list)) else (value,)


def _counted(seed: Tensor | None, output: ShardTensor) -> Tensor | None:
    """The seed without phantom and halo rows, which another rank counts or none."""
    if seed is None or not output._role.has_rows or (not output._role.is_atoms and output._meta.counts is None):
        return to_local(seed)
    if not output._role.is_atoms:  # edges that fill up count nowhere
        return output._meta.only_counted(to_local(seed), output._row_dim, edges=True)
    meta, n = output._meta, output.shape[output._row_dim]
    if meta.counts is not None:
        counts = torch.nn.functional.pad(meta.counts, (0, n - meta.n_owned))
    else:
        counts = torch.arange(n, device=output.device) < meta.n_counted
    shape = [-1 if d == output._row_dim else 1 for d in range(output.dim())]
    return to_local(seed) * counts.view(shape)
