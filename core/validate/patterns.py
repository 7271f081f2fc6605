"""From wrong numbers to what is wrong: the ratio to the reference, which rows, which geometries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nvdd.validate.diagnosis import Diagnosis

_RATIO = 1e-5  # how well a ratio must be uniform to count as one
_MANY = 6  # numbers; of fewer any ratio may be an accident


@dataclass(frozen=True)
class Wrong:
    """An output that did not pass in one geometry.

    Attributes:
        output, geometry: which.
        per_atom: whether rows are atoms.
        found: in atom order, or rank 0's rows of systems.
        reference: the same of the single process.
        by_rank: values of each rank, where rows are not atoms.
        owner: (N,) rank of each atom.
        boundary: (N,) whether an edge of the atom crosses to another rank.
        system: (N,) system of each atom.
    """

    output: str
    geometry: str
    per_atom: bool
    found: np.ndarray
    reference: np.ndarray
    by_rank: Sequence[np.ndarray]
    owner: np.ndarray
    boundary: np.ndarray
    system: np.ndarray


def recognise(wrong: Sequence[Wrong], passed: Mapping[str, set[str]], n_ranks: int) -> list[Diagnosis]:
    """Diagnoses for outputs that do not pass; ``passed`` has the geometries in which each output does.

    A ratio or a permutation in one geometry is no accident; that only certain rows are wrong must hold in all.
    """
    found: dict[str, Diagnosis] = {}
    for output in dict.fromkeys(w.output for w in wrong):
        mine = [w for w in wrong if w.output == output]
        for diagnosis in (d for w in mine for d in _of_numbers(w, n_ranks)):
            found.setdefault(diagnosis.key, diagnosis)
        of_rows = [{d.kind: d for d in _of_rows(w)} for w in mine if w.per_atom and w.found.shape == w.reference.shape]
        if of_rows and not any(d.output == output for d in found.values()):
            for kind, diagnosis in of_rows[0].items():
                if all(kind in others for others in of_rows):
                    found.setdefault(diagnosis.key, diagnosis)
        diagnosis = _of_geometries(output, {w.geometry for w in mine}, passed.get(output, set()))
        if diagnosis is not None:
            found.setdefault(diagnosis.key, diagnosis)
    return list(found.values())


def _of_numbers(item: Wrong, n_ranks: int) -> list[Diagnosis]:
    name, at = item.output, f"[{item.geometry}]"
    found, wanted = item.found, item.reference
    if found.shape != wanted.shape:
        text = f"{name} {at} has shape {found.shape}, in the single process {wanted.shape}"
        return [Diagnosis("wrong-shape", text, "Declare the kind of output that it is (PER_NODE, PER_GRAPH)", name)]
    if not np.isfinite(found).all():
        text = f"{name} {at} has values that are not finite, in the single process it has none"
        return [
            Diagnosis(
                "not-finite",
                text,
                "Look for a division by a number of neighbours, atoms or edges that is zero on one rank",
                name,
            )
        ]
    scale = np.abs(wanted).max(initial=0.0)
    if scale == 0:
        return []
    ratio = _ratio(found, wanted) if n_ranks > 1 else None
    if not np.abs(found).max(initial=0.0) > 1e-12 * scale:
        return [
            Diagnosis(
                "zeros", f"{name} {at} is zero over ranks",
                "The usual cause is an in-place op whose return was dropped (write out = out.scatter_add_(...)), or an adapter "
                "whose output is discarded", name,
            )
        ]  # fmt: skip
    if not item.per_atom:
        if ratio is not None and np.isclose(ratio, n_ranks, rtol=_RATIO):
            return [_times(name, at, n_ranks)]
        alike = all(np.array_equal(v, item.by_rank[0]) for v in item.by_rank)
        total = sum(item.by_rank)
        if not alike and np.abs(total - wanted).max() <= _RATIO * scale:
            return [
                Diagnosis(
                    "share", f"the ranks' values of {name} {at} are shares: they add up to the single process's",
                    "Declare OutputSpec(OutputKind.PER_GRAPH, Reduce.ALL_REDUCE), or sum with index_add by data.batch", name,
                )
            ]  # fmt: skip
    if ratio is not None:
        if np.isclose(ratio, n_ranks, rtol=_RATIO):
            return [_times(name, at, n_ranks)]
        if np.isclose(ratio, 1 / n_ranks, rtol=_RATIO):
            text = f"{name} {at} is 1/{n_ranks} of the single process's"
            return [
                Diagnosis(
                    "divided",
                    text,
                    "Nothing may be divided by the number of ranks; sums over ranks are not means",
                    name,
                )
            ]
        if np.isclose(ratio, -1, rtol=_RATIO):
            text = f"{name} {at} has the opposite sign"
            return [Diagnosis("sign", text, "Check edge_layout.vector, and the sign of forces or virial", name)]
        if wanted.size >= _MANY and abs(ratio - 1) > 1e-3:
            text = f"{name} {at} is {ratio:.6g} times the single process's"
            return [
                Diagnosis(
                    "scaled", text, "Look for a factor that depends on how atoms are divided (a count, a mean)", name
                )
            ]
    if not item.per_atom:
        different = any(np.abs(v - item.by_rank[0]).max() > _RATIO * scale for v in item.by_rank[1:])
        if different:
            text = f"{name} {at} is not the same on every rank"
            return [
                Diagnosis(
                    "not-replicated", text, "Sum it over ranks, or declare it as a share (Reduce.ALL_REDUCE)", name
                )
            ]
        return []
    flat, wanted = (v.reshape(len(v), -1) for v in (found, wanted))
    key = lambda rows: rows[np.lexsort(np.round(rows / scale, 9).T[::-1])]
    if np.allclose(key(flat), key(wanted), rtol=0, atol=1e-7 * scale):
        text = f"{name} {at} has the right rows at the wrong atoms"
        return [
            Diagnosis(
                "permuted", text, "Rows belong to data's atoms in data's order; look for a sort or an index", name
            )
        ]
    return []


def _of_rows(item: Wrong) -> list[Diagnosis]:
    """What the wrong rows have in common."""
    name, at = item.output, f"[{item.geometry}]"
    flat, wanted = (v.reshape(len(v), -1) for v in (item.found, item.reference))
    scale = np.abs(wanted).max(initial=0.0)
    bad = np.abs(flat - wanted).max(1) > 1e-7 * scale
    out = []
    if item.boundary.any() and not item.boundary.all() and bad.any() and not (bad & ~item.boundary).any():
        text = f"{name} {at} is wrong only for atoms whose edges cross to another rank ({int(bad.sum())} of {len(bad)})"
        remedy = (
            "Their neighbours' rows are stale, or what they write to the halo does not come back: for a custom op declare "
            "output_transforms={0: ScatterOutputs()}; else look at to_local around a gather"
        )
        out.append(Diagnosis("boundary", text, remedy, name))
    owners = set(item.owner[bad].tolist())
    if len(owners) == 1 and len(set(item.owner.tolist())) > 1:
        text = f"{name} {at} is wrong only on rank {owners.pop()}"
        out.append(
            Diagnosis("one-rank", text, "Look for what is peculiar to it (first rows, empty lists, its number)", name)
        )
    systems = set(item.system[bad].tolist())
    if len(set(item.system.tolist())) > 1 and len(systems) < len(set(item.system.tolist())):
        text = f"{name} {at} is wrong only in system {sorted(systems)}"
        out.append(
            Diagnosis("one-system", text, "Look for sums over all atoms where those of each system are meant", name)
        )
    return out


def _times(name: str, at: str, n_ranks: int) -> Diagnosis:
    return Diagnosis(
        "times-world-size", f"{name} {at} is {n_ranks} times the single process's: it is summed over ranks twice",
        "It is the same on every rank already; drop it from all_reduce_outputs", name,
    )  # fmt: skip


def _ratio(found: np.ndarray, wanted: np.ndarray) -> float | None:
    """The factor between both, if there is one."""
    square = float((wanted * wanted).sum())
    factor = float((found * wanted).sum()) / square
    return factor if np.abs(found - factor * wanted).max() <= _RATIO * abs(factor) * np.abs(wanted).max() else None


def _of_geometries(output: str, wrong: set[str], passed: set[str]) -> Diagnosis | None:
    """What only some geometries show."""
    if not passed:
        return None
    kind = lambda names: {n.split(": ")[0] for n in names}
    if kind(wrong) == {"dynamics"}:
        text = f"{output} goes wrong during dynamics only ({', '.join(sorted(wrong))})"
        return Diagnosis(
            "stale", text, "Something is kept from an earlier step: a cache of edges, cells, charges or rows", output
        )
    if wrong and all("vacuum" in w for w in wrong):
        text = f"{output} is wrong only where a rank has no atoms or no edges"
        return Diagnosis(
            "empty-rank", text, "Zero atoms and zero edges must run the same code; no early return", output
        )
    if wrong and all("changed inputs" in w for w in wrong):
        text = f"{output} is wrong only once charges and other inputs have changed between two calls"
        return Diagnosis("stale", text, "Read node and system inputs from data at every call", output)
    if wrong and all("two systems" in w for w in wrong):
        text = f"{output} is wrong only with several systems in a batch"
        return Diagnosis("one-system", text, "Sum by data.batch, not over all atoms", output)
    if wrong and all("translated" in w or "dynamics" in w for w in wrong):
        text = f"{output} is wrong only where atoms are outside the cell or in other images"
        return Diagnosis(
            "images", text, "Use neighbor_list_shifts (or data.edge_vectors), never positions wrapped by hand", output
        )
    if wrong and all("strained" in w for w in wrong):
        text = f"{output} is wrong only in the triclinic or changed cell"
        return Diagnosis("cell", text, "Read data.cell at every call; shifts are rows times the cell", output)
    return None
