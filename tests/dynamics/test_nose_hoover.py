"""Nose-Hoover chains."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ase import units
from ase.md.nose_hoover_chain import NoseHooverChainNVT

import one_process
from nvdd import InputError, NoseHoover
from nvdd.dynamics.chains import NoseHooverChain


@pytest.mark.parametrize(("length", "substeps"), [(3, 1), (1, 2)])
def test_trajectory_and_conserved_energy_are_ase_s(length, substeps):
    dynamics = NoseHoover(2.0, 90.0, tau=100.0, chain_length=length, substeps=substeps)
    run, reference = one_process.compare(
        "lj",
        dynamics,
        lambda atoms: NoseHooverChainNVT(atoms, 2.0 * units.fs, 90.0, 100.0 * units.fs, tchain=length, tloop=substeps),
        100,
    )
    assert run.conserved[0] == pytest.approx(reference.get_conserved_energy(), abs=1e-10)


def test_conserved_energy_does_not_drift():
    """The energy of the atoms swings a hundred times as far."""
    run = one_process.Oscillators(NoseHoover(2.0, 200.0, tau=80.0), 10, 50.0)
    conserved, energies = [], []

    def note(state) -> None:
        conserved.append(float(run.conserved))
        energies.append(float(state.energy + run.kinetic))

    run.run(1000, note)
    assert np.ptp(conserved) < 0.01 * np.ptp(energies)


def test_each_system_has_a_chain_of_its_own():
    make = lambda n_systems: one_process.Oscillators(NoseHoover(2.0, 100.0, tau=60.0), 5, 60.0, n_systems=n_systems)
    both, alone = make(2), make(1)
    alone.state.positions, alone.state.velocities = both.state.positions[:5].clone(), both.state.velocities[:5].clone()
    both.run(30)
    alone.run(30)
    links = both.state.system_state["thermostat"]
    assert (links[0] - links[1]).abs().max() > 1e-3
    torch.testing.assert_close(both.state.positions[:5], alone.state.positions, rtol=0, atol=1e-14)
    torch.testing.assert_close(links[:1], alone.state.system_state["thermostat"], rtol=1e-12, atol=1e-15)


def test_a_chain_is_reversible():
    chain = NoseHooverChain(tau=5.0, length=3)
    links = torch.tensor([[[0.1, 0.2, 0.3], [1.0, -0.5, 0.2]]], dtype=torch.float64)
    energy, freedom = torch.tensor([2.0], dtype=torch.float64), torch.tensor([12.0], dtype=torch.float64)
    there, factor = chain.propagate(links, energy, freedom, 0.05, 0.3)
    back, inverse = chain.propagate(there, energy * factor**2, freedom, 0.05, -0.3)
    torch.testing.assert_close(back, links, rtol=1e-12, atol=1e-13)
    assert float(factor * inverse) == pytest.approx(1.0, abs=1e-13)


def test_what_is_refused():
    with pytest.raises(InputError, match=r"NoseHoover: tau = 1 fs is too short for a timestep of 2 fs"):
        NoseHoover(2.0, 300.0, tau=1.0)
    with pytest.raises(InputError, match="chain_length must be a whole number from 1 on, got 0"):
        NoseHoover(2.0, 300.0, chain_length=0)
