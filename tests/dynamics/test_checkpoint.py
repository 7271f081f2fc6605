"""Checkpoints: a run goes on on another number of ranks as if nothing had happened, whatever ended it."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import md
import parity
from nvdd import (
    CSVR,
    FIRE,
    FIRE2,
    LBFGS,
    NPH,
    NPT,
    Batch,
    DomainConfig,
    DomainParallel,
    InputError,
    Langevin,
    NoseHoover,
    VelocityRescale,
)
from nvdd.communicator import Communicator
from nvdd.dynamics.cell_relaxation import CellRelaxation
from nvdd.dynamics.checkpoint import Checkpoint, load_checkpoint, write_whole

ONE = Communicator(None)
OPTIONS = {"skin": 0.4, "migration_hysteresis": 0.0}
INTEGRATORS = {
    "Langevin": lambda: Langevin(4.0, temperature=120.0, friction=0.005, seed=3),
    "NoseHoover": lambda: NoseHoover(4.0, temperature=120.0),
    "CSVR": lambda: CSVR(4.0, temperature=120.0, tau=100.0, seed=3),
    "VelocityRescale": lambda: VelocityRescale(4.0, temperature=120.0, interval=3),
    "NPH": lambda: NPH(4.0, tau=400.0, mode="aniso"),
    "NPT": lambda: NPT(4.0, temperature=120.0, pressure=0.0, mode="full"),
    "FIRE": lambda: FIRE(1e-9, "frechet"),
    "FIRE2": lambda: FIRE2(1e-9),
    "LBFGS": lambda: LBFGS(1e-9, "unit", memory=5),
}


def halves(ranks, folder, make, steps: int, atoms=None):
    """Steps on 4 ranks; half of them on 3 ranks, and the other half on 2."""
    atoms = md.hot_argon((2, 2, 3)) if atoms is None else atoms
    path = str(folder / "run.ckpt")
    whole = ranks.run(4, md.run_on_rank, "lj", atoms, make(), steps, OPTIONS)
    first = ranks.run(3, md.run_on_rank, "lj", atoms, make(), steps // 2, OPTIONS, [Checkpoint(path, steps // 2)])
    second = ranks.run(2, md.run_on_rank, "lj", path, make(), steps // 2, OPTIONS)
    return whole, first, second


def assert_same(whole, second, steps: int) -> None:
    assert second[0]["steps"] == steps
    for name in ("positions", "velocities"):
        assert np.abs(second[0][name] - whole[0][name]).max() < 1e-8, name
    assert np.abs(second[0]["cell"] - whole[0]["cell"]).max() < 1e-9
    np.testing.assert_allclose(second[0]["conserved"], whole[0]["conserved"], rtol=0, atol=1e-8)


@pytest.mark.parametrize("name", INTEGRATORS)
def test_from_three_ranks_to_two(ranks, tmp_path, name):
    whole, _, second = halves(ranks, tmp_path, INTEGRATORS[name], 16)
    assert_same(whole, second, 16)
    if name != "FIRE2":  # which evaluates again after steps that it takes back
        assert second[0]["evaluations"] == 8, "forces come with the checkpoint"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_steps_of_langevin(ranks, tmp_path):
    """More than 100 migrations; step 500 is a checkpoint of 3 ranks from which 2 go on; 1 and 4 ranks agree."""
    make, atoms = INTEGRATORS["Langevin"], md.hot_argon((3, 3, 3))
    whole, _, second = halves(ranks, tmp_path, make, 1000, atoms)
    assert_same(whole, second, 1000)
    assert sum(part["migrated"] for part in whole) > 100
    for size in (1, 2, 3):
        alone = ranks.run(size, md.run_on_rank, "lj", atoms, make(), 1000, OPTIONS)
        assert np.abs(alone[0]["positions"] - whole[0]["positions"]).max() < 1e-8


def test_another_integrator_is_refused_or_takes_atoms_alone(ranks, tmp_path):
    path = str(tmp_path / "run.ckpt")
    atoms = md.hot_argon((2, 2, 2))
    ranks.run(2, md.run_on_rank, "lj", atoms, INTEGRATORS["Langevin"](), 2, {}, [Checkpoint(path, 2)])
    nose = INTEGRATORS["NoseHoover"]
    with pytest.raises(InputError, match="was written by Langevin, whose state NoseHoover can't take over"):
        md.run_on_rank(Communicator(None), "lj", path, nose(), 1, {})
    part = md.run_on_rank(Communicator(None), "lj", path, nose(), 1, {}, integrator=False)
    assert part["steps"] == 1


def written(path, dynamics, steps: int = 2) -> str:
    """A checkpoint of one rank."""
    md.run_on_rank(ONE, "lj", md.hot_argon((2, 2, 2)), dynamics, steps, {}, [Checkpoint(path, steps)])
    return str(path)


def restarted(path: str, dynamics) -> DomainParallel:
    run = DomainParallel(dynamics, parity.wrapper("lj"), DomainConfig(mesh=ONE))
    run.restart(path)
    return run


REFUSED = {
    "mode = iso, and this one has full": (NPT(2.0, 120.0), NPT(2.0, 120.0, mode="full")),
    r"axes = \[True, True, True\], and this one has \[True, False, True\]": (
        NPH(2.0, mode="aniso"),
        NPH(2.0, mode="aniso", axes=(True, False, True)),
    ),
    "NPT with chain_length = 3, and this one has 4": (NPT(2.0, 120.0), NPT(2.0, 120.0, chain_length=4)),
    "NoseHoover with chain_length = 3, and this one has 2": (NoseHoover(2.0, 120.0), NoseHoover(2.0, 120.0, chain_length=2)),
    "memory = 100, and this one has 5": (LBFGS(), LBFGS(memory=5)),
    "cell = None, and this one has {'kind': 'frechet'": (FIRE(), FIRE(cell="frechet")),
    "pressure_GPa = 0.0, and this one has 1.0": (FIRE(cell="unit"), FIRE(cell=CellRelaxation("unit", pressure=1.0))),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_parameters_with_which_a_state_means_nothing_are_refused(tmp_path, message):
    wrote, other = REFUSED[message]
    path = written(tmp_path / "run.ckpt", wrote)
    with pytest.raises(InputError, match=message):
        restarted(path, other)
    restarted(path, wrote)


@pytest.mark.parametrize(
    "wrote, other",
    [
        (NPT(2.0, 120.0, tau_cell=300.0), NPT(1.0, 60.0, pressure=0.1, tau=50.0, tau_cell=900.0)),
        (NPH(2.0, tau=300.0), NPH(2.0, tau=150.0)),
    ],
)
def test_a_barostat_s_new_period_counts(tmp_path, wrote, other):
    """The cell gets the mass that its period (and temperature) asks for, and goes on at the rate at which it moves."""
    path = written(tmp_path / "run.ckpt", wrote, 20)
    before, after = restarted(path, wrote).state.system_state, restarted(path, other).state.system_state
    ratio = (other.tau_cell / wrote.tau_cell) ** 2
    if isinstance(wrote, NPT):
        ratio *= 60.0 / 120.0
    torch.testing.assert_close(after["cell_mass"], ratio * before["cell_mass"], rtol=1e-12, atol=0.0)
    rate = before["cell_momentum"] / before["cell_mass"]
    assert rate.abs().max() > 0
    torch.testing.assert_close(after["cell_momentum"] / after["cell_mass"], rate, rtol=1e-12, atol=0.0)
    if isinstance(wrote, NPT):
        fresh = DomainParallel(other, parity.wrapper("lj"), DomainConfig(mesh=ONE))
        fresh.partition(Batch.from_atoms(md.hot_argon((2, 2, 2))))
        fresh.start()
        torch.testing.assert_close(after["cell_mass"], fresh.state.system_state["cell_mass"], rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("name", INTEGRATORS)
def test_everything_comes_to_the_rank_s_device(tmp_path, name):
    """A checkpoint of a CPU read for another device; "meta" stands for a GPU. Nothing remembers where it was written."""
    path = written(tmp_path / "run.ckpt", INTEGRATORS[name]())
    state = load_checkpoint(path, Communicator(None, "meta"))[0].state
    inner = {**state.system_state, **state.per_atom(), "energy": state.energy}
    assert len(state.system_state) > 0 and {tensor.device.type for tensor in inner.values()} == {"meta"}


def test_what_can_t_be_read(tmp_path):
    comm = Communicator(None)
    with pytest.raises(InputError, match="can't be read as a checkpoint"):
        load_checkpoint(tmp_path / "none.ckpt", comm)
    (tmp_path / "half.ckpt").write_bytes(b"123")
    with pytest.raises(InputError, match="can't be read as a checkpoint"):
        load_checkpoint(tmp_path / "half.ckpt", comm)
    save_file({"x": torch.zeros(1)}, tmp_path / "weights.ckpt")
    with pytest.raises(InputError, match="is no checkpoint of this version of nvdd"):
        load_checkpoint(tmp_path / "weights.ckpt", comm)
    with pytest.raises(InputError, match="there is no folder"):
        md.run_on_rank(
            comm, "lj", md.hot_argon((1, 1, 1)), md.Verlet(1.0), 1, {}, [Checkpoint(tmp_path / "a" / "b.ckpt")]
        )


def test_a_file_is_replaced_when_the_new_one_is_whole(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def fails(part) -> None:
        part.write_text("ne")
        assert path.read_text() == "old"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(path, fails)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]
    write_whole(path, lambda part: part.write_text("new"))
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["file"]
