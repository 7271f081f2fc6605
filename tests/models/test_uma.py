"""UMA and eSEN against fairchem's own calculator: in one process and over ranks, files, ASE, and what is refused."""

from __future__ import annotations

import copy
import json
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from ase import Atoms

import families
import uma_models
from builders import quartz
from nvdd import (
    SPEC_MPNN_HALO,
    SPEC_UMA_HALO,
    Batch,
    DistributedModel,
    DomainConfig,
    HaloStoragePolicy,
    MLIPSpec,
    dispatch_trace,
)
from nvdd.communicator import Communicator
from nvdd.errors import InputError, MissingDependencyError
from nvdd.models import load
from nvdd.models.configuration import rebuild
from nvdd.models.uma import FAMILY, UMAWrapper
from nvdd.models.uma_files import from_file, random_uma
from nvdd.models.uma_parts import parts_of
from nvdd_lammps import export_model
from structures import structure
from uma_models import MODELS, TASKS, checkpoint, theirs

families.require("uma", "fairchem")
pytestmark = pytest.mark.filterwarnings("ignore:index_reduce")
# charge and multiplicity of the structures below
INFO = {"charge": 1, "spin": 2}
EXACT = [name for name in MODELS if name != "grid"]  # see test_grid_on_edges

test_parity = families.parity_test("uma", (1, 2, 3, 4))
test_envelope = families.envelope_test("uma")
test_envelope_on_two_ranks = families.envelope_test("uma-1.2", 2)
test_stress = families.stress_test("uma")
test_ase = families.ase_test("uma")
test_cli = families.cli_test("uma")
test_lammps = families.lammps_test("uma")


@cache
def wrapper(path: str, task: str = "omol", dtype: torch.dtype = torch.float64) -> UMAWrapper:
    return load(f"uma:{path}", dtype=dtype, task=task)


def with_info(atoms: Atoms, **info: int) -> Atoms:
    atoms = atoms.copy()
    atoms.info.update(info)
    return atoms


def close(found: Any, expected: Any, relative: float, what: str) -> None:
    error, scale = np.abs(np.asarray(found) - expected).max(), np.abs(expected).max()
    assert error <= relative * scale + 1e-14, f"{what} differ by {error}, largest {scale}"


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", EXACT)
def test_equals_fairchem(name, task):
    """In one process, with charge and multiplicity given and by default; each of them changes the energy."""
    energies = []
    for info in ({}, {"charge": 2}, {"spin": 3}):
        atoms = with_info(quartz((2, 1, 1)), **info)
        expected = theirs(name, atoms, task)
        found = DistributedModel(wrapper(checkpoint(name), task))(Batch.from_atoms(atoms), set(expected))
        close(found["energy"], expected["energy"], 1e-12, "energies")
        close(found["forces"], expected["forces"], 1e-11, "forces")
        if "stress" in expected:
            close(found["stress"][0], expected["stress"], 1e-11, "stress")
        energies.append(float(expected["energy"]))
    assert len(set(energies)) == 3 and np.abs(expected["forces"]).max() > 0.01


def on_rank(comm: Communicator, path: str, systems: list[Atoms], strategy: str, options: dict) -> dict[str, Any]:
    """Runs on each rank: evaluates twice (the second time no plan is built)."""
    model, chunk = wrapper(path), options.pop("chunk", None)
    if chunk is not None:
        model = _in_chunks(copy.deepcopy(model), chunk)
    distributed = DistributedModel(model, DomainConfig(mesh=comm, strategy=strategy, **options))
    batch, wanted = Batch.from_atoms(systems), set(model.model_config.outputs)
    if any(atoms.cell.rank < 3 for atoms in systems):
        wanted -= {"stress", "stresses"}
    distributed(batch, {"energy"})
    state = torch.get_rng_state()
    with dispatch_trace() as trace:
        out = distributed(batch, wanted)
    assert torch.equal(torch.get_rng_state(), state), "the user's random numbers are not drawn from"
    again = distributed(batch, wanted)
    assert torch.equal(out["energy"], again["energy"]) and torch.equal(out["forces"], again["forces"])
    return {"ids": out.ids.numpy(), "exchanges": trace.n_exchanges, **{k: v.numpy() for k, v in out.items()}}


def _in_chunks(model: UMAWrapper, chunk: int) -> UMAWrapper:
    """Edges by ``chunk`` at a time, computed again in the derivative."""
    for module in model.modules():
        if hasattr(module, "activation_checkpoint_chunk_size"):
            module.activation_checkpoint_chunk_size = chunk
    return model


def assembled(parts: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    ids = np.concatenate([p["ids"] for p in parts])
    assert sorted(ids) == list(range(len(ids))), "every atom must be owned exactly once"
    out = {name: parts[0][name] for name in ("energy", "stress") if name in parts[0]}
    for part in parts[1:]:
        np.testing.assert_array_equal(part["energy"], parts[0]["energy"])
    for name in ("energies", "forces", "stresses"):
        if name in parts[0]:
            rows = np.concatenate([p[name] for p in parts])
            out[name] = np.empty_like(rows)
            out[name][ids] = rows
    return out


def check(found: dict, expected: dict) -> None:
    close(found["energy"][0], expected["energy"], 1e-12, "energies")
    close(found["energies"].sum(), expected["energy"], 1e-12, "sum of energies")
    close(found["forces"], expected["forces"], 1e-11, "forces")
    if "stress" in expected:
        close(found["stress"][0], expected["stress"], 1e-11, "stress")
        close(found["stresses"].sum(0), found["stress"][0], 1e-11, "sum of stresses")


@pytest.mark.parametrize("strategy", ("halo", "graph"))
@pytest.mark.parametrize("name", EXACT)
def test_over_ranks(ranks, name, strategy):
    """1 to 4 ranks against fairchem, with a skin, whose edges beyond the cutoff the model must not see."""
    atoms = with_info(quartz((2, 1, 1)), **INFO)
    expected = theirs(name, atoms, "omol")
    layers = 3 if name == "uma-3" else 2
    for n in (1, 2, 3, 4):
        parts = ranks.run(n, on_rank, checkpoint(name), [atoms], strategy, {"skin": 1.0})
        check(assembled(parts), expected)
        # features in each layer, their gradients, forces; of direct forces positions instead of both
        wanted = 0 if n == 1 else layers + 1 if name == "direct" else 2 * layers + 1
        assert [p["exchanges"] for p in parts] == [wanted] * n


@pytest.mark.parametrize("name", ("uma", "uma-1.2"))
@pytest.mark.parametrize("strategy", ("halo", "graph"))
def test_batch_of_systems(ranks, name, strategy):
    """Each with its own charge, multiplicity and composition, on ranks that lack some of them."""
    systems = [
        with_info(quartz((2, 1, 1)), charge=1, spin=2),
        with_info(structure("silane-like"), charge=0, spin=1),
        with_info(structure("silica tiny"), charge=-2, spin=0),
    ]
    systems[1].cell = [30, 30, 30]
    parts = ranks.run(3, on_rank, checkpoint(name), systems, strategy, {})
    found, start = assembled(parts), 0
    for k, atoms in enumerate(systems):
        expected, rows = theirs(name, atoms, "omol"), slice(start, start + len(atoms))
        close(found["energy"][k], expected["energy"], 1e-12, "energies")
        close(found["forces"][rows], expected["forces"], 1e-11, "forces")
        if "stress" in expected:
            close(found["stress"][k], expected["stress"], 1e-11, "stress")
        start += len(atoms)


def test_edges_in_chunks(ranks):
    """Computed again in the derivative, in numbers of chunks that differ by rank: nothing is fetched in between."""
    systems = [with_info(quartz((2, 1, 1)), **INFO), with_info(structure("silica tiny"), **INFO)]
    parts = ranks.run(3, on_rank, checkpoint("uma"), systems, "halo", {"chunk": 100})
    assert [p["exchanges"] for p in parts] == [5] * 3
    found, expected = assembled(parts), theirs("uma", systems[0], "omol")
    close(found["energy"][0], expected["energy"], 1e-12, "energies")
    close(found["forces"][: len(systems[0])], expected["forces"], 1e-11, "forces")


def test_float32(ranks):
    """As weights are: within fairchem's own noise, which draws random frames at each call."""
    atoms = with_info(quartz((2, 1, 1)), **INFO)
    runs = [theirs("uma", atoms, "omol", "float32") for _ in range(3)]
    noise = max(np.abs(run["forces"] - runs[0]["forces"]).max() for run in runs)
    parts = ranks.run(2, on_rank_in_float32, checkpoint("uma"), atoms)
    found = assembled(parts)
    assert abs(found["energy"][0] - runs[0]["energy"]) <= 1e-6 * abs(runs[0]["energy"])
    assert np.abs(found["forces"] - runs[0]["forces"]).max() <= max(3 * noise, 2e-6)


def on_rank_in_float32(comm: Communicator, path: str, atoms: Atoms) -> dict[str, Any]:
    out = DistributedModel(wrapper(path, dtype=torch.float32), DomainConfig(mesh=comm))(Batch.from_atoms(atoms))
    return {"ids": out.ids.numpy(), **{k: v.numpy() for k, v in out.items()}}


def test_grid_on_edges(ranks):
    """Of act_type="s2" fairchem's own results depend on the random turn of each edge's frame, beyond rounding."""
    atoms = with_info(quartz((2, 1, 1)), **INFO)
    runs = [theirs("grid", atoms, "omol") for _ in range(3)]
    found = assembled(ranks.run(2, on_rank, checkpoint("grid"), [atoms], "halo", {}))
    for name in ("energy", "forces"):
        noise = max(np.abs(run[name] - runs[0][name]).max() for run in runs)
        assert 1e-12 < noise < 1e-6 and np.abs(found[name] - runs[0][name]).max() <= 10 * noise
    one = DistributedModel(wrapper(checkpoint("grid")))(Batch.from_atoms(atoms))
    close(found["energy"], one["energy"].numpy(), 1e-12, "energies")
    close(found["forces"], one["forces"].numpy(), 1e-11, "forces")


def test_wrapper_alone_is_single_process_code():
    """Called without nvdd's runtime, and so without adapters."""
    from builders import evaluate

    atoms = with_info(quartz((2, 1, 1)), **INFO)
    found = evaluate(wrapper(checkpoint("uma-1.2")), atoms)
    expected = theirs("uma-1.2", atoms, "omol")
    close(found.energy[0], expected["energy"], 1e-12, "energies")
    close(found.forces, expected["forces"], 1e-11, "forces")


# -- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_rebuilt_from_json(name):
    original = wrapper(checkpoint(name))
    again = rebuild("uma", json.loads(json.dumps(FAMILY.configuration(original))), torch.float64)
    again.load_state_dict(original.state_dict())
    batch = Batch.from_atoms(with_info(quartz(), **INFO))
    one, other = (DistributedModel(model)(batch) for model in (original, again))
    assert torch.equal(one["energy"], other["energy"]) and torch.equal(one["forces"], other["forces"])


def test_spec_survives_a_file(tmp_path):
    """Adapters by name: another process finds them."""
    spec = wrapper(checkpoint("uma")).distribution_spec()
    spec.save(tmp_path / "spec.json")
    assert MLIPSpec.load(tmp_path / "spec.json") == spec


def test_random_weights():
    """By seed, the same on every rank; both families."""
    batch = Batch.from_atoms(quartz())
    energy = lambda model: float(DistributedModel(model)(batch, {"energy"})["energy"])
    assert energy(load("uma:random")) == energy(load("uma:random", seed="0", size="tiny")) != energy(random_uma(seed=1))
    assert energy(load("escn:random")) != energy(load("uma:random"))
    assert energy(random_uma(task="omol")) != energy(random_uma(task="omat"))
    FAMILY.configuration(load("escn:random", charge=0, spin=1))
    for arguments, message in (
        ({"size": "large"}, "size='large' is none of tiny, small"),
        ({"task": "oc99"}, "task='oc99' is none of them"),
        ({"checkpointing": "maybe"}, "checkpointing='maybe' is neither yes nor no"),
    ):
        with pytest.raises(InputError, match=message):
            load("uma:random", **arguments)


def test_files_that_are_none(tmp_path):
    for family in ("uma", "escn"):
        with pytest.raises(InputError, match=f"'{family}' needs a model: {family}:FILE"):
            load(family)
    with pytest.raises(InputError, match=r"no UMA checkpoint file 'nothing\.pt'.*nvdd downloads none"):
        load("uma:nothing.pt")
    other = tmp_path / "other.pt"
    torch.save({"a": 1}, other)
    with pytest.raises(InputError, match=r"other\.pt can't be read as an inference checkpoint of fairchem: AttributeError"):
        load(f"uma:{other}")
    with pytest.raises(InputError, match=r"has the tasks omat, omol, and task=None is none of them"):
        load(f"uma:{checkpoint('uma')}")
    with pytest.raises(InputError, match="seed and size are of random weights"):
        load(f"uma:{checkpoint('uma')}", seed=1)
    with pytest.raises(InputError, match="was not read from a checkpoint"):
        FAMILY.configuration(_changed(wrapper(checkpoint("uma")), source=None))


def _changed(model: UMAWrapper, **attributes: Any) -> UMAWrapper:
    model = copy.copy(model)
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


# -- inputs and refusals -------------------------------------------------------------------------------------------


def test_charge_and_spin():
    path = checkpoint("uma")
    energy = lambda model, **info: float(
        DistributedModel(model)(Batch.from_atoms(with_info(quartz(), **info)), {"energy"})["energy"]
    )
    free, fixed = wrapper(path), load(f"uma:{path}", dtype=torch.float64, task="omol", charge="2", spin=3)
    assert free.model_config.system_inputs == {"charge", "spin"} and fixed.model_config.system_inputs == frozenset()
    assert energy(fixed, charge=-5) == energy(free, charge=2, spin=3) != energy(free) == energy(free, charge=0, spin=1)
    for info in ({"charge": 0.5}, {"charge": 101}, {"spin": -1}):
        with pytest.raises(InputError, match=r"give a whole number from .* for each, atoms\.info"):
            energy(free, **info)
    for options in ({"charge": "one"}, {"charge": 1.5}, {"spin": 200}):
        with pytest.raises(InputError, match="is not a whole number from"):
            load(f"uma:{path}", task="omol", **options)


def test_refused_systems():
    model = wrapper(checkpoint("uma"))
    run = lambda atoms, m=model: DistributedModel(m)(Batch.from_atoms(atoms), {"energy"})
    with pytest.raises(InputError, match="a lone atom without periodic boundaries; its energy is in a table"):
        run(Atoms("O"))
    assert torch.isfinite(run(Atoms("O", cell=[9, 9, 9], pbc=True))["energy"]).all()
    few = _changed(model, backbone=_changed(model.backbone, max_neighbors=10))
    with pytest.raises(InputError, match=r"an atom has \d+ neighbours within 4\.5 A, of which this model takes the nearest 10"):
        run(quartz(), few)
    with pytest.raises(InputError, match="is for inference"):
        copy.deepcopy(model).train()(Batch.from_atoms(quartz()))


def test_refused_specs():
    """The backbone runs on plain tensors, where nothing else would notice what is missing."""
    model = wrapper(checkpoint("uma"))
    for spec in (SPEC_MPNN_HALO, SPEC_UMA_HALO, model.distribution_spec().with_policy(HaloStoragePolicy())):
        with pytest.raises(InputError, match="lacks the adapters by which UMA reads other ranks' atoms"):
            DistributedModel(model, spec=spec)


def test_refused_models():
    from fairchem.core.units.mlip_unit.utils import load_inference_model

    def model(**backbone: Any):
        averaged, content = load_inference_model(checkpoint("esen"), {"backbone": backbone}, use_ema=True, strict=False)
        averaged.module.setup_tasks(content.tasks_config)
        return averaged.module

    for changes, message in (
        ({"use_quaternion_wigner": False}, "makes rotations from Euler angles"),
        ({"execution_mode": "umas_fast_pytorch"}, "runs by UMASFastPytorchBackend"),
    ):
        with pytest.raises(InputError, match=message):
            parts_of(model(**changes), "omat")
    mean = model()
    mean.output_heads["energyandforcehead"].head.reduce = "mean"
    units = model()
    units.tasks["omat_forces"].normalizer.rmsd *= 2
    shifted = model()
    shifted.tasks["omat_forces"].normalizer.mean += 0.5
    other = model()
    other.backbone = torch.nn.Linear(1, 1)
    merged = model()
    merged.output_heads["energyandforcehead"].merged_on_dataset = "omat"
    unknown = model()
    unknown.output_heads["second"] = unknown.output_heads["energyandforcehead"]
    for refused, message in (
        (mean, "takes the mean over atoms"),
        (units, "forces are no derivative of the energy"),
        (shifted, r"forces in units of 1\.\d+ with a mean of 0\.5"),
        (other, "this model has a torch.nn.modules.linear.Linear"),
        (merged, "is merged for one dataset"),
        (unknown, "which head gives the energy 'omat_energy' of this model is not clear"),
    ):
        with pytest.raises(InputError, match=message):
            parts_of(refused, "omat")


def test_versions(monkeypatch):
    from nvdd.models import uma_parts

    monkeypatch.setattr(uma_parts, "version", lambda name: "2.30.1")
    with pytest.raises(MissingDependencyError, match=r"supports fairchem-core 2\.24\.\*, and 2\.30\.1 is installed"):
        load("uma:random")
    monkeypatch.undo()
    monkeypatch.setitem(__import__("sys").modules, "fairchem.core.models.uma", None)
    with pytest.raises(MissingDependencyError, match="UMA models need fairchem-core"):
        load("uma:random")


# -- front ends ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ("halo", "graph"))
def test_from_calculator(strategy):
    """fairchem's own calculator goes in, on two ranks; charge is read at each call."""
    from nvdd_ase import NVDDCalculator

    own = uma_models.calculator("uma", "omol")
    atoms = with_info(quartz((2, 1, 1)), **INFO)
    with NVDDCalculator.from_calculator(own, ranks=2, strategy=strategy) as calculator:
        for charge in (1, -3):
            atoms.info["charge"] = charge
            atoms.calc = calculator
            expected = theirs("uma", atoms, "omol")
            close(atoms.get_potential_energy(), expected["energy"], 1e-12, "energies")
            close(atoms.get_forces(), expected["forces"], 1e-11, "forces")
            close(atoms.get_stress(voigt=False), expected["stress"], 1e-11, "stress")
    assert FAMILY.from_calculator(object()) is None


def test_lammps_wants_charge_and_spin_of_molecules(tmp_path):
    path, file = checkpoint("uma"), tmp_path / "uma.nvdd"
    with pytest.raises(InputError, match=r"reads charge, spin, which LAMMPS does not have; set them as options of the model"):
        export_model(f"uma:{path}", file, options={"task": "omol"})
    assert export_model(f"uma:{path}", file, options={"task": "omol", "charge": 0, "spin": 1})["cutoff"] == 4.5
    assert export_model(f"uma:{path}", file, options={"task": "omat"})["packages"]["fairchem-core"].startswith("2.24")


def test_from_file_takes_overrides():
    """As from_model_checkpoint does, but for what nvdd needs itself."""
    model = from_file(checkpoint("uma"), "omat", overrides={"backbone": {"max_neighbors": 77, "otf_graph": True}})
    assert model.backbone.max_neighbors == 77 and model.backbone.otf_graph is False


def test_experts_of_another_kernel(tmp_path):
    """Files of models that were trained with segment_mm of fairchem_cpp: the same weights, by torch."""
    content = torch.load(checkpoint("uma"), weights_only=False)
    content.model_config["backbone"]["moe_layer_type"] = "dgl"
    torch.save(content, tmp_path / "dgl.pt")
    batch, energies = Batch.from_atoms(quartz()), []
    for path in (checkpoint("uma"), str(tmp_path / "dgl.pt")):
        energies.append(float(DistributedModel(wrapper(path, "omat"))(batch, {"energy"})["energy"]))
    assert energies[0] == energies[1]
