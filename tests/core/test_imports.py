"""``import nvdd`` is cheap, and imports go one way."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

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
    "": ("specs", "models", "runtime"),
    "handlers": ("specs", "models", "runtime"),
    "specs": ("models", "runtime", "handlers"),
    "runtime": ("models",),
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
        "handlers": ROOT / "handlers",
        "runtime": ROOT / "runtime",
        "specs": Path(nvdd.specs.__file__).parent,
    }
    wrong = []
    for package, folder in folders.items():
        for path in folder.glob("*.py"):
            if package == "" and path.name in ("__init__.py", "worker.py"):  # the facade; the entry of a process
                continue
            for name in imports(path):
                part = name.split(".")[1] if "." in name else ""
                if name.startswith("nvdd_ase") or part in FORBIDDEN[package]:
                    wrong.append(f"{path.name} imports {name}")
    assert not wrong
