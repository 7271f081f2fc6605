"""Long runs against statistical mechanics. Each takes minutes: opt in with --run-slow, -s prints what was measured."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from ase import units
from ase.build import bulk
from ase.constraints import FixCom
from scipy import stats

import lj_fluid
import parity
from builders import quartz
from dense_lj import DenseRun
from nvdd import CSVR, FIRE, NPH, NPT, NVE, Langevin, NoseHoover, Simulation
from sampling import drift, independent, mean_and_error

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

ARGON, N = {"epsilon": 0.0104, "sigma": 3.4, "cutoff": 7.5, "onset": 6.0}, 108
# A dense fluid above its critical point: at 100 K some runs stay crystalline for half their length
KELVIN, TIMESTEP, STEPS = 140.0, 4.0, 20_000
CRYSTAL = 40.0  # K: where all of the cell moves, argon is solid, since nothing holds the shape of a liquid's
PRESSURES = (0.03, 0.045)  # GPa; their volumes overlap

ENSEMBLES = {
    "nve": lambda t, dt: NVE(dt),
    "nose-hoover": lambda t, dt: NoseHoover(dt, t, tau=50 * dt),
    "csvr": lambda t, dt: CSVR(dt, t, tau=50 * dt, seed=3),
    "langevin": lambda t, dt: Langevin(dt, t, friction=0.02 / dt, seed=3),
    "nph": lambda t, dt: NPH(dt, PRESSURES[0], tau=200 * dt),
    "npt-iso": lambda t, dt: NPT(dt, t, PRESSURES[0], tau=50 * dt, tau_cell=200 * dt),
    "npt-full": lambda t, dt: NPT(dt, t, PRESSURES[0], tau=50 * dt, tau_cell=200 * dt, mode="full"),
}


@cache
def liquid_argon() -> DenseRun:
    """108 atoms of argon at 140 K, with the centre of mass at rest."""
    atoms = bulk("Ar", "fcc", a=6.0, cubic=True).repeat(3)
    atoms.rattle(0.2, seed=1)
    run = DenseRun(atoms, Langevin(TIMESTEP, KELVIN, friction=0.01, seed=5), **ARGON)
    run.draw_velocities(2 * KELVIN, seed=2)
    run.run(3000)
    return run


@cache
def solid_argon() -> DenseRun:
    """The same, crystalline, at 40 K."""
    run = DenseRun(
        bulk("Ar", "fcc", a=5.4, cubic=True).repeat(3), Langevin(TIMESTEP, CRYSTAL, friction=0.01, seed=5), **ARGON
    )
    run.draw_velocities(2 * CRYSTAL, seed=2)
    run.run(1000)
    return run


def kelvin_of(ensemble: str) -> float:
    """The temperature of an ensemble's run."""
    return CRYSTAL if ensemble == "npt-full" else KELVIN


@cache
def argon_run(ensemble: str, pressure: float | None = None) -> dict[str, np.ndarray]:
    dynamics = ENSEMBLES[ensemble](kelvin_of(ensemble), TIMESTEP)
    if pressure is not None:
        dynamics.pressure = pressure
    solid = ensemble == "npt-full"
    run = DenseRun(bulk("Ar", "fcc", a=5.4 if solid else 6.0, cubic=True).repeat(3), dynamics, **ARGON)
    start = (solid_argon() if solid else liquid_argon()).state
    run.state.positions, run.state.velocities = start.positions.clone(), start.velocities.clone()
    if "np" in ensemble:
        run.run(2000)
    return run.run(STEPS)


@pytest.mark.parametrize("ensemble", ENSEMBLES)
def test_drift_of_argon(ensemble):
    """20 000 steps of 4 fs: the conserved quantity does not drift by more than 1 % of k T an atom."""
    change, spread = drift(argon_run(ensemble)["conserved"])
    per_atom = N * units.kB * kelvin_of(ensemble)
    print(f"\n{ensemble}: drift {change / per_atom:.2e} k T an atom in {STEPS} steps, spread {spread / per_atom:.2e}")
    assert abs(change) < 0.01 * per_atom and spread < 0.01 * per_atom


@pytest.mark.parametrize("ensemble", ["nose-hoover", "csvr", "langevin", "npt-iso", "npt-full"])
def test_kinetic_energy_is_canonical(ensemble):
    """A gamma distribution of N_f / 2; mean to 4 errors, variance to 20 %, Kolmogorov and Smirnov on thinned values."""
    freedom, thermal = 3 * N - 3, units.kB * kelvin_of(ensemble)
    kinetic = argon_run(ensemble)["kinetic"][50:]
    mean, error = mean_and_error(kinetic)
    thin = independent(kinetic)
    found = stats.kstest(thin, stats.gamma(freedom / 2, scale=thermal).cdf)
    variance = np.var(kinetic) / (freedom / 2 * thermal**2)
    print(
        f"\n{ensemble}: T = {2 * mean / freedom / units.kB:.2f} +- {2 * error / freedom / units.kB:.2f} K, variance "
        f"{variance:.3f} of the canonical one, p = {found.pvalue:.3f} of {len(thin)} values"
    )
    assert abs(mean - freedom / 2 * thermal) < 4 * error
    assert abs(variance - 1) < 0.2
    assert len(thin) > 50 and found.pvalue > 1e-3


@pytest.mark.parametrize("ensemble", ["npt-iso", "npt-full"])
def test_pressure_is_that_of_the_barostat(ensemble):
    """<P> = P, and <(P - P_ext) V> = -k T, which is Tuckerman's (Statistical Mechanics, 2010, 5.6) virial theorem."""
    run, thermal = argon_run(ensemble), units.kB * kelvin_of(ensemble)
    mean, error = mean_and_error(run["pressure"][50:])
    work, work_error = mean_and_error(((run["pressure"] - PRESSURES[0] * units.GPa) * run["volume"])[50:])
    print(f"\n{ensemble}: P = {mean / units.GPa:.4f} +- {error / units.GPa:.4f} GPa for {PRESSURES[0]}")
    print(f"<(P - P_ext) V> = {work:.4f} +- {work_error:.4f} eV for {-thermal:.4f}")
    assert abs(mean - PRESSURES[0] * units.GPa) < 4 * error
    assert abs(work + thermal) < 4 * work_error


def test_volumes_at_two_pressures():
    """ln(p_1(V) / p_2(V)) has the slope (P_2 - P_1) / k T: Shirts, J. Chem. Theory Comput. 9, 909 (2013).

    The slope by maximum likelihood (logistic regression), on independent volumes.
    """
    from scipy.optimize import minimize

    low, high = (independent(argon_run("npt-iso", p)["volume"][50:]) for p in PRESSURES)
    scale = np.std(low)
    volumes = np.concatenate([low, high])
    middle = volumes.mean()
    x, of_low = (volumes - middle) / scale, np.r_[np.ones(len(low)), np.zeros(len(high))]

    def cost(parameters: np.ndarray) -> float:
        z = parameters[0] + parameters[1] * x
        return float(np.sum(np.logaddexp(0, z) - of_low * z))

    found = minimize(cost, np.zeros(2))
    share = 1 / (1 + np.exp(found.x[0] + found.x[1] * x))
    information = np.einsum("n,ni,nj->ij", share * (1 - share), *2 * [np.stack([np.ones_like(x), x], 1)])
    slope, error = found.x[1] / scale, np.sqrt(np.linalg.inv(information)[1, 1]) / scale
    expected = (PRESSURES[1] - PRESSURES[0]) * units.GPa / (units.kB * KELVIN)
    print(f"\nslope {slope:.5f} +- {error:.5f} /A^3 for {expected:.5f}; {len(low)} and {len(high)} volumes")
    assert abs(slope - expected) < 3 * error and error < 0.35 * expected


def test_density_of_the_lennard_jones_fluid():
    """At k T = 1.2 epsilon and the pressure of 0.7 atoms per sigma^3, to 0.5 %, twice what the equation of state is
    good for there; all in reduced units, which are eV, A and amu."""
    temperature, density, cutoff = 1.2, 0.7, 2.5
    pressure = lj_fluid.pressure(temperature, density) - lj_fluid.tail_pressure(density, cutoff)
    atoms = bulk("H", "fcc", a=(4 / 0.68) ** (1 / 3), cubic=True).repeat(3)
    atoms.set_masses(np.ones(len(atoms)))
    atoms.rattle(0.02, seed=1)
    dt = 0.005 / units.fs
    dynamics = NPT(dt, temperature / units.kB, pressure / units.GPa, tau=100 * dt, tau_cell=200 * dt)
    run = DenseRun(atoms, dynamics, epsilon=1.0, sigma=1.0, cutoff=cutoff)
    run.draw_velocities(2 * temperature / units.kB, seed=3)
    run.run(4000)
    mean, error = mean_and_error(len(atoms) / run.run(20_000)["volume"])
    print(f"\ndensity {mean:.4f} +- {error:.4f} for {density}")
    assert error < 0.003 and abs(mean - density) < 0.005 * density + 3 * error


@pytest.mark.parametrize("ensemble", ["nve", "nose-hoover", "csvr", "npt-iso"])
def test_drift_of_mace(ensemble):
    """2 000 steps of 0.5 fs of quartz with a MACE of random weights, near a minimum of its own."""
    atoms, wrapper = quartz(stdev=0.02), parity.wrapper("mace")
    relaxation = Simulation(atoms, wrapper, FIRE(fmax=0.05, cell="frechet"))
    relaxation.run(300)
    atoms = relaxation.to_atoms()[0]
    atoms.set_constraint(FixCom())
    run = Simulation(atoms, wrapper, ENSEMBLES[ensemble](300.0, 0.5))
    run.draw_velocities(300.0, seed=1, exact=True)
    rows = []
    run.run(2000, lambda run: rows.append((run.conserved[0], run.temperature[0])))
    conserved, kelvin = np.array(rows).T
    change, spread = drift(conserved)
    per_atom = len(atoms) * units.kB * 300
    print(
        f"\n{ensemble}: drift {change / per_atom:.2e} k T an atom in 2000 steps, spread {spread / per_atom:.2e}; "
        f"T = {kelvin.mean():.0f} K"
    )
    assert abs(change) < 0.01 * per_atom and spread < 0.02 * per_atom
