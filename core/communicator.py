"""`Communicator`: the few collective operations that the rest of nvdd uses, over one process group."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nvdd.errors import CommunicationError
from nvdd.trace import ExchangeRecord, active_traces

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}
_HEADER = 64  # bytes before each message between hosts: sequence number, bytes a row, name of the site
_SITE = _HEADER - 16


class Communicator:
    """The ranks of one process group; without a group, a single rank.

    Attributes:
        rank, size: this rank's number, and how many there are.
        device: where this rank computes.
        backend: ``"gloo"``, ``"nccl"`` or ``"none"`` (a single rank).

    Every rank calls the same methods in the same order. Messages carry a sequence number and the name of the
    site that sent them; if two ranks are not at the same site, both raise `CommunicationError`. (Over NCCL the
    check would cost a synchronisation and is left out.)
    """

    def __init__(self, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu") -> None:
        self.group = group
        self.device = torch.device(device)
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1
        self.backend = "none"
        if group is not None:
            name = dist.get_backend(group)  # "nccl", "gloo", or "cpu:gloo,cuda:nccl"
            table = dict(p.split(":") for p in name.split(",")) if ":" in name else {}
            self.backend = table.get(self.device.type, name)
            self._global_ranks = dist.get_process_group_ranks(group)
        self._sequence = 0

    @classmethod
    def from_mesh(
        cls, mesh: Any, mesh_dim: str | int | None = None, device: torch.device | str | None = None
    ) -> Communicator:
        """From a ``torch.distributed.device_mesh.DeviceMesh`` (one dimension of it, if it has several)."""
        if mesh.ndim > 1 and mesh_dim is None:
            raise ValueError(
                f"the mesh has dimensions {mesh.mesh_dim_names}; name the one over which atoms are divided: mesh_dim="
            )
        group = mesh.get_group(mesh_dim) if mesh_dim is not None else mesh.get_group()
        if device is None:
            device = f"cuda:{torch.cuda.current_device()}" if mesh.device_type == "cuda" else mesh.device_type
        return cls(group, device)

    def exchange(
        self,
        send: Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        site: str,
        setup: bool = False,
    ) -> Tensor:
        """Sends rows to peers and receives rows from them.

        Args:
            send: (sum(send_counts), ...) rows in the order of the ranks that get them.
            send_counts, recv_counts: rows to and from each rank.
            site: what the exchange is for, for messages and traces.
            setup: True for messages that make a plan; traces count them apart.

        Returns:
            (sum(recv_counts), ...) rows in the order of the ranks that sent them.
        """
        start = time.perf_counter()
        recv = send.new_empty((sum(recv_counts), *send.shape[1:]))
        if self.size > 1:
            self._sequence += 1
            if self.backend == "nccl":
                self._exchange_direct(send.contiguous(), send_counts, recv, recv_counts)
            else:
                self._exchange_tagged(send, send_counts, recv, recv_counts, site)
            width = send[0].numel() * send.element_size() if len(send) else _row_bytes(recv)
            record = ExchangeRecord(
                site,
                sum(send_counts),
                sum(recv_counts),
                sum(send_counts) * width,
                sum(recv_counts) * width,
                time.perf_counter() - start,
            )
            for trace in active_traces():
                if setup:
                    trace.setup[site] += 1
                else:
                    trace.exchanges.append(record)
        return recv

    def _exchange_direct(self, send: Tensor, send_counts, recv: Tensor, recv_counts) -> None:
        ops = []
        sends, recvs = send.split(list(send_counts)), recv.split(list(recv_counts))
        for peer in range(self.size):
            if send_counts[peer]:
                ops.append(dist.P2POp(dist.isend, sends[peer], self._global_ranks[peer], self.group))
            if recv_counts[peer]:
                ops.append(dist.P2POp(dist.irecv, recvs[peer], self._global_ranks[peer], self.group))
        if ops:
            for work in dist.batch_isend_irecv(ops):
                work.wait()

    def _exchange_tagged(self, send: Tensor, send_counts, recv: Tensor, recv_counts, site: str) -> None:
        width = _row_bytes(recv)
        header = _header(self._sequence, width, site)
        outgoing, incoming = [], []
        row = 0
        for peer, count in enumerate(send_counts):
            if count:
                outgoing.append((peer, _message(header, send[row : row + count], width)))
                row += count
        incoming = [(p, torch.empty(_HEADER + n * width, dtype=torch.uint8)) for p, n in enumerate(recv_counts) if n]
        try:
            ops = [dist.P2POp(dist.irecv, buf, self._global_ranks[p], self.group) for p, buf in incoming]
            ops += [dist.P2POp(dist.isend, buf, self._global_ranks[p], self.group) for p, buf in outgoing]
            if ops:
                for work in dist.batch_isend_irecv(ops):
                    work.wait()
        except RuntimeError as error:
            raise CommunicationError(f"rank {self.rank}, exchange {self._sequence} ({site}): {error}") from error
        row = 0
        for peer, buffer in incoming:
            self._check(buffer, peer, width, site)
            count = recv_counts[peer]
            payload = buffer[_HEADER:].view(recv.dtype).view(count, *recv.shape[1:])
            recv[row : row + count].copy_(payload)
            row += count

    def _check(self, buffer: Tensor, peer: int, width: int, site: str) -> None:
        sequence, their_width = buffer[:16].view(torch.int64).tolist()
        their_site = bytes(buffer[16:_HEADER].tolist()).rstrip(b"\0").decode("ascii", "replace")
        if (sequence, their_width, their_site) != (self._sequence, width, _clip(site)):
            raise CommunicationError(
                f"ranks are out of step: rank {self.rank} is in exchange {self._sequence} ({site}, {width} bytes a row), "
                f"rank {peer} in exchange {sequence} ({their_site}, {their_width} bytes a row). The model takes another "
                "path on some ranks: look for a branch on the number of atoms or edges around a gather of neighbours."
            )

    def all_reduce(self, value: Tensor, op: str = "sum", site: str = "") -> Tensor:
        """A new tensor: ``value`` combined over ranks by ``op`` (sum, max, min, prod); the same on every rank."""
        if self.size == 1:
            return value.clone()
        for trace in active_traces():
            trace.reductions[site or op] += 1
        staged = self.backend != "nccl" and value.device.type != "cpu"
        out = (
            value.detach().to("cpu", copy=True)
            if staged
            else value.detach().clone(memory_format=torch.contiguous_format)
        )
        try:
            dist.all_reduce(out, _OPS[op], group=self.group)
        except RuntimeError as error:
            raise CommunicationError(f"rank {self.rank}, {op} over ranks ({site}): {error}") from error
        return out.to(value.device) if staged else out

    def all_gather_object(self, value: Any, site: str = "") -> list[Any]:
        """The picklable ``value`` of every rank, in rank order."""
        if self.size == 1:
            return [value]
        for trace in active_traces():
            trace.setup[site or "all_gather_object"] += 1
        out: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(out, value, group=self.group)
        except RuntimeError as error:
            raise CommunicationError(f"rank {self.rank}, gathering objects ({site}): {error}") from error
        return out

    def transpose_counts(self, counts: Sequence[int], site: str = "") -> list[int]:
        """Tells each rank how many rows I want of it; gives how many rows each wants of me."""
        if self.size == 1:
            return list(counts)
        for trace in active_traces():
            trace.setup[site or "counts"] += 1
        device = self.device if self.backend == "nccl" else torch.device("cpu")
        mine = torch.tensor(list(counts), dtype=torch.int64, device=device)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            dist.all_gather(everyone, mine, group=self.group)
        except RuntimeError as error:
            raise CommunicationError(f"rank {self.rank}, counts of rows ({site}): {error}") from error
        return torch.stack(everyone)[:, self.rank].tolist()


def _row_bytes(rows: Tensor) -> int:
    width = rows.element_size()
    for size in rows.shape[1:]:
        width *= size
    return width


def _clip(site: str) -> str:
    return site.encode("ascii", "replace")[:_SITE].decode("ascii")


def _header(sequence: int, width: int, site: str) -> Tensor:
    raw = sequence.to_bytes(8, "little") + width.to_bytes(8, "little") + _clip(site).encode().ljust(_SITE, b"\0")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _message(header: Tensor, rows: Tensor, width: int) -> Tensor:
    buffer = torch.empty(_HEADER + rows.shape[0] * width, dtype=torch.uint8)
    buffer[:_HEADER] = header
    buffer[_HEADER:].view(rows.dtype).view(rows.shape).copy_(rows)
    return buffer
