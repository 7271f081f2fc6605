"""``import nvdd`` is cheap, and imports go one way."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import nvdd

ROOT = Path(nvdd.__file__).parent
HEAVY = ("ase", "scipy", "warp", "vesin", "matplotlib", "e3nn", "mace", "sevenn", "typer", "rich", "torch")


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout


def test_import_loads_nothing_heavy():
    code = "import sys; before = set(sys.modules); import nvdd; print(*sorted(set(sys.modules) - before))"
    loaded = run(code).split()
    assert not [m for m in loaded if m.split(".")[0] in HEAVY]
    assert len(loaded) < 15, loaded


def test_everything_public_costs_half_a_second_beyond_torch():
    code = (
        "import time, torch, torch.distributed; start = time.process_time(); import nvdd\n"
        "for name in ('Batch', 'DistributedModel', 'DomainConfig', 'ShardTensor', 'MLIPSpec', 'Communicator'):\n"
        "    getattr(nvdd, name)\n"
        "print(time.process_time() - start)"
    )
    assert min(float(run(code)) for _ in range(3)) < 0.5


def test_all_public_names_resolve():
    for name in nvdd.__all__:
        assert getattr(nvdd, name) is not None


# package -> packages of nvdd that it must not import
FORBIDDEN = {
    "": ("specs", "models", "runtime", "dynamics"),
    "adapters": ("specs", "models", "runtime", "validate"),
    "handlers": ("specs", "models", "runtime", "validate"),
    "specs": ("models", "runtime", "handlers"),
    "runtime": ("models", "dynamics"),
    "dynamics": ("models",),
    "planning": ("models", "dynamics"),
}


def imports(path: Path) -> set[str]:
    """Modules of nvdd that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add("nvdd." * (node.level > 0) + node.module)
    return {name for name in found if name.split(".")[0] in ("nvdd", "nvdd_ase")}


def test_imports_go_one_way():
    import nvdd.specs

    folders = {
        "": ROOT,
        "adapters": ROOT / "adapters",
        "dynamics": ROOT / "dynamics",
        "handlers": ROOT / "handlers",
        "planning": ROOT / "planning",
        "runtime": ROOT / "runtime",
        "specs": Path(nvdd.specs.__file__).parent,
    }
    wrong = []
    for package, folder in folders.items():
        for path in folder.glob("*.py"):
            if package == "" and path.name in ("__init__.py", "spec.py", "worker.py"):  # the facade; the entry of a process
                continue
            for name in imports(path):
                part = name.split(".")[1] if "." in name else ""
                if name.startswith("nvdd_ase") or part in FORBIDDEN[package]:
                    wrong.append(f"{path.name} imports {name}")
    assert not wrong


# what the public description of bring-your-own-model names, beside `nvdd.validate`
BRING_YOUR_OWN = ["MLIPSpec", "DistributionSpec", "CompilePolicy", "ForceStrategy", "OutputSpec", "OutputKind", "Reduce", "SPEC_MPNN_HALO", "SPEC_LJ_HALO", "SPEC_UMA_HALO", "SPEC_EWALD_HALO", "SPEC_PME_HALO", "SPEC_DFTD3_HALO", "SPEC_MPNN_GP", "StoragePolicy", "HaloStoragePolicy", "ShardedStoragePolicy", "LocalStoragePolicy", "GraphParallelPolicy", "OpAdapter", "MethodAdapter", "FunctionAdapter", "PythonAdapter", "JitAdapter", "AdapterRegistry", "AdapterStatus", "GatherInputs", "GatherInputsFull", "SliceOwned", "ScatterOutputs", "AllReduceSum", "SliceOutputsOwned", "distributed_method", "refresh_neighbors", "neighbor_refresh_adapters", "scatter_to_owners", "system_sum", "to_local", "localize", "current_dd_context", "autograd_target", "Scope", "ParticleHaloConfig", "reshard_by_destination", "ShardTensor", "DistributedModel", "DomainConfig", "StrategyKind", "SpatialPartitioner", "trace_and_validate"]
SUBMODULES = {
    "nvdd.ops": """ShardTensor StoragePolicy HaloStoragePolicy ShardedStoragePolicy LocalStoragePolicy GraphParallelPolicy
        OpAdapter GatherInputs GatherInputsFull SliceOwned ScatterOutputs AllReduceSum SliceOutputsOwned to_local""",
    "nvdd.specs": """MLIPSpec DistributionSpec CompilePolicy ForceStrategy OutputSpec OutputKind Reduce OpAdapter
        SPEC_MPNN_HALO SPEC_LJ_HALO SPEC_UMA_HALO SPEC_EWALD_HALO SPEC_PME_HALO SPEC_DFTD3_HALO SPEC_MPNN_GP""",
    "nvdd.spec": "MLIPSpec DistributionSpec OpAdapter OutputKind SPEC_MPNN_HALO",
    "nvdd.validate": "trace_and_validate",
}


@pytest.mark.parametrize("name", BRING_YOUR_OWN)
def test_names_of_bring_your_own_model(name):
    assert name in nvdd.__all__
    assert getattr(nvdd, name) is not None


@pytest.mark.parametrize("module", SUBMODULES)
def test_submodules_have_the_same_objects(module):
    for name in SUBMODULES[module].split():
        assert getattr(importlib.import_module(module), name) is getattr(nvdd, name)
