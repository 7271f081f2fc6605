"""Initial velocities."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ase import Atoms, units
from ase.constraints import FixAtoms
from scipy import stats

import one_process
import parity
from nvdd import NVE, InputError, Simulation


def drawn(atoms, kelvin=300.0, seed=1, **options) -> Simulation:
    run = Simulation(atoms, parity.wrapper("lj"), NVE(1.0))
    run.draw_velocities(kelvin, seed, **options)
    return run


def test_distribution():
    atoms = Atoms(["Ar", "Ne"] * 1500, positions=np.random.default_rng(0).normal(size=(3000, 3)) * 100)
    velocities = drawn(atoms, zero_momentum=False).state.velocities.numpy()
    for k, symbol in enumerate(("Ar", "Ne")):
        spread = np.sqrt(units.kB * 300.0 / atoms[k].mass)
        assert atoms[k].symbol == symbol
        assert stats.kstest(velocities[k::2].ravel(), stats.norm(scale=spread).cdf).pvalue > 1e-3
    assert stats.kstest(drawn(atoms, seed=2).state.velocities[:, 0], velocities[:, 0]).pvalue > 1e-3
    assert not np.allclose(drawn(atoms, seed=2).state.velocities, velocities)


def test_momentum_and_exact_temperature():
    run = drawn([one_process.argon(), one_process.argon(1)], 250.0, exact=True)
    state = run.state
    momenta = state.sum_systems(state.masses.unsqueeze(1) * state.velocities)
    assert momenta.abs().max() < 1e-12
    assert run.temperature == pytest.approx([250.0, 250.0], rel=1e-12)


def test_systems_of_one_atom_keep_their_velocity_beside_others():
    one = Atoms("Ar", positions=[[0.0, 0.0, 0.0]])
    run = drawn([one_process.argon(1), one], 250.0, exact=True)
    state = run.state
    momenta = state.sum_systems(state.masses.unsqueeze(1) * state.velocities)
    assert momenta[0].abs().max() < 1e-12 and momenta[1].abs().min() > 1e-3
    assert run.temperature == pytest.approx([250.0, 250.0], rel=1e-12)
    with pytest.raises(InputError, match="zero_momentum leaves the only atom of system 0 that can move at rest"):
        drawn(one, zero_momentum=True, exact=True)


def test_an_atom_has_the_same_velocity_wherever_it_stands():
    atoms = one_process.argon()
    state = drawn(atoms, zero_momentum=False).state
    from nvdd.dynamics.base import Evaluator
    from nvdd.dynamics.velocities import draw_velocities

    before, order = state.velocities.clone(), torch.randperm(len(atoms))
    state.set_per_atom({name: value[order] for name, value in state.per_atom().items()})
    draw_velocities(state, Evaluator(NVE(1.0), lambda *_: None), 300.0, 1, zero_momentum=False)
    assert torch.equal(state.velocities, before[order])


def test_fixed_atoms_get_none_and_keep_the_drift():
    atoms = one_process.argon()
    atoms.set_constraint(FixAtoms([0, 1]))
    state = drawn(atoms).state
    assert not state.velocities[:2].any() and state.velocities[2:].all()
    assert (state.masses.unsqueeze(1) * state.velocities).sum(0).abs().max() > 1.0


def test_what_is_refused():
    atoms = one_process.argon(1)
    atoms.set_constraint(FixAtoms(range(len(atoms))))
    with pytest.raises(InputError, match="no atom of system 0 can move, so it has no temperature"):
        drawn(atoms)
    with pytest.raises(InputError, match="draw_velocities: temperature must be a number that is zero or above"):
        drawn(one_process.argon(1), -1.0)
