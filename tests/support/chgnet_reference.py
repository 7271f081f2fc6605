"""CHGNet without nvdd: chgnet's own graph, layers and derivatives, in float32 as it ships and in float64.

chgnet's calculator is float32. For float64 the same modules are cast, and its graph is given float64 geometry.
"""

from __future__ import annotations

import contextlib
import copy
import io
from functools import cache
from typing import Any

import numpy as np
import torch
from ase import Atoms

# chgnet takes no system without three cell vectors: open axes get a box in which no image is near
_ROOM = 40.0


@cache
def module(name: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A module as chgnet loads it; not to be changed."""
    from chgnet.model.model import CHGNet

    with contextlib.redirect_stdout(io.StringIO()):
        model = CHGNet.load(model_name=name, use_device="cpu", verbose=False)
    model.graph_converter.set_isolated_atom_response("ignore")
    return model.to(dtype).eval()


@cache
def calculator(name: str) -> Any:
    from chgnet.model.dynamics import CHGNetCalculator

    with contextlib.redirect_stdout(io.StringIO()):
        return CHGNetCalculator(
            copy.deepcopy(module(name)), use_device="cpu", on_isolated_atoms="ignore", return_site_energies=True
        )


def boxed(atoms: Atoms) -> Atoms:
    """The same atoms in a periodic cell, with room on open axes."""
    atoms = atoms.copy()
    if atoms.pbc.all():
        return atoms
    cell = atoms.cell.array.copy()
    for axis in np.flatnonzero(~atoms.pbc):
        cell[axis] = 0
    complete = Atoms(cell=cell).cell.complete().array
    for axis in np.flatnonzero(~atoms.pbc):
        cell[axis] = complete[axis] * (_ROOM + np.ptp(atoms.positions @ complete[axis]))
    atoms.cell, atoms.pbc = cell, True
    return atoms


def as_it_ships(name: str, atoms: Atoms) -> dict[str, np.ndarray]:
    """CHGNetCalculator's results."""
    atoms = boxed(atoms)
    calc = calculator(name)
    calc.calculate(atoms)
    full = lambda key: np.asarray(calc.results[key], float)
    return {key: full(key) for key in ("energy", "energies", "forces", "stress", "magmoms")}


def float64(name: str, atoms: Atoms, module64: torch.nn.Module | None = None) -> dict[str, np.ndarray]:
    """Energy eV, energies (N,), forces (N, 3) eV/A, stress (3, 3) eV/A^3, magmoms (N,), all of it in float64."""
    from chgnet.model.model import BatchedGraph
    from pymatgen.io.ase import AseAtomsAdaptor

    model, atoms = module64 or module(name, torch.float64), boxed(atoms)
    structure = AseAtomsAdaptor.get_structure(atoms)
    graph = model.graph_converter(structure)
    put = lambda a: torch.tensor(np.asarray(a), dtype=torch.float64)
    graph.atom_frac_coord = put(structure.frac_coords).requires_grad_(True)
    graph.lattice = put(structure.lattice.matrix).requires_grad_(True)
    graph.neighbor_image = graph.neighbor_image.to(torch.float64)
    batched = BatchedGraph.from_graphs([graph], model.bond_basis_expansion, model.angle_basis_expansion, compute_stress=True)
    out = model._compute(batched, compute_magmom=True, return_site_energies=True)
    energies = out["site_energies"][0]
    positions, strain = batched.atom_positions[0], batched.strains[0]
    gradient, virial = torch.autograd.grad(energies.sum(), (positions, strain), allow_unused=True, materialize_grads=True)
    numpy = lambda t: t.detach().numpy()
    shifts = 0.0
    if model.composition_model is not None:
        shifts = numpy(model.composition_model.fc.weight).reshape(-1)[atoms.numbers - 1]
    values = numpy(energies) + shifts
    return {
        "energy": values.sum(),
        "energies": values,
        "forces": -numpy(gradient),
        "stress": numpy(virial) / atoms.get_volume(),
        "magmoms": numpy(out["m"][0]),
    }
