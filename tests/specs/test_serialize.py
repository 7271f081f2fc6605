"""Specs in JSON files: nothing is lost, nothing unknown is taken, what can't be found again is not written."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import spec_parts
from hypothesis import HealthCheck, given, settings

import nvdd.specs as presets
from nvdd import (
    SPEC_MPNN_HALO,
    DistributionSpec,
    GatherInputs,
    HaloStoragePolicy,
    InputError,
    MethodAdapter,
    MLIPSpec,
    OpAdapter,
    PythonAdapter,
    SliceOutputsOwned,
    neighbor_refresh_adapters,
)
from nvdd.specs.serialize import VERSION, spec_from_json, spec_to_json

MESSAGES = OpAdapter("nvddtest::messages", {0: GatherInputs()}, {0: SliceOutputsOwned()})


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(spec_parts.specs())
def test_round_trip_is_the_identity(spec):
    written = json.loads(json.dumps(spec.to_dict()))
    read = MLIPSpec.from_dict(written)
    assert read == spec
    assert hash(read) == hash(spec)
    assert read.to_dict() == written
    assert pickle.loads(pickle.dumps(spec)) == spec


@pytest.mark.parametrize("name", [n for n in presets.__all__ if n.startswith("SPEC_")])
def test_presets(name, tmp_path):
    preset = getattr(presets, name)
    preset.save(tmp_path / "spec.json")
    assert MLIPSpec.load(tmp_path / "spec.json") == preset
    assert preset.name == name


def test_what_stands_in_the_file():
    spec = SPEC_MPNN_HALO.with_custom_ops(MESSAGES).with_adapters(*spec_parts.HELPERS[-2:])
    content = spec.to_dict()
    assert content["version"] == VERSION == 2
    assert content["distribution"]["custom_ops"] == [
        {
            "kind": "op",
            "op": "nvddtest::messages",
            "arg_transforms": {"0": "GatherInputs"},
            "output_transforms": {"0": "SliceOutputsOwned"},
            "output_roles": {},
            "registered_by": "custom_ops",
        }
    ]
    assert content["adapters"][0]["replacement"] == "spec_parts:body"
    assert content["adapters"][1]["replacement"] == {
        "path": "spec_parts:Body", "arguments": {"times": 4}
    }  # fmt: skip


def test_the_two_functions_are_the_methods():
    assert spec_to_json(SPEC_MPNN_HALO) == SPEC_MPNN_HALO.to_dict()
    assert spec_from_json(spec_to_json(SPEC_MPNN_HALO)) == SPEC_MPNN_HALO


def test_adapters_of_verbs_can_be_saved():
    import torch

    spec = SPEC_MPNN_HALO.with_adapters(*neighbor_refresh_adapters([torch.nn.Linear(1, 1)], output=1, always=True))
    assert MLIPSpec.from_dict(spec.to_dict()) == spec


BAD = {
    "newer": (lambda c: c.update(version=3), "version 3, and this nvdd reads version 2; update nvdd"),
    "older": (lambda c: c.update(version=1), "version 1, and this nvdd reads version 2; save the spec again"),
    "no version": (lambda c: c.pop("version"), "the field 'version' is missing"),
    "version is a word": (lambda c: c.update(version="2"), "'version' is '2', where int is expected"),
    "unknown": (lambda c: c.update(halo=1), "unknown field 'halo'"),
    "unknown in a policy": (lambda c: c["distribution"]["policy"].update(width=1), "policy: unknown field 'width'"),
    "unknown in a part": (lambda c: c["distribution"].update(more=1), "spec.distribution: unknown field 'more'"),
    "unknown in an output": (lambda c: c["outputs"]["energy"].update(unit="eV"), "spec.outputs.energy: unknown field"),
    "unknown in an op": (lambda c: c["distribution"]["custom_ops"][0].update(x=1), r"custom_ops\[0\]: unknown field 'x'"),
    "missing": (lambda c: c.pop("outputs"), "the field 'outputs' is missing"),
    "missing knob": (lambda c: c["distribution"]["policy"].pop("system_reductions"), "'system_reductions' is missing"),
    "policy": (lambda c: c["distribution"]["policy"].update(kind="ring"), "kind 'ring' is not one of 'halo', 'sharded'"),
    "modes": (lambda c: c["distribution"]["policy"].update(gather_mode="local"), "has no meaning; use halo_fetch"),
    "strategy": (lambda c: c.update(force_strategy="magic"), "'magic' is not known to this nvdd; it knows 'edge_vectors'"),
    "kind": (lambda c: c["outputs"]["energy"].update(kind="per_bond"), "outputs.energy.kind: 'per_bond' is not known"),
    "reduce": (lambda c: c["outputs"]["energies"].update(reduce="all_reduce"), "is for outputs of kind 'per_graph'"),
    "list": (lambda c: c.update(adapters={}), "'adapters' is {}, where list is expected"),
    "adapter": (lambda c: c["adapters"][0].update(kind="magic"), "kind 'magic' is not one of 'op', 'method'"),
    "path": (lambda c: c["adapters"][0].update(replacement="spec_parts.body"), "is not an import path"),
    "function": (lambda c: c["adapters"][0].update(replacement="spec_parts:gone"), "spec_parts has no 'gone'"),
    "module": (lambda c: c["adapters"][0].update(replacement="no_such:f"), "the module 'no_such', which can't be imported"),
    "arguments": (
        lambda c: c["adapters"][1]["replacement"].update(arguments={"size": 1}), "does not take the arguments of the file",
    ),
    "transform": (
        lambda c: c["distribution"]["custom_ops"][0]["arg_transforms"].update({"1": "Melt"}), "'Melt' is not one of",
    ),
    "position": (
        lambda c: c["distribution"]["custom_ops"][0]["arg_transforms"].update({"9": "SliceOwned"}),
        "no tensor argument 9 in nvddtest::messages",
    ),
    "not registered": (
        lambda c: c["distribution"]["custom_ops"][0].update(op="nvddtest::gone"),
        "nvddtest::gone is not registered in this process; import the module that registers it: import custom_ops",
    ),
    "two for one": (lambda c: c["adapters"].append(c["adapters"][0]), "two adapters for spec_parts.Block.forward"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_refused_at_load(case, tmp_path):
    change, message = BAD[case]
    content = SPEC_MPNN_HALO.with_custom_ops(MESSAGES).with_adapters(*spec_parts.HELPERS[-2:]).to_dict()
    change(content)
    with pytest.raises(InputError, match=message):
        MLIPSpec.from_dict(copy.deepcopy(content))
    (tmp_path / "bad.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=rf"the spec file .*bad\.json can't be used: .*{message}"):
        MLIPSpec.load(tmp_path / "bad.json")


def test_files_that_are_no_specs(tmp_path):
    with pytest.raises(InputError, match=r"no spec file .*gone\.json"):
        MLIPSpec.load(tmp_path / "gone.json")
    (tmp_path / "text.json").write_text("hello")
    with pytest.raises(InputError, match="is not JSON"):
        MLIPSpec.load(tmp_path / "text.json")
    with pytest.raises(InputError, match="an object with named fields is expected"):
        MLIPSpec.from_dict([1])


def _inner():
    def nested(x):
        return x

    class Local:
        def forward(self):
            return 1

    return nested, Local


def test_refused_at_save(tmp_path):
    nested, Local = _inner()
    policy = type("Mine", (HaloStoragePolicy,), {})
    for spec, message in (
        (SPEC_MPNN_HALO.with_adapters(PythonAdapter("spec_parts", "helper", lambda x: x)), "inside a function"),
        (SPEC_MPNN_HALO.with_adapters(PythonAdapter("spec_parts", "helper", nested)), "defined inside a function"),
        (SPEC_MPNN_HALO.with_adapters(PythonAdapter("spec_parts", "helper", partial(spec_parts.replacement, times=2))),
         "as a frozen dataclass"),
        (SPEC_MPNN_HALO.with_adapters(PythonAdapter("spec_parts", "helper", 3)), "not a function or class of a module"),
        (SPEC_MPNN_HALO.with_adapters(MethodAdapter(Local, "forward", spec_parts.body)), "move the class to the top level"),
        (SPEC_MPNN_HALO.with_adapters(
            MethodAdapter(spec_parts.Block, "forward", spec_parts.Body(times=[1]))), r"the argument times=\[1\]"),
        (MLIPSpec(DistributionSpec(policy())), "can't be written as JSON; a spec in a file has one of HaloStoragePolicy"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            spec.save(tmp_path / "spec.json")
        assert not (tmp_path / "spec.json").exists()


def test_a_function_of_the_script_itself_is_refused():
    code = (
        "from nvdd import *\n"
        "def mine(x): return x\n"
        "try: SPEC_MPNN_HALO.with_adapters(PythonAdapter('json', 'dumps', mine)).to_dict()\n"
        "except InputError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "defined in the script itself" in done.stdout


def test_an_operation_of_another_process_names_its_module(tmp_path):
    SPEC_MPNN_HALO.with_custom_ops(MESSAGES).save(tmp_path / "spec.json")
    code = (
        "import sys; from nvdd import InputError, MLIPSpec\n"
        "try: MLIPSpec.load(sys.argv[1])\n"
        "except InputError as error: print(error)\n"
        "import custom_ops; print(MLIPSpec.load(sys.argv[1]).distribution.custom_ops[0].name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "spec.json")], capture_output=True, text=True, timeout=120,
        check=True, env={"PYTHONPATH": str(Path(spec_parts.__file__).parent), "PATH": "", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    first, second = done.stdout.splitlines()
    assert "import custom_ops" in first and second == "nvddtest::messages"
