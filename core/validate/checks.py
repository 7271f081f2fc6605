"""From what the ranks sent to verdicts: rows in atom order, every output, every geometry, every edge."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from nvdd.data import Batch
from nvdd.specs import MLIPSpec, OutputKind
from nvdd.validate.diagnosis import Diagnosis
from nvdd.validate.edges import check_edges
from nvdd.validate.patterns import Wrong, recognise
from nvdd.validate.rank_side import RankResult
from nvdd.validate.reference import Truth
from nvdd.validate.report import Attempt
from nvdd.validate.tolerance import Tolerance, compare

DERIVED = {"energy": False, "energies": True, "forces": True, "virial": False, "stress": False, "stresses": True}


class Checker:
    """Compares results with the truth of each geometry.

    Args:
        geometries: by name.
        truths: by name.
        tolerance: limits of float64 and float32 models.
        cutoff: of the model, A.
        kinds: kind of each output that the wrapper returns.
    """

    def __init__(
        self,
        geometries: Mapping[str, Batch],
        truths: Mapping[str, Truth],
        tolerance: Tolerance,
        cutoff: float,
        kinds: Mapping[str, OutputKind],
    ) -> None:
        self.geometries, self.truths, self.tolerance = geometries, truths, tolerance
        self.cutoff, self.kinds = cutoff, kinds
        self.largest: dict[str, float] = {}
        for truth in truths.values():
            for name, value in truth.values.items():
                if np.isfinite(value).all():
                    self.largest[name] = max(self.largest.get(name, 0.0), float(np.abs(value).max(initial=0.0)))

    def per_atom(self, name: str, spec: MLIPSpec) -> bool | None:
        """Whether rows of an output are atoms; None for one value that is the same everywhere."""
        declared = spec.outputs.get(name)
        kind = self.kinds.get(name, declared.kind if declared is not None else None)
        if kind is OutputKind.GLOBAL:
            return None
        if kind in (OutputKind.PER_NODE, OutputKind.PER_GRAPH):
            return kind is OutputKind.PER_NODE
        return DERIVED.get(name, False)

    def check(self, attempt: Attempt, ranks: Sequence[Sequence[RankResult]], also: Mapping[str, Mapping] | None = None):
        """Fills ``attempt`` with comparisons, halo completeness and diagnoses of wrong numbers.

        Args:
            ranks: results of each rank, in the same order.
            also: further reference values by geometry: of outputs that the single process's autograd doesn't give.
        """
        wrong: list[Wrong] = []
        passed: dict[str, set[str]] = defaultdict(set)
        for results in zip(*ranks, strict=True):
            first = results[0]
            label = f"{first.case}: {first.geometry}" + (
                " again" if first.turn and first.geometry == "as given" else ""
            )
            truth, batch = self.truths[first.geometry], self.geometries[first.geometry]
            complete = check_edges(
                label, batch, self.cutoff, truth.edges, [r.edges for r in results], [r.ids for r in results]
            )
            if attempt.halo_completeness is None or attempt.halo_completeness.matches:
                attempt.halo_completeness = complete
            if not self._owned_once(attempt, results, batch, label):
                continue
            reference = {**(also or {}).get(first.geometry, {}), **truth.values}
            for name in sorted(first.values):
                if name in reference:
                    self._compare(attempt, name, label, results, batch, reference[name], wrong, passed)
        attempt.diagnoses += recognise(wrong, passed, len(ranks))
        attempt.fired = sum((r.fired for r in ranks[0]), attempt.fired)
        attempt.n_exchanges = sum(r.n_exchanges for r in ranks[0])

    def _owned_once(self, attempt: Attempt, results: Sequence[RankResult], batch: Batch, label: str) -> bool:
        ids = np.concatenate([r.ids for r in results])
        if len(ids) == batch.n_atoms and np.array_equal(np.sort(ids), np.arange(batch.n_atoms)):
            return True
        lost = sorted(set(range(batch.n_atoms)) - set(ids.tolist()))[:10]
        text = f"[{label}] {len(ids)} atoms are owned of {batch.n_atoms}; nobody owns {lost}"
        attempt.diagnoses.append(Diagnosis("ownership", text, "This is a fault of the partition, not of the model"))
        return False

    def _compare(self, attempt, name, label, results, batch, reference, wrong, passed) -> None:
        per_atom = self.per_atom(name, attempt.spec)
        ids, values = [r.ids for r in results], [r.values[name] for r in results]
        system = batch.batch.numpy()
        counts = np.bincount(system, minlength=batch.n_systems)
        if per_atom and all(v.shape[:1] == i.shape for v, i in zip(values, ids, strict=True)):
            rows = np.concatenate(values)
            found = np.empty_like(rows)
            found[np.concatenate(ids)] = rows
            candidates = [found]
        else:
            candidates, per_atom = values, False
        worst = None
        for found in candidates:
            comparison = compare(
                name, label, found, reference, self.tolerance, system if per_atom else None,
                None if per_atom else counts, self.largest.get(name),
            )  # fmt: skip
            if worst is None or (worst[0].ok and not comparison.ok):
                worst = comparison, found
        comparison, found = worst
        attempt.comparisons.append(comparison)
        if comparison.ok:
            passed[name].add(label)
            return
        owner = np.zeros(batch.n_atoms, np.int64)
        for rank, mine in enumerate(ids):
            owner[mine] = rank
        boundary = np.zeros(batch.n_atoms, bool)
        for result in results:
            crossing = result.edges[owner[result.edges[:, 0]] != owner[result.edges[:, 1]]]
            boundary[crossing[:, :2].ravel()] = True
        wrong.append(Wrong(name, label, bool(per_atom), found, reference, values, owner, boundary, system))


def migrations(ranks: Sequence[Sequence[RankResult]], case: str) -> tuple[int, int]:
    """How many atoms changed owner between geometries of a case, and in how many steps the partition was kept."""
    moved, kept, before, builds = 0, 0, None, None
    for results in zip(*ranks, strict=True):
        if results[0].case != case:
            continue
        owner = {int(i): rank for rank, r in enumerate(results) for i in r.ids}
        if before is not None:
            moved += sum(before.get(i) != rank for i, rank in owner.items())
            kept += builds == results[0].builds
        before, builds = owner, results[0].builds
    return moved, kept
