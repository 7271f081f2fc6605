"""FIRE and FIRE2, against ASE's."""

from __future__ import annotations

import pytest
from ase import Atoms
from ase.filters import FrechetCellFilter, UnitCellFilter
from ase.optimize import FIRE as AseFIRE
from ase.optimize import FIRE2 as AseFIRE2

import one_process
from nvdd import FIRE, FIRE2, InputError

QUIET = {"logfile": None}
LONG = [("lj", 200), pytest.param("mace", 200, marks=pytest.mark.slow)]
PAIRS = {
    "FIRE": (lambda cell: FIRE(1e-9, cell), lambda atoms: AseFIRE(atoms, **QUIET)),
    "FIRE2": (lambda cell: FIRE2(1e-9, cell), lambda atoms: AseFIRE2(atoms, **QUIET)),
    "ABC-FIRE": (lambda cell: FIRE2(1e-9, cell, use_abc=True), lambda atoms: AseFIRE2(atoms, use_abc=True, **QUIET)),
}


@pytest.mark.parametrize(("model", "steps"), LONG)
@pytest.mark.parametrize("name", PAIRS)
def test_trajectory_is_ase_s(name, model, steps):
    mine, ase = PAIRS[name]
    one_process.compare(model, mine(None), ase, steps if name != "ABC-FIRE" else 80)


@pytest.mark.parametrize(("kind", "filtered"), [("frechet", FrechetCellFilter), ("unit", UnitCellFilter)])
@pytest.mark.parametrize("name", PAIRS)
def test_trajectory_with_a_cell_is_ase_s(name, kind, filtered):
    mine, ase = PAIRS[name]
    one_process.compare("lj", mine(kind), lambda atoms: ase(filtered(atoms)), 40)


def test_parameters_are_ase_s():
    options = {"dt": 0.05, "maxstep": 0.1, "dtmax": 0.4, "Nmin": 2, "finc": 1.2, "fdec": 0.6, "astart": 0.2, "fa": 0.9}
    one_process.compare("lj", FIRE(1e-9, **options), lambda a: AseFIRE(a, a=0.2, **options, **QUIET), 60)
    options["dtmin"] = 0.01
    one_process.compare("lj", FIRE2(1e-9, **options), lambda a: AseFIRE2(a, **options, **QUIET), 60)


def test_a_dimer_relaxes_to_its_minimum():
    import parity
    from nvdd import Simulation

    run = Simulation(Atoms("Ar2", positions=[[0, 0, 0], [4.4, 0, 0]]), parity.wrapper("lj"), FIRE(fmax=1e-6))
    assert run.run(300)
    assert run.to_atoms()[0].get_distance(0, 1) == pytest.approx(2 ** (1 / 6) * 3.4, abs=1e-4)


def test_what_is_refused():
    with pytest.raises(InputError, match=r"FIRE: fmax must be a positive number \(eV/A\), got 0"):
        FIRE(0)
    with pytest.raises(InputError, match="FIRE2: dtmin must be a positive number, got -1"):
        FIRE2(dtmin=-1)
    with pytest.raises(InputError, match="FIRE: cell must be None, 'frechet', 'unit' or a CellRelaxation, got True"):
        FIRE(cell=True)
