"""Whether this process is one of several that a launcher started: torchrun, mpirun, srun, or torch.distributed itself.

`detect` reads environment variables and touches neither MPI nor the network; `Launch.join` makes the process group.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ..errors import InputError, MissingDependencyError, NvddError

# (rank, size, local rank, local size) as each MPI's mpirun names them
_MPI_NAMES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
# A batch or salloc shell has the job's variables but runs in no step of its own, or in one that is not srun's.
_STEP_NAMES = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST")
_SHELL_STEPS = {"batch", "interactive", "extern", "4294967290", "4294967291", "4294967292"}
_PORTS = (15000, 17000)  # first, how many: below the ephemeral ports of Linux
_HOW_TO_OPT_OUT = "spmd='off' makes every process compute by itself"


@dataclass(frozen=True)
class Launch:
    """One process of a run of several.

    Attributes:
        launcher: ``"torchrun"``, ``"mpirun"``, ``"srun"``, ``"torch.distributed"`` (the script has made the process
            group itself), or ``"environment"`` (RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set by other means).
        rank, size: this process's number, and how many there are.
        local_rank, local_size: the same among those of its host; None where the launcher does not say.
        rendezvous: how the processes find each other: ``"env"``, ``"mpi"``, ``"tcp"``, or ``"group"`` (they have).
        address: host and port of rank 0, for ``"tcp"``.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int | None = None
    local_size: int | None = None
    rendezvous: str = "env"
    address: tuple[str, int] | None = None

    def check_ranks(self, ranks: int | None) -> None:
        """Raises `InputError` if the user asks for another number of ranks than there are."""
        if ranks is not None and ranks != self.size:
            raise InputError(
                f"ranks={ranks!r}, but {self.launcher} has started {self.size} processes, each of which is one rank: "
                f"leave ranks= out, or start the script with plain python ({_HOW_TO_OPT_OUT})"
            )

    def join(self, timeout: timedelta) -> bool:
        """Makes torch.distributed's default group over gloo, unless there is one; True if it was made here.

        Raises:
            NvddError: not all processes came within ``timeout``.
            MissingDependencyError: mpirun without mpi4py.
            InputError: MPI sees another number of processes than the launcher started.
        """
        import torch.distributed as dist

        check_mpi(self)
        if dist.is_initialized():
            if (dist.get_rank(), dist.get_world_size()) != (self.rank, self.size):
                raise InputError(
                    f"torch.distributed calls this process rank {dist.get_rank()} of {dist.get_world_size()}, "
                    f"{self.launcher} rank {self.rank} of {self.size}"
                )
            return False
        try:
            if self.rendezvous == "env":
                dist.init_process_group("gloo", init_method="env://", timeout=timeout)
            else:
                store = self._store(dist, timeout)
                dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size, timeout=timeout)
        except (RuntimeError, OSError) as error:  # torch's DistError and its kin are RuntimeErrors
            raise NvddError(self._explain(error, timeout)) from error
        return True

    def _store(self, dist: Any, timeout: timedelta) -> Any:
        """A TCPStore that rank 0 hosts."""
        if self.rendezvous == "tcp":
            host, port = self.address
            return dist.TCPStore(host, port, self.size, is_master=self.rank == 0, timeout=timeout)
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
        store, address = None, None
        if self.rank == 0:  # the system chooses a free port; nobody can take it in between
            store = dist.TCPStore("127.0.0.1", 0, self.size, is_master=True, timeout=timeout, wait_for_workers=False)
            address = (MPI.Get_processor_name(), store.port)
        host, port = comm.bcast(address, root=0)
        if store is None:
            same_host = host == MPI.Get_processor_name()  # whose name need not resolve
            store = dist.TCPStore("127.0.0.1" if same_host else host, port, self.size, is_master=False, timeout=timeout)
        return store

    def _explain(self, error: Exception, timeout: timedelta) -> str:
        where = f" at {self.address[0]}:{self.address[1]}" if self.address else ""
        text = f"rank {self.rank} of {self.size} ({self.launcher}): the ranks did not meet{where}: {error}"
        if "address already in use" in str(error).lower():
            return text + ". Another program has the port: export MASTER_PORT=<a free port> before the launcher"
        return text + (
            f". All {self.size} processes must make the calculator, within start_timeout ({timeout.total_seconds():g} s) "
            f"of each other: no 'if rank == 0' around it ({_HOW_TO_OPT_OUT})"
        )


def detect(environ: Mapping[str, str] | None = None) -> Launch | None:
    """The launch that this process belongs to; None for a process by itself, also one that a launcher started alone.

    Args:
        environ: environment variables; None for this process's, and then torch.distributed and MPI are asked too if
            the script has started them.
    """
    env = os.environ if environ is None else environ
    launch = (
        (_from_group(env) if environ is None else None)
        or _from_torchrun(env)
        or _from_mpi(env)
        or _from_slurm(env)
        or (_from_loaded_mpi() if environ is None else None)
    )
    return launch if launch is not None and launch.size > 1 else None


def check_mpi(launch: Launch) -> None:
    """Compares the launcher's number of processes with MPI's, where MPI is used.

    Without a common PMI, an MPI makes each process a world of one ("singletons"): ``srun`` with the wrong ``--mpi``,
    or the mpirun of another MPI than mpi4py's. Each would then take itself for the only one.
    """
    if launch.rendezvous == "mpi":
        try:
            from mpi4py import MPI
        except ImportError as error:
            raise MissingDependencyError(
                f"{launch.launcher} has started {launch.size} processes, which find each other through mpi4py, and that "
                f"can't be imported ({error}). Install it into {sys.executable}: pip install mpi4py; or use torchrun "
                f"--nproc-per-node {launch.size} instead ({_HOW_TO_OPT_OUT})"
            ) from error
    else:
        MPI = _loaded_mpi()  # a script that has loaded it has asked for it; otherwise MPI is none of our business
        if MPI is None or launch.launcher != "srun":
            return
    seen = MPI.COMM_WORLD.Get_size()
    if seen == launch.size:
        return
    library = MPI.Get_library_version().splitlines()[0].strip("\0 ")
    remedy = (
        "choose the plugin that fits this MPI (srun --mpi=list; srun --mpi=pmi2 or --mpi=pmix), or don't import mpi4py: "
        "nvdd needs no MPI under srun"
        if launch.launcher == "srun"
        else "use the mpirun of that MPI, or build mpi4py for this one (pip install --no-binary mpi4py mpi4py), or use torchrun"
    )
    raise InputError(
        f"{launch.launcher} has started {launch.size} processes, but mpi4py ({library}) sees {seen} in this one, so that "
        f"each process would do the whole work: {remedy}"
    )


def _from_group(env: Mapping[str, str]) -> Launch | None:
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    known = _from_torchrun(env) or _from_mpi(env) or _from_slurm(env)
    rank, size = dist.get_rank(), dist.get_world_size()
    local = (known.local_rank, known.local_size) if known and (known.rank, known.size) == (rank, size) else (None, None)
    return Launch("torch.distributed", rank, size, *local, rendezvous="group")


def _from_torchrun(env: Mapping[str, str]) -> Launch | None:
    # nvdd's own worker processes have RANK and WORLD_SIZE, but no address: they are no launch
    if not all(env.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        return None
    name = "torchrun" if "TORCHELASTIC_RUN_ID" in env else "environment"
    rank, size = _int(env, "RANK"), _int(env, "WORLD_SIZE")
    return Launch(name, rank, size, _int(env, "LOCAL_RANK", None), _int(env, "LOCAL_WORLD_SIZE", None))


def _from_mpi(env: Mapping[str, str]) -> Launch | None:
    for rank, size, local_rank, local_size in _MPI_NAMES:
        if env.get(rank) and env.get(size):
            mpi = Launch(
                "mpirun", _int(env, rank), _int(env, size), _int(env, local_rank, None), _int(env, local_size, None), "mpi"
            )  # fmt: skip
            slurm = _from_slurm(env)
            # srun --mpi=pmi2 sets PMI_RANK too; mpirun inside a job starts its helpers by srun, one a node
            return slurm if slurm and (slurm.rank, slurm.size) == (mpi.rank, mpi.size) and rank == "PMI_RANK" else mpi
    return None


def _from_slurm(env: Mapping[str, str]) -> Launch | None:
    in_step = any(env.get(name) for name in _STEP_NAMES)
    step = env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID") or "0"
    names = [n for n in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS") if env.get(n)]
    if not in_step or step in _SHELL_STEPS or not names or not env.get("SLURM_PROCID"):
        return None
    size = _int(env, names[0])
    one_node = (env.get("SLURM_STEP_NUM_NODES") or env.get("SLURM_NNODES")) == "1"
    return Launch(
        "srun",
        _int(env, "SLURM_PROCID"),
        size,
        _int(env, "SLURM_LOCALID", None),
        size if one_node else None,
        "tcp",
        _slurm_address(env, step, one_node),
    )


def _slurm_address(env: Mapping[str, str], step: str, one_node: bool) -> tuple[str, int]:
    """Where task 0 can be reached: it runs on the step's first node; the port follows from job and step."""
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    # the node where srun was typed is a login node under salloc, hence the last choice
    host = env.get("MASTER_ADDR") or (
        "127.0.0.1" if one_node else first_host(nodes) if nodes else env.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
    )
    job = int(re.sub(r"\D", "", env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID") or "0") or 0)
    first, count = _PORTS
    port = env.get("MASTER_PORT") or first + (job * 13 + int(re.sub(r"\D", "", step) or 0)) % count
    return host, int(port)


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list: ``"gpu[03-06,12],login1"`` -> ``"gpu03"``."""
    head = re.match(r"[^,\[]*(\[[^\]]*\][^,\[]*)*", nodelist.strip()).group()
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", head)


def _loaded_mpi() -> Any:
    """mpi4py's MPI if this process has loaded and initialised it, else None."""
    module = sys.modules.get("mpi4py.MPI")
    return module if module is not None and module.Is_initialized() and not module.Is_finalized() else None


def _from_loaded_mpi() -> Launch | None:
    """An mpirun whose variables are unknown, in a script that uses mpi4py itself."""
    MPI = _loaded_mpi()
    if MPI is None:
        return None
    return Launch("mpirun", MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size(), rendezvous="mpi")


def _int(env: Mapping[str, str], name: str, default: Any = "required") -> Any:
    value = env.get(name)
    if not value and default != "required":
        return default
    try:
        return int(value)
    except (TypeError, ValueError):
        raise InputError(
            f"the environment variable {name}={value!r}, by which a launcher numbers its processes, is not a whole "
            f"number: unset it ({_HOW_TO_OPT_OUT})"
        ) from None
