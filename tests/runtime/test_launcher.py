"""Which environments are a launch, and what is wrong with those that look like one."""

from __future__ import annotations

import sys
import types
from datetime import timedelta

import pytest

from launching import slurm
from nvdd.errors import InputError, MissingDependencyError, NvddError
from nvdd.runtime import launcher
from nvdd.runtime.launcher import Launch, detect, first_host

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node7", "MASTER_PORT": "29400", "TORCHELASTIC_RUN_ID": "x",
}  # fmt: skip
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "9"}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_RANK": "5",
}  # fmt: skip


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, None),
        (TORCHRUN, Launch("torchrun", 3, 4, 1, 2, "env")),
        (
            {k: TORCHRUN[k] for k in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")},
            Launch("environment", 3, 4, None, None, "env"),
        ),
        # nvdd's own workers; a variable that somebody exports
        ({k: TORCHRUN[k] for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}, None),
        ({"WORLD_SIZE": "4"}, None),
        ({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}, None),  # alone: plain Python
        (MPICH, Launch("mpirun", 1, 2, 1, 2, "mpi")),
        (OPENMPI, Launch("mpirun", 5, 8, 1, 4, "mpi")),
        ({**MPICH, "PMI_RANK": "0", "PMI_SIZE": "1"}, None),
        ({**MPICH, **TORCHRUN}, Launch("torchrun", 3, 4, 1, 2, "env")),  # torchrun inside mpirun: the inner one
    ],
)
def test_launchers(env, expected):
    assert detect(env) == expected


def test_srun():
    launch = detect(slurm(1, 4))
    assert (launch.launcher, launch.rank, launch.size) == ("srun", 1, 4)
    assert (launch.local_rank, launch.local_size, launch.rendezvous) == (1, 4, "tcp")
    host, port = launch.address
    assert host == "127.0.0.1" and 15000 <= port < 32000
    assert detect(slurm(3, 4)).address == launch.address
    assert detect({**slurm(1, 4), "SLURM_STEP_ID": "7"}).address != launch.address

    nodes = {**slurm(5, 8), "SLURM_NNODES": "2", "SLURM_STEP_NODELIST": "gpu[03-04]", "SLURM_LOCALID": "1"}
    launch = detect(nodes)
    assert (launch.local_rank, launch.local_size, launch.address[0]) == (1, None, "gpu03")
    assert detect({**nodes, "MASTER_ADDR": "ib-gpu03", "MASTER_PORT": "4000"}).address == ("ib-gpu03", 4000)
    # srun --mpi=pmi2; an mpirun in a job, whose helpers (one a node) are tasks of srun
    assert detect({**nodes, "PMI_RANK": "5", "PMI_SIZE": "8"}).launcher == "srun"
    assert detect({**slurm(1, 2), "PMI_RANK": "5", "PMI_SIZE": "8"}).launcher == "mpirun"
    assert detect({**slurm(1, 2), **OPENMPI}).launcher == "mpirun"


@pytest.mark.parametrize(
    "without",
    [
        ("SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST"),  # salloc's shell
        ("SLURM_STEP_ID", "SLURM_STEP_NODELIST"),  # sbatch's script: SLURM_PROCID is 0 there
    ],
)
def test_a_slurm_shell_is_no_launch(without):
    env = {k: v for k, v in slurm(0, 4).items() if k not in without}
    assert detect(env) is None
    for step in ("batch", "interactive", "4294967290", "4294967291"):
        assert detect({**slurm(0, 4), "SLURM_STEP_ID": step}) is None
    assert detect({**slurm(0, 4), "SLURM_STEP_NUM_TASKS": "1"}) is None  # salloc's interactive step


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node01", "node01"),
        ("node01,node02", "node01"),
        ("node[01-04,07]", "node01"),
        ("node[7,9],other3", "node7"),
        ("rack[2-3]-n[04-05]", "rack2-n04"),
        ("a-b.c.org,d", "a-b.c.org"),
    ],
)
def test_first_host(nodes, host):
    assert first_host(nodes) == host


def test_wrong_number_of_ranks():
    launch = detect(TORCHRUN)
    launch.check_ranks(None)
    launch.check_ranks(4)
    with pytest.raises(InputError, match=r"ranks=3, but torchrun has started 4 processes.*leave ranks= out"):
        launch.check_ranks(3)


def test_broken_variables():
    with pytest.raises(InputError, match="PMI_RANK='one'"):
        detect({**MPICH, "PMI_RANK": "one"})


def test_mpirun_without_mpi4py(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(MissingDependencyError, match=r"mpirun has started 2 processes.*pip install mpi4py.*torchrun"):
        detect(MPICH).join(timedelta(seconds=1))


def test_singletons(monkeypatch):
    """An MPI that does not know of its launcher: each process is a world of one."""
    world = types.SimpleNamespace(Get_size=lambda: 1, Get_rank=lambda: 0)
    mpi = types.SimpleNamespace(
        COMM_WORLD=world,
        Get_library_version=lambda: "MPICH Version: 4.2\n...",
        Is_initialized=lambda: True,
        Is_finalized=lambda: False,
    )
    package = types.ModuleType("mpi4py")
    package.MPI = mpi
    monkeypatch.setitem(sys.modules, "mpi4py", package)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    text = r"has started 2 processes, but mpi4py \(MPICH Version: 4.2\) sees 1"
    with pytest.raises(InputError, match="mpirun " + text + r".*use the mpirun of that MPI"):
        launcher.check_mpi(detect(MPICH))
    with pytest.raises(InputError, match="srun " + text + r".*srun --mpi=pmi2"):
        launcher.check_mpi(detect(slurm(0, 2)))
    launcher.check_mpi(detect(TORCHRUN))  # torchrun does not use it
    monkeypatch.delitem(sys.modules, "mpi4py.MPI")
    launcher.check_mpi(detect(slurm(0, 2)))  # nor does srun, unless the script does
    assert detect() is None


def test_the_others_do_not_come(monkeypatch):
    monkeypatch.setattr(launcher, "check_mpi", lambda launch: None)  # another test may have started MPI in this process
    launch = detect({**slurm(0, 2), "MASTER_PORT": "0"})
    with pytest.raises(NvddError, match=r"rank 0 of 2 \(srun\): the ranks did not meet.*no 'if rank == 0' around it"):
        launch.join(timedelta(seconds=1))
