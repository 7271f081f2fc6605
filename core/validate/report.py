"""What the validator found: verdict, working spec, every attempt."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from nvdd.specs import MLIPSpec
from nvdd.validate.diagnosis import Diagnosis
from nvdd.validate.edges import HaloCompleteness
from nvdd.validate.fixes import Fix
from nvdd.validate.layers import Divergence
from nvdd.validate.tolerance import Comparison, Tolerance

_SHOWN = 6


@dataclass
class Attempt:
    """One spec that was tried.

    Attributes:
        spec: the spec; None where the model declares none and nothing could be tried.
        fixes: how it differs from the initial one.
        stage: how far it came: ``"reference"``, ``"one rank"``, ``"ranks"``.
        comparisons: each output in each geometry, against the single process.
        error: the exception that ended it, if one did.
        diagnoses: what that or the numbers mean.
        halo_completeness: the first geometry in which edges are missing or too many, else the last one.
        helper_diagnostics: helpers of watched packages that look like undeclared sums over systems.
        divergence: the first module whose output differs, in atom order.
        fired: (op, handler) -> how often, on rank 0 in all geometries.
        n_exchanges: between ranks, in all geometries.
    """

    spec: MLIPSpec | None
    fixes: tuple[Fix, ...] = ()
    stage: str = "reference"
    comparisons: list[Comparison] = field(default_factory=list)
    error: BaseException | None = None
    diagnoses: list[Diagnosis] = field(default_factory=list)
    halo_completeness: HaloCompleteness | None = None
    helper_diagnostics: list[str] = field(default_factory=list)
    divergence: Divergence | None = None
    fired: Counter = field(default_factory=Counter)
    n_exchanges: int = 0

    @property
    def ok(self) -> bool:
        """Whether every output passed in every geometry, over ranks, with every edge in its place."""
        complete = self.halo_completeness is not None and self.halo_completeness.matches
        done = self.stage == "ranks" and self.error is None and complete and bool(self.comparisons)
        return done and not self.diagnoses and all(c.ok for c in self.comparisons)

    @property
    def failures(self) -> list[Comparison]:
        """The comparisons that did not pass."""
        return [c for c in self.comparisons if not c.ok]

    @property
    def problems(self) -> frozenset[str]:
        """``kind`` and ``kind:output`` of the diagnoses."""
        return frozenset(k for d in self.diagnoses for k in (d.kind, d.key))

    def max_errors(self) -> dict[str, tuple[float, float]]:
        """Output -> largest absolute and relative error in all geometries."""
        worst: dict[str, tuple[float, float]] = {}
        for c in self.comparisons:
            a, r = worst.get(c.output, (0.0, 0.0))
            worst[c.output] = max(a, c.max_abs), max(r, c.max_rel)
        return worst


@dataclass
class TraceReport:
    """The verdict of `nvdd.validate.trace_and_validate`.

    Attributes:
        spec: the spec that works, or the one that came nearest; ``report.spec.save(path)`` writes it.
        attempts: every spec tried, in order.
        world_size: number of ranks.
        tolerance: limits that held together.
        geometries: the geometries compared, by case.
        notes: what was not tested, and why.
        reference_ops: torch operation -> how often the wrapper's own forward calls it, in one process.
    """

    spec: MLIPSpec | None
    attempts: list[Attempt]
    world_size: int
    tolerance: Tolerance
    geometries: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    reference_ops: Counter = field(default_factory=Counter)

    @property
    def ok(self) -> bool:
        """Whether the last attempt passed everything."""
        return bool(self.attempts) and self.attempts[-1].ok

    @property
    def fix_applied(self) -> str | None:
        """The rules that made the spec work, joined by `` + ``; None if it worked as declared, or never."""
        fixes = self.attempts[-1].fixes if self.ok else ()
        return " + ".join(map(str, fixes)) or None

    @property
    def best(self) -> Attempt | None:
        """The attempt that passed, else the one that came farthest with the fewest failures.

        One that tried something else on suspicion, and failed, tells less than what raised the suspicion.
        """
        if not self.attempts or self.ok:
            return self.attempts[-1] if self.attempts else None
        far = {"reference": 0, "one rank": 1, "ranks": 2}
        rank = lambda a: (
            not any(f.speculative for f in a.fixes),
            far[a.stage],
            a.error is None,
            -len(a.failures) if a.comparisons else -1e9,
        )
        return max(self.attempts, key=rank)

    @property
    def diagnoses(self) -> list[Diagnosis]:
        """Those of the attempt that came farthest; none if one passed."""
        return [] if self.ok or self.best is None else self.best.diagnoses

    @property
    def next_action(self) -> str:
        """What to do now: the first line is the most important."""
        if self.ok:
            if self.fix_applied:
                return f"save report.spec: it works after {self.fix_applied}; or declare the same in the wrapper"
            return "nothing: the spec works as it is; save report.spec, or leave it in the wrapper"
        attempt = self.best
        if attempt is None:
            return "nothing was tried"
        lines = [str(d) for d in attempt.diagnoses]
        if attempt.halo_completeness is not None and not attempt.halo_completeness.matches:
            lines.insert(0, f"{attempt.halo_completeness}. No change of the spec can bring them back.")
        if attempt.divergence:
            lines.append(f"Look into the model there: {attempt.divergence}.")
        if not lines and attempt.failures:
            lines.append(f"No known pattern: {attempt.failures[0]}. Compare the operations in attempts[-1].fired.")
        if not lines and attempt.error is not None:
            lines.append(f"{type(attempt.error).__name__}: {attempt.error}")
        return "\n".join(lines) or "no diagnosis; read report.summary()"

    def summary(self) -> str:
        """The report as text."""
        tried = f"{len(self.attempts)} attempt{'s' * (len(self.attempts) != 1)}"
        fixed = f", after {self.fix_applied}" if self.fix_applied else ""
        lines = [
            f"validation {'PASSED' if self.ok else 'FAILED'} on {self.world_size} ranks in {tried}{fixed}",
            f"limits: atol {self.tolerance.atol:g} and rtol {self.tolerance.rtol:g}, both; {len(self.geometries)} geometries",
        ]
        for number, attempt in enumerate(self.attempts, 1):
            lines += _describe(number, attempt)
        lines += [f"note: {note}" for note in self.notes]
        lines.append("next: " + self.next_action)
        return "\n".join(lines)

    def log_summary(self, logger: logging.Logger | None = None) -> None:
        """Writes `summary` to a logger, a line a record; a report that failed as warnings."""
        logger = logger or logging.getLogger("nvdd.validate")
        for line in self.summary().splitlines():
            logger.log(logging.INFO if self.ok else logging.WARNING, line)


def _describe(number: int, attempt: Attempt) -> list[str]:
    fixes = ", ".join(map(str, attempt.fixes)) or "as declared"
    lines = [f"attempt {number} ({fixes}): {'ok' if attempt.ok else f'failed at {attempt.stage}'}"]
    for output, (absolute, relative) in sorted(attempt.max_errors().items()):
        n = sum(c.output == output for c in attempt.comparisons)
        lines.append(f"  {output}: abs {absolute:.2e}, rel {relative:.2e} in {n} geometries")
    lines += _some(attempt.failures)
    if attempt.error is not None:
        lines.append(f"  error: {type(attempt.error).__name__}: {attempt.error}")
    if attempt.halo_completeness is not None:
        lines.append(f"  {attempt.halo_completeness}")
    lines += [f"  diagnosis: {d}" for d in attempt.diagnoses]
    if attempt.divergence:
        lines.append(f"  layers: {attempt.divergence}")
    if attempt.fired:
        telling = [(op, h, n) for (op, h), n in attempt.fired.most_common() if not h.startswith("inspect")]
        common = ", ".join(f"{op} ({h}) x {n}" for op, h, n in telling[:_SHOWN])
        lines.append(f"  {attempt.n_exchanges} exchanges; handlers: {common}")
    return lines


def _some(failures: Sequence[Comparison]) -> list[str]:
    lines = [f"  {c}" for c in failures[:_SHOWN]]
    return lines + ([f"  ... and {len(failures) - _SHOWN} more"] if len(failures) > _SHOWN else [])
