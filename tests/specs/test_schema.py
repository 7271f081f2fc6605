"""The JSON schema of specs: what is saved validates, and what it refuses can't be read."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import jsonschema
import pytest
import spec_parts
from hypothesis import HealthCheck, given, settings

import nvdd.specs as presets
from nvdd import AtomStage, EdgeStage, InputError, MethodAdapter, MLIPSpec
from nvdd.specs.schema import spec_schema

FILE = Path(__file__).parents[2] / "docs" / "spec.schema.json"
CHECK = jsonschema.Draft202012Validator(spec_schema())


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(spec_schema())


def test_the_file_is_current():
    assert json.loads(FILE.read_text()) == spec_schema(), "run python docs/spec_schema.py"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(spec_parts.specs())
def test_any_spec_validates(spec):
    CHECK.validate(json.loads(json.dumps(spec.to_dict())))


@pytest.mark.parametrize("name", [n for n in presets.__all__ if n.startswith("SPEC_")])
def test_saved_presets_validate(name, tmp_path):
    getattr(presets, name).save(tmp_path / "spec.json")
    CHECK.validate(json.loads((tmp_path / "spec.json").read_text()))


def test_stages_validate():
    stages = EdgeStage(spec_parts.Block, "forward", ("x",)), AtomStage(spec_parts.Block, "forward", ("x", "y"))
    written = presets.SPEC_MPNN_HALO.with_adapters(*stages).to_dict()
    CHECK.validate(json.loads(json.dumps(written)))
    written["adapters"][1]["atoms"] = []
    assert not CHECK.is_valid(json.loads(json.dumps(written)))


SPEC = presets.SPEC_EWALD_HALO.with_adapters(MethodAdapter(spec_parts.Block, "forward", spec_parts.body)).to_dict()

WRONG = {
    "a field too many": lambda s: s.update(colour="red"),
    "no outputs": lambda s: s.pop("outputs"),
    "another version": lambda s: s.update(version=99),
    "an unknown policy": lambda s: s["distribution"]["policy"].update(kind="cloud"),
    "modes that do not go together": lambda s: s["distribution"]["policy"].update(gather_mode="distributed"),
    "a flag that is a text": lambda s: s["distribution"]["policy"].update(system_reductions="yes"),
    "an unknown force strategy": lambda s: s.update(force_strategy="guess"),
    "a reduction of another kind of output": lambda s: s["outputs"]["energies"].update(reduce="all_reduce"),
    "an unknown kind of output": lambda s: s["outputs"]["energies"].update(kind="per_bond"),
    "an unknown adapter": lambda s: s["adapters"][0].update(kind="magic"),
    "an adapter without its method": lambda s: s["adapters"][0].pop("method_name"),
    "an unknown transform": lambda s: s["distribution"]["custom_ops"][0]["arg_transforms"].update({"0": "Gather"}),
    "an argument that is no position": lambda s: s["distribution"]["custom_ops"][0]["arg_transforms"].update(x="AsIs"),
    "an unknown role": lambda s: s["distribution"]["custom_ops"][1]["output_roles"].update({"0": "GUEST"}),
    "a padder without a class": lambda s: s.update(compile_policy={"static_shapes": True, "graph_padder": "module"}),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=list(WRONG))
def test_what_the_schema_refuses_can_not_be_read(change):
    CHECK.validate(SPEC)
    assert MLIPSpec.from_dict(SPEC).to_dict() == SPEC
    wrong = copy.deepcopy(SPEC)
    change(wrong)
    assert not CHECK.is_valid(wrong)
    with pytest.raises(InputError):
        MLIPSpec.from_dict(wrong)
