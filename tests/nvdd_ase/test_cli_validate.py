"""`nvdd validate`: verdict, exit code, and the spec that it writes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from ase.build import bulk
from typer.testing import CliRunner

from nvdd import MLIPSpec
from nvdd_ase.cli import app

MODEL = """
import torch
from nvdd import SPEC_LJ_HALO, BaseModelMixin, ModelConfig, ModelOutputs, NeighborConfig

class Pairs(torch.nn.Module, BaseModelMixin):
    def __init__(self, masked, scale):
        super().__init__()
        self.masked, self.scale = masked, scale
        self.model_config = ModelConfig(neighbor_config=NeighborConfig(4.5))

    def forward(self, data):
        pair = self.scale * (1 - data.edge_vectors.norm(dim=1) / 4.5) ** 3
        if self.masked:
            pair = pair * (data.senders < data.n_atoms)
        zero = torch.zeros(data.n_atoms, dtype=pair.dtype, device=pair.device)
        return ModelOutputs(energies=zero.index_add(0, data.receivers, pair))

    def distribution_spec(self, strategy=None):
        return SPEC_LJ_HALO

def make(masked=False, scale=1.0):
    return Pairs(masked, scale)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("pairs_to_validate", None)
    (tmp_path / "pairs_to_validate.py").write_text(MODEL)
    atoms = bulk("Ar", "fcc", a=5.0, cubic=True).repeat(2)
    atoms.rattle(0.1, seed=1)
    atoms.write("ar.extxyz")
    return tmp_path


def run(*arguments: str):
    return CliRunner().invoke(app, ["validate", *arguments, "--device", "cpu"], catch_exceptions=False)


def test_passes_and_writes_the_spec(folder):
    result = run("py:pairs_to_validate:make", "ar.extxyz", "--option", "scale=0.5", "--steps", "1", "-o", "spec.json")
    assert result.exit_code == 0, result.output
    assert "validation PASSED on 2 ranks" in result.output
    assert MLIPSpec.load("spec.json").outputs.keys()


def test_fails_with_the_reason_and_writes_nothing(folder):
    result = run("py:pairs_to_validate:make", "ar.extxyz", "--option", "masked=true", "-o", "spec.json")
    assert result.exit_code == 1, result.output
    assert "validation FAILED" in result.output and "edge_index < n_atoms" in result.output
    assert not (folder / "spec.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("py:pairs_to_validate:make", "ar.extxyz", "--ranks", "1"), "--ranks must be at least 2"),
        (("py:pairs_to_validate", "ar.extxyz"), "py:module:attribute"),
        (("py:no_such_module_here:make", "ar.extxyz"), "no module"),
        (("py:pairs_to_validate:make", "none.extxyz"), "no such file"),
        (("py:pairs_to_validate:make", "ar.extxyz", "-o", "spec.txt"), "must end in"),
    ],
)
def test_mistyped_input(folder, arguments, words):
    result = run(*arguments)
    assert result.exit_code == 2 and words in result.stderr, result.output
