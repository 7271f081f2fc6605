"""`.nvdd` files: what is written gives the same numbers in another process, what is damaged or foreign is refused."""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import nvdd
import nvdd_lammps
from builders import evaluate, quartz, random_mace
from nvdd.errors import InputError, MissingDependencyError
from nvdd.models import registry
from nvdd.models.lj import LennardJonesModelWrapper
from nvdd_lammps import export_model
from nvdd_lammps.model_file import FORMAT, Envelope, load_bytes, load_file, read_meta

LJ = {"epsilon": "Si:0.2,O:0.1", "sigma": "Si:2.4,O:1.9", "pair_coeffs": "Si-O:0.15:2.0", "cutoff": 4.5}


@pytest.fixture(scope="module")
def lj_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "lj.nvdd"
    export_model("lj", path, options=LJ)
    return path


def archive(path: Path) -> bytes:
    found = [argument for _, argument, _ in pickletools.genops(path.read_bytes()) if isinstance(argument, bytes)]
    assert len(found) == 1
    return found[0]


def rewritten(source: Path, target: Path, **changes: bytes | None) -> Path:
    """A copy with some entries of the archive replaced, or left out for None; ``meta_json`` stands for ``meta.json``."""
    changes = {name.replace("_", "."): data for name, data in changes.items()}
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive(source))) as old, zipfile.ZipFile(buffer, "w") as new:
        for name in old.namelist():
            data = changes.get(name, old.read(name))
            if data is not None:
                new.writestr(name, data)
    target.write_bytes(pickle.dumps(Envelope(buffer.getvalue()), protocol=4))
    return target


def meta_of(path: Path, **changes) -> bytes:
    return json.dumps({**read_meta(path), **changes}).encode()


def assert_same(wrapper, again, tight: bool = True) -> None:
    atoms = quartz()
    one, two = evaluate(wrapper, atoms), evaluate(again, atoms)
    scale = np.abs(one.forces).max()
    np.testing.assert_allclose(two.energy, one.energy, rtol=1e-12 if tight else 1e-6)
    assert scale > 1e-3
    assert np.abs(two.forces - one.forces).max() <= (1e-11 if tight else 2e-6) * scale


# -- families ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        LJ,
        {"epsilon": 0.1, "sigma": 2.1, "cutoff": 4.0, "shift": "smooth", "onset": 3.0},
        {"epsilon": {"O": 0.1, "Si": 0.3}, "sigma": {"O": 2.0, "Si": 2.5}, "mixing": "arithmetic", "shift": "energy"},
    ],
)
@pytest.mark.parametrize("dtype", ("float64", "float32"))
def test_lj(tmp_path, options, dtype):
    export_model("lj", tmp_path / "a.nvdd", options=options, dtype=dtype, elements=["O", "Si"])
    wrapper, meta = load_file(tmp_path / "a.nvdd")
    assert isinstance(wrapper, LennardJonesModelWrapper) and wrapper.dtype == getattr(torch, dtype)
    assert (meta["elements"], meta["cutoff"], meta["dtype"]) == (["O", "Si"], wrapper.cutoff, dtype)
    assert_same(registry.load("lj", dtype=getattr(torch, dtype), **options), wrapper, tight=dtype == "float64")


MACE = {
    "l 3": {"l_max": 3, "hidden": "4x0e+4x1o+4x2e"},  # has constants of e3nn's code generation among its buffers
    "one layer": {"n_layers": 1, "hidden": "16x0e"},
    "MACE, zbl": {"scale_shift": False, "zbl": True},
    "agnesi, heads": {"distance_transform": "Agnesi", "heads": ("dft", "Default")},
    "non-linear": {"interaction": "RealAgnosticResidualNonLinearInteractionBlock"},
    "density, soft": {
        "interaction": "RealAgnosticDensityResidualInteractionBlock",
        "distance_transform": "Soft",
    },
}


@pytest.mark.parametrize("name", MACE)
def test_mace(tmp_path, name):
    pytest.importorskip("mace")
    torch.save(random_mace(**MACE[name]), tmp_path / "my.model")
    options = {"head": "dft"} if "heads" in name else {}
    meta = export_model(f"mace:{tmp_path / 'my.model'}", tmp_path / "a.nvdd", options=options)
    assert not meta["pickled"] and meta["packages"].keys() == {"torch", "mace-torch", "e3nn"}
    assert meta["elements"] == ["O", "Si"]
    wrapper, _ = load_file(tmp_path / "a.nvdd")
    assert_same(registry.load(f"mace:{tmp_path / 'my.model'}", **options), wrapper)
    assert not any(p.requires_grad for p in wrapper.parameters()) and not wrapper.training


def test_mace_in_float32(tmp_path):
    pytest.importorskip("mace")
    torch.save(random_mace(), tmp_path / "my.model")
    export_model(f"mace:{tmp_path / 'my.model'}", tmp_path / "a.nvdd", dtype="float32")
    wrapper, meta = load_file(tmp_path / "a.nvdd")
    assert wrapper.dtype == torch.float32 and meta["dtype"] == "float32"
    assert_same(registry.load(f"mace:{tmp_path / 'my.model'}", dtype=torch.float32), wrapper, tight=False)


def test_mace_with_a_block_of_its_own_is_refused_and_can_be_pickled(tmp_path):
    pytest.importorskip("mace")
    import copy

    module = copy.deepcopy(random_mace())
    module.interactions[1].avg_num_neighbors = 7.0  # not what the first block has: extraction reads that one
    torch.save(module, tmp_path / "my.model")
    model = f"mace:{tmp_path / 'my.model'}"
    with pytest.raises(InputError, match="rebuilt from its configuration it is another model"):
        export_model(model, tmp_path / "a.nvdd")
    assert not list(tmp_path.glob("*.nvdd*"))
    with pytest.warns(UserWarning, match="as a pickle, which whoever loads it executes"):
        meta = export_model(model, tmp_path / "a.nvdd", allow_pickle=True)
    assert meta["pickled"]
    with pytest.warns(UserWarning, match="loading it executes code from the file"):
        wrapper, _ = load_file(tmp_path / "a.nvdd")
    assert_same(registry.load(model), wrapper)


@pytest.mark.parametrize(
    "checkpoint, modal",
    [
        ("7net-0", None),
        ("7net-mf-0", "R2SCAN"),
        pytest.param("7net-mf-0", "PBE", marks=pytest.mark.slow),
        pytest.param("7net-l3i5", None, marks=pytest.mark.slow),
    ],
)
def test_sevennet(tmp_path, checkpoint, modal):
    pytest.importorskip("sevenn")
    options = {"modal": modal} if modal else {}
    export_model(f"sevenn:{checkpoint}", tmp_path / "a.nvdd", options=options, elements=["Si", "O"])
    wrapper, meta = load_file(tmp_path / "a.nvdd")
    assert wrapper.modal == modal and meta["elements"] == ["Si", "O"] and meta["cutoff"] == 5.0
    assert_same(registry.load(f"sevenn:{checkpoint}", **options), wrapper, tight=False)
    described = json.loads(zipfile.ZipFile(io.BytesIO(archive(tmp_path / "a.nvdd"))).read("configuration.json"))
    assert not [
        key for key in described["config"] if "_path" in key or "optim" in key or "device" in key
    ]  # of training


# -- models of one's own -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "attribute, options", [("Pairs", {"cutoff": 3.5, "scale": 1.5}), ("annotated", {"scale": 4.0}), ("READY", {})]
)
def test_module_of_ones_own(tmp_path, attribute, options):
    model = f"py:exported_models:{attribute}"
    meta = export_model(model, tmp_path / "a.nvdd", options=options)
    assert meta["model"] == model and not meta["pickled"]
    wrapper, _ = load_file(tmp_path / "a.nvdd")
    assert_same(registry.load(model, **options), wrapper)


def test_weights_of_ones_own_come_from_the_file(tmp_path, monkeypatch):
    import exported_models

    monkeypatch.setattr(exported_models, "READY", exported_models.Pairs(scale=3.0))
    export_model("py:exported_models:READY", tmp_path / "a.nvdd")
    exported_models.READY.scale.data.fill_(100.0)
    assert load_file(tmp_path / "a.nvdd")[0].scale == 3.0


def test_charges_are_an_input_that_lammps_has(tmp_path):
    export_model("py:exported_models:Charged", tmp_path / "a.nvdd")
    with pytest.raises(InputError, match="Charged reads weight, which LAMMPS does not have"):
        export_model("py:exported_models:Charged", tmp_path / "b.nvdd", options={"inputs": "weight"})


def test_what_is_in_neither_options_nor_weights_is_noticed(tmp_path):
    with pytest.raises(InputError, match="rebuilt from its configuration it is another model"):
        export_model("py:exported_models:forgetful", tmp_path / "a.nvdd")


def test_a_file_can_name_only_what_makes_wrappers(tmp_path, lj_file):
    with pytest.raises(InputError, match="does not say that it makes a wrapper"):
        export_model("py:exported_models:unannotated", tmp_path / "a.nvdd")
    trace = tmp_path / "executed"
    call = {"module": "subprocess", "attribute": "run", "options": {"args": ["touch", str(trace)]}}
    evil = rewritten(
        lj_file,
        tmp_path / "evil.nvdd",
        meta_json=meta_of(lj_file, family="py", model="py:subprocess:run"),
        configuration_json=json.dumps(call).encode(),
    )
    with pytest.raises(InputError, match="'py:subprocess:run' does not say that it makes a wrapper"):
        load_file(evil)
    assert not trace.exists()


# -- the file ------------------------------------------------------------------------------------------------------


def test_the_pickle_has_one_global_and_one_argument(lj_file):
    operations = list(pickletools.genops(lj_file.read_bytes()))
    names = [name.name for name, _, _ in operations]
    assert names.count("STACK_GLOBAL") == 1 and names.count("REDUCE") == 1 and "GLOBAL" not in names
    assert [a for _, a, _ in operations if isinstance(a, str)] == ["nvdd_lammps", "from_bytes"]
    with zipfile.ZipFile(io.BytesIO(archive(lj_file))) as content:
        assert content.namelist() == ["meta.json", "spec.json", "configuration.json", "weights.safetensors"]


def test_the_same_model_gives_the_same_file(tmp_path, lj_file):
    export_model("lj", tmp_path / "again.nvdd", options=LJ)
    assert (tmp_path / "again.nvdd").read_bytes() == lj_file.read_bytes()


def test_read_meta(lj_file):
    meta = read_meta(lj_file)
    assert meta["format"] == FORMAT and meta["nvdd"] == nvdd.__version__ and meta["family"] == "lj"
    assert meta["elements"] == ["O", "Si"] and meta["cutoff"] == 4.5 and meta["units"] == "metal"
    assert meta["probe"].keys() == {"energy", "max_force"}


def test_another_process_loads_it_without_what_it_does_not_need(lj_file):
    """As LAMMPS does it: by unpickling; the family's module is imported, no other family's package."""
    script = (
        "import sys; from nvdd_lammps.model_file import load_file; wrapper, meta = load_file(sys.argv[1])\n"
        "print(wrapper.cutoff, sorted({'mace', 'sevenn', 'e3nn', 'nvdd_ase', 'lammps'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(lj_file)], capture_output=True, text=True, timeout=120)
    assert done.stdout == "4.5 []\n", done.stderr


def test_unpickling_gives_the_object_for_lammps(lj_file):
    with open(lj_file, "rb") as file:
        unified = pickle.load(file)
    assert isinstance(unified, nvdd_lammps.NVDDUnified)
    assert unified.element_types == ["O", "Si"] and 2 * unified.rcutfac == pytest.approx(4.5)
    assert isinstance(nvdd_lammps.load_unified(lj_file), nvdd_lammps.NVDDUnified)


def test_importing_the_package_is_light():
    script = "import nvdd_lammps, sys; print(sorted({'torch', 'numpy', 'ase', 'lammps', 'nvdd'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


# -- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        ({"model": "lj"}, r"lj takes any element, .*--elements Si,O"),
        ({"model": "lj", "elements": ["Xy"]}, "Xy is no chemical symbol"),
        ({"model": "lj", "elements": ["X"]}, "X is no chemical symbol"),
        ({"model": "lj", "elements": []}, "name each element once, and one at least"),
        ({"model": "lj", "elements": ["Si", "Si"]}, "name each element once"),
        ({"model": "lj", "options": LJ, "elements": ["Ar"]}, "lj does not know Ar; it knows O, Si"),
        ({"model": "lj", "elements": ["Si"], "dtype": "float16"}, "dtype 'float16' is not known"),
        ({"model": "lj", "elements": ["Si"], "options": {"depth": 1}}, "no option depth"),
        (
            {"model": "lj", "elements": ["Si"], "options": {"epsilon": 1e300, "sigma": 1e30, "cutoff": 4}},
            "no model to run",
        ),
        ({"model": "lj", "path": "model.pt", "elements": ["Si"]}, r"must end in \.nvdd"),
        ({"model": "lj", "path": "nowhere/a.nvdd", "elements": ["Si"]}, "the folder .*nowhere does not exist"),
        ({"model": "magic:x"}, "unknown model family 'magic'"),
    ],
)
def test_export_refuses(tmp_path, options, message):
    path = tmp_path / options.pop("path", "a.nvdd")
    with pytest.raises(InputError, match=message):
        export_model(options.pop("model"), path, **options)
    assert not list(tmp_path.iterdir())


def test_a_newer_format_names_both_versions(tmp_path, lj_file):
    newer = rewritten(lj_file, tmp_path / "b.nvdd", meta_json=meta_of(lj_file, format=FORMAT + 1, nvdd="9.8.7"))
    message = rf"b\.nvdd: its format is {FORMAT + 1}, written by nvdd 9\.8\.7; nvdd {nvdd.__version__} here reads format {FORMAT}"
    for read in (load_file, read_meta):
        with pytest.raises(InputError, match=message):
            read(newer)


def test_every_truncation_is_an_input_error(tmp_path, lj_file):
    whole, path = lj_file.read_bytes(), tmp_path / "cut.nvdd"
    for length in (*range(0, 60), *range(60, len(whole), 41), len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(InputError, match=r"cut\.nvdd: it is no \.nvdd file or was cut short"):
            load_file(path)


def test_flipped_bytes_are_noticed(tmp_path, lj_file):
    """In the archive each entry has a check sum."""
    whole, path = bytearray(lj_file.read_bytes()), tmp_path / "flipped.nvdd"
    at = whole.index(b"weights.safetensors") + 200
    whole[at] ^= 0xFF
    path.write_bytes(whole)
    with pytest.raises(InputError, match=r"cut short .*Bad CRC-32"):
        load_file(path)


@pytest.mark.parametrize(
    "content", (b"", b"\x80\x04N.", b"LAMMPS data file\n", pickle.dumps({"a": 1}), pickle.dumps(b"x"))
)
def test_foreign_files(tmp_path, content):
    (tmp_path / "a.nvdd").write_bytes(content)
    with pytest.raises(InputError, match=r"a\.nvdd: it (is no|holds a)"):
        load_file(tmp_path / "a.nvdd")


def test_a_missing_file(tmp_path):
    with pytest.raises(InputError, match="there is no such file"):
        load_file(tmp_path / "a.nvdd")
    with pytest.raises(InputError, match="it can't be read"):
        load_file(tmp_path)


class _Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_hostile_pickle_runs_nothing(tmp_path):
    (tmp_path / "a.nvdd").write_bytes(pickle.dumps(_Touch(tmp_path / "executed")))
    with pytest.raises(InputError, match=r"a pickle that wants (io|_io)\.open"):
        load_file(tmp_path / "a.nvdd")
    assert not (tmp_path / "executed").exists()


def test_weights_of_another_model(tmp_path, lj_file):
    from safetensors.torch import save

    other = rewritten(lj_file, tmp_path / "b.nvdd", weights_safetensors=save({"depth": torch.zeros(1)}))
    with pytest.raises(InputError, match=r"missing: epsilon, .*; unexpected: depth\); the file was written with torch"):
        load_file(other)


@pytest.mark.parametrize("entry", ("spec_json", "configuration_json", "weights_safetensors", "meta_json"))
def test_a_missing_entry(tmp_path, lj_file, entry):
    with pytest.raises(InputError, match="cut short"):
        load_file(rewritten(lj_file, tmp_path / "b.nvdd", **{entry: None}))


def test_a_family_that_is_not_here(tmp_path, lj_file, monkeypatch):
    with pytest.raises(InputError, match="unknown model family 'magic'"):
        load_file(rewritten(lj_file, tmp_path / "b.nvdd", meta_json=meta_of(lj_file, family="magic")))
    monkeypatch.setattr(registry.ModelFamily, "installed", lambda self: False)
    with pytest.raises(MissingDependencyError, match="not installed"):
        load_file(lj_file)


def test_another_spec_or_cutoff_than_at_export(tmp_path, lj_file):
    content = archive(lj_file)
    spec = json.loads(zipfile.ZipFile(io.BytesIO(content)).read("spec.json"))
    spec["force_strategy"] = "positions"
    with pytest.raises(InputError, match="declares another distribution here than when it was exported"):
        load_file(rewritten(lj_file, tmp_path / "b.nvdd", spec_json=json.dumps(spec).encode()))
    with pytest.raises(InputError, match=r"a cutoff of 4\.5 A here and of 5\.5 A in the file"):
        load_file(rewritten(lj_file, tmp_path / "c.nvdd", meta_json=meta_of(lj_file, cutoff=5.5)))


def test_loading_leaves_no_trace_in_torch(lj_file, tmp_path):
    pytest.importorskip("mace")
    torch.save(random_mace(), tmp_path / "my.model")
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        export_model(f"mace:{tmp_path / 'my.model'}", tmp_path / "a.nvdd")
    load_bytes(archive(tmp_path / "a.nvdd"))
    after = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(1)) and torch.get_default_dtype() == torch.float32
