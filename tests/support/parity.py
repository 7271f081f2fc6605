"""The same evaluation twice: over ranks with nvdd, and in one process with the model's own calculator.

Models (and `structures`) have names, so that a test sends names to the ranks and each rank builds what it needs
once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from ase import Atoms

from builders import random_aimnet2, random_mace
from nvdd import (
    Batch,
    DistributedModel,
    DomainConfig,
    HaloStoragePolicy,
    dispatch_trace,
)
from nvdd.communicator import Communicator
from nvdd.neighbors import attach_neighbors
from reference import brute_force_lj
from structures import STRUCTURES, structure  # noqa: F401

LJ = {"epsilon": {"Ar": 0.0104, "Ne": 0.0031}, "sigma": {"Ar": 3.4, "Ne": 2.8}, "cutoff": 8.5, "mixing": "arithmetic"}

MACE = {
    "mace": {},
    "mace-3-layers": {"n_layers": 3},
    "mace-l3": {"l_max": 3},
    "mace-zbl": {"zbl": True, "n_layers": 2},
    "mace-zbl-agnesi-3-l3": {"zbl": True, "n_layers": 3, "l_max": 3, "distance_transform": "Agnesi"},
}
CUEQ = ("mace-cueq", "mace-cueq-fused")  # the model "mace" with cuEquivariance's parts
SMALL_SEVENNET = ("sevennet-small", "sevennet-small-fused")  # one SevenNet with random weights, float64
DFTD3 = {
    "dftd3": {"functional": "pbe", "atm": True, "cutoff": 9.0, "cutoff_cn": 7.0, "cutoff_atm": 6.0},
    "dftd3-zero": {"functional": "b3lyp", "damping": "zero", "cutoff": 8.0, "cutoff_cn": 10.0},
}
AIMNET2 = {"aimnet2": {}, "aimnet2-open": {"channels": 2}}
SEVENN = {"7net-0": None, "7net-l3i5": None, "7net-mf-0": "PBE"}


@cache
def wrapper(name: str) -> Any:
    """The model wrapper, built once per process; ``"family:nequip"`` is one of `families`."""
    if name.startswith("family:"):
        import families

        return families.case(name.removeprefix("family:")).wrapper()
    if name in CUEQ:
        import cueq

        return cueq.wrapper(fused=name == "mace-cueq-fused")
    if name in SMALL_SEVENNET:
        import cueq

        return cueq.small_sevennet(fused=name == "sevennet-small-fused")
    if name == "lj":
        from nvdd.models.lj import LennardJonesModelWrapper

        return LennardJonesModelWrapper(**LJ)
    if name in DFTD3:
        from nvdd.models.dftd3 import DFTD3ModelWrapper

        return DFTD3ModelWrapper(**DFTD3[name])
    if name in AIMNET2:
        from nvdd.models.aimnet2 import AIMNet2Wrapper

        return AIMNet2Wrapper(random_aimnet2(**AIMNET2[name]))
    if name in MACE:
        from nvdd.models.mace import MACEWrapper

        return MACEWrapper(random_mace(**MACE[name])).requires_grad_(False)
    from nvdd.models.sevenn import SevenNetWrapper

    name, _, dtype = name.partition("/")
    return SevenNetWrapper.from_checkpoint(name, modal=SEVENN[name], dtype=getattr(torch, dtype) if dtype else None)


@cache
def calculator(name: str) -> Any:
    """The model's own calculator, independent of nvdd."""
    if name in MACE:
        from mace.calculators import MACECalculator

        return MACECalculator(models=random_mace(**MACE[name]), device="cpu", default_dtype="float64")
    from sevenn.calculator import SevenNetCalculator

    return SevenNetCalculator(name, modal=SEVENN[name], device="cpu")


@dataclass
class Results:
    """Energy eV, energies (N,) eV, forces (N, 3) eV/A, stress (3, 3), stresses (N, 3, 3) eV/A^3 or None."""

    energy: float
    energies: np.ndarray
    forces: np.ndarray
    stress: np.ndarray | None
    stresses: np.ndarray | None
    noise: float = 0.0


_FULL = [[0, 5, 4], [5, 1, 3], [4, 3, 2]]


@cache
def reference(model: str, name: str) -> Results:
    """One process, without nvdd, of a named structure."""
    return exact(model, structure(name))


def exact(model: str, atoms: Atoms) -> Results:
    """One process, without nvdd; of "7net-0/float64", D3 and AIMNet2 the wrapper alone, on plain tensors.

    Of the small SevenNet that is the wrapper of the model with e3nn's convolutions.
    """
    atoms = atoms.copy()
    if model in SMALL_SEVENNET:
        return _plain(wrapper(SMALL_SEVENNET[0]), atoms)
    if "/" in model or model in DFTD3 or model in AIMNET2:
        return _plain(wrapper(model), atoms)
    if model == "lj":
        from ase.data import atomic_numbers

        tables = {k: {atomic_numbers[s]: v for s, v in LJ[k].items()} for k in ("epsilon", "sigma")}
        r = brute_force_lj(atoms.positions, atoms.numbers, atoms.cell.array, atoms.pbc, tables["epsilon"], tables["sigma"],
                           LJ["cutoff"], mixing=LJ["mixing"])  # fmt: skip
        full = lambda s: None if s is None else np.asarray(s)[..., _FULL]
        return Results(r["energy"], r["energies"], r["forces"], full(r["stress"]), full(r["stresses"]))
    calc = calculator(model)
    atoms.calc = calc
    forces = atoms.get_forces().astype(float)
    # along open axes MACE replaces the user's cell by one of its own, and divides the virial by that one's volume
    has_volume = atoms.cell.rank == 3 and (model in SEVENN or atoms.pbc.all())
    stress = atoms.get_stress(voigt=False) if has_volume else None
    energies = np.asarray(calc.results["energies"], float)
    noise = 0.0
    if model in SEVENN:
        order = np.random.default_rng(0).permutation(len(atoms))
        permuted = atoms[order]
        permuted.calc = calc
        noise = float(np.abs(permuted.get_forces() - forces[order]).max())
    return Results(float(atoms.get_potential_energy()), energies, forces, stress, None, noise)


def _plain(model: Any, atoms: Atoms) -> Results:
    batch = Batch.from_atoms(atoms)
    batch.positions.requires_grad_(True)
    attach_neighbors(batch, model.model_config.neighbor_config.cutoff, model.edge_layout)
    energies = model(batch)["energies"].reshape(-1)
    (gradient,) = torch.autograd.grad(energies.sum(), batch.positions)
    energies = energies.detach().numpy()
    return Results(float(energies.sum()), energies, -gradient.numpy(), None, None)


def on_rank(comm: Communicator, model: str, name: str, options: dict, strain=None) -> dict[str, Any]:
    """Runs on each rank: evaluates twice (the second time no plan is built), gives this rank's rows."""
    atoms = structure(name).copy()
    if strain is not None:
        atoms.set_cell(atoms.cell.array @ (np.eye(3) + strain), scale_atoms=True)
    spec = None
    if options.pop("halo_correction", False):
        policy = HaloStoragePolicy(scatter_mode="halo_correction", gather_mode="halo_read")
        spec = wrapper(model).distribution_spec().with_policy(policy)
    distributed = DistributedModel(wrapper(model), DomainConfig(mesh=comm, **options), spec=spec)
    batch = Batch.from_atoms(atoms)
    wanted = {"energy", "energies", "forces"}
    if atoms.cell.rank == 3:
        wanted |= {"stress", "stresses"}
    wanted &= distributed.available_outputs
    distributed(batch, {"energy"})
    with dispatch_trace() as trace:
        out = distributed(batch, wanted)
    return {
        "ids": out.ids.numpy(),
        "exchanges": trace.n_exchanges,
        "sites": [e.site for e in trace.exchanges],
        "bytes": trace.bytes_sent,
        "setup": dict(trace.setup),
        **{k: v.numpy() for k, v in out.items()},
    }


def several_on_rank(comm: Communicator, model: str, names: list[str]) -> dict[str, Any]:
    """Runs on each rank: the named structures in one batch."""
    batch = Batch.from_atoms([structure(name) for name in names])
    out = DistributedModel(wrapper(model), DomainConfig(mesh=comm))(batch, {"energy", "energies", "forces"})
    return {"ids": out.ids.numpy(), **{k: v.numpy() for k, v in out.items()}}


def sequence_on_rank(comm: Communicator, model: str, steps: list[Atoms]) -> list[dict[str, Any]]:
    """Runs on each rank: one evaluation after another by the same model."""
    distributed = DistributedModel(wrapper(model), DomainConfig(mesh=comm))
    found = []
    for atoms in steps:
        out = distributed(Batch.from_atoms(atoms), {"energy", "energies", "forces"})
        found.append({"ids": out.ids.numpy(), **{k: v.numpy() for k, v in out.items()}})
    return found


def assemble(parts: list[dict[str, Any]], n_atoms: int) -> Results:
    """Ranks' rows in the user's order; every atom exactly once, per-system values equal on all ranks."""
    ids = np.concatenate([p["ids"] for p in parts])
    assert sorted(ids) == list(range(n_atoms)), "every atom must be owned exactly once"

    def rows(key: str) -> np.ndarray | None:
        if key not in parts[0]:
            return None
        value = np.concatenate([p[key] for p in parts])
        out = np.empty_like(value)
        out[ids] = value
        return out

    for part in parts[1:]:
        np.testing.assert_array_equal(part["energy"], parts[0]["energy"])
    stress = parts[0]["stress"][0] if "stress" in parts[0] else None
    return Results(float(parts[0]["energy"][0]), rows("energies"), rows("forces"), stress, rows("stresses"))


def assert_parity(found: Results, expected: Results, tight: bool) -> None:
    """Absolute and relative limits together (tight: float64; else float32 against the model's own noise)."""
    if tight:
        close = lambda a, b, what: _assert_close(a, b, 1e-11, 1e-14, what)
        assert abs(found.energy - expected.energy) <= 1e-12 * abs(expected.energy) + 1e-14, (
            found.energy,
            expected.energy,
        )
    else:
        limit = max(3 * expected.noise, 2e-6)
        n = len(expected.energies)
        assert abs(found.energy - expected.energy) <= 2e-6 * n and abs(found.energy / expected.energy - 1) <= 1e-6
        error = np.abs(found.forces - expected.forces).max()
        assert error <= limit, f"forces differ by {error}, limit {limit}"
        # values of 5 to 10 eV an atom in float32
        close = lambda a, b, what: _assert_close(a, b, 2e-6, 2e-6, what)
    close(found.energies, expected.energies, "energies")
    if tight:
        close(found.forces, expected.forces, "forces")
    if expected.stress is not None:
        close(found.stress, expected.stress, "stress") if tight else _assert_close(
            found.stress, expected.stress, 1e-5, 1e-7, "stress"
        )
    if found.stresses is not None:
        _assert_close(found.stresses.sum(0), found.stress, 1e-11, 1e-14, "sum of stresses")
    if expected.stresses is not None:
        close(found.stresses, expected.stresses, "stresses")


def _assert_close(found, expected, relative: float, absolute: float, what: str) -> None:
    error, scale = np.abs(found - expected).max(), np.abs(expected).max()
    assert error <= relative * scale + absolute, f"{what} differ by {error}, largest {scale}"
