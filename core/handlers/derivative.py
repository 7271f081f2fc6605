"""Derivatives that a model takes inside its forward: ``torch.autograd.grad(energy, data.positions)``.

The adjoints of exchanges and sums make them complete: the gradient of an owned row has every rank's share in it.
"""

from __future__ import annotations

import torch

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
    outputs, inputs = call.arg(0, "outputs"), call.arg(1, "inputs")
    many = isinstance(inputs, (tuple, list))
    for output in outputs if isinstance(outputs, (tuple, list)) else (outputs,):
        role = getattr(output, "_role", None)
        if role is not Role.SYSTEM and not (role is not None and role.has_rows):
            raise call.refuse(
                "what is differentiated is not known to be summed over ranks",
                "Sum per-atom energies by data.batch (index_add, scatter_add) or with .sum() first",
            )
    grads = call.run()

    def with_role(grad, leaf):
        if grad is None or not isinstance(leaf, ShardTensor):
            return grad
        if leaf._role is Role.ANCHOR:
            raise call.refuse("positions and cell are stand-ins under ForceStrategy.EDGE_VECTORS")
        if leaf._role is Role.PADDED:
            grad = correct(to_local(grad), leaf._meta.plan, "gradient of padded rows")
        elif leaf._role is Role.SYSTEM:
            raise call.refuse("a gradient by a per-system value inside the forward", "Let the framework derive stress")
        return like(grad, leaf)

    return tuple(map(with_role, grads, inputs if many else (inputs,)))
