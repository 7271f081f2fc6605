"""The Python side of the LAMMPS plugin: loads the file that a deck names, and calls its object at each step.

The pair style (src/pair_mliap_nvdd.cpp) calls `_serve` through ctypes: to load a file, to tell the elements of
``pair_coeff``, at each force evaluation, and when the style goes away. What is raised ends LAMMPS.
"""

from __future__ import annotations

import ctypes as ct
import itertools
import math
import pickle
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvdd.errors import InputError, MissingDependencyError, NvddError
from nvdd_lammps.plugin_data import ModelStruct, StepData, StepStruct

_LOAD, _TYPES, _COMPUTE, _RELEASE = range(4)
_DONE, _FAILED_HERE, _FAILED_EVERYWHERE = range(3)

# ---- models that pair styles have loaded -------------------------------------------------------------------------


@dataclass
class _Loaded:
    """What one pair style of this process has loaded."""

    unified: Any
    element_of_type: list[str | None]


_loaded: dict[int, _Loaded] = {}
_handles = itertools.count(1)


def _read(path: str) -> Any:
    """The object in a file: of nvdd's own format, or any that ML-IAP would load."""
    file = Path(path)
    if not file.is_file():
        raise InputError(f"there is no model file {path}")
    if file.suffix == ".nvdd":
        from nvdd_lammps import load_unified

        return load_unified(file)
    if file.suffix in (".pt", ".pth"):
        import torch

        return torch.load(file, map_location="cpu", weights_only=False)
    with file.open("rb") as stream:
        return pickle.load(stream)


def _check(unified: Any, path: str) -> None:
    missing = [name for name in ("element_types", "rcutfac", "compute_forces") if not hasattr(unified, name)]
    if missing:
        raise InputError(
            f"{path} holds a {type(unified).__name__}, which is no ML-IAP unified model: it has no {missing[0]}"
        )
    if not (math.isfinite(unified.rcutfac) and unified.rcutfac > 0):
        raise InputError(f"the model in {path} has rcutfac = {unified.rcutfac}; half of its cutoff is expected")
    if not unified.element_types or not all(isinstance(name, str) for name in unified.element_types):
        raise InputError(f"the model in {path} has element_types = {unified.element_types!r}; symbols are expected")


def _load(model: ModelStruct, path: str) -> None:
    unified = _read(path)
    _check(unified, path)
    unified.interface = None  # ML-IAP sets it; models that look for it find it
    elements = " ".join(unified.element_types).encode()
    if len(elements) >= ModelStruct.elements.size:
        raise InputError(f"the model in {path} has {len(unified.element_types)} elements, more than there are")
    model.handle = next(_handles)
    model.nelements = len(unified.element_types)
    model.cutoff = 2.0 * unified.rcutfac
    model.elements = elements
    _loaded[model.handle] = _Loaded(unified, [])


def _compute(step: StepStruct) -> None:
    loaded = _loaded[step.handle]
    data = StepData(step, loaded.element_of_type)
    for name in ("compute_descriptors", "compute_gradients", "compute_forces"):
        work = getattr(loaded.unified, name, None)
        if work is not None:
            work(data)
    if step.want_eatom and step.nlistatoms and not step.eatoms_set:
        raise InputError("this model gives no energies per atom: take out the compute pe/atom that asks for them")


def _release(model: ModelStruct) -> None:
    loaded = _loaded.pop(model.handle, None)
    model.handle = 0
    close = getattr(loaded and loaded.unified, "close", None)
    if close is not None:
        close()
    sys.stdout.flush()  # in `lmp` nothing else does: its exit doesn't end Python
    sys.stderr.flush()


# ---- called by the plugin ----------------------------------------------------------------------------------------


def _request(kind: int, pointer: int, text: str) -> None:
    if kind == _COMPUTE:
        _compute(StepStruct.from_address(pointer))
        return
    model = ModelStruct.from_address(pointer)
    if kind == _LOAD:
        _load(model, text)
    elif kind == _TYPES:
        _loaded[model.handle].element_of_type = [None if word == "NULL" else word for word in text.split()]
    else:
        _release(model)


def _serve(kind: int, pointer: int, text: bytes, message: int, size: int) -> int:
    try:
        _request(kind, pointer, text.decode(errors="surrogateescape"))
        ct.memset(message, 0, 1)  # last: a message that nobody has written tells the plugin of an interrupt
        return _DONE
    except BaseException as error:  # anything that is raised must end LAMMPS, which can't see Python's exceptions
        everywhere = _is_agreed(error)
        if _wants_traceback(error, kind, everywhere):
            traceback.print_exc()
        encoded = _describe(error).encode(errors="replace")[: size - 1].decode(errors="ignore").encode()
        ct.memmove(message, encoded + b"\0", len(encoded) + 1)
        sys.stdout.flush()
        sys.stderr.flush()
        return _FAILED_EVERYWHERE if everywhere else _FAILED_HERE


def _is_agreed(error: BaseException) -> bool:
    """Whether every rank raises the same."""
    ranks = sys.modules.get("nvdd_lammps.ranks")  # what isn't imported hasn't raised
    return ranks is not None and isinstance(error, ranks.AgreedError)


def _wants_traceback(error: BaseException, kind: int, everywhere: bool) -> bool:
    """Not for a user's mistake in the deck, and of an agreed error only where it began."""
    if everywhere:
        return error.__cause__ is not None
    return kind == _COMPUTE or not isinstance(error, NvddError | InputError | MissingDependencyError)


def _describe(error: BaseException) -> str:
    if isinstance(error, NvddError | InputError | MissingDependencyError):
        return str(error)
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


_Callback = ct.CFUNCTYPE(ct.c_int, ct.c_int, ct.c_void_p, ct.c_char_p, ct.c_void_p, ct.c_int)
_callback = _Callback(_serve)  # kept for as long as the process lives


def connect(address: int, model_size: int, step_size: int) -> None:
    """Called by the plugin's C++ side when it first needs Python; ``address`` takes the callback.

    Raises:
        NvddError: the compiled plugin belongs to another version of nvdd.
    """
    if (model_size, step_size) != (ct.sizeof(ModelStruct), ct.sizeof(StepStruct)):
        raise NvddError("the LAMMPS plugin was compiled by another version of nvdd: start LAMMPS from this environment")
    if not hasattr(sys, "argv"):
        sys.argv = ["lmp"]  # an embedded interpreter has none, and packages look at it
    ct.CFUNCTYPE(None, _Callback)(address)(_callback)
