"""`sum_over_edges`: sums over edges that are made, or taken from a list, some receivers' edges at a time.

A model with thousands of neighbours an atom would keep most of its memory for its edges. Of a sum over edges that depends
on per-atom rows and edge vectors alone, autograd need keep the rows only: each block of edges is made again in the
backward pass, and what comes of it is added to the rows of its atoms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nvdd.cell_list_kernels import fold_kernel
from nvdd.data import Batch
from nvdd.errors import DistributedOpError
from nvdd.nearby import EdgeBlocks, block_size
from nvdd.shard_tensor import ShardTensor, is_traced, to_local
from nvdd.warp_runtime import Arrays, launch, warp

Term = Callable[..., Tensor]


def sum_over_edges(data: Batch, term: Term, *rows: Tensor) -> Tensor:
    """The sum of ``term(vectors, receivers, senders, *rows)`` over blocks of edges, each with all edges of its receivers.

    In a block are about ``max_edges_per_chunk`` edges, by default 4 million; where there is more than one, none stays in
    memory, and ``term`` runs a second time in the backward pass. With ``NeighborConfig(blocks=True)`` no list of all edges
    is made at all. Nothing may be sent between ranks from within ``term``: rows of neighbours are fetched before
    (`refresh_neighbors(x, pad=True)`)::

        def forward(self, data):
            size = to_local(refresh_neighbors(self.sizes(data), pad=True))
            energies = sum_over_edges(data, self.pair_energies, size)

    Args:
        data: what the wrapper was given.
        term: of ``vectors`` (E, 3) A with the sign of ``data.edge_layout``, ``receivers`` and ``senders`` (E,) int64 rows,
            and ``rows``: a tensor whose first dimension is the atoms, with the sum over these edges for each of their
            receivers and zero elsewhere. It is differentiated by autograd, and the same each time.
        rows: tensors of any shape that it is to be differentiated by; others it can have in its closure.

    Returns:
        A plain tensor like those that ``term`` returns.
    """
    rows = tuple(to_local(row) for row in rows)
    source: Any = data.edge_blocks
    if source is None:
        if is_traced():
            return term(to_local(data.edge_vectors), to_local(data.receivers), to_local(data.senders), *rows)
        source = _Listed.of(data)
    source.note()
    if source.n_blocks == 1:  # all that autograd keeps is one block
        return term(*source.edges(0), *rows)
    total: Any = None
    for block in range(source.n_blocks):
        of_block = lambda k, leaf, *rows: term(*source.edges(k, leaf), *rows)
        part = checkpoint(of_block, block, source.leaf(block), *rows, use_reentrant=False, preserve_rng_state=False)
        total = part if total is None else total + part
    return total


# --- edges that are made ------------------------------------------------------------------------------------------


@dataclass(eq=False)
class SearchedEdges:
    """Blocks of edges as functions of what the energy is differentiated by.

    Attributes:
        blocks: the edges.
        place: (n_padded, 3) A, what is differentiated by in place of positions; its values do not matter.
        strain: (n_padded, 3, 3) likewise, of each atom: a vector is strained by the mean of those at its two ends.
        cell: (n_systems, 3, 3) A, if vectors depend on it, else None.
        system: (n_padded,) of each row.
        dtype: of the vectors.
        sign: 1 for sender minus receiver, else -1.
        meta: the partition, whose sums in blocks are counted.
    """

    blocks: EdgeBlocks
    place: Tensor
    strain: Tensor
    cell: Tensor | None
    system: Tensor
    dtype: torch.dtype
    sign: float
    meta: Any

    @property
    def n_blocks(self) -> int:
        """At least 1."""
        return len(self.blocks.bounds)

    def note(self) -> None:
        """That a sum is made in blocks."""
        self.meta.sums_in_chunks += 1

    def leaf(self, block: int) -> tuple[Tensor, ...]:
        """What a block's vectors depend on."""
        return self.place, self.strain, *([] if self.cell is None else [self.cell])

    def edges(self, block: int, leaf: tuple[Tensor, ...] | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Vectors (E, 3), receivers and senders (E,)."""
        place, strain, *cell = self.leaf(block) if leaf is None else leaf
        found = self.blocks.edges(block)
        vectors = _Vectors.apply(place, strain, cell[0] if cell else None, self, block)
        vectors = vectors.to(self.dtype)
        return vectors if self.sign > 0 else -vectors, found.receivers, found.senders


class _Vectors(torch.autograd.Function):
    """Edge vectors of a block, which the search has computed, tied to what they are functions of."""

    @staticmethod
    def forward(ctx, place, strain, cell, source, block):
        ctx.source, ctx.block, ctx.rows, ctx.by_cell = source, block, len(place), cell is not None
        found = source.blocks.edges(block)
        ctx.save_for_backward(found.vectors, found.senders)
        return found.vectors.view_as(found.vectors)

    @staticmethod
    def backward(ctx, gradient):
        vectors, senders = ctx.saved_tensors
        found = _Folded.apply(gradient, ctx.source, ctx.block, vectors.detach(), senders, ctx.rows, ctx.by_cell)
        return *found, None, None


class _Folded(torch.autograd.Function):
    """Gradients by edge vectors as those by place, strain and cell."""

    @staticmethod
    def forward(ctx, gradient, source, block, vectors, senders, n_rows, by_cell):
        gradient = gradient.detach().contiguous()
        place, strain = gradient.new_zeros(n_rows, 3), gradient.new_zeros(n_rows, 3, 3)
        begin, end = source.blocks.bounds[block]
        if len(vectors):
            wp, starts = warp(), source.blocks.starts(block)
            vec, whole = lambda t: Arrays.of(t, wp.vec3d), lambda t: Arrays.of(t, wp.int64)
            inputs = [begin, whole(starts), vec(vectors), whole(senders), vec(gradient)]
            launch(fold_kernel(), end - begin, inputs, [vec(place), Arrays.of(strain, wp.mat33d)], gradient.device)
        cell = None
        if by_cell:
            receivers = source.blocks.edges(block).receivers
            product = source.blocks.shifts(block).unsqueeze(2) * gradient.unsqueeze(1)
            cell = gradient.new_zeros(source.cell.shape).index_add_(0, source.system[receivers], product)
        return place, strain, cell

    @staticmethod
    def backward(ctx, *_):
        raise DistributedOpError(
            "sums over edges in blocks have first derivatives only, and forces of a model that takes its edges so were "
            "differentiated again; leave NeighborConfig(blocks=True) out, so that there is a list of edges"
        )


# --- edges of a list ----------------------------------------------------------------------------------------------


class _Listed:
    """Blocks of the edges that a batch has."""

    def __init__(self, vectors: Tensor, receivers: Tensor, senders: Tensor, n_atoms: int, at_once: int, meta: Any) -> None:
        self._meta = meta
        if len(vectors) <= at_once:
            self._parts = [(vectors, receivers, senders)]
            return
        starts = _starts(receivers)
        if len(starts) != int(torch.zeros(n_atoms, dtype=torch.bool, device=receivers.device).index_fill_(0, receivers, True).sum()):
            order = receivers.argsort(stable=True)  # one receiver's edges are not next to each other
            vectors, receivers, senders = (t.index_select(0, order) for t in (vectors, receivers, senders))
            starts = _starts(receivers)
        sizes = list(_sizes(starts.tolist(), len(receivers), at_once))
        self._parts = list(zip(*(t.split(sizes) for t in (vectors, receivers, senders)), strict=True))

    @classmethod
    def of(cls, data: Batch) -> _Listed:
        """Those of a batch, by what its run says of chunks."""
        meta = data.receivers._meta if isinstance(data.receivers, ShardTensor) else None
        at_once = block_size(None if meta is None else meta.edges_at_once)
        vectors, receivers, senders = to_local(data.edge_vectors), to_local(data.receivers), to_local(data.senders)
        return cls(vectors, receivers, senders, data.n_atoms, at_once, meta)

    @property
    def n_blocks(self) -> int:
        return len(self._parts)

    def note(self) -> None:
        if self._meta is not None:
            self._meta.sums_in_chunks += 1

    def leaf(self, block: int) -> Tensor:
        return self._parts[block][0]

    def edges(self, block: int, leaf: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        vectors, receivers, senders = self._parts[block]
        return vectors if leaf is None else leaf, receivers, senders


def _starts(receivers: Tensor) -> Tensor:
    """Where another receiver's edges begin."""
    return torch.cat([receivers.new_zeros(1), (receivers[1:] != receivers[:-1]).nonzero().squeeze(1) + 1])


def _sizes(starts: list[int], n: int, at_once: int) -> Iterator[int]:
    begin = 0
    for start, end in zip(starts, [*starts[1:], n], strict=True):
        if end - begin > at_once and start > begin:
            yield start - begin
            begin = start
    yield n - begin
