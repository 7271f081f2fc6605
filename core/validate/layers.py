"""Layer by layer: the first module of the model whose output differs from the single process's, in atom order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nvdd.data import Batch
from nvdd.roles import Role
from nvdd.shard_tensor import ShardTensor, to_local

_MOST = 4_000_000  # numbers of one output; larger ones are left out


@dataclass(frozen=True)
class LayerOutput:
    """The first tensor that a module returned.

    Attributes:
        name: ``layers.0.mix``, with ``(2)`` for its second call.
        kind: ``"atoms"``, ``"edges"``, ``"systems"``, or ``""`` if it is not known what its rows are.
        value: this process's rows; of atoms without a phantom and without halo rows.
    """

    name: str
    kind: str
    value: np.ndarray


@contextmanager
def record_layers(wrapper: torch.nn.Module) -> Iterator[list[LayerOutput]]:
    """Records the outputs of all submodules during the block, in the order of their calls."""
    records: list[LayerOutput] = []
    calls: Counter = Counter()
    now: dict[str, Batch] = {}

    def start(module: Any, args: tuple, kwargs: dict) -> None:
        now["batch"] = next((a for a in (*args, *kwargs.values()) if isinstance(a, Batch)), None)

    def hook(name: str):
        def after(module: Any, args: Any, output: Any) -> None:
            calls[name] += 1
            tensor = _first_float(output)
            if tensor is not None and tensor.numel() <= _MOST:
                label = name if calls[name] == 1 else f"{name} ({calls[name]})"
                kind, value = _rows(tensor, now.get("batch"))
                records.append(LayerOutput(label, kind, value.detach().to(torch.float64).cpu().numpy().copy()))

        return after

    handles = [wrapper.register_forward_pre_hook(start, with_kwargs=True)]
    for name, module in wrapper.named_modules():
        if name:
            try:
                handles.append(module.register_forward_hook(hook(name)))
            except RuntimeError:  # a scripted module may refuse hooks
                continue
    try:
        yield records
    finally:
        for handle in handles:
            handle.remove()


def _first_float(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value if to_local(value).is_floating_point() else None
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return next((t for t in map(_first_float, items) if t is not None), None)


def _rows(tensor: Tensor, batch: Batch | None) -> tuple[str, Tensor]:
    """What the rows are: by role, else by number where that leaves no doubt."""
    plain = to_local(tensor)
    role = tensor._role if isinstance(tensor, ShardTensor) else None
    if role in (Role.OWNED, Role.PADDED):
        return ("atoms", plain[: tensor._meta.n_counted]) if tensor._row_dim == 0 else ("", plain)
    if role is Role.EDGE:
        return ("edges", plain) if tensor._row_dim == 0 else ("", plain)
    if role is Role.SYSTEM:
        return "systems", plain
    if batch is None or role is not None or not plain.dim():
        return "", plain
    meta = getattr(batch.batch, "_meta", None)
    n_atoms, n_edges = to_local(batch.atomic_numbers).shape[0], 0 if batch.neighbor_list is None else len(to_local(batch.neighbor_list))
    rows = plain.shape[0]
    if n_atoms == n_edges or rows not in (n_atoms, n_edges):
        return "", plain
    if rows == n_atoms:
        return "atoms", plain if meta is None else plain[: meta.n_counted]
    return "edges", plain


@dataclass(frozen=True)
class Divergence:
    """The first module whose output differs.

    Attributes:
        module: its name.
        text: how much, and in which rows.
        crossing: whether all wrong rows are edges from, or atoms next to, another rank's atoms, and there are right ones.
    """

    module: str
    text: str
    crossing: bool = False

    def __str__(self) -> str:
        return self.text


def first_divergence(
    reference: Sequence[LayerOutput],
    edges: np.ndarray,
    ranks: Sequence[tuple[np.ndarray, np.ndarray, Sequence[LayerOutput]]],
    rtol: float,
) -> Divergence | None:
    """The first module whose output differs; None if none does.

    Args:
        reference: of the single process.
        edges: (E, 5) of the single process, in its order.
        ranks: ids, edges and records of each rank.
        rtol: of the largest value of the module's output.
    """
    order, across = _order(edges), _across(edges, [ids for ids, _, _ in ranks])
    for k, expected in enumerate(reference):
        parts = [records[k] if k < len(records) else None for _, _, records in ranks]
        for rank, part in enumerate(parts):
            if part is None or part.name != expected.name:
                other = "nothing more" if part is None else part.name
                text = f"rank {rank} calls {other} where the single process calls {expected.name}"
                return Divergence(expected.name, text)
        kind = parts[0].kind
        if any(p.kind != kind for p in parts) or kind not in ("atoms", "edges", "systems"):
            continue
        if kind == "systems":
            pairs = [(f"rank {r}", p.value, expected.value) for r, p in enumerate(parts)]
        else:
            place = _places(kind, order, edges, ranks)
            if place is None or sum(len(p.value) for p in parts) != len(expected.value):
                continue
            found = np.empty_like(expected.value)
            values = np.concatenate([p.value for p in parts])
            if values.shape != found.shape:
                return _shapes(expected.name, values, found)
            found[place] = values
            pairs = [(kind, found, expected.value)]
        for what, value, wanted in pairs:
            if value.shape != wanted.shape:
                return _shapes(expected.name, value, wanted)
            error = np.abs(value - wanted)
            if not wanted.size or not np.isfinite(wanted).all():
                continue
            limit = rtol * max(float(np.abs(wanted).max()), 1e-300)
            if not float(np.nanmax(error)) <= limit or np.isnan(error).any():
                rows = np.unique(np.argwhere(~(error <= limit))[:, 0])
                crossing = kind in ("atoms", "edges") and 0 < len(rows) < len(wanted) and set(rows) <= across[kind]
                text = (
                    f"{expected.name} is the first module whose output differs: by {np.nanmax(error):.2e} "
                    f"(largest value {np.abs(wanted).max():.2e}), in {len(rows)} of {len(wanted)} rows of {what} "
                    f"({', '.join(map(str, rows[:5]))}{', ...' * (len(rows) > 5)})"
                )
                return Divergence(
                    expected.name, text + ", all of them next to another rank's atoms" * crossing, crossing
                )
    return None


def _shapes(name: str, value: np.ndarray, wanted: np.ndarray) -> Divergence:
    return Divergence(name, f"{name}: shape {value.shape}, in the single process {wanted.shape}")


def _across(edges: np.ndarray, ids: Sequence[np.ndarray]) -> dict[str, set[int]]:
    """Edges between atoms of two ranks, and the atoms at their ends."""
    owner = np.zeros(sum(map(len, ids)), np.int64)
    for rank, mine in enumerate(ids):
        owner[mine] = rank
    crossing = owner[edges[:, 0]] != owner[edges[:, 1]]
    return {"edges": set(np.flatnonzero(crossing)), "atoms": set(edges[crossing, :2].ravel())}


def _order(edges: np.ndarray) -> np.ndarray:
    return np.lexsort(edges.T[::-1])


def _places(kind: str, order: np.ndarray, edges: np.ndarray, ranks: Sequence[tuple]) -> np.ndarray | None:
    """Row of the single process for each row of the ranks, one after the other."""
    if kind == "atoms":
        return np.concatenate([ids for ids, _, _ in ranks])
    found = np.concatenate([e for _, e, _ in ranks])
    theirs = _order(found)
    if found.shape != edges.shape or not np.array_equal(found[theirs], edges[order]):
        return None
    place = np.empty(len(found), np.int64)
    place[theirs] = order
    return place
