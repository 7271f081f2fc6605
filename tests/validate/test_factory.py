"""Factories that other processes can reach, and those that they can't."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from ase.build import bulk

from nvdd import SPEC_LJ_HALO, BaseModelMixin, InputError, ModelConfig, ModelOutputs, NeighborConfig
from nvdd.validate import FactoryRef, ValidationSession, trace_and_validate
from nvdd.validate.factory import checksum


class Pairs(torch.nn.Module, BaseModelMixin):
    def __init__(self, cutoff: float = 4.5) -> None:
        super().__init__()
        self.k = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.model_config = ModelConfig(neighbor_config=NeighborConfig(cutoff))

    def forward(self, data):
        pair = (1 - data.edge_vectors.norm(dim=1) / self.model_config.neighbor_config.cutoff) ** 3
        zero = torch.zeros(data.n_atoms, dtype=pair.dtype, device=pair.device)
        return ModelOutputs(energies=self.k * zero.index_add(0, data.receivers, pair))

    def distribution_spec(self, strategy=None):
        return SPEC_LJ_HALO


def make(cutoff: float = 4.5):
    return Pairs(cutoff)


def test_function_of_this_test_module_goes_by_its_file():
    ref = FactoryRef.of(functools.partial(make, cutoff=4.0))
    assert ref.path == __file__ and ref.attribute == "make" and ref.kwargs == {"cutoff": 4.0}
    wrapper = ref.make("cpu")
    assert wrapper.model_config.neighbor_config.cutoff == 4.0


def test_function_of_an_installed_module_goes_by_name():
    from nvdd.models.registry import load

    ref = FactoryRef.of(functools.partial(load, "lj", epsilon=0.01, sigma=3.4))
    assert ref.module == "nvdd.models.registry" and not ref.path
    assert FactoryRef.of("nvdd.models.registry:load").attribute == "load"


def test_class_is_a_factory():
    assert FactoryRef.of(Pairs).make("cpu").k.shape == (1,)


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (lambda: None, "lambda"),
        ("no_colon", "module:attribute"),
        (3, "not a int"),
    ],
)
def test_unreachable(factory, words):
    with pytest.raises(InputError, match=words):
        FactoryRef.of(factory)


def test_function_inside_a_function():
    def local():
        return make()

    with pytest.raises(InputError, match="top level"):
        FactoryRef.of(local)


def test_no_wrapper():
    with pytest.raises(InputError, match="not a wrapper"):
        FactoryRef.of(OrderedDict).make("cpu")


def test_checksum_sees_one_weight():
    a, b = make(), make()
    assert checksum(a) == checksum(b)
    with torch.no_grad():
        b.k += 1e-15
    assert checksum(a) != checksum(b)


def sample():
    atoms = bulk("Ar", "fcc", a=5.0, cubic=True).repeat(2)
    atoms.rattle(0.1, seed=1)
    return atoms


def test_validates_from_a_test_module():
    with ValidationSession(world_size=2) as session:
        report = trace_and_validate(make, sample(), session=session, md_steps=1)
        assert report.ok, report.summary()
        with pytest.raises(InputError, match="sample_batch must be"):
            trace_and_validate(make, "Ar", session=session)
        with pytest.raises(InputError, match="can't be divided"):
            trace_and_validate(make, sample()[:1], session=session)
        # nothing to divide: too far apart
        far = sample()
        far.set_cell(far.cell * 3, scale_atoms=True)
        report = trace_and_validate(make, far, session=session, md_steps=1)
        assert not report.ok and report.best.diagnoses[0].kind == "nothing-tested"


SCRIPT = """
from ase.build import bulk
import test_factory
from nvdd.validate import trace_and_validate

def make():
    return test_factory.Pairs(4.2)

if {condition}:
    atoms = bulk("Ar", "fcc", a=5.0, cubic=True).repeat(2)
    atoms.rattle(0.1, seed=1)
    report = trace_and_validate(make, atoms, md_steps=0)
    print("ok" if report.ok else report.next_action)
"""


def run_script(tmp_path, condition: str) -> str:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(condition=condition))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)], capture_output=True, text=True, env=environment, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_validates_from_a_script(tmp_path):
    assert run_script(tmp_path, '__name__ == "__main__"') == "ok"


def test_a_script_without_a_guard_is_told(tmp_path):
    assert "under if __name__ == '__main__'" in run_script(tmp_path, "True")
