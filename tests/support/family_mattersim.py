"""MatterSim with random weights, from a checkpoint as its training writes it.

Its own code takes positions in float32. What is compared in float64 is its network, unchanged, on the graph that its
own converter makes, in which positions and cell are put again in float64.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.calculators.calculator import Calculator, all_changes
from ase.stress import full_3x3_to_voigt_6_stress

from families import Case
from nvdd.models.building import building
from nvdd.models.mattersim import MatterSimWrapper
from vacuum import with_room

ARGUMENTS = {
    "num_blocks": 2, "units": 12, "max_l": 3, "max_n": 3, "cutoff": 4.5, "threebody_cutoff": 3.6, "max_z": 20,
}  # fmt: skip


@cache
def model_of(dtype: torch.dtype) -> torch.nn.Module:
    """A module as mattersim builds it, not to be changed."""
    from mattersim.forcefield.m3gnet.m3gnet import M3Gnet

    with building(torch.float32):
        torch.manual_seed(5)
        model = M3Gnet(device="cpu", **ARGUMENTS)
        model.normalizer.scale.uniform_(0.5, 2.0)
        model.normalizer.shift.uniform_(-4.0, -1.0)
    return model.to(dtype).eval()


class InDouble(Calculator):
    """M3Gnet's own forward in float64; forces and stress by derivatives of positions and strain."""

    implemented_properties = ("energy", "forces", "stress")

    def calculate(self, atoms: Any = None, properties: Any = None, system_changes: Any = all_changes) -> None:
        from mattersim.datasets.utils.build import build_dataloader
        from mattersim.forcefield.potential import batch_to_dict

        super().calculate(atoms, properties, system_changes)
        atoms = self.wrapped(with_room(atoms).copy())
        cutoffs = {"cutoff": ARGUMENTS["cutoff"], "threebody_cutoff": ARGUMENTS["threebody_cutoff"]}
        (graph,) = build_dataloader([atoms], model_type="m3gnet", batch_size=1, only_inference=1, **cutoffs)
        values = batch_to_dict(graph, device="cpu")
        positions = torch.tensor(atoms.positions, requires_grad=True)
        strain = torch.zeros(3, 3, dtype=torch.float64, requires_grad=True)
        deformation = torch.eye(3, dtype=torch.float64) + strain
        values["atom_pos"] = positions @ deformation
        values["cell"] = (torch.tensor(atoms.cell.array) @ deformation).unsqueeze(0)
        values["pbc_offsets"] = values["pbc_offsets"].as_subclass(StaysDouble)
        model = model_of(torch.float64)
        one_hot, model.one_hot_atoms = model.one_hot_atoms, lambda numbers: one_hot(numbers).double()
        try:
            energy = model(values)
        finally:
            del model.one_hot_atoms
        gradient, virial = torch.autograd.grad(energy.sum(), (positions, strain))
        stress = 0.5 * (virial + virial.T).numpy() / atoms.get_volume()
        self.results = {"energy": energy.item(), "forces": -gradient.numpy(), "stress": full_3x3_to_voigt_6_stress(stress)}


    @staticmethod
    def wrapped(atoms: Atoms) -> Atoms:
        """Atoms as the converter wraps them, to whose images the offsets of edges belong; molecules in a large box."""
        if not atoms.pbc.any():
            atoms.set_cell(np.eye(3) * (np.ptp(atoms.positions, axis=0).max() + 30))
            atoms.pbc = True
        atoms.set_scaled_positions(np.mod(atoms.get_scaled_positions(), 1))
        return atoms


class StaysDouble(torch.Tensor):
    """Whole numbers whose ``float()`` is float64."""

    def float(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).double()


def calculator_of_float32() -> Any:
    from mattersim.forcefield.potential import MatterSimCalculator, Potential

    return MatterSimCalculator(potential=Potential(model_of(torch.float32), device="cpu"), device="cpu")


def write(folder: Path) -> tuple[str, dict[str, Any]]:
    """A checkpoint with what mattersim reads of it."""
    path = folder / "model.pth"
    torch.save({"model_name": "m3gnet", "model_args": ARGUMENTS, "model": model_of(torch.float32).state_dict()}, path)
    return f"mattersim:{path}", {}


def make_case(dtype: torch.dtype, calculator: Any, **more: Any) -> Case:
    # atoms' features of each block, the gradients of those that depend on positions, forces
    return Case(
        lambda: MatterSimWrapper(model_of(dtype)).requires_grad_(False), calculator, write, {"halo": 4, "graph": 4}, 2,
        atomic=False, dtype=dtype, **more,
    )  # fmt: skip


CASES = {
    "mattersim": make_case(torch.float64, InDouble),
    "mattersim-float32": make_case(torch.float32, calculator_of_float32, tight=False),
}
