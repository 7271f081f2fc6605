"""A spec through JSON: nothing is lost, nothing unknown is taken."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest

from nvdd.errors import InputError
from nvdd.policy import HaloStoragePolicy, StoragePolicy
from nvdd.specs import (
    SPEC_LJ_HALO,
    SPEC_MPNN_HALO,
    DistributionSpec,
    ForceStrategy,
    MLIPSpec,
    OutputKind,
    OutputSpec,
    Reduce,
)
from nvdd.specs.serialize import VERSION, spec_from_json, spec_to_json

EVERYTHING = MLIPSpec(
    DistributionSpec(HaloStoragePolicy(system_reductions=False)),
    {
        f"{kind.value} {reduce.value}": OutputSpec(kind, reduce)
        for kind, reduce in itertools.product(OutputKind, Reduce)
    },
    force_strategy=ForceStrategy.MODEL_INTERNAL,
    name="everything that differs from a default",
)


def through_text(spec: MLIPSpec) -> MLIPSpec:
    return spec_from_json(json.loads(json.dumps(spec_to_json(spec))))


@pytest.mark.parametrize("spec", (SPEC_MPNN_HALO, SPEC_LJ_HALO, MLIPSpec(), EVERYTHING), ids=lambda spec: spec.name)
def test_round_trip(spec):
    again = through_text(spec)
    assert again == spec
    assert hash(again) == hash(spec)
    assert list(again.outputs) == list(spec.outputs)
    assert isinstance(again.force_strategy, ForceStrategy)


def test_every_field_is_written():
    written = spec_to_json(EVERYTHING)["spec"]
    assert written.keys() == {field.name for field in dataclasses.fields(MLIPSpec)} | {"class"}
    policy = written["distribution"]["policy"]
    assert policy.keys() == {field.name for field in dataclasses.fields(HaloStoragePolicy)} | {"class"}


def test_all_reduce_is_not_lost():
    """A share that loses its reduction would be a number of one rank."""
    spec = MLIPSpec(output_kinds={"energy": OutputKind.PER_GRAPH}, all_reduce_outputs=("energy",))
    assert through_text(spec).all_reduce_outputs == {"energy"}


def edited(**changes) -> dict:
    content = spec_to_json(SPEC_MPNN_HALO)
    content["spec"].update(changes)
    return content


@pytest.mark.parametrize(
    "content, message",
    [
        ({"version": VERSION + 1, "spec": {}}, rf"format version {VERSION + 1}, but this nvdd reads version {VERSION}"),
        ({}, "format version None"),
        ([], "format version None"),
        ({"version": VERSION}, "expected an MLIPSpec, found None"),
        ({"version": VERSION, "spec": {"class": "Nothing"}}, "no class 'Nothing' in this nvdd"),
        (edited(precision="half"), "MLIPSpec has no field precision in this nvdd"),
        (edited(force_strategy="by_magic"), "'by_magic' is not known to this nvdd; it knows 'edge_vectors'"),
        (edited(distribution={"class": "DistributionSpec"}), "the field policy of DistributionSpec is missing"),
        (
            edited(distribution={"class": "DistributionSpec", "policy": {"class": "HaloStoragePolicy", "system_reductions": True, "scatter_mode": "local", "gather_mode": "x"}}),
            "HaloStoragePolicy can't be made of what the file says: .*gather_mode='x'",
        ),
    ],
)  # fmt: skip
def test_refused(content, message):
    with pytest.raises(InputError, match=message):
        spec_from_json(content)


def test_a_missing_field_is_refused():
    content = spec_to_json(SPEC_MPNN_HALO)
    del content["spec"]["outputs"]["energy"]["reduce"]
    with pytest.raises(InputError, match=r"spec\.outputs\.energy: the field reduce of OutputSpec is missing"):
        spec_from_json(content)


def test_a_policy_of_ones_own_is_refused():
    class Mine(StoragePolicy):
        pass

    with pytest.raises(InputError, match=r"spec\.distribution\.policy: a .*Mine can't be written as JSON"):
        spec_to_json(MLIPSpec(DistributionSpec(Mine())))
