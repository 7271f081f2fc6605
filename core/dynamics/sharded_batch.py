"""`ShardedBatch`: atoms of which each rank has its own, how they come from one rank and go back there."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from nvdd.communicator import Communicator
from nvdd.data import Batch
from nvdd.dynamics.state import DynamicsState
from nvdd.dynamics.tables import Tables
from nvdd.errors import InputError, NvddError

_PIECE = 1 << 16  # rows that travel to or from one rank at a time


class ShardedBatch:
    """The atoms of this rank, of a system that no rank has as a whole.

    Attributes:
        state: the atoms of this rank, and what all ranks have alike.
        comm: the ranks.
    """

    def __init__(self, state: DynamicsState, comm: Communicator) -> None:
        self.state, self.comm = state, comm

    @property
    def ids(self) -> Tensor:
        """(n,) global ids of the atoms that this rank owns."""
        return self.state.ids

    @property
    def n_owned(self) -> int:
        """Atoms of this rank."""
        return len(self.state.ids)

    @property
    def n_global(self) -> int:
        """Atoms of all ranks."""
        return int(self.state.n_atoms.sum())

    def __repr__(self) -> str:
        return f"<ShardedBatch: {self.n_owned} of {self.n_global} atoms on rank {self.comm.rank} of {self.comm.size}>"

    @classmethod
    def scatter(cls, state: DynamicsState | None, comm: Communicator) -> ShardedBatch:
        """Sends a state from rank 0 to all, rank r getting the r-th block of rows; every rank calls it at once.

        Rows travel in pieces, so that no rank but rank 0 ever has more than its own.

        Args:
            state: all atoms, on rank 0; ignored elsewhere.
            comm: the ranks.
        """
        header = None
        if comm.rank == 0:
            tables = Tables.pack({name: value.cpu() for name, value in state.per_atom().items()})
            whole = {f.name: getattr(state, f.name) for f in fields(DynamicsState)}
            header = {
                "n": len(state.ids),
                "layout": tables.layout,
                "whole": {name: whole[name] for name in WHOLE},
                "types": {key: (table.dtype, table.shape[1]) for key, table in tables.columns.items()},
            }
        header = comm.all_gather_object(header, "scatter")[0]
        bounds = [header["n"] * rank // comm.size for rank in range(comm.size + 1)]
        columns = {}
        for key, (dtype, width) in header["types"].items():
            table = tables.columns[key] if comm.rank == 0 else torch.empty(0, width, dtype=dtype)
            columns[key] = _from_root(table, bounds, comm, key)
        rows = Tables({}, header["layout"]).unpack(columns)
        move: Callable[[Any], Any] = lambda value: value.to(comm.device) if isinstance(value, Tensor) else value
        whole = {name: _each(value, move) for name, value in header["whole"].items()}
        plain = {name: move(value) for name, value in rows.items() if "." not in name}
        made = DynamicsState(**{**plain, **whole})
        made.set_per_atom({name: move(value) for name, value in rows.items() if "." in name})
        return cls(made, comm)

    def gather_rows(self, names: Iterable[str]) -> dict[str, Tensor] | None:
        """Per-atom tensors of all atoms, those of ``names``, in the order of global ids, on rank 0 (on the host); None elsewhere.

        Every rank calls it at once. They come in pieces straight into place.

        Raises:
            InputError: a name that no per-atom tensor has.
        """
        everything = self.state.per_atom()
        unknown = set(names) - set(everything)
        if unknown:
            raise InputError(f"{sorted(unknown)} are no per-atom tensors of this run; there are {sorted(everything)}")
        tables = Tables.pack({"ids": everything["ids"], **{n: everything[n] for n in names}})
        n, places = self.n_global, [piece.squeeze(1) for piece in _to_root(self.ids.unsqueeze(1), self.comm, "ids")]
        if self.comm.rank == 0:
            _check_complete(torch.cat(places), n)
        found: dict[str, Tensor] = {}
        for key, table in tables.columns.items():
            found[key] = torch.empty(n if self.comm.rank == 0 else 0, table.shape[1], dtype=table.dtype)
            for place, piece in zip(places, _to_root(table, self.comm, key), strict=True):
                found[key][place] = piece
        return tables.unpack(found) if self.comm.rank == 0 else None

    def gather(self) -> Batch | None:
        """All atoms as a `Batch` in the order of global ids, on rank 0; None elsewhere. Every rank calls it at once.

        ``node_fields`` has ``momenta`` and ``masses`` beside the model's inputs, so that ``to_atoms`` gives atoms that
        ASE goes on with.
        """
        names = ["positions", "velocities", "masses", "atomic_numbers", "system"]
        names += [name for name in self.state.per_atom() if name.startswith("node_fields.")]
        rows = self.gather_rows(names)
        if rows is None:
            return None
        given = {name.removeprefix("node_fields."): rows[name] for name in names if name.startswith("node_fields.")}
        given |= {"momenta": rows["velocities"] * rows["masses"].unsqueeze(1), "masses": rows["masses"]}
        return Batch(
            positions=rows["positions"],
            atomic_numbers=rows["atomic_numbers"],
            cell=self.state.cell.cpu(),
            pbc=self.state.pbc.cpu(),
            batch=rows["system"],
            n_systems=self.state.n_systems,
            node_fields=given,
            system_fields={name: value.cpu() for name, value in self.state.system_fields.items()},
        )


# what all ranks have alike
WHOLE = (
    "cell", "pbc", "n_atoms", "n_fixed", "total_mass", "energy", "stress", "fix_com", "step", "time",
    "system_fields", "system_state",
)  # fmt: skip


def _each(value: Any, function: Any) -> Any:
    return {k: function(v) for k, v in value.items()} if isinstance(value, dict) else function(value)


def _from_root(table: Tensor, bounds: list[int], comm: Communicator, what: str) -> Tensor:
    """Rows ``bounds[r]`` to ``bounds[r + 1]`` of rank 0's table, for rank r."""
    if comm.size == 1:
        return table
    sizes = [b - a for a, b in itertools.pairwise(bounds)]
    mine, filled = table.new_empty(sizes[comm.rank], table.shape[1]), 0
    for start in range(0, max(sizes), _PIECE):
        counts = [max(0, min(_PIECE, size - start)) for size in sizes]
        n = counts[comm.rank]
        send, receive = [0] * comm.size, [0] * comm.size
        parts = [table[:0]]
        if comm.rank == 0:
            send = [0, *counts[1:]]
            parts += [table[bounds[r] + start : bounds[r] + start + counts[r]] for r in range(1, comm.size)]
            mine[filled : filled + n] = table[start : start + n]
        else:
            receive[0] = n
        arrived = comm.exchange(
            torch.cat(parts).to(comm.message_device), send, receive, f"scatter of {what}", setup=True
        )
        if comm.rank:
            mine[filled : filled + n] = arrived.cpu()
        filled += n
    return mine


def _to_root(table: Tensor, comm: Communicator, what: str) -> Iterator[Tensor]:
    """Pieces of the tables of all ranks, on rank 0, always in the same order; every rank goes through it."""
    sizes = comm.all_gather(torch.tensor([len(table)], device=comm.message_device), "gather").flatten().tolist()
    for start in range(0, max(sizes), _PIECE):
        counts = [max(0, min(_PIECE, size - start)) for size in sizes]
        mine = table[start : start + counts[comm.rank]]
        others = [0, *counts[1:]]
        nothing = [0] * comm.size
        if comm.rank == 0:
            arrived = comm.exchange(mine[:0].to(comm.message_device), nothing, others, f"gather of {what}", setup=True)
            yield torch.cat([mine.cpu(), arrived.cpu()])
        else:
            send = [len(mine), *nothing[1:]]
            comm.exchange(mine.to(comm.message_device), send, nothing, f"gather of {what}", setup=True)


def _check_complete(ids: Tensor, n: int) -> None:
    if len(ids) != n or not torch.equal(torch.sort(ids)[0], torch.arange(n)):
        raise NvddError(
            f"the ranks together have {len(ids)} atoms, and not each of the {n} atoms once; please report this"
        )
