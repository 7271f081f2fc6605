"""Capacities, and what fills them up: shapes that stay the same while atoms and edges come and go.

A compiled forward is made for fixed shapes. Rows and edges are therefore filled up to capacities that only grow; the
fill is atoms that count in no sum, and edges between two of these, so that it adds exactly nothing to energy, forces
and virial.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nvdd.adapters.paths import from_path
from nvdd.communicator import Communicator
from nvdd.data import Batch
from nvdd.errors import InputError

_SLACK = 0.02  # of a new capacity: what fills up costs as much as what counts
_MULTIPLE = 32
# a direction without zeros and in units of the cutoff well inside of it: no model has a singularity there
_FILL_VECTOR = (0.216, 0.288, 0.48)


def resolve_cap(
    count: int,
    cap: int = 0,
    *,
    slack: float = _SLACK,
    multiple: int = _MULTIPLE,
    comm: Communicator | None = None,
    site: str = "capacity",
) -> int:
    """The capacity for ``count`` rows: ``cap`` while it suffices, else more than is needed now.

    Args:
        count: rows of this rank.
        cap: the capacity so far; 0 for none.
        slack: by how much a new capacity exceeds the need; one that was too small gets three times that.
        multiple: capacities are multiples of it, at least 2: torch compiles sizes 0 and 1 apart.
        comm: ranks that shall have one capacity; every rank calls it at once. None to decide alone.
        site: for messages.

    Returns:
        The capacity, at least ``count`` of every rank, never less than ``cap``.

    Raises:
        InputError: a negative count or capacity, ``slack`` below 0, or ``multiple`` below 2.
    """
    if count < 0 or cap < 0:
        raise InputError(f"resolve_cap: count and cap must not be negative, got {count} and {cap}")
    if slack < 0 or multiple < 2:
        raise InputError(f"resolve_cap: slack must be at least 0 and multiple at least 2, got {slack} and {multiple}")
    if comm is not None and comm.size > 1:
        both = torch.tensor([count, cap], dtype=torch.int64, device=comm.message_device)
        count, cap = comm.all_reduce(both, "max", site).tolist()
    if 0 < count <= cap or (cap and not count):
        return cap
    need = max(count, 1)
    slack *= 3 if cap else 1  # atoms that move about shall not make it grow again and again
    return -(-int(need * (1 + slack) + 0.999999) // multiple) * multiple


def filled(values: Tensor, cap: int, fill: Tensor | float | int) -> Tensor:
    """(n, ...) -> (cap, ...), the rows behind the first ``n`` set to ``fill``.

    Raises:
        InputError: there are more rows than the capacity.
    """
    n = values.shape[0]
    if n > cap:
        raise InputError(f"{n} rows do not fit in a capacity of {cap}; let resolve_cap find it")
    if isinstance(fill, Tensor):
        rest = fill.to(values).expand(cap - n, *values.shape[1:])
    else:
        rest = values.new_full((cap - n, *values.shape[1:]), fill)
    return torch.cat([values, rest])


@dataclass
class GraphPadder(ABC):
    """Fills a model's graph up to a capacity that only grows.

    Attributes:
        slack, multiple: see `resolve_cap`.
        cap: the capacity so far: of edges (`COOPadder`) or of neighbours of an atom.
    """

    slack: float = _SLACK
    multiple: int = _MULTIPLE
    cap: int = 0

    def reserve(self, count: int, comm: Communicator | None = None) -> int:
        """Grows the capacity to hold ``count``, on all ranks of ``comm`` alike; gives it."""
        self.cap = resolve_cap(count, self.cap, slack=self.slack, multiple=self.multiple, comm=comm, site="graph capacity")
        return self.cap

    @abstractmethod
    def pad(self, graph: Mapping[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
        """The graph at its capacity.

        Args:
            graph: tensors by name, see the classes.
            first, last: rows of atoms that count nowhere, from ``first`` to ``last``; what is added joins them.
        """


@dataclass
class COOPadder(GraphPadder):
    """Of edge lists: ``pair`` (2, E) receivers and senders, ``vectors`` (E, 3) A, anything else (E, ...).

    Edges into all rows from ``first`` to ``last`` in turn are added at the end, their sender the row before the last (and of
    that the last), of a length inside the cutoff: a model may have singularities at zero, beyond its cutoff, and for atoms
    without neighbours. ``shift`` and what is given besides is zero there.

    Attributes:
        cutoff: A.
    """

    cutoff: float = 1.0

    def pad(self, graph: Mapping[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
        """See the class; grows the capacity where it must (on this rank only).

        Raises:
            InputError: less than two rows from ``first`` to ``last``.
        """
        if last <= first:
            raise InputError(f"COOPadder: edges that fill up join two rows at least, got rows {first} to {last}")
        pair, n_rows = graph["pair"], last + 1 - first
        cap = self.reserve(pair.shape[1] + n_rows)
        added = cap - pair.shape[1]
        receiver = first + torch.arange(added, dtype=pair.dtype, device=pair.device) * n_rows // added
        sender = torch.where(receiver == last - 1, last, last - 1)
        out = {name: filled(value, cap, 0) for name, value in graph.items() if name not in ("pair", "vectors")}
        out["pair"] = torch.cat([pair, torch.stack([receiver, sender])], 1)
        if "vectors" in graph:
            out["vectors"] = filled(graph["vectors"], cap, self.fill_vector(graph["vectors"]))
        return out

    def fill_vector(self, like: Tensor) -> Tensor:
        """(3,) A, from receiver to sender of an edge that is added; ``like`` has the type and place."""
        return torch.tensor(_FILL_VECTOR, dtype=torch.float64).mul_(self.cutoff).to(like)


@dataclass
class DensePadder(GraphPadder):
    """Of neighbour matrices: ``neighbor_matrix`` (N, K) rows of neighbours, ``neighbor_matrix_shifts`` (N, K, 3).

    The capacity is of K. Where there is no neighbour stands ``last``; rows behind the first N are left to the caller.
    """

    multiple: int = 8

    def pad(self, graph: Mapping[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
        """See the class."""
        matrix = graph["neighbor_matrix"]
        cap = self.reserve(matrix.shape[1])
        out = dict(graph)
        out["neighbor_matrix"] = filled(matrix.T, cap, last).T.contiguous()
        if (shifts := graph.get("neighbor_matrix_shifts")) is not None:
            out["neighbor_matrix_shifts"] = filled(shifts.transpose(0, 1), cap, 0).transpose(0, 1).contiguous()
        return out


@dataclass
class DenseBatchPadder(DensePadder):
    """A whole `Batch` with a neighbour matrix (AIMNet2's layout): rows of atoms up to ``rows``, neighbours up to K.

    Attributes:
        rows: the capacity of atoms so far; at least one more than there are, for the row that stands for no neighbour.
    """

    rows: int = 0

    def pad_batch(self, batch: Batch, matrix: Tensor) -> tuple[Batch, Tensor, Tensor]:
        """A batch at its capacity.

        Args:
            batch: of one system, or several.
            matrix: (N, K) rows of neighbours; N or more where there is none.

        Returns:
            The batch with ``rows`` atoms, of which those added have the inputs of the first but atomic number 0, by which
            AIMNet2 knows them, and belong to the last system; the matrix (rows, K); and (rows,) bool, the atoms that count.
        """
        n = batch.n_atoms
        self.rows = resolve_cap(n + 1, self.rows, slack=self.slack, multiple=self.multiple)
        dummy = self.rows - 1
        matrix = torch.where(matrix >= n, torch.full_like(matrix, dummy), matrix)
        matrix = filled(self.pad({"neighbor_matrix": matrix}, dummy, dummy)["neighbor_matrix"], self.rows, dummy)
        first = torch.zeros(self.rows, dtype=torch.int64, device=batch.positions.device)
        first[:n] = torch.arange(n, device=first.device)
        take = lambda value: value.index_select(0, first)
        system = filled(batch.batch, self.rows, batch.n_systems - 1)
        padded = Batch(
            positions=take(batch.positions),
            atomic_numbers=filled(batch.atomic_numbers, self.rows, 0),
            cell=batch.cell,
            pbc=batch.pbc,
            batch=system,
            n_systems=batch.n_systems,
            node_fields={name: take(value) for name, value in batch.node_fields.items()},
            system_fields=dict(batch.system_fields),
        )
        return padded, matrix, torch.arange(self.rows, device=first.device) < n


def padder_at(path: str | None, cutoff: float) -> COOPadder:
    """The padder of a compiled forward, `COOPadder` for None.

    Args:
        path: import path, ``"module:Class"``, of a subclass of `COOPadder` (`CompilePolicy.graph_padder`).
        cutoff: of the model, A.

    Raises:
        InputError: there is no such class, or it pads no edge lists, which is what models are given.
    """
    if path is None:
        return COOPadder(cutoff=cutoff)
    found = from_path(path, "CompilePolicy.graph_padder")
    if not (isinstance(found, type) and issubclass(found, COOPadder)):
        raise InputError(
            f"CompilePolicy: graph_padder {path!r} is no subclass of nvdd.COOPadder; models get edge lists, and a wrapper "
            "that makes neighbour matrices of them pads these itself, with DensePadder"
        )
    return found(cutoff=cutoff)
