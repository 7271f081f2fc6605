"""`NVDDCalculator` under launchers: the script of a single process, unchanged, gives its numbers and its files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from ase.io import read

from launching import MPIRUN, Run, run

SCRIPT = Path(__file__).with_name("spmd_ase_script.py")
EXAMPLE = Path(__file__).parents[2] / "examples" / "spmd_md.py"
needs_mpi = pytest.mark.skipif(not MPIRUN.exists(), reason="needs mpich")
pytestmark = pytest.mark.timeout(100)


def scenario(launcher: str, n: int, name: str, folder: Path, limit: float = 60.0) -> Run:
    folder.mkdir(exist_ok=True)
    result = run(launcher, n, SCRIPT, name, cwd=folder, limit=limit)
    print(f"{launcher} {n} {name}: {result.seconds:.1f} s, exit status {result.codes}\n{result.out}{result.err}")
    assert not result.left
    return result


def said(result: Run) -> dict[str, object]:
    """What the script printed, by its first words; under several ranks what the last of them printed."""
    values = {}
    for line in result.out.splitlines():
        word, _, value = line.partition(" [")
        values[word] = json.loads("[" + value) if value else None
    return values


def assert_same(a: dict, b: dict, words: list[str]) -> None:
    for word in words:
        np.testing.assert_allclose(a[word], b[word], rtol=1e-11, atol=1e-12, err_msg=word)


# -- one script


@pytest.fixture(scope="module")
def serial(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serial")
    assert run("python", 1, EXAMPLE, "--output", str(folder)).codes == [0]
    return read(folder / "spmd_md.traj@:")


@pytest.mark.parametrize(
    ("launcher", "n"),
    [
        ("torchrun", 2),
        pytest.param("mpirun", 2, marks=needs_mpi),
        pytest.param("mpirun", 3, marks=[needs_mpi, pytest.mark.slow]),
        pytest.param("srun", 2, marks=pytest.mark.slow),  # test_several_calculators and others run under it
    ],
)
def test_dynamics_of_one_script(serial, launcher, n, tmp_path):
    result = run(launcher, n, EXAMPLE, "--output", str(tmp_path))
    print(f"{result.seconds:.1f} s\n{result.out}{result.err}")
    assert set(result.codes) == {0} and not result.left
    assert [path.name for path in tmp_path.iterdir()] == ["spmd_md.traj"]
    frames = read(tmp_path / "spmd_md.traj@:")
    assert len(frames) == len(serial) == 5
    for a, b in zip(frames, serial, strict=True):
        np.testing.assert_allclose(a.positions, b.positions, rtol=0, atol=1e-11)
        np.testing.assert_allclose(a.get_forces(), b.get_forces(), rtol=0, atol=1e-12)
        assert abs(a.get_potential_energy() - b.get_potential_energy()) < 1e-11 * abs(b.get_potential_energy())
    assert len(result.lines("step")) == 5 and len(result.lines("rank ")) == n
    assert f"{n} ranks by {launcher}" in result.err


def test_several_calculators(tmp_path):
    alone, served = scenario("python", 1, "workflows", tmp_path / "a"), scenario("srun", 2, "workflows", tmp_path / "b")
    assert alone.codes == [0] and served.codes == [0, 0]
    words = [word for word, value in said(alone).items() if value]
    assert len(words) == 10
    assert_same(said(alone), said(served), words)
    assert len(served.lines("end")) == 1


@needs_mpi
def test_ase_does_not_wait_for_ranks_that_serve(tmp_path):
    result = scenario("mpirun", 2, "files", tmp_path)
    assert result.codes == [0] and "frames 0" not in result.out and result.lines("back") == ["back 48"]


def test_a_script_that_has_a_process_group(tmp_path):
    result = scenario("env", 2, "own_group", tmp_path)
    assert result.codes == [0, 0] and said(result)["group"] == [2.0, True, 2]
    assert "2 ranks by torch.distributed" in result.err or not result.err


# -- replicated, off


@needs_mpi
def test_replicated(tmp_path):
    alone, result = scenario("python", 1, "off", tmp_path), scenario("mpirun", 2, "replicated", tmp_path)
    assert result.codes == [0]
    for step in range(3):
        found = sorted(json.loads(line.split(" ", 1)[1]) for line in result.lines(f"step{step}"))
        assert [rank for rank, *_ in found] == [0, 1]
        assert found[0][1:] == found[1][1:]  # to the last bit: ranks must not drift apart
    assert [json.loads(line.split(" ", 1)[1])[1] for line in result.lines("report")] == [[24, 24]] * 2
    assert alone.codes == [0]
    caught = [json.loads(line.split(" ", 1)[1]) for line in result.lines("caught")]
    assert len(caught) == 4 and {kind for kind, _, _ in caught} == {"InputError"}
    texts = [text for _, text, _ in caught]
    assert sum("compared with rank 0, rank 1 in positions differs" in text for text in texts) == 2
    assert sum("weights on ranks [1] are not those of rank 0" in text for text in texts) == 2


@needs_mpi
def test_off(tmp_path):
    result = scenario("mpirun", 2, "off", tmp_path)
    first, second = (json.loads(line.split(" ", 1)[1]) for line in result.lines("alone"))
    assert first == second and first[0] == 1 and result.codes == [0]


# -- what goes wrong


def test_arguments_that_are_refused(tmp_path):
    result = scenario("srun", 2, "refusals", tmp_path)
    caught = [json.loads(line.split(" ", 1)[1]) for line in result.lines("caught")]
    assert result.codes == [0, 0] and result.lines("ranks") == ["ranks 2"]
    texts = [text for _, text, _ in caught]
    assert sum("ranks=3, but srun has started 2 processes" in text for text in texts) == 2
    assert sum("spmd must be 'serve', 'replicated' or 'off'" in text for text in texts) == 2
    assert "this run has begun with spmd='serve'" in texts[4]
    assert "Nothing" in texts[5] and said(result)["still"]


def test_faults_in_the_model(tmp_path):
    result = scenario("srun", 2, "faults", tmp_path)
    values = said(result)
    assert values["fault"] == [1, "forward", "ValueError: no good"] and result.lines("results") == ["results []"]
    assert values["one"] == values["recovered"]
    caught = [json.loads(line.split(" ", 1)[1]) for line in result.lines("caught")]
    assert [kind for kind, _, _ in caught] == ["RankError", "RankError", "NvddError"]
    assert caught[1][1].startswith("rank 1 failed in phase 'forward': its process") and "killed" in caught[1][1]
    assert "start the job again" in caught[2][1]
    assert all(seconds < 2.0 for _, _, seconds in caught)
    assert result.codes == [0, -9]


@pytest.mark.slow  # as in test_spmd.py, but for a calculation
def test_a_stopped_rank(tmp_path):
    result = scenario("srun", 2, "stop", tmp_path)
    ((kind, text, seconds),) = (json.loads(line.split(" ", 1)[1]) for line in result.lines("caught"))
    assert kind == "RankError" and seconds < 5.0
    assert "no answer to 'evaluate' within 2 s (rank 1 is in phase 'forward', and its process is stopped)" in text


@needs_mpi
def test_srun_without_a_working_mpi(tmp_path):
    result = scenario("srun", 2, "singletons", tmp_path)
    assert result.codes == [1, 1] and result.seconds < 30
    assert result.err.count("srun has started 2 processes, but mpi4py") == 2 and "srun --mpi=" in result.err


def test_only_one_rank_makes_the_calculator(tmp_path):
    result = scenario("srun", 2, "guarded", tmp_path)
    assert result.codes == [1, 0]
    assert "the ranks did not meet" in result.err and "no 'if rank == 0' around it" in result.err
