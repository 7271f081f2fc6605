"""Helpers of third-party packages: watched, restored, and recognised by what they add up to."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import zoo
import zoo_helpers

from nvdd.validate.helpers import HelperOutput, packages_of, undeclared_reductions, watch_helpers


def test_packages_that_the_model_imports_are_found():
    assert {"zoo", "zoo_helpers"} <= set(packages_of(zoo.make("Helper")))
    assert not {"torch", "nvdd", "numpy", "ase", "functools"} & set(packages_of(zoo.make("Helper")))


def test_watches_and_restores():
    original, scripted = zoo_helpers.mol_sum, zoo_helpers.smooth
    with pytest.raises(ZeroDivisionError), watch_helpers(["zoo_helpers"]) as watch:
        zoo_helpers.mol_sum(torch.ones(3), torch.tensor([0, 0, 1]))
        zoo_helpers.smooth(torch.ones(3))
        names = [(r.name, r.call, r.value.shape) for r in watch.take()]
        assert names == [("zoo_helpers.mol_sum", 1, (2,)), ("zoo_helpers.smooth", 1, (3,))]
        zoo_helpers.mol_sum(torch.ones(3), torch.tensor([0, 0, 1]))
        assert [r.call for r in watch.take()] == [1]
        raise ZeroDivisionError
    assert zoo_helpers.mol_sum is original and zoo_helpers.smooth is scripted


def outputs(value, role=""):
    return [HelperOutput("p.mol_sum", 1, np.asarray(value, float), role)]


def test_recognises_shares():
    assert undeclared_reductions(outputs([3.0, 4.0]), [outputs([1.0, 4.0]), outputs([2.0, 0.0])])
    replicated = [outputs([3.0, 4.0])] * 2
    assert not undeclared_reductions(outputs([3.0, 4.0]), replicated)
    known = [outputs([1.0, 4.0], "SYSTEM"), outputs([2.0, 0.0], "SYSTEM")]
    assert not undeclared_reductions(outputs([3.0, 4.0]), known)
    assert not undeclared_reductions(outputs([3.0, 4.0]), [outputs([1.0, 4.0]), outputs([5.0, 0.0])])
