"""The contract between integrators and whatever evaluates forces, in one process."""

from __future__ import annotations

import ase.units
import pytest
import torch
from ase.build import bulk

from nvdd import Batch, InputError
from nvdd.dynamics.base import BaseDynamics, Evaluator
from nvdd.dynamics.scalars import longest, power
from nvdd.dynamics.state import BOLTZMANN, FS, GPA, DynamicsState


def state(**options) -> DynamicsState:
    two = [bulk("Cu").repeat(2), bulk("Ar").repeat((1, 1, 3))]
    masses = torch.tensor([m for atoms in two for m in atoms.get_masses()])
    generator = torch.Generator().manual_seed(0)
    velocities = torch.randn(len(masses), 3, generator=generator, dtype=torch.float64)
    return DynamicsState.from_batch(Batch.from_atoms(two), masses, velocities, **options)


def springs(state: DynamicsState, stress: bool):
    x = state.positions
    virial = state.sum_systems(-x.unsqueeze(2) * -x.unsqueeze(1)) if stress else None
    return -x, 0.5 * state.sum_systems(x.square().sum(1)), virial


class Declares(BaseDynamics):
    scalars = {"power": power}  # noqa: RUF012
    maxima = {"fmax": lambda state: longest(state, state.forces)}  # noqa: RUF012


def test_units():
    assert ase.units.fs == FS
    assert ase.units.kB == BOLTZMANN
    assert ase.units.GPa == GPA


def test_an_evaluation_sets_forces_and_gives_declared_scalars():
    s = state()
    s.positions += 0.1
    evaluate = Evaluator(Declares(1.0), springs)
    evaluate.want_stress = True
    totals = evaluate(s, "power", "fmax")
    torch.testing.assert_close(s.forces, -s.positions)
    for k in range(2):
        mine = s.system == k
        torch.testing.assert_close(totals["power"][k], (s.forces * s.velocities)[mine].sum())
        torch.testing.assert_close(totals["fmax"][k], s.forces[mine].norm(dim=1).max())
        torch.testing.assert_close(s.energy[k], 0.5 * s.positions[mine].square().sum())
    assert s.stress.shape == (2, 3, 3)
    with pytest.raises(InputError, match=r"Declares asks for 'vf'; it declares \['fmax', 'kinetic_energy'"):
        evaluate.reduce(s, "vf")


def test_fixed_atoms_feel_nothing_and_don_t_count():
    fixed = torch.zeros(11, dtype=torch.bool)
    fixed[[0, 9]] = True
    s = state(fixed=fixed)
    s.positions += 0.1
    Evaluator(Declares(1.0), springs)(s)
    assert not s.forces[fixed].any() and not s.velocities[fixed].any() and s.forces[~fixed].all(1).any()
    assert s.degrees_of_freedom.tolist() == [21.0, 6.0]


def test_centre_of_mass_at_rest():
    s = state(fix_com=True)
    s.positions += 0.1
    evaluate = Evaluator(Declares(1.0), springs)
    evaluate(s)
    evaluate.remove_drift(s)
    assert s.sum_systems(s.forces).abs().max() < 1e-13
    assert s.sum_systems(s.masses.unsqueeze(1) * s.velocities).abs().max() < 1e-12
    assert s.degrees_of_freedom.tolist() == [21.0, 6.0]


def test_scalars_see_the_forces_that_hold_the_centre_of_mass():
    s = state(fix_com=True)
    s.positions += 0.1
    totals = Evaluator(Declares(1.0), springs)(s, "power", "fmax")
    torch.testing.assert_close(totals["power"], s.sum_systems((s.forces * s.velocities).sum(1)))
    torch.testing.assert_close(totals["fmax"], longest(s, s.forces))


def test_what_a_state_refuses():
    with pytest.raises(InputError, match="fix_com with fixed atoms"):
        state(fix_com=True, fixed=torch.ones(11, dtype=torch.bool))
    batch = Batch.from_atoms(bulk("Cu"))
    with pytest.raises(InputError, match=r"every mass must be positive \(amu\); the smallest is 0.0"):
        DynamicsState.from_batch(batch, torch.zeros(1))
    with pytest.raises(InputError, match=r"masses have shape \(2,\) for 1 atoms"):
        DynamicsState.from_batch(batch, torch.ones(2))
    with pytest.raises(InputError, match=r"timestep must be positive \(fs\), got 0"):
        Declares(0)


def test_per_atom_rows_move_together():
    s = state()
    s.node_state["history"] = torch.arange(22.0).reshape(11, 2)
    order = torch.randperm(11)
    rows = s.per_atom()
    s.set_per_atom({name: value[order] for name, value in rows.items()})
    torch.testing.assert_close(s.node_state["history"], torch.arange(22.0).reshape(11, 2)[order])
    assert s.ids.tolist() == order.tolist()
