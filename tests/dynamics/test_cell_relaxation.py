"""The cell's coordinates: their forces are the gradient, masks and pressures are ASE's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ase import units
from ase.filters import FrechetCellFilter, UnitCellFilter

import one_process
import parity
from nvdd import FIRE, CellRelaxation, InputError, Simulation

FILTERS = {"frechet": FrechetCellFilter, "unit": UnitCellFilter}


def begun(cell: CellRelaxation, steps: int = 8) -> Simulation:
    """A relaxation on its way, with a cell that is deformed."""
    run = Simulation(one_process.argon(1), parity.wrapper("lj"), FIRE(1e-9, cell, dt=0.5))
    run.run(steps)
    return run


@pytest.mark.parametrize("kind", FILTERS)
def test_forces_are_the_gradient_of_the_enthalpy(kind):
    """By differences of the enthalpy under moves of each coordinate."""
    cell = CellRelaxation(kind, pressure=0.2)
    run = begun(cell)
    state, evaluate = run.state, run._run.evaluate
    atom_forces, cell_forces = cell.atom_forces(state).clone(), cell.forces(state).clone()
    assert cell_forces.abs().max() > 1e-3
    saved = state.positions.clone(), state.cell.clone(), state.system_state["cell_strain"].clone()

    def enthalpy(atoms: torch.Tensor, strain: torch.Tensor) -> float:
        state.positions, state.cell, state.system_state["cell_strain"] = (s.clone() for s in saved)
        cell.move(state, atoms, strain)
        evaluate(state)
        return float(state.energy + cell.pressure * 0.006241509125883258 * state.volume)

    h, none, still = 1e-4, torch.zeros_like(saved[0]), torch.zeros(1, 3, 3, dtype=torch.float64)
    for i, j in ((0, 0), (1, 2), (2, 1), (2, 2)):
        step = still.clone()
        step[0, i, j] = h
        slope = (enthalpy(none, step) - enthalpy(none, -step)) / (2 * h)
        assert float(cell_forces[0, i, j]) == pytest.approx(-slope, abs=1e-7)
    step = none.clone()
    step[1, 2] = h
    slope = (enthalpy(step, still) - enthalpy(-step, still)) / (2 * h)
    assert float(atom_forces[1, 2]) == pytest.approx(-slope, abs=1e-7)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pressure": 0.4},
        {"hydrostatic": True},
        {"mask": [1, 1, 0, 0, 0, 0]},
        {"mask": [1, 1, 1, 0, 0, 0], "pressure": -0.1},
    ],
    ids=lambda o: "-".join(o) or "plain",
)
@pytest.mark.parametrize("kind", FILTERS)
def test_forces_are_ase_s(kind, options):
    compare_forces(kind, options)


def test_forces_at_constant_volume_are_ase_s():
    compare_forces("frechet", {"constant_volume": True})


def compare_forces(kind: str, options: dict) -> None:
    cell = CellRelaxation(kind, **options)
    run = begun(cell)
    atoms = run.to_atoms()[0]
    atoms.calc = one_process.NVDDCalculator(parity.wrapper("lj"))
    names = {"pressure": "scalar_pressure", "hydrostatic": "hydrostatic_strain"}
    given = {names.get(k, k): v * units.GPa if k == "pressure" else v for k, v in options.items()}
    reference = FILTERS[kind](one_process.argon(1), **given)  # whose cell is the undeformed one
    reference.atoms = atoms
    forces = reference.get_forces()
    np.testing.assert_allclose(cell.atom_forces(run.state), forces[:-3], rtol=0, atol=1e-11)
    np.testing.assert_allclose(cell.forces(run.state)[0], forces[-3:], rtol=0, atol=1e-10)


@pytest.mark.parametrize("mask", [None, [1, 1, 0, 0, 0, 1], [0, 0, 0, 1, 1, 1]], ids=["all", "plane", "shear"])
def test_a_volume_is_kept_and_masked_strains_stay(mask):
    run = begun(CellRelaxation(mask=mask, constant_volume=True), 20)
    volume = one_process.argon(1).get_volume()
    assert float(run.state.volume) == pytest.approx(volume, rel=1e-11)
    strain = run.state.system_state["cell_strain"][0]
    assert strain.abs().max() > 1e-4
    if mask is not None:
        wanted = torch.as_tensor(mask)[torch.tensor([[0, 5, 4], [5, 1, 3], [4, 3, 2]])]
        assert strain[wanted == 0].abs().max() < 1e-15


def test_what_is_refused():
    with pytest.raises(InputError, match="constant_volume needs kind='frechet'"):
        CellRelaxation("unit", constant_volume=True)
    with pytest.raises(InputError, match="leave nothing of the cell to relax"):
        CellRelaxation(hydrostatic=True, constant_volume=True)
    with pytest.raises(InputError, match="CellRelaxation: kind must be one of frechet, unit, got 'exp'"):
        CellRelaxation("exp")
    with pytest.raises(InputError, match=r"mask must have six entries \(xx, yy, zz, yz, xz, xy\) or be 3 x 3"):
        CellRelaxation(mask=[True, False])
    slab = one_process.argon(1)
    slab.pbc = (True, True, False)
    with pytest.raises(InputError, match=r"FIRE: system 0 is open along an axis .* say which strains relax"):
        Simulation(slab, parity.wrapper("lj"), FIRE(cell="frechet")).run(1)
    run = Simulation(slab, parity.wrapper("lj"), FIRE(1e-9, CellRelaxation(mask=[1, 1, 0, 0, 0, 1])))
    run.run(5)
    assert (run.to_atoms()[0].cell.array[2, 2] == slab.cell.array[2, 2]).all()
