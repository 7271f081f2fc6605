"""L-BFGS, against ASE's."""

from __future__ import annotations

import pytest
from ase.filters import FrechetCellFilter, UnitCellFilter
from ase.optimize import LBFGS as AseLBFGS

import one_process
from nvdd import LBFGS, InputError


@pytest.mark.parametrize(
    ("model", "steps", "memory"),
    [("lj", 200, 100), ("lj", 60, 5), pytest.param("mace", 200, 100, marks=pytest.mark.slow)],
)
def test_trajectory_is_ase_s(model, steps, memory):
    one_process.compare(model, LBFGS(1e-9, memory=memory), lambda a: AseLBFGS(a, memory=memory, logfile=None), steps)


@pytest.mark.parametrize(("kind", "filtered"), [("frechet", FrechetCellFilter), ("unit", UnitCellFilter)])
def test_trajectory_with_a_cell_is_ase_s(kind, filtered):
    one_process.compare("lj", LBFGS(1e-9, kind), lambda atoms: AseLBFGS(filtered(atoms), logfile=None), 40)


def test_parameters_are_ase_s():
    options = {"maxstep": 0.05, "damping": 0.8, "alpha": 50.0}
    one_process.compare("lj", LBFGS(1e-9, **options), lambda a: AseLBFGS(a, logfile=None, **options), 40)


def test_what_is_refused():
    with pytest.raises(InputError, match="LBFGS: maxstep = 2 A is more than atoms may move at once"):
        LBFGS(maxstep=2)
    with pytest.raises(InputError, match=r"LBFGS: memory must be a whole number from 1 on, got 2\.5"):
        LBFGS(memory=2.5)
