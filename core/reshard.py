"""`reshard_by_destination`: moves rows to the ranks that they are destined for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from nvdd.communicator import Communicator


def reshard_by_destination(
    rows: Tensor | Mapping[str, Tensor], destination: Tensor, mesh: Any
) -> Tensor | dict[str, Tensor]:
    """Sends each row to a rank (an all_to_all_v); every rank calls it at once. Differentiable to any order.

    Args:
        rows: (n, ...) or several such tensors by name, the same names on every rank.
        destination: (n,) int64, the rank that each row goes to.
        mesh: the ranks: a `Communicator`, a ``DeviceMesh`` or a process group.

    Returns:
        (m, ...) rows that this rank has now: in the order of the ranks that they come from, and from each in the order
        that they had there.

    Raises:
        ValueError: a destination is no rank, or there is not one for each row.
    """
    comm = _communicator(mesh, destination.device)
    fields = dict(rows) if isinstance(rows, Mapping) else {"rows": rows}
    for name, field in fields.items():
        if destination.dim() != 1 or field.shape[:1] != destination.shape:
            raise ValueError(
                f"reshard_by_destination: {name} of shape {tuple(field.shape)} with destinations of shape "
                f"{tuple(destination.shape)}; one destination is needed for each row"
            )
    if destination.numel() and (int(destination.min()) < 0 or int(destination.max()) >= comm.size):
        raise ValueError(
            f"reshard_by_destination: destinations from {int(destination.min())} to {int(destination.max())}, where there "
            f"are the ranks 0 to {comm.size - 1}"
        )
    order = torch.argsort(destination, stable=True)
    send = torch.bincount(destination, minlength=comm.size).tolist()
    receive = comm.transpose_counts(send, "reshard")
    moved = {
        name: _Move.apply(field.index_select(0, order), send, receive, comm, f"reshard of {name}")
        for name, field in fields.items()
    }
    return moved if isinstance(rows, Mapping) else moved["rows"]


def _communicator(mesh: Any, device: torch.device) -> Communicator:
    if isinstance(mesh, Communicator):
        return mesh
    return Communicator.from_mesh(mesh) if hasattr(mesh, "get_group") else Communicator(mesh, device)


class _Move(Function):
    """Rows in the order of their destinations -> in the order of their sources. Its adjoint moves them back."""

    @staticmethod
    def forward(ctx, rows: Tensor, send: list[int], receive: list[int], comm: Communicator, site: str) -> Tensor:
        ctx.send, ctx.receive, ctx.comm, ctx.site = send, receive, comm, site
        me = comm.rank
        parts = list(rows.split(send))
        mine, parts[me] = parts[me], rows[:0]  # what stays does not travel
        counts = lambda all_counts: [0 if r == me else n for r, n in enumerate(all_counts)]
        arrived = comm.exchange(torch.cat(parts), counts(send), counts(receive), site)
        pieces = list(arrived.split(counts(receive)))
        pieces[me] = mine
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _Move.apply(grad, ctx.receive, ctx.send, ctx.comm, ctx.site + " (adjoint)"), None, None, None, None
