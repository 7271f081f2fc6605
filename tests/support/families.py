"""The tests that every model family has to pass, made from a description of the family.

A family has a module ``family_<name>.py`` here with ``CASES``, and a test module of its own that asks for the tests::

    families.require("nequip", "nequip")
    test_parity = families.parity_test("nequip")
    test_envelope = families.envelope_test("nequip")
    test_several_systems = families.several_test("nequip")
    test_stress = families.stress_test("nequip")
    test_ase = families.ase_test("nequip")
    test_cli = families.cli_test("nequip")
    test_lammps = families.lammps_test("nequip")

The reference is the family's own ASE calculator, in one process and without nvdd. Cases and structures travel to the
ranks by name, and each rank builds what it needs once.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.data import atomic_numbers
from ase.stress import voigt_6_to_full_3x3_stress
from typer.testing import CliRunner

import lammps_parity
import parity
from nvdd import Batch, DistributedModel, DomainConfig, dispatch_trace
from nvdd.communicator import Communicator
from nvdd.models import registry
from nvdd_ase import NVDDCalculator
from parity import Results
from structures import structure

# slab, wire (open axes, no vectors along them), cell smaller than the cutoff, triclinic and left-handed, atoms outside the
# cell, molecules with an isolated atom, two atoms, and one: a rank that owns nothing
SILICA = (
    "quartz slab", "silica wire", "silica tiny", "silica left-handed", "silica unwrapped", "silica gas", "silica pair",
    "silica atom",
)  # fmt: skip
STRATEGIES = ("halo", "graph")
MODEL = "model"  # the name of a case's .nvdd file
BAR = 1.6021765e6  # LAMMPS's, from eV/A^3
_EXPORTED: dict[str, Path] = {}


@dataclass(frozen=True)
class Case:
    """A model of a family, and what is asked of it.

    Attributes:
        wrapper: makes nvdd's wrapper.
        calculator: makes the family's own ASE calculator of the same weights.
        write: writes the model into a folder; gives its name for nvdd (``"family:file"``) and options.
        exchanges: strategy -> exchanges in a step that builds no plan, on two ranks and more.
        layers: in which features of neighbours are read; 0 for a strictly local model.
        tight: whether both compute in float64. Else forces are compared within the calculator's own noise.
        structure: a name of `structures`: that of parity, stress, ASE and LAMMPS; periodic.
        envelope: names of `structures`.
        elements: of a deck's atom types.
        strategies: that the family can.
        stress_tolerance: relative, of finite differences with `strain`.
        strain: step of the differences.
        atomic: whether the calculator gives energies of atoms.
        action: what the deck runs.
        dtype: to which the file's model is converted; None where that is the type of the file.
        pickled: whether LAMMPS's file holds the module itself, since no configuration makes it.
    """

    wrapper: Callable[[], Any]
    calculator: Callable[[], Any]
    write: Callable[[Path], tuple[str, dict[str, Any]]]
    exchanges: Mapping[str, int]
    layers: int
    tight: bool = True
    structure: str = "quartz unit"
    envelope: tuple[str, ...] = SILICA
    elements: str = "Si O"
    strategies: tuple[str, ...] = STRATEGIES
    stress_tolerance: float = 1e-6
    strain: float = 2e-4
    atomic: bool = True
    action: str = "fix 1 all nve\nrun 6"
    pickled: bool = False
    dtype: torch.dtype | None = None

    @property
    def dtype_name(self) -> str | None:
        """As users write it."""
        return None if self.dtype is None else str(self.dtype).removeprefix("torch.")


def require(family: str, *packages: str) -> None:
    """Skips a test module where the family's packages (import names) are not installed."""
    for name in packages:
        if importlib.util.find_spec(name) is None:
            pytest.skip(
                f"{name} is not installed; `./dev family {family}` makes an environment with it and runs these tests",
                allow_module_level=True,
            )


@cache
def case(name: str) -> Case:
    """``"nequip"`` and ``"nequip-zbl"`` are in ``family_nequip.CASES``."""
    return importlib.import_module(f"family_{name.partition('-')[0]}").CASES[name]


@cache
def calculator(name: str) -> Any:
    """The family's own calculator, made once."""
    return case(name).calculator()


@cache
def reference(name: str, of: str) -> Results:
    """By the family's own calculator, of a named structure; in float32 with its noise under renumbering and translation."""
    return computed(name, structure(of))


def computed(name: str, atoms: Atoms) -> Results:
    """By the family's own calculator."""
    atoms, calc = atoms.copy(), calculator(name)
    atoms.calc = calc
    forces = np.asarray(atoms.get_forces(), float)
    energy = float(atoms.get_potential_energy())
    energies = np.asarray(calc.results["energies"], float) if case(name).atomic else None
    found = atoms.get_stress(voigt=False) if atoms.pbc.all() else None
    noise = 0.0
    if not case(name).tight:
        for seed in range(2):
            random = np.random.default_rng(seed)
            order = random.permutation(len(atoms))
            again = atoms[order]
            again.positions += random.uniform(-3, 3, 3)  # some packages round positions to float32, not distances
            again.calc = calc
            noise = max(noise, float(np.abs(again.get_forces() - forces[order]).max()))
    return Results(energy, energies, forces, found, None, noise)


@cache
def gives(name: str, output: str) -> bool:
    """Whether a case's model gives ``energies`` (its energy is a sum over atoms) or ``stresses`` (its forces are of pairs)."""
    return output in case(name).wrapper().model_config.outputs


def assert_parity(name: str, found: Results, expected: Results) -> None:
    """`parity.assert_parity`, also where the calculator, or the model, has no energies of atoms."""
    if not gives(name, "energies"):
        assert found.energies is None and expected.energies is None
        nothing = np.zeros(len(expected.forces))
        found, expected = (Results(**{**vars(r), "energies": nothing}) for r in (found, expected))
    elif expected.energies is None:
        np.testing.assert_allclose(found.energies.sum(), found.energy, rtol=1e-12 if case(name).tight else 1e-6)
        expected = replace(expected, energies=found.energies)
    parity.assert_parity(found, expected, tight=case(name).tight)


def check(ranks: Any, world_size: int, name: str, of: str, strategy: str, **options: Any) -> list[dict[str, Any]]:
    """Evaluates on ranks and compares; gives what the ranks gave."""
    parts = ranks.run(world_size, parity.on_rank, f"family:{name}", of, {"strategy": strategy, **options})
    assert_parity(name, parity.assemble(parts, len(structure(of))), reference(name, of))
    exchanges = {part["exchanges"] for part in parts}
    assert exchanges == {0 if world_size == 1 else case(name).exchanges[strategy]}, parts[0]["sites"]
    assert not parts[0]["setup"], "the second step must build no plan"
    return parts


def parity_test(name: str, ranks: tuple[int, ...] = (1, 2, 3), ci: tuple[int, ...] | None = None) -> Callable:
    """Energy, energies, forces and stress against the calculator; the number of exchanges. In CI on ``ci`` ranks (all)."""
    both = [
        pytest.param(n, strategy, marks=slow_unless(n in (ranks if ci is None else ci)))
        for n in ranks
        for strategy in case(name).strategies
        if n > 1 or strategy == "halo"
    ]

    @pytest.mark.parametrize(("world_size", "strategy"), both)
    def test(ranks, world_size, strategy):
        skin = {} if strategy == "graph" else {"skin": 1.0 if world_size == 2 else 0.5}
        check(ranks, world_size, name, case(name).structure, strategy, **skin)

    return test


def slow_unless(often: bool) -> tuple[pytest.MarkDecorator, ...]:
    """Marks of a test. What is slow in CI is that each process imports the family's package, not what it computes then."""
    return () if often else (pytest.mark.slow,)


def envelope_test(name: str, world_size: int = 3, ci: bool = True) -> Callable:
    """Every kind of cell and periodicity, few atoms, ranks that own nothing; the strategies take turns."""
    strategies = case(name).strategies
    rows = [
        pytest.param(of, strategies[k % len(strategies)], marks=slow_unless(ci)) for k, of in enumerate(case(name).envelope)
    ]

    @pytest.mark.parametrize(("of", "strategy"), rows)
    def test(ranks, of, strategy):
        check(ranks, world_size, name, of, strategy)

    return test


def several_test(name: str) -> Callable:
    """Systems of every periodicity in one batch on two ranks, each as alone; a rank lacks some of them."""

    def test(ranks):
        names = [of for of in case(name).envelope if of.rpartition(" ")[2] in ("wire", "atom", "tiny", "pair")]
        assert len(names) == 4
        parts, first = ranks.run(2, parity.several_on_rank, f"family:{name}", names), 0
        for k, of in enumerate(names):
            last = first + len(structure(of))
            mine = []
            for part in parts:
                rows = (part["ids"] >= first) & (part["ids"] < last)
                mine.append({"ids": part["ids"][rows] - first, "energy": part["energy"][k : k + 1],
                             "energies": part["energies"][rows], "forces": part["forces"][rows]})  # fmt: skip
            expected = replace(reference(name, of), stress=None)
            assert_parity(name, parity.assemble(mine, last - first), expected)
            first = last

    return test


def strained_on_rank(comm: Communicator, name: str, of: str, strains: list[np.ndarray]) -> dict[str, Any]:
    """Runs on each rank: stress without strain, and the energies of strained cells, by one model."""
    model = DistributedModel(parity.wrapper(f"family:{name}"), DomainConfig(mesh=comm))
    stress = model(Batch.from_atoms(structure(of)), {"energy", "stress"})["stress"][0].numpy()
    energies = []
    for strain in strains:
        atoms = structure(of).copy()
        atoms.set_cell(atoms.cell.array @ (np.eye(3) + strain), scale_atoms=True)
        energies.append(float(model(Batch.from_atoms(atoms), {"energy"})["energy"][0]))
    return {"stress": stress, "energies": energies}


def stress_test(name: str) -> Callable:
    """All six components on two ranks: central differences of fourth order in the strain."""

    def test(ranks):
        of, h = case(name).structure, case(name).strain
        strains, weights = [], {}
        for a, b in ((0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1)):
            for steps, weight in ((1, 8 / 12), (2, -1 / 12), (-1, -8 / 12), (-2, 1 / 12)):
                strain = np.zeros((3, 3))
                strain[a, b] += 0.5 * steps * h
                strain[b, a] += 0.5 * steps * h
                weights[len(strains)] = (a, b, weight / h)
                strains.append(strain)
        found = ranks.run(2, strained_on_rank, name, of, strains)[0]
        numeric = np.zeros((3, 3))
        for k, (a, b, weight) in weights.items():
            numeric[a, b] += weight * found["energies"][k] / structure(of).get_volume()
            numeric[b, a] = numeric[a, b]
        error = np.abs(numeric - found["stress"]).max()
        assert error <= case(name).stress_tolerance * np.abs(found["stress"]).max(), (numeric, found["stress"])

    return test


def ase_test(name: str, ranks: int = 2, ci: bool = True) -> Callable:
    """The model by its name in NVDDCalculator, with ranks of its own; and made from the family's calculator in one process."""

    @pytest.mark.parametrize("ranks", [pytest.param(ranks, marks=slow_unless(ci))])
    def test(tmp_path, ranks):
        model, options = case(name).write(tmp_path)
        atoms, expected = structure(case(name).structure).copy(), reference(name, case(name).structure)
        with NVDDCalculator(model, model_options=options, dtype=case(name).dtype_name, ranks=ranks) as calc:
            atoms.calc = calc
            assert_ase(name, atoms, expected)
        if registry.families()[model.partition(":")[0]].from_calculator is not None:
            atoms.calc = NVDDCalculator.from_calculator(calculator(name))
            assert_ase(name, atoms, expected)

    return test


def cli_test(name: str) -> Callable:
    """`nvdd single` by the model's name, and its line of `nvdd models`."""

    def test(tmp_path):
        from nvdd_ase.cli import app

        model, options = case(name).write(tmp_path)
        of, out = structure(case(name).structure), tmp_path / "out.json"
        of.write(tmp_path / "in.traj")
        words = ["single", tmp_path / "in.traj", "--model", model, "-o", out, *(f"--option={k}={v}" for k, v in options.items())]
        words += ["--dtype", case(name).dtype_name] if case(name).dtype else []
        done = CliRunner().invoke(app, list(map(str, words)), catch_exceptions=False)
        assert done.exit_code == 0, done.output
        got = json.loads(out.read_text())
        stress = voigt_6_to_full_3x3_stress(got["stress_eV_per_A3"])
        energies = np.array(got["energies_eV"]) if gives(name, "energies") else None
        found = Results(got["energy_eV"], energies, np.array(got["forces_eV_per_A"]), stress, None)
        assert_parity(name, found, reference(name, case(name).structure))
        family = registry.families()[model.partition(":")[0]]
        listed = " ".join(CliRunner().invoke(app, ["models"]).output.split())
        assert family.name in listed and " ".join(family.licence.split()[:2]) in listed

    return test


def assert_ase(name: str, atoms: Atoms, expected: Results) -> None:
    """What ASE gets of the atoms' calculator is what is expected."""
    energies = atoms.get_potential_energies() if gives(name, "energies") else None
    stress = atoms.get_stress(voigt=False) if expected.stress is not None else None
    assert_parity(name, Results(atoms.get_potential_energy(), energies, atoms.get_forces(), stress, None), expected)


def lammps_test(name: str, ranks: tuple[int, ...] = (1, 2), ci: tuple[int, ...] | None = None) -> Callable:
    """Some steps of MD in LAMMPS from a ``.nvdd`` file, and the calculator at the positions where they end."""

    @pytest.mark.parametrize("world_size", [pytest.param(n, marks=slow_unless(n in (ranks if ci is None else ci))) for n in ranks])
    def test(tmp_path_factory, world_size):
        atoms = {"energy_atom": gives(name, "energies"), "stress_atom": gives(name, "stresses")}
        job = lammps_parity.Job(MODEL, case(name).structure, case(name).action, elements=case(name).elements, **atoms)
        found = lammps_parity.run({name: job}, world_size, exported(name, tmp_path_factory))[name]
        assert "error" not in found, found["error"]
        expected = computed(name, lammps_atoms(found, case(name).elements))
        assert np.abs(expected.forces).max() > 1e-3
        stress = -found["pressure"][[0, 3, 4, 3, 1, 5, 4, 5, 2]].reshape(3, 3) / BAR
        assert_parity(name, Results(found["energy"], found["energies"], found["forces"], stress, None), expected)
        if found["stresses"] is None:
            return
        scale = np.abs(found["pressure"]).max()
        assert np.abs(-found["stresses"].sum(0) / found["volume"] - found["pressure"]).max() <= 1e-11 * scale

    return test


def exported(name: str, factory: pytest.TempPathFactory) -> Path:
    """A folder with the case's ``.nvdd`` file and data file, made once."""
    from nvdd_lammps import export_model

    if name not in _EXPORTED:
        folder = factory.mktemp(name)
        model, options = case(name).write(folder)
        export_model(model, folder / f"{MODEL}.nvdd", options=options, dtype=case(name).dtype, allow_pickle=case(name).pickled)
        of = case(name).structure
        lammps_parity.write_data(of, folder / f"{of.replace(' ', '_')}.data", case(name).elements)
        _EXPORTED[name] = folder
    return _EXPORTED[name]


def lammps_atoms(found: Mapping[str, Any], elements: str) -> Atoms:
    """The atoms where a run of LAMMPS has left them."""
    numbers = np.array([atomic_numbers[symbol] for symbol in elements.split()])[found["type"] - 1]
    return Atoms(numbers, found["x"], cell=found["cell"], pbc=found["pbc"])


def traffic_on_rank(comm: Communicator, name: str, of: str, strategy: str) -> dict[str, Any]:
    """Runs on each rank: what it sends in a step for energy and forces that builds no plan."""
    model = DistributedModel(parity.wrapper(f"family:{name}"), DomainConfig(mesh=comm, strategy=strategy))
    batch = Batch.from_atoms(structure(of))
    model(batch)
    with dispatch_trace() as trace:
        out = model(batch)
    return {"exchanges": trace.n_exchanges, "bytes": trace.bytes_sent, "halo": out.n_halo}


def only_forces_test(name: str, of: str) -> Callable:
    """Of a strictly local model: what crosses ranks in a step is the force on each halo row, 24 bytes, and nothing else."""

    @pytest.mark.parametrize("strategy", case(name).strategies)
    def test(ranks, strategy):
        for part in ranks.run(2, traffic_on_rank, name, of, strategy):
            assert part["exchanges"] == 1 and part["halo"] > 0
            assert part["bytes"] == 24 * part["halo"]

    return test
