"""Lennard-Jones over ranks against the sum over all images, for systems of every shape that hypothesis thinks of.

300 cases; 10 000 at random with ``--run-slow``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from nvdd import AtomicData, Batch, DistributedModel, DomainConfig
from nvdd.communicator import Communicator
from reference import brute_force_lj

EPSILON, SIGMA, CUTOFF = {18: 0.0104, 10: 0.0031}, {18: 2.3, 10: 2.1}, 5.0
APART = 2.2  # A, the least distance between atoms
SHAPES = ("orthorhombic", "triclinic", "left-handed", "tiny", "elongated")


@cache
def wrapper() -> Any:
    from nvdd.models.lj import LennardJonesModelWrapper

    by_symbol = lambda table: {"Ar": table[18], "Ne": table[10]}
    return LennardJonesModelWrapper(
        epsilon=by_symbol(EPSILON), sigma=by_symbol(SIGMA), cutoff=CUTOFF, mixing="arithmetic"
    )


# --- systems ----------------------------------------------------------------------------------------------------

System = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # positions, numbers, cell, pbc


@dataclass(frozen=True)
class Recipe:
    """A system of at most ``n_atoms`` atoms; what pytest prints of a case that fails.

    Attributes:
        shape: of the cell.
        pbc: periodic axes.
        absent: open axes whose cell vector is zero.
        n_atoms: how many atoms are tried; those that come too near to others are left out.
        faces: probability that a coordinate lies exactly on a face, an edge or a corner of the cell.
        seed: of the rest.
    """

    shape: str
    pbc: tuple[bool, bool, bool] = (True, True, True)
    absent: tuple[bool, bool, bool] = (False, False, False)
    n_atoms: int = 20
    faces: float = 0.0
    seed: int = 0

    def make(self) -> System:
        rng = np.random.default_rng(self.seed)
        pbc = np.array(self.pbc)
        cell = _cell(self.shape, rng)
        cell *= max(1.0, 1.05 * APART / _shortest(cell[pbc]))
        frame = _with_open_axes(cell, pbc)
        scaled = rng.uniform(-0.6, 1.6, (self.n_atoms, 3))
        on_face = rng.random((self.n_atoms, 3)) < self.faces
        scaled[on_face] = rng.choice([0.0, 1.0, 0.5, -1.0, 2.0], on_face.sum())
        positions = _apart(scaled @ frame, cell[pbc])
        numbers = rng.choice([18, 10], len(positions))
        cell[~pbc & np.array(self.absent)] = 0
        return positions, numbers, cell, pbc


def _cell(shape: str, rng: np.random.Generator) -> np.ndarray:
    lengths = {
        "tiny": rng.uniform(2.3, 3.0, 3),
        "elongated": rng.permutation([2.5, rng.uniform(2.5, 5), rng.uniform(25, 50)]),
    }.get(shape, rng.uniform(3.0, 13.0, 3))
    cell = np.diag(lengths)
    if shape == "orthorhombic":
        return cell
    cell = cell + lengths[:, None] * rng.uniform(-0.45, 0.45, (3, 3)) * (1 - np.eye(3))
    rotation = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    cell = cell @ (rotation if np.linalg.det(rotation) > 0 else -rotation)
    if (np.linalg.det(cell) < 0) != (shape == "left-handed"):
        cell = cell[[1, 0, 2]]
    return cell


def _with_open_axes(cell: np.ndarray, pbc: np.ndarray) -> np.ndarray:
    """Vectors along which atoms are spread: periodic ones, and others across them."""
    frame = cell.copy()
    if pbc.any() and not pbc.all():
        across = np.linalg.svd(cell[pbc])[2][pbc.sum() :]
        frame[~pbc] = across * np.linalg.norm(cell[~pbc], axis=1)[:, None]
    return frame


def _images(vectors: np.ndarray, reach: np.ndarray) -> np.ndarray:
    """(M, 3) sums of whole vectors, up to ``reach`` of each."""
    counts = list(product(*(range(-n, n + 1) for n in reach)))
    return np.array(counts, float).reshape(len(counts), len(vectors)) @ vectors


def _shortest(vectors: np.ndarray) -> float:
    lengths = np.linalg.norm(_images(vectors, np.full(len(vectors), 4)), axis=1)
    return float(np.sort(lengths)[1]) if len(lengths) > 1 else np.inf


def _apart(positions: np.ndarray, periodic: np.ndarray) -> np.ndarray:
    """Those of the positions that keep APART from the ones before them and their images."""
    reach = np.floor(APART * np.linalg.norm(np.linalg.pinv(periodic), axis=0) + 0.5).astype(int)
    images, kept = _images(periodic, reach), positions[:1]
    for x in positions[1:]:
        vectors = _home(x - kept, periodic)[:, None] + images
        if np.einsum("ijk,ijk->ij", vectors, vectors).min() >= APART**2:
            kept = np.append(kept, x[None], axis=0)
    return kept


def _home(difference: np.ndarray, periodic: np.ndarray) -> np.ndarray:
    return difference - np.rint(difference @ np.linalg.pinv(periodic)) @ periodic if len(periodic) else difference


_axes = st.tuples(st.booleans(), st.booleans(), st.booleans())
recipes = st.builds(
    Recipe,
    shape=st.sampled_from(SHAPES),
    pbc=_axes,
    absent=_axes,
    n_atoms=st.integers(1, 30),
    faces=st.sampled_from([0.0, 0.2, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)


def batch_of(many: list[System]) -> Batch:
    return Batch.from_data_list([AtomicData(x, numbers, cell, pbc) for x, numbers, cell, pbc in many])


# --- both evaluations -------------------------------------------------------------------------------------------


def evaluate(distributed: DistributedModel, many: list[System]) -> dict[str, np.ndarray]:
    out = distributed(batch_of(many), {"energy", "forces"})
    return {"ids": out.ids.numpy(), "energy": out["energy"].numpy(), "forces": out["forces"].numpy()}


def on_rank(comm: Communicator, many: list[System], balance: str, skin: float) -> dict[str, np.ndarray]:
    return evaluate(DistributedModel(wrapper(), DomainConfig(mesh=comm, balance=balance, skin=skin)), many)


def assert_parity(parts: list[dict[str, np.ndarray]], many: list[System]) -> None:
    exact = [brute_force_lj(x, z, cell, pbc, EPSILON, SIGMA, CUTOFF, mixing="arithmetic") for x, z, cell, pbc in many]
    ids = np.concatenate([p["ids"] for p in parts])
    n = sum(len(x) for x, *_ in many)
    assert sorted(ids) == list(range(n)), "every atom must be owned exactly once"
    forces = np.empty((n, 3))
    forces[ids] = np.concatenate([p["forces"] for p in parts])
    expected = np.concatenate([e["forces"] for e in exact])
    for part in parts:
        for k, e in enumerate(exact):
            assert abs(part["energy"][k] - e["energy"]) <= 1e-12 * abs(e["energy"]) + 1e-14
    assert np.abs(forces - expected).max() <= 1e-11 * np.abs(expected).max() + 1e-14


cases = {
    "world_size": st.integers(1, 4),
    "many": st.lists(recipes, min_size=1, max_size=3),
    "balance": st.sampled_from(["auto", "grid", "rcb"]),
    "skin": st.floats(0, 1),
}
# a case that fails is short as it is; making it shorter would start new ranks each time
common = settings(
    deadline=None,
    database=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def check(ranks: Any, world_size: int, many: list[Recipe], balance: str, skin: float) -> None:
    systems = [recipe.make() for recipe in many]
    assert_parity(ranks.run(world_size, on_rank, systems, balance, skin, timeout=60.0), systems)


@settings(common, max_examples=300, derandomize=True)
@given(**cases)
def test_any_system(ranks, world_size, many, balance, skin):
    check(ranks, world_size, many, balance, skin)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@settings(common, max_examples=10_000)
@given(**cases)
def test_any_system_ten_thousand(ranks, world_size, many, balance, skin):
    check(ranks, world_size, many, balance, skin)


def test_cases_are_of_every_kind():
    """Self images, isolated atoms, atoms on faces and outside, left-handed cells, missing vectors are among them."""
    seen = set()
    for shape, pbc, seed in product(SHAPES, product((True, False), repeat=3), range(3)):
        x, _, cell, pbc = Recipe(shape, pbc, (False, True, True), 15, 0.2, seed).make()
        exact = brute_force_lj(x, np.full(len(x), 18), cell, pbc, EPSILON, SIGMA, CUTOFF)
        seen |= {"left-handed"} if np.linalg.det(cell) < 0 else set()
        seen |= {"no volume"} if np.linalg.matrix_rank(cell) < 3 else set()
        seen |= {"isolated atoms"} if (exact["energies"] == 0).any() else set()
        seen |= {"no edges"} if exact["n_edges"] == 0 else set()
        seen |= {"self images"} if exact["n_edges"] > 20 * len(x) else set()
        if pbc.all():
            scaled = x @ np.linalg.inv(cell)
            seen |= {"on a face"} if (np.abs(scaled - np.rint(scaled)) < 1e-14).any() else set()
            seen |= {"outside"} if (scaled < -0.1).any() and (scaled > 1.1).any() else set()
    assert seen >= {"left-handed", "no volume", "isolated atoms", "self images", "on a face", "outside"}, seen


# --- systems that move ------------------------------------------------------------------------------------------


def walk_on_rank(comm: Communicator, steps: list[list[System]], balance: str, skin: float) -> Any:
    distributed = DistributedModel(wrapper(), DomainConfig(mesh=comm, balance=balance, skin=skin))
    found, builds = [], []
    for many in steps:
        found.append(evaluate(distributed, many))
        builds.append(distributed.graphs.n_builds)
    return found, builds


def walk(kind: str, n_steps: int, step: float) -> list[list[System]]:
    """A random walk of two systems; ``kind`` says what else changes: nothing, the cell, the number of atoms."""
    rng = np.random.default_rng(11)
    many = [
        Recipe("triclinic", n_atoms=30, seed=8).make(),
        Recipe("elongated", (True, False, True), (True, True, True), 20, 0.2, 5).make(),
    ]
    steps = []
    for k in range(n_steps):
        steps.append([(x.copy(), z.copy(), cell.copy(), pbc) for x, z, cell, pbc in many])
        moved = []
        for x, z, cell, pbc in many:
            x = x + rng.normal(scale=step, size=x.shape)
            if kind == "cell":
                strain = np.eye(3) + rng.normal(scale=2e-3, size=(3, 3))
                x, cell = x @ strain, cell @ strain
            if kind == "wrapped" and k % 3 == 0:  # a jump by whole cells, as wrapping makes it
                x = x + rng.integers(-1, 2, x.shape)[:, pbc] @ cell[pbc]
            if kind == "number" and k % 5 == 4:
                keep = rng.permutation(len(x))[: max(1, len(x) - 1)]
                x, z = (x[keep], z[keep]) if k % 2 else (np.append(x, [[60.0 + k, 50, 40]], 0), np.append(z, 18))
            moved.append((x, z, cell, pbc))
        many = moved
    return steps


@pytest.mark.parametrize("balance", ("grid", "rcb"))
@pytest.mark.parametrize("kind", ("positions", "cell", "number", "wrapped"))
def test_moving(ranks, kind, balance):
    """Every step is right, and the neighbour list is only made again when it has to be."""
    steps = walk(kind, 40, 0.04)
    parts = ranks.run(3, walk_on_rank, steps, balance, 0.8)
    for k, many in enumerate(steps):
        assert_parity([found[k] for found, _ in parts], many)
    builds = parts[0][1]
    assert all(b == builds for _, b in parts), "ranks must decide alike"
    if kind == "positions":
        assert 2 <= builds[-1] <= 8, builds
    elif kind == "cell":
        assert builds == list(range(1, len(steps) + 1))
    else:
        assert 8 <= builds[-1] <= 24, builds


def test_small_moves_keep_the_list(ranks):
    """Half the skin is the limit for each atom, exactly."""
    start = Recipe("triclinic", (True, True, False), (True, True, True), 20, 0.0, 3).make()
    positions, rest = start[0], start[1:]
    shifts = [0.0, 0.3, 0.499, 0.5, 0.501, 0.501]
    steps = [[(positions + np.array([s, 0, 0]) * (np.arange(len(positions)) == 0)[:, None], *rest)] for s in shifts]
    for found, builds in ranks.run(2, walk_on_rank, steps, "auto", 1.0):
        assert len(found) == len(steps)
        assert builds == [1, 1, 1, 1, 2, 2]


def test_skin_zero_makes_a_list_each_time(ranks):
    start = Recipe("triclinic", seed=3).make()
    for _, builds in ranks.run(2, walk_on_rank, [[start]] * 3, "auto", 0.0):
        assert builds == [1, 2, 3]
