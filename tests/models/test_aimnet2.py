"""AIMNet2Wrapper in one process against aimnet's own code, charges over ranks, files, and what it refuses."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from ase import Atoms
from vesin import NeighborList

import parity
from builders import aimnet2_network, evaluate, make_batch, quartz, random_aimnet2
from nvdd import Batch, DistributedModel, DomainConfig
from nvdd.errors import InputError, MissingDependencyError
from nvdd.models.aimnet2 import FAMILY, AIMNet2Wrapper
from nvdd.models.configuration import rebuild
from nvdd.models.registry import load
from nvdd.specs import MLIPSpec

pytest.importorskip("aimnet")


def charged_systems() -> list[Atoms]:
    """A crystal, a molecule, a lone atom, with charge and multiplicity."""
    systems = [quartz((2, 1, 1)), quartz(seed=5)[:6], Atoms("O", cell=[12, 12, 12], pbc=True)]
    systems[1].pbc = False
    for atoms, charge, mult in zip(systems, (1.0, -2.0, 0.5), (2, 3, 1), strict=True):
        atoms.info.update(charge=charge, mult=mult)
    return systems


def aimnets_own(model: torch.nn.Module, systems: list[Atoms], cutoff: float = 4.5) -> dict[str, np.ndarray]:
    """Energy, forces by positions, charges from aimnet's forward, in float64: positions, cells, its flat layout."""
    n = sum(map(len, systems))
    rows: list[list] = [[] for _ in range(n + 1)]
    start = 0
    for atoms in systems:
        found = NeighborList(cutoff=cutoff, full_list=True).compute(
            atoms.positions, atoms.cell.array, periodic=atoms.pbc, quantities="ijS"
        )
        for i, j, shift in zip(*found, strict=True):
            rows[start + int(i)].append((start + int(j), shift))
        start += len(atoms)
    width = max(map(len, rows))
    matrix, shifts = torch.full((n + 1, width), n), torch.zeros(n + 1, width, 3, dtype=torch.float64)
    for k, row in enumerate(rows):
        for place, (j, shift) in enumerate(row):
            matrix[k, place], shifts[k, place] = j, torch.tensor(np.array(shift, float))
    positions = torch.tensor(np.concatenate([*(a.positions for a in systems), np.zeros((1, 3))]), requires_grad=True)
    owner = np.repeat(np.arange(len(systems)), list(map(len, systems)))
    native = copy.copy(model)
    to64 = lambda types: [torch.float64 if t.is_floating_point else t for t in types]
    native._required_keys_dtype, native._optional_keys_dtype = (
        to64(model._required_keys_dtype),
        to64(model._optional_keys_dtype),
    )
    out = native(
        {
            "coord": positions,
            "numbers": torch.tensor(np.concatenate([*(a.numbers for a in systems), [0]])),
            "charge": torch.tensor([a.info["charge"] for a in systems]),
            "mult": torch.tensor([a.info["mult"] for a in systems]),
            "mol_idx": torch.tensor([*owner, owner[-1]]),
            "nbmat": matrix,
            "shifts": shifts,
            "cell": torch.tensor(np.stack([a.cell.array for a in systems])),
        }
    )
    (gradient,) = torch.autograd.grad(out["energy"].sum(), positions)
    spins = {"spin_charges": out["spin_charges"].detach().numpy()[:-1]} if "spin_charges" in out else {}
    return {"energy": out["energy"].detach().numpy(), "forces": -gradient.numpy()[:-1],
            "charges": out["charges"].detach().numpy()[:-1], **spins}  # fmt: skip


@pytest.mark.parametrize("channels", (1, 2))
@pytest.mark.parametrize("short_range", (False, True))
def test_equals_aimnets_own_code(channels, short_range):
    model, systems = random_aimnet2(channels, short_range), charged_systems()
    wanted = aimnets_own(model, systems)
    mine = DistributedModel(AIMNet2Wrapper(model))(Batch.from_atoms(systems), set(wanted))
    for name, value in wanted.items():
        np.testing.assert_allclose(mine[name].numpy(), value, rtol=0, atol=1e-12 * np.abs(value).max(), err_msg=name)
    owner = np.repeat([0, 1, 2], list(map(len, systems)))
    totals = np.bincount(owner, wanted["charges"])
    np.testing.assert_allclose(totals, [1, -2, 0.5], atol=5e-3)  # up to aimnet's epsilon
    assert np.abs(wanted["charges"]).max() > 0.05 and np.abs(wanted["forces"]).max() > 0.1


def test_equals_the_calculator():
    """Of float32, with Coulomb energy left out on both sides; and from the calculator itself."""
    from aimnet.calculators import AIMNet2ASE, AIMNet2Calculator

    model = copy.deepcopy(random_aimnet2(short_range=False, dtype=torch.float32))
    theirs = AIMNet2ASE(AIMNet2Calculator(model, device="cpu", needs_coulomb=False, needs_dispersion=False))
    atoms = quartz()
    atoms.calc = theirs
    mine = evaluate(FAMILY.from_calculator(theirs), atoms)
    assert mine.energy[0] == pytest.approx(atoms.get_potential_energy(), rel=1e-6)
    np.testing.assert_allclose(mine.forces, atoms.get_forces(), atol=2e-5 * np.abs(mine.forces).max())
    np.testing.assert_allclose(mine.stress[0], atoms.get_stress(voigt=False), atol=2e-5 * np.abs(mine.stress).max())
    theirs.set_charge(1)
    with pytest.raises(InputError, match=r"this AIMNet2ASE has charge=1, mult=1 of its own; set atoms.info"):
        FAMILY.from_calculator(theirs)
    theirs.base_calc.external_coulomb = object()
    with pytest.raises(InputError, match="adds external_coulomb to its model; take the model's file and compose"):
        FAMILY.from_calculator(theirs)
    assert FAMILY.from_calculator(object()) is None


def on_rank(comm, name: str) -> dict:
    """Runs on each rank: charged systems in one batch, charge and multiplicity from atoms.info."""
    out = DistributedModel(parity.wrapper(name), DomainConfig(mesh=comm))(
        Batch.from_atoms(charged_systems()), {"energy", "forces", "charges"}
    )
    return {"ids": out.ids.numpy(), **{k: v.numpy() for k, v in out.items()}}


@pytest.mark.parametrize("name", parity.AIMNET2)
@pytest.mark.parametrize("world_size", (2, pytest.param(3, marks=pytest.mark.slow)))  # tests/runtime/test_model.py has 3
def test_charges_over_ranks(ranks, world_size, name):
    """Energies, charges and forces of charged systems, some of which a rank lacks, as aimnet's own code gives them."""
    wanted = aimnets_own(random_aimnet2(**parity.AIMNET2[name]), charged_systems())
    parts = ranks.run(world_size, on_rank, name)
    ids = np.concatenate([p["ids"] for p in parts])
    for part in parts:
        np.testing.assert_allclose(part["energy"], wanted["energy"], rtol=1e-12)
    for key in ("forces", "charges"):
        found = np.concatenate([p[key] for p in parts])
        np.testing.assert_allclose(found, wanted[key][ids], rtol=0, atol=1e-11 * np.abs(wanted[key]).max())


def test_charge_and_multiplicity():
    """From atoms.info, by option, and their usual values; each changes the energy."""
    closed, open_shell = AIMNet2Wrapper(random_aimnet2()), AIMNet2Wrapper(random_aimnet2(2))
    assert closed.model_config.system_inputs == {"charge"}
    assert open_shell.model_config.system_inputs == {"charge", "mult", "spin"}
    energy = lambda wrapper, **info: evaluate(wrapper, _with(info)).energy[0]
    assert energy(closed) == energy(closed, charge=0) != energy(closed, charge=1)
    assert energy(AIMNet2Wrapper(random_aimnet2(), charge="1"), charge=0) == energy(closed, charge=1)
    assert energy(open_shell) == energy(open_shell, mult=1) != energy(open_shell, spin=3) == energy(open_shell, mult=3)
    assert AIMNet2Wrapper(random_aimnet2(2), charge=0, mult=2).model_config.system_inputs == frozenset()
    batch = make_batch(closed, quartz())
    batch.system_fields["charge"] = torch.zeros(1, 2)
    with pytest.raises(InputError, match="charge has 2 values for 1 systems"):
        closed(batch)


def _with(info: dict) -> Atoms:
    atoms = quartz()
    atoms.info.update(info)
    return atoms


def test_float32_keeps_atomic_energies():
    """Those of heavy atoms are thousands of eV, and float32 has seven digits."""
    model = copy.deepcopy(random_aimnet2())
    model.outputs["atomic_shift"].shifts.weight[14] = -7890.123456789
    wrapper = AIMNet2Wrapper(model).to(torch.float32)
    assert wrapper.shifts.values[14].item() == -7890.123456789 and wrapper.dtype is torch.float32
    energies = evaluate(wrapper, quartz()).energies - evaluate(AIMNet2Wrapper(model), quartz()).energies
    assert np.abs(energies).max() < 1e-4


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A model in aimnet's format 2, as `aimnet export` writes it: Coulomb energy and dispersion are left to others."""
    path = tmp_path_factory.mktemp("aimnet2") / "model.pt"
    content = {
        "format_version": 2, "model_yaml": yaml.safe_dump(aimnet2_network()), "cutoff": 4.5, "needs_coulomb": True,
        "needs_dispersion": True, "coulomb_mode": "sr_embedded", "coulomb_sr_rc": 4.0, "coulomb_sr_envelope": "exp",
        "d3_params": {"s6": 1.0, "s8": 0.3908, "a1": 0.566, "a2": 3.128}, "has_embedded_lr": True,
        "implemented_species": [1, 8, 14], "supports_charged_systems": False,
        "state_dict": random_aimnet2(dtype=torch.float32).state_dict(),
    }  # fmt: skip
    torch.save(content, path)
    return path


def test_file(file):
    with pytest.raises(
        InputError, match=r"leaves Coulomb energy .* and dispersion .* to others; compose it with them, and say "
    ):
        load(f"aimnet2:{file}")
    wrapper = load(f"aimnet2:{file}", long_range="separate", charge="0")
    assert wrapper.model_config.elements == {1, 8, 14} and not any(p.requires_grad for p in wrapper.parameters())
    atoms = quartz()
    expected = evaluate(AIMNet2Wrapper(random_aimnet2(dtype=torch.float32)), atoms)
    assert evaluate(wrapper, atoms).energy[0] == pytest.approx(expected.energy[0], rel=1e-6)
    again = rebuild("aimnet2", FAMILY.configuration(wrapper), torch.float32)
    again.load_state_dict(wrapper.state_dict())
    assert evaluate(again, atoms).energy == evaluate(wrapper, atoms).energy
    assert (
        evaluate(load(f"aimnet2:{file}", long_range="separate", dtype=torch.float64), atoms).energy != expected.energy
    )
    charged = load(f"aimnet2:{file}", long_range="separate")
    with pytest.raises(InputError, match=r"is for neutral systems, and the charges are \[1.0\] e"):
        evaluate(charged, _with({"charge": 1.0}))


def test_files_that_are_none(file, tmp_path):
    with pytest.raises(InputError, match="'aimnet2' needs a model: aimnet2:FILE"):
        load("aimnet2")
    with pytest.raises(InputError, match=r"no AIMNet2 file 'nothing\.pt'"):
        load("aimnet2:nothing.pt")
    other = tmp_path / "other.pt"
    torch.save({"a": 1}, other)
    with pytest.raises(InputError, match=r"other\.pt can't be read as an AIMNet2 model: ValueError"):
        load(f"aimnet2:{other}")
    scripted = tmp_path / "model.jpt"
    scripted.write_bytes(b"")
    with pytest.raises(InputError, match="this AIMNet2 model is TorchScript"):
        load(f"aimnet2:{scripted}")
    with pytest.raises(InputError, match="does not come from a file, so how it was made is unknown"):
        FAMILY.configuration(AIMNet2Wrapper(random_aimnet2()))


def test_spec_survives_a_file(tmp_path):
    """Adapters by name: another process finds them."""
    spec = AIMNet2Wrapper(random_aimnet2()).distribution_spec()
    spec.save(tmp_path / "spec.json")
    assert MLIPSpec.load(tmp_path / "spec.json") == spec


def test_refused(monkeypatch):
    import sys

    with pytest.raises(InputError, match=r"needs an eager aimnet\.models\.AIMNet2, not a torch\.nn\.modules\.linear\.Linear"):
        AIMNet2Wrapper(torch.nn.Linear(1, 1))
    with pytest.raises(InputError, match="is TorchScript"):
        AIMNet2Wrapper(torch.jit.script(torch.nn.Linear(1, 1)))
    for arguments, message in (
        ({"charge": "one"}, "charge='one' is not a number"),
        ({"long_range": "pme"}, "long_range='pme' is not known"),
    ):
        with pytest.raises(InputError, match=message):
            AIMNet2Wrapper(random_aimnet2(), **arguments)
    for change, message in (
        (
            {"lr": _named("LRCoulomb")},
            "has a LRCoulomb among its outputs, a Coulomb energy that reaches beyond its cutoff",
        ),
        ({"x": torch.nn.Identity()}, "has a Identity among its outputs, which nvdd does not know"),
        ({"energy_mlp": None}, "has no output 'energy'"),
    ):
        model = copy.deepcopy(random_aimnet2())
        for name, module in change.items():
            model.outputs.pop(name) if module is None else model.outputs.update({name: module})
        with pytest.raises(InputError, match=message):
            AIMNet2Wrapper(model)
    model = copy.deepcopy(random_aimnet2())
    model.outputs["srcoulomb"].rc.fill_(9.0)
    with pytest.raises(InputError, match=r"takes off Coulomb energy within 9\.0 A, beyond its cutoff of 4\.5 A"):
        AIMNet2Wrapper(model)
    monkeypatch.setitem(sys.modules, "aimnet.models", None)
    with pytest.raises(MissingDependencyError, match="AIMNet2 models need aimnet"):
        AIMNet2Wrapper(SimpleNamespace())


def _named(name: str) -> torch.nn.Module:
    return type(name, (torch.nn.Module,), {})()
