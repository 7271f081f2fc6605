"""Checkpoints: the whole state of a run in one file, from which a run on any number of ranks goes on.

The format is safetensors: per-atom tensors in the order of global ids (``atoms.positions``, ``atoms.velocities``, ...),
what belongs to systems (``systems.cell``, ``systems.system_state.thermostat``, ...), and the rest as JSON in the header.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from nvdd.communicator import Communicator
from nvdd.dynamics.failures import raise_together
from nvdd.dynamics.hooks import Hook, HookScope
from nvdd.dynamics.sharded_batch import WHOLE, ShardedBatch
from nvdd.dynamics.state import DynamicsState
from nvdd.errors import InputError

_VERSION = "2"
_DICTIONARIES = ("system_fields", "system_state")


def save_checkpoint(path: str | Path, batch: ShardedBatch, parameters: dict[str, Any]) -> None:
    """Writes all atoms to ``path``; every rank calls it at once, rank 0 writes.

    A file that is there already is replaced when the new one is whole and on the disk, so at any moment there is one
    from which to go on.

    Args:
        path: of the file; by custom ``.ckpt``.
        batch: the atoms.
        parameters: of the dynamics, to be compared by a restart.

    Raises:
        InputError: on every rank, if rank 0 can't write there. The run can go on.
    """
    rows = batch.gather_rows([name for name in batch.state.per_atom() if name != "ids"])
    failure = None
    if rows is not None:
        try:
            _save(Path(path), rows, batch, parameters)
        except Exception as error:
            failure = error
    raise_together(batch.comm, failure)


def _save(path: Path, rows: dict[str, torch.Tensor], batch: ShardedBatch, parameters: dict[str, Any]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    check_folder(path)
    tensors = {f"atoms.{name}": value.contiguous() for name, value in rows.items()}
    plain: dict[str, Any] = {}
    for name in WHOLE:
        value = getattr(batch.state, name)
        if name in _DICTIONARIES:
            tensors |= {f"systems.{name}.{key}": tensor.detach().cpu().contiguous() for key, tensor in value.items()}
        elif isinstance(value, torch.Tensor):
            tensors[f"systems.{name}"] = value.detach().cpu().contiguous()
        else:
            plain[name] = value
    header = {"nvdd_checkpoint": _VERSION, "plain": json.dumps(plain), "parameters": json.dumps(parameters)}
    try:
        write_whole(path, lambda part: save_file(tensors, part, metadata=header))
    except (OSError, SafetensorError) as error:
        raise InputError(f"no checkpoint can be written to {path}: {error}") from error


def load_checkpoint(path: str | Path, comm: Communicator) -> tuple[ShardedBatch, dict[str, Any]]:
    """Atoms and the parameters of the dynamics; each rank reads its own block of rows.

    All tensors come to the rank's device, whatever device wrote them; an integrator that computes with some of them on
    the host brings them there (`nvdd.dynamics.host`).

    Raises:
        InputError: there is no such file, or it is no checkpoint.
    """
    file, header = _open(Path(path))
    names = list(file.keys())
    n = file.get_slice("atoms.ids").get_shape()[0]
    mine = slice(n * comm.rank // comm.size, n * (comm.rank + 1) // comm.size)
    rows = {k.removeprefix("atoms."): file.get_slice(k)[mine].to(comm.device) for k in names if k.startswith("atoms.")}
    systems: dict[str, Any] = {"stress": None, **{name: {} for name in _DICTIONARIES}, **json.loads(header["plain"])}
    for name in names:
        kind, _, rest = name.partition(".")
        if kind != "systems":
            continue
        where, _, key = rest.partition(".")
        value = file.get_tensor(name)
        if key:
            systems[where][key] = value.to(comm.device)
        else:
            systems[where] = value.to(comm.device)
    state = DynamicsState(**{k: v for k, v in rows.items() if "." not in k}, **systems)
    state.set_per_atom({k: v for k, v in rows.items() if "." in k})
    return ShardedBatch(state, comm), json.loads(header["parameters"])


def read_parameters(path: str | Path) -> dict[str, Any]:
    """The parameters of the dynamics that wrote a checkpoint.

    Raises:
        InputError: as `load_checkpoint`.
    """
    return json.loads(_open(Path(path))[1]["parameters"])


def _open(path: Path) -> tuple[Any, dict[str, str]]:
    """The file, and its header."""
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, framework="pt")
        header = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"{path} can't be read as a checkpoint ({error}); give the file that a run with --checkpoint wrote"
        ) from error
    if header.get("nvdd_checkpoint") != _VERSION:
        raise InputError(f"{path} is no checkpoint of this version of nvdd (it says {header.get('nvdd_checkpoint')!r})")
    return file, header


def write_whole(path: Path, write: Any) -> None:
    """Calls ``write(temporary path)``, brings that file to the disk and puts it in the place of ``path`` at once."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write(part)
        mask = os.umask(0)
        os.umask(mask)
        part.chmod(0o666 & ~mask)  # as any other new file
        _sync(part)
        os.replace(part, path)
        _sync(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


class Checkpoint(Hook):
    """Writes a checkpoint, each time in the place of the last one.

    Args:
        path: of the file.
        every: steps.

    Raises:
        InputError: when the run starts, if the folder is not there; later, if the file can't be written.
    """

    scope = HookScope.GLOBAL
    observes = False

    def __init__(self, path: str | Path, every: int = 1000) -> None:
        super().__init__(every)
        self.path = Path(path)

    def open(self, run: Any) -> None:
        """Looks whether the file can be written, before anything is computed."""
        if run.comm.rank == 0:
            check_folder(self.path)

    def __call__(self, run: Any, seen: Any) -> None:
        save_checkpoint(self.path, run.batch, run.dynamics.parameters())


def check_folder(path: Path) -> None:
    """Raises InputError if there is no folder for ``path``."""
    if not path.parent.is_dir():
        raise InputError(f"{path} can't be written: there is no folder {path.parent}")
