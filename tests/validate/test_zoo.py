"""The zoo: of each model the validator's verdict, the fix that it applies, or the diagnosis that it gives."""

from __future__ import annotations

import functools
import logging
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import zoo

from nvdd import MLIPSpec
from nvdd.validate import ValidationSession, trace_and_validate

AS_DECLARED = (
    "Plain", "SeedsPolicy", "NoSpec", "DroppedRebind", "ChargeEquilibration", "Full", "FeatureNorm", "ReceiverSoftmax",
    "SenderSoftmax", "DegreeNormalised", "ReverseEdges", "ReturnsForces", "EnergyOnly", "Float32", "HelperAdapted",
    "Fused", "FusedUnderHaloRead", "Neutral", "Sharded", "BatchNormTraining",  # in eval mode
)  # fmt: skip
FIXED = {
    "Undeclared": "declare_output(charges) + declare_output(moments)",
    "WrongKind": "declare_output(total)",
    "ExtraAllReduce": "drop_extra_all_reduce(energy)",
    "LostRole": "promote_to_all_reduce(energy)",
    "ReadsPositions": "force_strategy",
    "FusedMissingGather": "add_gather_inputs(zoo::fused)",
    "FusedMissingScatter": "scatter_outputs(zoo::fused)",
    "FusedMissingOutput": "scatter_outputs(zoo::fused)",
    "HalfList": "store_sharded",
    "FusedDoublePadding": "drop_gather_inputs(zoo::fused)",
}
# model -> (kind of diagnosis, stage, words of the next action)
REFUSED = {
    "SentinelIdiom": ("index-values", "one rank", "zoo.py"),
    "ShardedSentinel": ("index-values", "ranks", "number of atoms of this rank"),
    "GlobalAttention": ("mixes-rows", "one rank", "matmul"),
    "TopK": ("mixes-rows", "one rank", "argsort"),
    "SortedAtoms": ("mixes-rows", "one rank", "sort"),
    "Helper": ("mixes-rows", "one rank", "zoo_helpers.py"),
    "ScriptedGather": ("scripted-op", "one rank", "zoo.scripted_gather"),
    "ScriptedModule": ("scripted-op", "one rank", "eager"),
    "FusedWithoutAdapter": ("missing-op-adapter", "one rank", "zoo::fused"),
    "CumulativeSum": ("mixes-rows", "one rank", "cumsum"),
    "FirstAtom": ("order-dependent", "reference", "order of the atoms"),
    "Stateful": ("not-repeatable", "reference", "call to call"),
    "Noisy": ("not-repeatable", "reference", "random"),
    "Severed": ("severed-graph", "reference", "detach"),
    "NotFinite": ("reference-not-finite", "reference", "not finite in one process"),
    "Unseeded": ("weights-differ", "reference", "seed"),
    "DividesByRows": ("local-number", "one rank", "n_atoms_per_system"),
    "LocalMean": ("wrong-numbers", "ranks", "mix.1"),
    "LocalGather": ("wrong-neighbours", "ranks", "to_local"),
    "HelperOnPlainTensors": ("helper-reduction", "ranks", "zoo_helpers.mol_sum"),
    "BranchOnEmpty": ("out-of-step", "ranks", "zero edges"),
    "BranchOnEmptyMean": ("out-of-step", "ranks", "zero edges"),
}


@pytest.fixture(scope="module")
def session(request):
    with ValidationSession(world_size=2, device=request.config.getoption("--device"), timeout=60.0) as session:
        yield session


def validate(session, name: str, train: bool = False, **options):
    return trace_and_validate(
        functools.partial(zoo.make, name, train), zoo.sample(), session=session, md_steps=3, **options
    )


@pytest.mark.parametrize("name", AS_DECLARED)
def test_works_as_declared(session, name):
    report = validate(session, name)
    assert report.ok and report.fix_applied is None and len(report.attempts) == 1, report.summary()
    attempt = report.attempts[0]
    assert attempt.halo_completeness.matches and not attempt.diagnoses
    if name not in ("EnergyOnly", "Float32"):
        assert max(a for a, _ in attempt.max_errors().values()) < 1e-12, report.summary()
        assert attempt.max_errors()["forces"][1] < 1e-11, report.summary()
        assert {"energy", "forces"} <= attempt.max_errors().keys()
    assert attempt.n_exchanges > 0 and attempt.fired


@pytest.mark.parametrize("name", FIXED)
def test_is_fixed(session, name, tmp_path):
    report = validate(session, name)
    assert report.ok and report.fix_applied == FIXED[name], report.summary()
    assert len(report.attempts) > 1 and not report.attempts[0].ok and report.attempts[0].diagnoses
    assert report.fix_applied in report.next_action
    # what is saved is what works
    report.spec.save(tmp_path / "spec.json")
    again = validate(session, name, spec=MLIPSpec.load(tmp_path / "spec.json"))
    assert again.ok and again.fix_applied is None and again.spec == report.spec, again.summary()


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused(session, name):
    kind, stage, words = REFUSED[name]
    report = validate(session, name)
    assert not report.ok and report.fix_applied is None, report.summary()
    attempt = report.best
    assert attempt.stage == stage and attempt.diagnoses[0].kind == kind, report.summary()
    assert words in report.next_action, report.next_action


@pytest.mark.parametrize(
    ("name", "kind"), [("BatchNormTraining", "batch-norm-training"), ("Dropout", "not-repeatable")]
)
def test_training_mode(session, name, kind):
    report = validate(session, name, train=True)
    assert not report.ok and report.best.diagnoses[0].kind == kind, report.summary()
    assert "model.eval()" in report.next_action


def test_every_model_has_a_verdict():
    models = {n for n, c in vars(zoo).items() if isinstance(c, type) and issubclass(c, zoo.Model)} - {"Model"}
    assert models == {*AS_DECLARED, *FIXED, *REFUSED, "Dropout"}


def test_three_ranks_and_the_log(caplog):
    with caplog.at_level(logging.INFO):
        report = trace_and_validate(functools.partial(zoo.make, "Full"), zoo.sample(), world_size=3, md_steps=2)
        report.log_summary(logging.getLogger("zoo"))
    assert report.ok, report.summary()
    assert any("PASSED on 3 ranks" in r.getMessage() for r in caplog.records)
    assert all(r.levelno == logging.INFO for r in caplog.records if r.name == "zoo")


def test_two_validations_share_the_ranks(session):
    before = session.call("run", _nothing())
    assert validate(session, "Plain").ok
    pids = session._ranks.pids
    assert validate(session, "FeatureNorm").ok
    assert session._ranks.pids == pids and len(before) == 2


def _nothing():
    from nvdd.validate import FactoryRef
    from nvdd.validate.rank_side import Request

    ref = FactoryRef.of(functools.partial(zoo.make, "Plain"))
    return Request(ref, None, (), (), {}, frozenset(), frozenset())
