"""`Communicator`: the few collective operations that the rest of nvdd uses, over one process group."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
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
_HEADER_TAG, _ROWS_TAG = 1, 2
_NO_LIMIT = 7 * 86400.0  # s
_LEAST = 0.01  # s; gloo takes a time-out of zero for none


class Communicator:
    """The ranks of one process group; without a group, a single rank.

    Args:
        group: a process group of torch.distributed; or a bare backend (``ProcessGroupGloo``, ``ProcessGroupNCCL``),
            which works without torch.distributed's default group.
        device: where this rank computes.

    Attributes:
        rank, size: this rank's number, and how many there are.
        device: where this rank computes.
        backend: ``"gloo"``, ``"nccl"`` or ``"none"`` (a single rank).
        deadline: ``time.monotonic()`` by which every operation must have ended, or raises; ``math.inf`` for no limit,
            None for the group's own.
        doing: the operation that this rank is in, as (its number, what it is); None between operations. For whoever
            watches from another thread: ranks that stay in different ones are waiting for each other.
        before_close: functions that are called when this object leaves its group.
        waited: seconds that this rank has spent in operations.

    Every rank calls the same methods in the same order. Messages carry a sequence number and the name of the
    site that sent them; if two ranks are not at the same site, both raise `CommunicationError`. (Over NCCL the
    check would cost a synchronisation and is left out.)
    """

    def __init__(self, group: Any = None, device: torch.device | str = "cpu") -> None:
        self.group = group
        self.device = torch.device(device)
        self.rank = group.rank() if group is not None else 0
        self.size = group.size() if group is not None else 1
        self.backend = "none"
        self._registered = isinstance(group, dist.ProcessGroup)  # known to torch.distributed
        if group is not None:
            # of a process group: "nccl", "gloo", or "cpu:gloo,cuda:nccl"
            name = dist.get_backend(group) if self._registered else group.name()
            table = dict(p.split(":") for p in name.split(",")) if ":" in name else {}
            self.backend = table.get(self.device.type, name)
        self.deadline: float | None = None
        self.doing: tuple[int, str] | None = None
        self.waited = 0.0
        self.before_close: list[Callable[[], Any]] = []
        self._operations = 0
        self._sequence = 0
        self._in_flight: Any = None

    @classmethod
    def from_mesh(
        cls, mesh: Any, mesh_dim: str | int | None = None, device: torch.device | str | None = None
    ) -> Communicator:
        """From ``mesh``, a ``torch.distributed.device_mesh.DeviceMesh``; ``mesh_dim`` names its dimension, if it has several.

        Raises:
            ValueError: the mesh has several dimensions and none is named.
        """
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
                self._exchange_direct(send.contiguous(), send_counts, recv, recv_counts, site)
            else:
                self._exchange_tagged(send, send_counts, recv, recv_counts, site)
            width = _row_bytes(recv)
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

    def _exchange_direct(self, send: Tensor, send_counts, recv: Tensor, recv_counts, site: str) -> None:
        # over NCCL one all_to_all is a point-to-point message for each pair of ranks that has rows
        with self._guard(f"exchange {self._sequence} ({site})"):
            options = dist.AllToAllOptions()
            options.asyncOp = False
            _wait(self.group.alltoall_base(recv, send, list(recv_counts), list(send_counts), options))

    def _exchange_tagged(self, send: Tensor, send_counts, recv: Tensor, recv_counts, site: str) -> None:
        """Each message is announced by a header; rows are only received once it is what this rank expects."""
        width = _row_bytes(recv)
        header = _header(self._sequence, width, site)
        outgoing, incoming = _host_copy(send), recv if not recv.is_cuda else _pinned(recv)
        if send.is_cuda and len(send):
            torch.cuda.current_stream(send.device).synchronize()  # once for all messages
        sends = outgoing.split(list(send_counts))
        recvs = incoming.split(list(recv_counts))
        to = [p for p in range(self.size) if send_counts[p]]
        of = [p for p in range(self.size) if recv_counts[p]]
        what = f"exchange {self._sequence} ({site})"
        with self._guard(what) as limit:
            works = [self.group.send([header], p, _HEADER_TAG) for p in to]
            works += [self.group.send([sends[p]], p, _ROWS_TAG) for p in to]
            headers = [torch.empty(_HEADER, dtype=torch.uint8) for _ in of]
            heard = [self.group.recv([h], p, _HEADER_TAG) for h, p in zip(headers, of, strict=True)]
            for work in heard:
                work.wait(*limit)
        self._in_flight = (works, header, outgoing)  # they outlive an error that is raised here
        for h, p in zip(headers, of, strict=True):
            self._check(h, p, width, site)
        with self._guard(what) as limit:
            works += [self.group.recv([recvs[p]], p, _ROWS_TAG) for p in of]
            for work in works:
                work.wait(*limit)
        self._in_flight = None
        if incoming is not recv:
            recv.copy_(incoming, non_blocking=True)

    def _check(self, header: Tensor, peer: int, width: int, site: str) -> None:
        sequence, their_width = header[:16].view(torch.int64).tolist()
        their_site = bytes(header[16:_HEADER].tolist()).rstrip(b"\0").decode("ascii", "replace")
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
            trace.bytes_reduced += value.numel() * value.element_size()
        staged = self.backend != "nccl" and value.device.type != "cpu"
        out = (
            value.detach().to("cpu", copy=True)
            if staged
            else value.detach().clone(memory_format=torch.contiguous_format)
        )
        with self._guard(f"{op} over ranks ({site})"):
            options = dist.AllreduceOptions()
            options.reduceOp, options.asyncOp = dist.ReduceOp(_OPS[op]), False
            _wait(self.group.allreduce([out], options))
        return out.to(value.device) if staged else out

    def all_gather_object(self, value: Any, site: str = "") -> list[Any]:
        """The picklable ``value`` of every rank, in rank order."""
        if self.size == 1:
            return [value]
        for trace in active_traces():
            trace.setup[site or "all_gather_object"] += 1
        body = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        with self._guard(f"gathering objects ({site})"):
            lengths = [int(n) for n in self._all_gather(torch.tensor([len(body)]))]
            bodies = self._all_gather(torch.nn.functional.pad(body, (0, max(lengths) - len(body))))
        return [pickle.loads(bytes(b[:n].cpu().numpy())) for b, n in zip(bodies, lengths, strict=True)]

    def all_gather(self, value: Tensor, site: str = "") -> Tensor:
        """(n_ranks, ...) the ``value`` (...) of every rank, of one shape on all; the same on every rank."""
        if self.size == 1:
            return value.detach().unsqueeze(0)
        for trace in active_traces():
            trace.reductions[site or "all_gather"] += 1
            trace.bytes_reduced += value.numel() * value.element_size()
        with self._guard(f"gathering over ranks ({site})"):
            return torch.stack(self._all_gather(value.detach().contiguous())).to(value.device)

    @property
    def message_device(self) -> torch.device:
        """Where small messages are best made: what NCCL sends must be on the GPU, what gloo sends on the host."""
        return self.device if self.backend == "nccl" else torch.device("cpu")

    def _all_gather(self, value: Tensor) -> list[Tensor]:
        """The ``value`` of every rank, of one shape on all."""
        value = value.to(self.device if self.backend == "nccl" else "cpu")
        everyone = [torch.empty_like(value) for _ in range(self.size)]
        _wait(self.group.allgather([everyone], [value]))
        return everyone

    def broadcast(self, value: Tensor, root: int = 0, site: str = "") -> Tensor:
        """The ``value`` of rank ``root``, on every rank; the others give a tensor of its shape, dtype and device."""
        if self.size == 1:
            return value
        for trace in active_traces():
            trace.setup[site or "broadcast"] += 1
        out = value.detach().to(self.device if self.backend == "nccl" else "cpu").contiguous()
        with self._guard(f"broadcast from rank {root} ({site})"):
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor, options.asyncOp = root, 0, False
            _wait(self.group.broadcast([out], options))
        return out.to(value.device)

    def transpose_counts(self, counts: Sequence[int], site: str = "") -> list[int]:
        """Tells each rank how many rows this one wants of it, ``counts``; gives how many rows each wants of this one."""
        if self.size == 1:
            return list(counts)
        for trace in active_traces():
            trace.setup[site or "counts"] += 1
        with self._guard(f"counts of rows ({site})"):
            everyone = self._all_gather(torch.tensor(list(counts), dtype=torch.int64))
        return torch.stack(everyone)[:, self.rank].tolist()

    # -- limits, and the end

    def _native(self) -> Any:
        """The backend behind the group."""
        device = self.device if self.backend == "nccl" else torch.device("cpu")
        return self.group._get_backend(device) if self._registered else self.group

    @contextmanager
    def _guard(self, what: str) -> Iterator[tuple]:
        """Around one operation: sets its time limit, and says rank and site if it fails.

        Yields the arguments for ``Work.wait``: gloo's sends and receives want the limit there. (NCCL would take it
        for an order to block the host.)
        """
        if self.group is None:
            raise CommunicationError(f"rank {self.rank}, {what}: the process group has been closed after a failure")
        limit: tuple = ()
        if self.deadline is not None and self.backend == "gloo":
            left = timedelta(seconds=min(_NO_LIMIT, max(_LEAST, self.deadline - time.monotonic())))
            limit = (left,)
            self._native()._set_default_timeout(left)
        self._operations += 1
        self.doing = (self._operations, what)
        began = time.perf_counter()
        try:
            yield limit
        except RuntimeError as error:
            raise CommunicationError(f"rank {self.rank}, {what}: {error}") from error
        finally:
            self.doing = None
            self.waited += time.perf_counter() - began

    def abort(self) -> None:
        """Breaks off what this rank is in, from another thread. Over gloo nothing can: `deadline` bounds that."""
        if self.group is not None and self.backend == "nccl":
            self._native().abort()

    def close(self) -> None:
        """Leaves the group, which this object must be the only one to hold: the peers' operations fail at once."""
        for function in self.before_close:
            with suppress(Exception):
                function()
        group, self.group = self.group, None
        if group is not None:
            with suppress(Exception):  # of a broken group
                if self.backend == "nccl":  # whose orderly end waits for the peers
                    dist.distributed_c10d._abort_process_group(group) if self._registered else group.abort()
                elif self._registered:
                    dist.destroy_process_group(group)
        del group
        self._in_flight = None  # whose requests hold the group's connections too


def _wait(work: Any) -> None:
    if work is not None:  # None: already in the stream
        work.wait()


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


def _host_copy(rows: Tensor) -> Tensor:
    """Contiguous rows in host memory; of rows on a GPU the copy is only begun."""
    return _pinned(rows).copy_(rows, non_blocking=True) if rows.is_cuda else rows.contiguous()


def _pinned(like: Tensor) -> Tensor:
    """Host memory for such rows, from which a GPU copies at full speed; torch keeps it for reuse."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
