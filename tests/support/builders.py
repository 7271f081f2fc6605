"""Models, structures and a plain reference for tests of model wrappers, in one process and without nvdd's runtime."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.spacegroup import crystal
from vesin import NeighborList

from nvdd.data import Batch


@cache
def random_mace(
    n_layers: int = 2,
    l_max: int = 2,
    zbl: bool = False,
    elements: tuple[int, ...] = (8, 14),
    hidden: str = "16x0e+16x1o",
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    r_max: float = 4.5,
    scale_shift: bool = True,
    *,
    heads: tuple[str, ...] | None = None,
    interaction: str = "RealAgnosticResidualInteractionBlock",
    distance_transform: str = "None",
) -> torch.nn.Module:
    """An eager e3nn MACE with random weights; built once per set of arguments, so don't change what you get.

    Args:
        n_layers: message-passing layers.
        l_max: of the edges' spherical harmonics.
        zbl: adds the ZBL pair repulsion.
        elements: atomic numbers.
        hidden: irreps of node features.
        seed: of the weights.
        dtype: of the weights.
        r_max: cutoff, A.
        scale_shift: ScaleShiftMACE, else MACE.
        heads: names of the heads.
        interaction: class of the interaction blocks; the first block has no residual connection,
            except for the non-linear ones.
        distance_transform: "None", "Agnesi" or "Soft".
    """
    import mace  # noqa: F401  before e3nn
    from e3nn import o3
    from mace import modules

    n_heads = len(heads or ("Default",))
    e0 = -1.0 - 0.25 * np.arange(n_heads)[:, None] - np.arange(len(elements))[None, :]
    classes = modules.interaction_classes
    without_residual = interaction.replace("Residual", "").replace("Att", "")
    first = interaction if "NonLinear" in interaction else without_residual
    scaling = {"atomic_inter_scale": [0.8, 1.1][:n_heads], "atomic_inter_shift": [0.1, -0.2][:n_heads]}
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return (modules.ScaleShiftMACE if scale_shift else modules.MACE)(
                r_max=r_max,
                num_bessel=8,
                num_polynomial_cutoff=5,
                max_ell=l_max,
                interaction_cls=classes[interaction],
                interaction_cls_first=classes[first],
                num_interactions=n_layers,
                num_elements=len(elements),
                hidden_irreps=o3.Irreps(hidden),
                MLP_irreps=o3.Irreps("16x0e"),
                atomic_energies=e0,
                avg_num_neighbors=20.0,
                atomic_numbers=list(elements),
                correlation=3,
                gate=torch.nn.functional.silu,
                pair_repulsion=zbl,
                distance_transform=distance_transform,
                radial_MLP=[16, 16],
                radial_type="bessel",
                heads=list(heads) if heads else None,
                **(scaling if scale_shift else {}),
            ).eval()
    finally:
        torch.set_default_dtype(before)


def aimnet2_network(channels: int = 1, short_range: bool = True) -> dict[str, Any]:
    """A small AIMNet2 in the words of aimnet's configuration; see `random_aimnet2`."""
    energy = {"key_in": "energy", "key_out": "energy"}
    mlp = {"activation_fn": "torch.nn.GELU", "last_linear": True, "hidden": [16]}
    module = lambda name, **kwargs: {"class": f"aimnet.modules.{name}", "kwargs": kwargs}
    outputs = {
        "energy_mlp": module("Output", n_in=24, n_out=1, key_in="aim", key_out="energy", mlp=mlp),
        "atomic_shift": module("AtomicShift", **energy),
        "atomic_sum": module("AtomicSum", **energy),
    }
    if short_range:
        outputs["srcoulomb"] = module("SRCoulomb", rc=4.0, key_in="charges", key_out="energy")
    network = {
        "nfeature": 6, "d2features": True, "ncomb_v": 4, "hidden": [[32], [32], [32, 24]], "aim_size": 24,
        "aev": {"rc_s": 4.5, "nshifts_s": 6}, "outputs": outputs, "num_charge_channels": channels,
    }  # fmt: skip
    return {"class": "aimnet.models.AIMNet2", "kwargs": network}


@cache
def random_aimnet2(channels: int = 1, short_range: bool = True, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    """An AIMNet2 with random weights and a small network; built once per set of arguments, so don't change it.

    Args:
        channels: of charges: 1 (closed shell), 2 (open shell).
        short_range: takes off short-range Coulomb energy, as published models do.
        dtype: of the weights.
    """
    from aimnet.config import build_module

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = build_module(aimnet2_network(channels, short_range))
        with torch.no_grad():  # charges of some tenths, and forces of some eV/A
            for mlp in model.mlps[:-1]:
                [layer for layer in mlp if hasattr(layer, "weight")][-1].weight[: 2 * channels] *= 3
            model.outputs["energy_mlp"].mlp[-1].weight *= 5
            model.outputs["atomic_shift"].shifts.weight[1:].uniform_(-3, -1)  # row 0 is the dummy's
    return model.to(dtype).eval().requires_grad_(False)


# --- structures ---------------------------------------------------------------------------------------------


def quartz(repeat: tuple[int, int, int] = (1, 1, 1), stdev: float = 0.08, seed: int = 1) -> Atoms:
    """Alpha-quartz, 9 atoms a cell, sheared and rattled: triclinic, and thinner than twice any cutoff here."""
    atoms = crystal(
        ["Si", "O"],
        [(0.4697, 0, 2 / 3), (0.4135, 0.2669, 0.7858)],
        spacegroup=154,
        cellpar=[4.913, 4.913, 5.405, 90, 90, 120],
    )
    shear = np.array([[1.0, 0.05, 0.03], [0.0, 1.0, -0.06], [0.02, 0.0, 1.0]])
    atoms.set_cell(atoms.cell.array @ shear, scale_atoms=True)
    atoms = Atoms(atoms.numbers, atoms.positions, cell=atoms.cell, pbc=True).repeat(repeat)
    atoms.rattle(stdev, seed=seed)
    return atoms


# --- reference: what the framework makes of atomic energies, on one rank --------------------------------------


def make_batch(wrapper: Any, systems: Atoms | list[Atoms], dtype: torch.dtype | None = None) -> Batch:
    """A Batch with the edges r < cutoff, in the wrapper's layout, and edge vectors that need a gradient."""
    systems = [systems] if isinstance(systems, Atoms) else systems
    batch = Batch.from_atoms(systems)
    layout, cutoff = wrapper.edge_layout, wrapper.model_config.neighbor_config.cutoff
    pairs, shifts, vectors, start = [], [], [], 0
    for atoms in systems:
        i, j, shift, vector = NeighborList(cutoff=cutoff, full_list=True).compute(
            atoms.positions, atoms.cell.array, periodic=atoms.pbc, quantities="ijSD"
        )
        pair = (j, i) if layout.sender_column == 0 else (i, j)  # i is the centre
        pairs.append(np.stack(pair, axis=1).astype(np.int64) + start)
        shifts.append(layout.sign * shift)
        vectors.append(layout.sign * vector)
        start += len(atoms)
    leaf = torch.tensor(np.concatenate(vectors), dtype=dtype or wrapper.dtype).requires_grad_(True)
    return Batch(
        positions=batch.positions,
        atomic_numbers=batch.atomic_numbers,
        cell=batch.cell,
        pbc=batch.pbc,
        batch=batch.batch,
        node_fields=batch.node_fields,
        system_fields=batch.system_fields,
        neighbor_list=torch.tensor(np.concatenate(pairs)),
        neighbor_list_shifts=torch.tensor(np.concatenate(shifts)),
        edge_vectors=leaf,
        edge_layout=layout,
    )


@dataclass
class Results:
    """What one forward gives, float64: energy (n_systems,), energies (n,), forces (n, 3), stress (n_systems, 3, 3)."""

    energy: np.ndarray
    energies: np.ndarray
    forces: np.ndarray
    stress: np.ndarray


def evaluate(wrapper: Any, systems: Atoms | list[Atoms], dtype: torch.dtype | None = None) -> Results:
    """Energies in eV, forces in eV/A and stress in eV/A^3 (positive: tension) from d(energy)/d(edge vectors)."""
    batch = make_batch(wrapper, systems, dtype)
    leaf, sign = batch.edge_vectors, wrapper.edge_layout.sign
    energies = wrapper(batch)["energies"]
    assert energies.shape == (batch.n_atoms,)
    total = energies.double().sum()
    (gradient,) = torch.autograd.grad(total, leaf) if total.requires_grad else (torch.zeros_like(leaf),)
    r, g = sign * leaf.detach().double(), sign * gradient.double()  # r = x_sender - x_receiver
    forces = torch.zeros(batch.n_atoms, 3, dtype=torch.float64)
    forces.index_add_(0, batch.receivers, g).index_add_(0, batch.senders, -g)
    virial = torch.zeros(batch.n_systems, 3, 3, dtype=torch.float64)
    virial.index_add_(0, batch.batch[batch.receivers], r[:, :, None] * g[:, None, :])
    energy = torch.zeros(batch.n_systems, dtype=torch.float64)
    energy.index_add_(0, batch.batch, energies.detach().double())
    volume = torch.linalg.det(batch.cell).abs()
    return Results(
        energy.numpy(), energies.detach().double().numpy(), forces.numpy(), (virial / volume[:, None, None]).numpy()
    )


def full_stress(atoms: Atoms) -> np.ndarray:
    """(3, 3) stress from the calculator, eV/A^3."""
    return atoms.get_stress(voigt=False)


# --- how a model treats its edge index ------------------------------------------------------------------------


class SpyIndex(torch.Tensor):
    """An edge index that may only be taken apart, and used to gather and scatter rows; it counts what is done.

    It stands for `nvdd.ShardTensor` here: an operation that it refuses has no meaning over ranks.
    """

    counts: Counter
    role: str

    @classmethod
    def wrap(cls, pair: torch.Tensor, sender_column: int) -> SpyIndex:
        """A (2, E) index; ``counts`` is shared by all that is made of it."""
        return cls._like(pair, f"pair{sender_column}", Counter())

    @classmethod
    def _like(cls, tensor, role, counts):
        out = tensor.as_subclass(cls)
        out.role, out.counts = role, counts
        return out

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        spy = next(a for a in (*args, *kwargs.values()) if isinstance(a, cls))
        plain = [a.as_subclass(torch.Tensor) if isinstance(a, cls) else a for a in args]
        name = func.__name__ if func.__name__ != "__get__" else f"get:{func.__self__.__name__}"
        with torch._C.DisableTorchFunctionSubclass():
            if name in ("get:shape", "get:device", "get:dtype", "size", "dim", "numel"):
                return func(*plain, **kwargs)
            out = func(*plain, **kwargs)
            spy.counts[name, spy.role if not spy.role.startswith("pair") else "pair"] += 1
            if name == "__getitem__" and isinstance(args[0], cls) and spy.role.startswith("pair"):
                role = "sender" if args[1] == int(spy.role[4:]) else "receiver"
                return cls._like(out, role, spy.counts)
            if name in ("unsqueeze", "expand_as") and isinstance(args[0], cls):
                return cls._like(out, spy.role, spy.counts)
            gather = name == "__getitem__" and isinstance(args[1], cls)
            scatter = name in ("scatter_add_", "scatter_reduce_") and spy.role == "receiver"
            if not (gather or scatter):
                raise AssertionError(f"{name} of an edge index ({spy.role})")
            if gather and spy.role == "sender":
                kind = "integer" if not args[0].is_floating_point() else "feature"
                spy.counts[f"{kind} gather", "sender"] += 1
            return out


def spy_on(wrapper: Any, atoms: Atoms) -> Counter:
    """Runs the wrapper with a SpyIndex and returns the number of times of each (operation, role)."""
    batch = make_batch(wrapper, atoms)
    plain = wrapper(batch)["energies"]
    pair = SpyIndex.wrap(batch.edge_index, wrapper.edge_layout.sender_column)
    spied = _WithIndex(batch, pair)
    assert torch.equal(wrapper(spied)["energies"], plain)
    return pair.counts


class _WithIndex:
    """A Batch with another edge_index."""

    def __init__(self, batch: Batch, edge_index: torch.Tensor) -> None:
        self._batch, self.edge_index = batch, edge_index

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)


# --- other processes ------------------------------------------------------------------------------------------

LOAD_ELSEWHERE = """
import pickle, sys, torch
from nvdd.models.{family} import FAMILY
assert FAMILY.from_calculator(object()) is None
assert not {{"{family}", "e3nn"}} & set(sys.modules), "imported before it was needed"
folder = sys.argv[1]
wrapper = torch.load(folder + "/wrapper.pt", weights_only=False)
loaded = list(sys.modules)
assert "mace" not in loaded or loaded.index("mace") < loaded.index("e3nn")
batch = torch.load(folder + "/batch.pt", weights_only=False)
batch.edge_vectors.requires_grad_(True)
with open(folder + "/wrapper.pkl", "rb") as file:
    again = pickle.load(file)
for model in (wrapper, again):
    energies = model(batch)["energies"]
    (gradient,) = torch.autograd.grad(energies.sum(), batch.edge_vectors)
    expected = torch.load(folder + "/expected.pt")
    torch.testing.assert_close(energies.detach(), expected["energies"])
    torch.testing.assert_close(gradient, expected["gradient"])
"""


def assert_loads_elsewhere(wrapper: Any, folder: Path, family: str) -> None:
    """The wrapper survives torch.save and pickle; a fresh process gets the same energies and gradient."""
    batch = make_batch(wrapper, quartz())
    energies = wrapper(batch)["energies"]
    (gradient,) = torch.autograd.grad(energies.sum(), batch.edge_vectors)
    torch.save({"energies": energies.detach(), "gradient": gradient}, folder / "expected.pt")
    batch._edge_vectors = batch.edge_vectors.detach()
    torch.save(batch, folder / "batch.pt")
    torch.save(wrapper, folder / "wrapper.pt")
    (folder / "wrapper.pkl").write_bytes(pickle.dumps(wrapper))
    script = LOAD_ELSEWHERE.format(family=family)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, str(folder)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
