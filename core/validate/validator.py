"""`trace_and_validate`: does a model over ranks give what it gives in one process, and with which spec?"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from nvdd.communicator import Communicator
from nvdd.config import DomainConfig
from nvdd.data import Batch
from nvdd.errors import DistributedOpError, InputError
from nvdd.policy import HaloStoragePolicy
from nvdd.runtime.model import DistributedModel, resolve_spec
from nvdd.specs import SPEC_MPNN_HALO, DistributionSpec, ForceStrategy, MLIPSpec, OutputKind
from nvdd.validate import reference
from nvdd.validate.checks import DERIVED, Checker, migrations
from nvdd.validate.diagnosis import Diagnosis, translate
from nvdd.validate.factory import FactoryRef, checksum
from nvdd.validate.fixes import Fix, apply_fixes, propose
from nvdd.validate.geometries import Case, dynamics, make_cases, with_geometry
from nvdd.validate.helpers import HelperWatch, packages_of, undeclared_reductions, watch_helpers
from nvdd.validate.layers import first_divergence
from nvdd.validate.rank_side import RankResult, Request, evaluate_cases
from nvdd.validate.reference import Truth
from nvdd.validate.report import Attempt, TraceReport
from nvdd.validate.session import RanksFailed, ValidationSession
from nvdd.validate.tolerance import Tolerance, compare

_MOST_FIXES = 4  # of one spec
_ON_ONE_RANK = ("default", "two systems", "vacuum")  # the other cases differ from these in the partition


def trace_and_validate(
    model_factory: Any,
    sample_batch: Any,
    world_size: int = 2,
    device: str = "cpu",
    atol: float | None = None,
    rtol: float | None = None,
    *,
    spec: MLIPSpec | None = None,
    watch: Sequence[str] | None = None,
    md_steps: int = 5,
    max_attempts: int = 8,
    timeout: float = 120.0,
    session: ValidationSession | None = None,
    seed: int = 0,
) -> TraceReport:
    """Runs a model in one process and over ranks, compares every output, and repairs the spec where a rule knows how.

    The wrapper's own forward on plain tensors is the reference. The same factory then makes the model on
    ``world_size`` processes, which evaluate it under the spec in several geometries and partitions and along a short
    run of dynamics. An output passes if its absolute *and* its relative error are within the limits, in atom order, in
    every geometry (`nvdd.validate.tolerance`).

    Args:
        model_factory: a function at the top level of a module or script (or a ``functools.partial`` of one, or
            ``"module:attribute"``) that makes the wrapper, with the same weights each time. Train or eval mode is
            the factory's.
        sample_batch: a `Batch`, an ``ase.Atoms`` or a list of them: tens of atoms, with everything that the model reads.
        world_size: number of ranks; 3 find more than 2.
        device: ``"cpu"``, ``"cuda"`` (a GPU for each rank), ``"cuda:0"`` (all ranks on one GPU).
        atol: in the unit of the output (energy and virial: per atom); None for 1e-8 in float64, 1e-4 in float32.
        rtol: of the output's largest value in the same system; None for the same numbers.
        spec: None for the wrapper's ``distribution_spec``; where it has none, `SPEC_MPNN_HALO`.
        watch: packages whose helper functions are watched; None for those that define the model's modules.
        md_steps: steps of dynamics; 0 for none.
        max_attempts: most specs to try, the initial one included.
        timeout: seconds for one attempt, after which ranks count as waiting for each other.
        session: ranks to use; it decides ``world_size``, ``device`` and ``timeout``.
        seed: of the displacements.

    Returns:
        The report. A model that can't be distributed gives a report with the reason, not an exception.

    Raises:
        InputError: the factory can't be reached from other processes, or the sample is no structure.
    """
    factory = FactoryRef.of(model_factory)
    own = session is None
    if session is None:
        session = ValidationSession(world_size, device, timeout)
    try:
        return _Validation(factory, _as_batch(sample_batch), session, spec, watch, seed).run(
            atol, rtol, md_steps, max_attempts
        )
    finally:
        if own:
            session.close()


def _as_batch(sample: Any) -> Batch:
    if not isinstance(sample, Batch):
        if not (hasattr(sample, "numbers") or (isinstance(sample, (list, tuple)) and sample)):
            raise InputError(
                f"sample_batch must be a Batch, an ase.Atoms or a list of them, not a {type(sample).__name__}"
            )
        sample = Batch.from_atoms(sample)
    if sample.n_atoms < 2:
        raise InputError(f"a sample of {sample.n_atoms} atoms can't be divided; give some tens of atoms")
    cpu = sample.to("cpu")
    return with_geometry(cpu, cpu.positions.detach().to(torch.float64), cpu.cell.detach().to(torch.float64))


class _Validation:
    """One call of `trace_and_validate`."""

    def __init__(self, factory, sample, session, spec, watch, seed) -> None:
        self.factory, self.sample, self.session = factory, sample, session
        self.given, self.watch, self.seed = spec, watch, seed
        device = torch.device(session.device)
        self.device = torch.device("cuda", 0) if device.type == "cuda" and device.index is None else device
        self.notes: list[str] = []
        self.truths: dict[str, Truth] = {}
        self._watched: HelperWatch | None = None
        self.ops: Counter = Counter()
        self.kinds: dict[str, OutputKind] = {}

    def run(self, atol: float | None, rtol: float | None, md_steps: int, max_attempts: int) -> TraceReport:
        tolerance = Tolerance.of(torch.float64, atol, rtol)
        report = TraceReport(None, [], self.session.world_size, tolerance, notes=self.notes)
        first = Attempt(None)
        try:
            self.wrapper = self.factory.make(self.device)
            self.weights = checksum(self.wrapper)  # now: BatchNorm in training changes its buffers
            report.tolerance = self.tolerance = Tolerance.of(getattr(self.wrapper, "dtype", torch.float64), atol, rtol)
            first.spec = report.spec = self.initial = self._initial_spec()
            self._prepare(md_steps)
            first.diagnoses = self._judge_reference()
        except Exception as error:
            if isinstance(error, InputError) and not self.truths and not hasattr(self, "wrapper"):
                raise
            first.error, first.diagnoses = error, [translate(error)]
        if first.diagnoses:
            report.attempts = [first]
            return report
        report.reference_ops = self.ops
        report.geometries = [f"{c.name}: {g}" for c in self.cases for g in c.geometries]
        self._search(report, max_attempts)
        return report

    # -- the single process

    def _initial_spec(self) -> MLIPSpec:
        declared = self.given if self.given is not None else resolve_spec(self.wrapper, DomainConfig().strategy)
        if declared is None:
            self.given = declared = MLIPSpec(
                DistributionSpec(HaloStoragePolicy(scatter_mode="local", gather_mode="halo_fetch")),
                SPEC_MPNN_HALO.outputs,
                name="inferred",
            )
            self.notes.append("the wrapper declares no distribution_spec: SPEC_MPNN_HALO was taken to begin with")
        return declared

    def _truth(self, name: str, layers: bool = False) -> Truth:
        return reference.evaluate(
            self.wrapper, self.geometries[name], self.device, layers, self._watched, ops=None if self.ops else self.ops
        )

    def _prepare(self, md_steps: int) -> None:
        """Makes the geometries and their truths."""
        if self.watch is None:
            self.watch = packages_of(self.wrapper)
        self.watch = tuple(self.watch)
        with watch_helpers(self.watch) as self._watched:
            self._evaluate_truths(md_steps)
        self._watched = None
        self._infer_kinds()

    def _evaluate_truths(self, md_steps: int) -> None:
        self.geometries, cases = make_cases(self.sample, self.session.world_size, self.seed)
        self.cases: list[Case] = []
        for case in cases:
            why = None
            for name in dict.fromkeys(case.geometries):
                if name not in self.truths and why is None:
                    why = self._add_truth(name, case.essential)
            if why is None:
                self.cases.append(case)
            else:
                # the other geometries of the case still count
                kept = tuple(g for g in case.geometries if g in self.truths)
                self.notes.append(f"{case.name}: {why}")
                if kept and case.name != "two systems":
                    self.cases.append(replace(case, geometries=kept))
        if md_steps > 0:
            self._add_dynamics(md_steps)

    def _add_truth(self, name: str, essential: bool) -> str | None:
        """Evaluates the single process; where it may fail and does, gives the reason."""
        try:
            truth = self._truth(name)
        except Exception as error:
            if essential:
                raise
            return f"{name} fails in one process ({type(error).__name__}: {error})"
        if not essential and not all(np.isfinite(v).all() for v in truth.values.values()):
            return f"{name} is not finite in one process"
        if name == "two systems" and (why := self._not_additive(truth)):
            return why
        self.truths[name] = truth
        return None

    def _not_additive(self, truth: Truth) -> str | None:
        """Whether the model mixes the systems of a batch, which is its own affair and not one of ranks."""
        n = self.sample.n_systems
        energy = truth.values.get("energy")
        alone = self.truths["rattled"].values.get("energy")
        if energy is None or alone is None:
            return None if energy is alone else "the model gives no energy for two systems"
        scale = max(float(np.abs(alone).max()), 1e-300)
        if energy.shape != (2 * n,) or np.abs(energy[:n] - alone).max() > 1e-5 * scale:
            return (
                "in one process the energy of a system depends on the others in the batch; the model takes one system"
            )
        return None

    def _add_dynamics(self, steps: int) -> None:
        forces = lambda batch: reference.evaluate(self.wrapper, batch, self.device).values.get(
            "forces", np.zeros(batch.positions.shape)
        )
        frames = dynamics(self.sample, forces, steps, self.seed)
        for name, frame in frames.items():
            self.geometries[name] = frame
            self.truths[name] = self._truth(name)
        self.cases.append(Case("dynamics", tuple(frames)))

    def _infer_kinds(self) -> None:
        one, many = self.truths["as given"], self.truths.get("two systems")
        doubled = self.geometries.get("two systems")
        sizes = (doubled.n_atoms, doubled.n_systems) if doubled is not None else (0, 0)
        self.kinds = reference.infer_kinds(one, self.sample.n_atoms, self.sample.n_systems, many, *sizes)

    def _judge_reference(self) -> list[Diagnosis]:
        """What is wrong in one process already, so that no spec can help."""
        found = []
        truth = self.truths["as given"]
        if "energy" not in truth.values:
            found.append(
                Diagnosis(
                    "no-energy",
                    f"the wrapper returned {sorted(truth.returned)}: no energy that can be summed",
                    "Return energies (n_atoms,), or energy (n_systems,)",
                )
            )
        for name, t in self.truths.items():
            bad = sorted(k for k, v in t.values.items() if not np.isfinite(v).all())
            if bad:
                text = f"{', '.join(bad)} [{name}] is not finite in one process"
                found.append(Diagnosis("reference-not-finite", text, "Repair the model, or take another sample"))
                break
        wants_forces = "forces" in self.wrapper.model_config.outputs
        if truth.severed and wants_forces and "forces" not in truth.returned and not found:
            found.append(translate(RuntimeError("the energy does not depend on the geometry")))
        return found or self._judge_repeatable(truth) or self._judge_tested()

    def _judge_repeatable(self, truth: Truth) -> list[Diagnosis]:
        """Random numbers, state between calls, other weights, and dependence on the order of atoms."""
        again = self._truth("as given")
        if name := self._differs(truth, again, None):
            return [
                Diagnosis(
                    "not-repeatable",
                    f"{name} of the same structure differs between two calls in one process: the model draws random numbers "
                    "or keeps something from call to call",
                    "Call model.eval() in the factory, and let every output depend on the inputs alone",
                )
            ]
        if checksum(self.factory.make(self.device)) != self.weights:
            return [
                Diagnosis(
                    "weights-differ",
                    "the factory makes other weights each time, so each rank would compute another model",
                    "Load a checkpoint, or seed it: torch.manual_seed(0) in the factory",
                )
            ]
        moved, order = reference.permuted(self.sample, self.seed)
        other = reference.evaluate(self.wrapper, moved, self.device)
        if name := self._differs(truth, other, order):
            return [
                Diagnosis(
                    "order-dependent",
                    f"{name} depends on the order of the atoms: with the atoms permuted, one process gives other values",
                    "Find what picks atoms by their row (x[0], a sort, a running sum); it has no meaning over ranks",
                )
            ]
        return []

    def _differs(self, truth: Truth, other: Truth, order: np.ndarray | None) -> str | None:
        """The first output that differs by more than the limits; ``order``: row of ``truth`` of each row of ``other``."""
        system = self.sample.batch.numpy()
        for name, value in sorted(truth.values.items()):
            kind = self.kinds.get(name)
            per_atom = kind is OutputKind.PER_NODE if kind is not None else DERIVED.get(name, False)
            found = other.values.get(name, np.zeros(0))
            if order is not None and per_atom and found.shape[:1] == order.shape:
                rows = np.empty_like(found)
                rows[order] = found
                found = rows
            counts = np.bincount(system, minlength=self.sample.n_systems)
            is_atoms = per_atom and value.shape[:1] == system.shape
            largest = max(
                float(np.abs(t.values[name]).max(initial=0.0)) for t in self.truths.values() if name in t.values
            )
            result = compare(name, "", found, value, self.tolerance, system if is_atoms else None,
                             None if is_atoms else counts, largest)  # fmt: skip
            if not result.ok:
                return name
        return None

    def _judge_tested(self) -> list[Diagnosis]:
        """Zeros compare equal whatever goes wrong."""
        largest = lambda name: max(
            (np.abs(t.values[name]).max(initial=0) for t in self.truths.values() if name in t.values), default=0.0
        )
        wanted = {"energy"} | ({"forces"} if "forces" in self.truths["as given"].values else set())
        empty = sorted(name for name in wanted if not largest(name) > self.tolerance.atol)
        for name in sorted(self.truths["as given"].values.keys() - wanted):
            if largest(name) == 0:
                self.notes.append(f"{name} is zero in every geometry")
        if not empty:
            return []
        text = f"{', '.join(empty)} is zero (below atol) in every geometry of the sample, so nothing would be tested"
        return [
            Diagnosis("nothing-tested", text, "Give a structure with neighbours within the cutoff, or a smaller atol")
        ]

    # -- the attempts

    def _search(self, report: TraceReport, max_attempts: int) -> None:
        """Tries the initial spec, then what the rules propose, the most promising first."""
        queue: list[tuple[Fix, ...]] = [()]
        tried: set[frozenset[Fix]] = set()
        while queue and len(report.attempts) < max_attempts:
            fixes = queue.pop(0)
            if frozenset(fixes) in tried:
                continue
            tried.add(frozenset(fixes))
            attempt = self._attempt(fixes)
            report.attempts.append(attempt)
            if attempt.ok:
                report.spec = attempt.spec
                return
            failed = {c.output for c in attempt.failures}
            returned = self.truths["as given"].returned
            more = propose(attempt.spec, self.kinds, attempt.problems, failed, returned)
            undeclared = [f for f in more if f.rule == "declare_output"]
            rest = [f for f in more if f.rule != "declare_output"]
            steps = [tuple(undeclared)] if undeclared else [(f,) for f in rest]
            queue[:0] = [(*fixes, *s) for s in steps if len(fixes) < _MOST_FIXES]
        report.spec = report.best.spec

    def _request(self, spec: MLIPSpec, fixes: tuple[Fix, ...], cases: Sequence[Case], layers: bool = False) -> Request:
        truth = self.truths["as given"]
        wanted = (set(truth.returned) | {"energy"}) & (truth.values.keys() | {"energies"})
        derives = spec.force_strategy in (ForceStrategy.EDGE_VECTORS, ForceStrategy.POSITIONS) and not truth.severed
        if derives:
            asked = self.wrapper.model_config.outputs
            wanted |= {"forces"} & asked
            if "stress" in asked and "stress" not in truth.returned:
                wanted |= {"virial"}
            if "stresses" in asked and spec.force_strategy is ForceStrategy.EDGE_VECTORS:
                wanted |= {"stresses"}
        used = {g for c in cases for g in c.geometries}
        return Request(
            self.factory, self.given, fixes, tuple(cases), {k: v for k, v in self.geometries.items() if k in used},
            frozenset(wanted), truth.returned, layers, self.watch,
        )  # fmt: skip

    def _attempt(self, fixes: tuple[Fix, ...]) -> Attempt:
        attempt = Attempt(apply_fixes(self.initial, fixes), fixes, "one rank")
        request = self._request(attempt.spec, fixes, self.cases)
        checker = Checker(self.geometries, self.truths, self.tolerance, self._cutoff, self.kinds)
        alone = self._one_rank(attempt, request, checker)
        if alone is None or attempt.diagnoses or attempt.failures:
            return attempt
        attempt.diagnoses = self._undeclared(attempt.spec)
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
        checker.check(attempt, ranks, also)
        attempt.diagnoses += _untested(attempt, request, self.truths["as given"], ranks)
        if not attempt.ok:
            if len({a["weights"] for a in answers} | {self.weights}) > 1:
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

    def _undeclared(self, spec: MLIPSpec) -> list[Diagnosis]:
        """Outputs that ranks would refuse to combine; known without asking them."""
        names = sorted(self.truths["as given"].returned & self.truths["as given"].values.keys())
        declared = lambda n: n in spec.outputs and spec.outputs[n].kind is not OutputKind.UNKNOWN
        return [
            translate(DistributedOpError(f"output {n!r} of the wrapper is not declared in the model's spec"))
            for n in names
            if not declared(n)
        ]

    @property
    def _cutoff(self) -> float:
        return self.wrapper.model_config.neighbor_config.cutoff

    def _one_rank(self, attempt: Attempt, request: Request, checker: Checker) -> list[RankResult] | None:
        """The runtime in this process: what it refuses, it refuses on one rank too, without starting any."""
        done: list[RankResult] = []
        try:
            wrapper = self.factory.make(self.device)
            few = replace(request, cases=[c for c in self.cases if c.name in _ON_ONE_RANK])
            evaluate_cases(Communicator(None, self.device), DistributedModel, wrapper, few, done)
        except Exception as error:
            attempt.error, attempt.diagnoses = error, [translate(error)]
            return None
        checker.check(attempt, [done])
        if attempt.failures:
            text = f"on one rank already nvdd's evaluation is not the wrapper's own forward: {attempt.failures[0]}"
            remedy = "Look for what the wrapper does with positions, cell or n_atoms that is not in data.edge_vectors"
            attempt.diagnoses.append(Diagnosis("one-rank-differs", text, remedy, attempt.failures[0].output))
            self._locate(attempt, attempt.fixes, on_ranks=False)
        return done

    def _helpers(self, attempt: Attempt, ranks: Sequence[Sequence[RankResult]]) -> None:
        for results in zip(*ranks, strict=False):
            if results[0].geometry in self.truths and not attempt.helper_diagnostics:
                truth = self.truths[results[0].geometry]
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
        case = next(c for c in self.cases if c.name == case_name)
        request = self._request(attempt.spec, fixes, [replace(case, geometries=(geometry,))], layers=True)
        with contextlib.suppress(Exception):  # a hint, not a verdict
            if on_ranks:
                parts = [a["results"][0] for a in self.session.run(request)]
            else:
                done: list[RankResult] = []
                evaluate_cases(
                    Communicator(None, self.device), DistributedModel, self.factory.make(self.device), request, done
                )
                parts = done[:1]
            truth = self._truth(geometry, layers=True)
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
        if not any(c.name == "dynamics" for c in self.cases):
            return
        moved, kept = migrations(ranks, "dynamics")
        note = "dynamics: " + ", ".join(
            w
            for w, bad in (("no atom changed its owner", not moved), ("the partition was never kept", not kept))
            if bad
        )
        if (not moved or not kept) and note not in self.notes:
            self.notes.append(note)


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
