"""`trace_and_validate`: does a model over ranks give what it gives in one process, and with which spec?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from nvdd.config import DomainConfig
from nvdd.data import Batch
from nvdd.errors import InputError
from nvdd.specs import SPEC_MPNN_HALO, MLIPSpec
from nvdd.specs.declared import spec_of
from nvdd.validate.diagnosis import translate
from nvdd.validate.factory import FactoryRef, refuse_while_loading
from nvdd.validate.fixes import Fix, propose
from nvdd.validate.geometries import with_geometry
from nvdd.validate.report import Attempt, TraceReport
from nvdd.validate.session import ValidationSession
from nvdd.validate.single_process import SingleProcess
from nvdd.validate.tolerance import Tolerance
from nvdd.validate.trial import Trial

_MOST_FIXES = 4  # of one spec


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
        InputError: the factory can't be reached from other processes, the sample is no structure, or a script calls this
            outside ``if __name__ == "__main__"``.
    """
    refuse_while_loading()
    factory = FactoryRef.of(model_factory)
    own = session is None
    if session is None:
        session = ValidationSession(world_size, device, timeout)
    try:
        return _validate(
            factory, _as_batch(sample_batch), session, (atol, rtol), spec, watch, md_steps, max_attempts, seed
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


def _validate(
    factory: FactoryRef,
    sample: Batch,
    session: ValidationSession,
    limits: tuple[float | None, float | None],
    given: MLIPSpec | None,
    watch: Sequence[str] | None,
    md_steps: int,
    max_attempts: int,
    seed: int,
) -> TraceReport:
    device = torch.device(session.device)
    device = torch.device("cuda", 0) if device.type == "cuda" and device.index is None else device
    report = TraceReport(None, [], session.world_size, Tolerance.of(torch.float64, *limits))
    first = Attempt(None)
    try:
        single = SingleProcess(factory, sample, session.world_size, device, watch, seed)
        report.notes, report.reference_ops = single.notes, single.ops
        report.tolerance = tolerance = Tolerance.of(single.dtype, *limits)
        given, initial = _initial_spec(given, single)
        first.spec = report.spec = initial
        single.prepare(md_steps)
        first.diagnoses = single.judge(tolerance)
    except InputError as error:
        if first.spec is None:  # of the factory itself
            raise
        first.error, first.diagnoses = error, [translate(error)]
    except Exception as error:
        first.error, first.diagnoses = error, [translate(error)]
    if first.diagnoses:
        if first.diagnoses[0].kind == "order-dependent":  # nvdd may refuse the very line
            Trial(single, session, tolerance, initial, given).look_for_refusal(first)
        report.attempts = [first]
        return report
    report.geometries = [f"{c.name}: {g}" for c in single.cases for g in c.geometries]
    _search(Trial(single, session, tolerance, initial, given), report, max_attempts)
    return report


def _initial_spec(given: MLIPSpec | None, single: SingleProcess) -> tuple[MLIPSpec | None, MLIPSpec]:
    """The spec that ranks must be told (None: they find it themselves), and the spec to begin with."""
    declared = given if given is not None else spec_of(single.wrapper, DomainConfig().strategy)
    if declared is None:
        single.notes.append("the wrapper declares no distribution_spec: SPEC_MPNN_HALO was taken to begin with")
        given = declared = SPEC_MPNN_HALO.with_name("inferred")
    return given, declared


def _search(trial: Trial, report: TraceReport, max_attempts: int) -> None:
    """Tries the initial spec, then what the rules propose, the most promising first."""
    queue: list[tuple[Fix, ...]] = [()]
    tried: set[frozenset[Fix]] = set()
    while queue and len(report.attempts) < max_attempts:
        fixes = queue.pop(0)
        if frozenset(fixes) in tried:
            continue
        tried.add(frozenset(fixes))
        attempt = trial.run(fixes)
        report.attempts.append(attempt)
        if attempt.ok:
            report.spec = attempt.spec
            return
        failed = {c.output for c in attempt.failures}
        more = propose(cast(MLIPSpec, attempt.spec), trial.single.kinds, attempt.problems, failed, trial.single.returned)
        undeclared = [f for f in more if f.rule == "declare_output"]
        rest = [f for f in more if f.rule != "declare_output"]
        steps = [tuple(undeclared)] if undeclared else [(f,) for f in rest]
        queue[:0] = [(*fixes, *s) for s in steps if len(fixes) < _MOST_FIXES]
    report.spec = report.best.spec
