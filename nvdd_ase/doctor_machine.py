"""What `nvdd doctor` says of torch and of the machine: GPUs, cores, network, memory, compiled kernels."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from pathlib import Path

from nvdd_ase.doctor_check import MISSING, OK, WARNING, Check
from nvdd_ase.doctor_packages import older, requirements


def python() -> Check:
    """The interpreter."""
    return Check("python", OK, f"{sys.version.split()[0]} ({sys.executable or '?'})")


def nvdd_itself() -> Check:
    """Version and place of nvdd."""
    import nvdd

    return Check("nvdd", OK, f"{nvdd.__version__} ({Path(nvdd.__file__).parent})")


def torch_build() -> Check:
    """Version, build and place of torch."""
    needed = requirements().get("torch", "2.8")
    try:
        import torch
    except Exception as error:  # OSError too: a library of CUDA that does not load
        remedy = f"install torch {needed} or newer, see https://pytorch.org/get-started/locally/"
        return Check("torch", MISSING, f"{type(error).__name__}: {error}", remedy, essential=True)
    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU"
    value = f"{torch.__version__}, built for {built_for} ({Path(torch.__file__).parent})"
    if older(torch.__version__, needed):
        return Check("torch", MISSING, value, f"nvdd needs torch {needed} or newer: pip install -U torch", True)
    return Check("torch", OK, value)


def backends() -> Check:
    """What torch.distributed can do."""
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        remedy = "more than one rank needs a torch that is built with torch.distributed"
        return Check("backends", MISSING, f"none in torch {torch.__version__}", remedy)
    there = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    value = ", ".join(name if has else f"no {name}" for name, has in there.items()) + " (nvdd uses gloo and nccl)"
    if not there["gloo"]:
        return Check("backends", MISSING, value, "ranks on CPUs need gloo: install torch from pytorch.org")
    if torch.version.cuda and not there["nccl"]:
        return Check("backends", WARNING, value, "without nccl, GPUs exchange through the CPU's memory: slow")
    return Check("backends", OK, value)


def gpus() -> Check:
    """What torch sees of GPUs."""
    import torch

    count = torch.cuda.device_count()
    if count:
        gib = 2**30
        about = [torch.cuda.get_device_properties(i) for i in range(count)]
        names = [f"{i}: {a.name}, {a.total_memory / gib:.0f} GiB" for i, a in enumerate(about)]
        torch.cuda.current_stream().synchronize()  # a driver that is too old says so here
        return Check("GPUs", OK, "; ".join(names))
    if torch.version.cuda:
        remedy = "if there is one: look at nvidia-smi and CUDA_VISIBLE_DEVICES; else nvdd computes on the CPU"
        return Check("GPUs", WARNING, f"torch is built for CUDA {torch.version.cuda} but sees none", remedy)
    if shutil.which("nvidia-smi"):
        remedy = "nvdd computes on the CPU; for GPUs install a torch for CUDA from pytorch.org"
        return Check("GPUs", WARNING, "this machine has nvidia-smi, but torch is built for the CPU", remedy)
    return Check("GPUs", OK, "none; nvdd computes on the CPU")


def cores() -> Check:
    """Cores, and threads for each rank."""
    from nvdd.runtime.rank_process import available_cores

    cores, quota = available_cores(), _quota()
    value = f"{cores} of {os.cpu_count()}" + (f", limited to the time of {quota:g}" if quota else "")
    usable = max(1, min(cores, int(quota or cores)))
    given = os.environ.get("OMP_NUM_THREADS")
    if given is None:
        value += "; OMP_NUM_THREADS is not set: N local ranks take 1/N of the cores each"
        if quota and quota < cores:
            remedy = f"set OMP_NUM_THREADS to {usable} / the number of ranks: threads beyond the limit slow all down"
            return Check("CPU cores", WARNING, value, remedy)
        return Check("CPU cores", OK, value)
    value += f"; OMP_NUM_THREADS={given}"
    threads = given.split(",")[0]
    if not threads.isdigit() or not 1 <= int(threads) <= usable:
        remedy = f"set it to a number from 1 to {usable}, such that number x ranks is at most {usable}"
        return Check("CPU cores", WARNING, value, remedy)
    return Check("CPU cores", OK, f"{value}: room for {usable // int(threads)} local ranks")


def _quota(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> float | None:
    """The cores whose time a container may use, if it is limited."""
    try:
        limit, period = path.read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return None


def network() -> Check:
    """The network interface that gloo takes."""
    there = sorted(name for _, name in socket.if_nameindex())
    given = os.environ.get("GLOO_SOCKET_IFNAME")
    if given:
        unknown = sorted(set(given.split(",")) - set(there))
        if unknown:
            remedy = f"gloo will not start: unset GLOO_SOCKET_IFNAME, or choose from {', '.join(there)}"
            return Check("network", WARNING, f"GLOO_SOCKET_IFNAME={given}; there is no {', '.join(unknown)}", remedy)
        return Check("network", OK, f"GLOO_SOCKET_IFNAME={given}")
    value = f"GLOO_SOCKET_IFNAME is not set: local ranks use the loopback interface; there are {', '.join(there)}"
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        remedy = "this host's name has no address: under torchrun or mpirun set GLOO_SOCKET_IFNAME (on one host: lo)"
        return Check("network", WARNING, value, remedy)
    return Check("network", OK, value)


def shared_memory() -> Check:
    """Memory that processes share."""
    from nvdd.runtime import shared_arrays

    fd, view = shared_arrays.create((1024,), "f8")
    os.close(fd)
    view[:] = 1.0
    how = "memfd" if hasattr(os, "memfd_create") else "a temporary file"
    value = f"works ({how})"
    try:
        size = shutil.disk_usage("/dev/shm").total
    except OSError:
        return Check("shared memory", OK, value)
    value += f"; /dev/shm {size / 2**20:.0f} MiB"
    if size < 2**28:
        remedy = "nvdd itself needs none of /dev/shm, NCCL does: start containers with --shm-size=1g"
        return Check("shared memory", WARNING, value, remedy)
    return Check("shared memory", OK, value)


def warp() -> Check:
    """Where compiled kernels are kept."""
    from nvdd.warp_runtime import warp as initialised

    wp = initialised()
    cache = wp.config.kernel_cache_dir
    value = f"{wp.__version__}; compiled kernels in {cache}"
    if not os.access(cache, os.W_OK):
        remedy = "this folder can't be written: set WARP_CACHE_PATH to one that can"
        return Check("warp", WARNING, value, remedy)
    return Check("warp", OK, value)
