"""One spec, tried: on one rank in this process, then on real ranks, and looked into where it fails."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

from nvdd.communicator import Communicator
from nvdd.errors import DistributedOpError
from nvdd.roles import Role
from nvdd.runtime.model import DistributedModel
from nvdd.specs import ForceStrategy, MLIPSpec, OutputKind, Reduce
from nvdd.validate.checks import Checker, migrations
from nvdd.validate.diagnosis import Diagnosis, translate
from nvdd.validate.fixes import Fix, apply_fixes
from nvdd.validate.geometries import Case
from nvdd.validate.helpers import undeclared_reductions
from nvdd.validate.layers import first_divergence
from nvdd.validate.rank_side import RankResult, Request, evaluate_cases
from nvdd.validate.reference import Truth
from nvdd.validate.report import Attempt
from nvdd.validate.session import RanksFailed, ValidationSession
from nvdd.validate.single_process import SingleProcess
from nvdd.validate.tolerance import Tolerance

_ON_ONE_RANK = ("default", "two systems", "vacuum")  # the other cases differ from these in the partition


class Trial:
    """Tries specs of one model.

    Args:
        single: the model in this process, with its truths.
        session: the ranks.
        tolerance: when outputs are equal.
        initial: the spec that fixes change.
        given: the same if ranks must be told; None if it is the wrapper's own.
    """

    def __init__(
        self,
        single: SingleProcess,
        session: ValidationSession,
        tolerance: Tolerance,
        initial: MLIPSpec,
        given: MLIPSpec | None,
    ) -> None:
        self.single, self.session, self.tolerance = single, session, tolerance
        self.initial, self.given = initial, given
        self.checker = Checker(single.geometries, single.truths, tolerance, single.cutoff, single.kinds)

    def run(self, fixes: tuple[Fix, ...] = ()) -> Attempt:
        """Tries the initial spec with ``fixes``."""
        attempt = Attempt(apply_fixes(self.initial, fixes), fixes, "one rank")
        request = self._request(attempt.spec, fixes, self.single.cases)
        alone = self._one_rank(attempt, request)
        if alone is None or attempt.diagnoses or attempt.failures:
            return attempt
        attempt.diagnoses = self._uncombined(attempt.spec, alone)
        if attempt.diagnoses:
            return attempt
        attempt.comparisons, attempt.halo_completeness, attempt.stage = [], None, "ranks"
        try:
            answers = self.session.run(request)
        except RanksFailed as failed:
            attempt.error, attempt.diagnoses = failed.error, [_on_ranks_only(translate(failed.error))]
            if failed.records is not None:
                self._helpers(attempt, failed.records)
            return attempt
        ranks = [a["results"] for a in answers]
        also = {r.geometry: {k: r.values[k] for k in ("stresses",) if k in r.values} for r in alone}
        self.checker.check(attempt, ranks, also)
        attempt.diagnoses += _untested(attempt, request, self.single.truths["as given"], ranks)
        if not attempt.ok:
            if len({a["weights"] for a in answers} | {self.single.weights}) > 1:
                text = "the weights on the ranks are not those of this process"
                attempt.diagnoses.insert(
                    0, Diagnosis("weights-differ", text, "Seed the factory, or load a checkpoint in it")
                )
            self._locate(attempt, fixes)
            self._helpers(attempt, ranks)
            if not attempt.diagnoses and attempt.failures:
                text = f"wrong numbers over ranks, with no pattern that is known: {attempt.failures[0]}"
                remedy = "See the first module that differs, and which handlers fired"
                attempt.diagnoses.append(Diagnosis("wrong-numbers", text, remedy, attempt.failures[0].output))
        self._coverage(ranks)
        return attempt

    def look_for_refusal(self, attempt: Attempt) -> None:
        """Puts what nvdd refuses on one rank, with the line of the model, before what else is known."""
        alone = Attempt(self.initial)
        self._one_rank(alone, self._request(self.initial, (), self.single.cases))
        if isinstance(alone.error, DistributedOpError):
            attempt.error, attempt.stage = alone.error, "one rank"
            attempt.diagnoses = [*alone.diagnoses, *attempt.diagnoses]

    def _uncombined(self, spec: MLIPSpec, alone: Sequence[RankResult]) -> list[Diagnosis]:
        """Outputs that ranks would refuse to combine; known without asking them."""
        found = []
        for name in sorted(self.single.returned & self.single.truths["as given"].values.keys()):
            declared = spec.outputs.get(name)
            if declared is None or declared.kind is OutputKind.UNKNOWN:
                why = "of the wrapper is not declared in the model's spec"
            elif (
                declared.kind is OutputKind.PER_GRAPH
                and declared.reduce is not Reduce.ALL_REDUCE
                and any(r.roles.get(name) != Role.SYSTEM.name for r in alone)
            ):
                why = "of the wrapper is declared PER_GRAPH, but it is not known to be summed over ranks"
            else:
                continue
            found.append(translate(DistributedOpError(f"output {name!r} {why}")))
        return found

    def _request(self, spec: MLIPSpec, fixes: tuple[Fix, ...], cases: Sequence[Case], layers: bool = False) -> Request:
        truth = self.single.truths["as given"]
        wanted = (set(truth.returned) | {"energy"}) & (truth.values.keys() | {"energies"})
        derives = spec.force_strategy in (ForceStrategy.EDGE_VECTORS, ForceStrategy.POSITIONS) and not truth.severed
        if derives:
            asked = self.single.wrapper.model_config.outputs
            wanted |= {"forces"} & asked
            if "stress" in asked and "stress" not in truth.returned:
                wanted |= {"virial"}
            if "stresses" in asked and spec.force_strategy is ForceStrategy.EDGE_VECTORS:
                wanted |= {"stresses"}
        used = {g for c in cases for g in c.geometries}
        return Request(
            self.single.factory, self.given, fixes, tuple(cases), {k: v for k, v in self.single.geometries.items() if k in used},
            frozenset(wanted), truth.returned, layers, self.single.watch,
        )  # fmt: skip

    def _one_rank(self, attempt: Attempt, request: Request) -> list[RankResult] | None:
        """The runtime in this process: what it refuses, it refuses on one rank too, without starting any."""
        done: list[RankResult] = []
        try:
            wrapper = self.single.factory.make(self.single.device)
            few = replace(request, cases=[c for c in self.single.cases if c.name in _ON_ONE_RANK])
            evaluate_cases(Communicator(None, self.single.device), DistributedModel, wrapper, few, done)
        except Exception as error:
            attempt.error, attempt.diagnoses = error, [translate(error)]
            return None
        self.checker.check(attempt, [done])
        if attempt.failures:
            text = f"on one rank already nvdd's evaluation is not the wrapper's own forward: {attempt.failures[0]}"
            remedy = "Look for what the wrapper does with positions, cell or n_atoms that is not in data.edge_vectors"
            attempt.diagnoses.append(Diagnosis("one-rank-differs", text, remedy, attempt.failures[0].output))
            self._locate(attempt, attempt.fixes, on_ranks=False)
        return done

    def _helpers(self, attempt: Attempt, ranks: Sequence[Sequence[RankResult]]) -> None:
        for results in zip(*ranks, strict=False):
            if results[0].geometry in self.single.truths and not attempt.helper_diagnostics:
                truth = self.single.truths[results[0].geometry]
                attempt.helper_diagnostics = undeclared_reductions(truth.helpers, [r.helpers for r in results])
        for text in attempt.helper_diagnostics:
            remedy = (
                "Declare a replacement that sums over ranks in spec.distribution.third_party_helpers (PythonAdapter, with "
                "nvdd.system_sum), or sum with index_add by data.batch in the wrapper"
            )
            attempt.diagnoses.append(Diagnosis("helper-reduction", text, remedy))

    def _locate(self, attempt: Attempt, fixes: tuple[Fix, ...], on_ranks: bool = True) -> None:
        """Evaluates the first geometry that failed once more, recording every module's output."""
        if not attempt.failures:
            return
        case_name, _, geometry = attempt.failures[0].geometry.removesuffix(" again").partition(": ")
        case = next(c for c in self.single.cases if c.name == case_name)
        request = self._request(attempt.spec, fixes, [replace(case, geometries=(geometry,))], layers=True)
        with contextlib.suppress(Exception):  # a hint, not a verdict
            if on_ranks:
                parts = [a["results"][0] for a in self.session.run(request)]
            else:
                done: list[RankResult] = []
                evaluate_cases(
                    Communicator(None, self.single.device),
                    DistributedModel,
                    self.single.factory.make(self.single.device),
                    request,
                    done,
                )
                parts = done[:1]
            truth = self.single.truth(geometry, layers=True)
            attempt.divergence = first_divergence(
                truth.layers, truth.edges, [(p.ids, p.edges, p.layers) for p in parts], max(self.tolerance.rtol, 1e-9)
            )
        if attempt.divergence is not None and attempt.divergence.crossing:
            text = f"{attempt.divergence.module} reads wrong rows of other ranks' atoms, and right ones of its own"
            remedy = (
                "Gather with the tensors as they come, x[data.senders], not with to_local, .data or NumPy; a kernel that reads "
                "neighbours needs GatherInputs(), and one that writes to them ScatterOutputs(), in its OpAdapter"
            )
            attempt.diagnoses.append(Diagnosis("wrong-neighbours", text, remedy))

    def _coverage(self, ranks: Sequence[Sequence[RankResult]]) -> None:
        if not any(c.name == "dynamics" for c in self.single.cases):
            return
        moved, kept = migrations(ranks, "dynamics")
        note = "dynamics: " + ", ".join(
            w
            for w, bad in (("no atom changed its owner", not moved), ("the partition was never kept", not kept))
            if bad
        )
        if (not moved or not kept) and note not in self.single.notes:
            self.single.notes.append(note)


def _untested(
    attempt: Attempt, request: Request, truth: Truth, ranks: Sequence[Sequence[RankResult]]
) -> list[Diagnosis]:
    """Outputs that nobody compared, and samples that nobody had to divide: neither may pass for tested."""
    found = []
    lost = sorted((request.wanted & truth.values.keys()) - {c.output for c in attempt.comparisons})
    if lost and attempt.comparisons:
        text = f"{', '.join(lost)} was asked for and not given over ranks"
        found.append(Diagnosis("not-compared", text, "Name it in ModelConfig(outputs=...) and in the spec"))
    if not any(r.n_halo for results in ranks for r in results):
        text = "no edge of the sample joins atoms of two ranks, so nothing was exchanged"
        found.append(Diagnosis("nothing-tested", text, "Give a larger or denser structure"))
    return found


def _on_ranks_only(diagnosis: Diagnosis) -> Diagnosis:
    """One rank alone has passed: what severs the graph on several of them is a path that one of them takes."""
    if diagnosis.kind != "severed-graph":
        return diagnosis
    return Diagnosis(
        "out-of-step",
        "on one rank the energy does not depend on the geometry, in one process it does: the model takes another path there",
        "Look for a branch on the number of atoms or edges, or an early return; run the same operations for zero edges",
    )
