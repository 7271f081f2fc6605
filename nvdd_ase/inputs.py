"""What can be wrong with a calculator's arguments and atoms, found before any rank is asked."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from nvdd.cells import Frame
from nvdd.errors import InputError
from nvdd.model_config import stored_name

DTYPES = ("float32", "float64")
NUMERIC = "fiub"  # numpy's kinds of dtypes that a model can read
ASE_KEYWORDS = ("restart", "ignore_bad_restart_file", "label", "atoms", "directory")


def check_keywords(given: Iterable[str], own: Sequence[str]) -> None:
    """Refuses what is no argument: ASE's own constructor would take ``rank=2`` without a word."""
    for name in given:
        if name not in ASE_KEYWORDS:
            near = difflib.get_close_matches(name, own, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(own)}"
            raise InputError(f"NVDDCalculator has no argument {name!r}; {hint} (options of the model: model_options=)")


def checked_model(model: Any, options: Mapping[str, Any]) -> Any:
    """The model as ranks are told it: with an absolute path, since they may be started anew from another folder."""
    if isinstance(model, str):
        from nvdd.models.composed import parts
        from nvdd.models.registry import check

        check(model, options)
        return " + ".join(_with_absolute_path(part) for part in parts(model))
    if not callable(model) or not hasattr(model, "model_config") or isinstance(model, type):
        hint = ""
        if hasattr(model, "calculation_required"):
            hint = "; NVDDCalculator.from_calculator(...) distributes the model of a calculator"
        elif isinstance(model, type):
            hint = f"; {model.__name__} is a class: give an instance"
        raise InputError(
            "model must be 'family:checkpoint', 'py:module:attribute', or a wrapper object (a torch module with a "
            f"model_config), got {model!r}{hint}"
        )
    if options:
        raise InputError(
            f"model_options {dict(options)} go with the name of a model; this {type(model).__name__} is built already: "
            "set them there"
        )
    return model


def _with_absolute_path(model: str) -> str:
    family, _, checkpoint = model.partition(":")
    path = os.path.abspath(os.path.expanduser(checkpoint))
    return f"{family}:{path}" if family != "py" and checkpoint and os.path.isfile(path) else model


def checked_options(model: Any, options: Any) -> dict[str, Any]:
    """Options of a model's name, or of the blocks of a sum, in the form that ranks are told."""
    if isinstance(model, str):
        from nvdd.models.composed import normal_options

        return normal_options(model, options)
    return dict(options or {})


def checked_ranks(ranks: Any) -> int:
    """``ranks`` as an int."""
    if not isinstance(ranks, (int, np.integer)) or isinstance(ranks, bool) or ranks < 1:
        raise InputError(f"ranks must be a whole number of at least 1, got {ranks!r}")
    return int(ranks)


def checked_dtype(dtype: Any) -> str | None:
    """Name of the dtype, or None for the model's own."""
    name = str(dtype).removeprefix("torch.") if dtype is not None else None
    if name is not None and name not in DTYPES:
        raise InputError(f"dtype must be one of {', '.join(DTYPES)} or None (the model's own), got {dtype!r}")
    return name


def checked_device(device: Any) -> str:
    """``"cpu"``, ``"cuda"`` or ``"cuda:k"``; for None, a GPU if torch sees one."""
    import torch

    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    name = str(device)
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise InputError(
            f"device must be 'cpu', 'cuda', 'cuda:<number>' or None (a GPU if there is one), got {device!r}"
        )
    if name != "cpu":
        count = torch.cuda.device_count()
        if count == 0:
            raise InputError(
                f"device {name!r}: torch {torch.__version__} sees no GPU on this machine; use device='cpu'"
            )
        if ":" in name and int(name.split(":")[1]) >= count:
            raise InputError(f"device {name!r}: this machine has {count} GPU(s), numbered from 0")
    return name


def checked_seconds(name: str, value: Any) -> float | None:
    """A limit in seconds, or None for none."""
    if value is not None and not (_is_number(value) and value > 0):
        raise InputError(f"{name} must be a positive number of seconds, or None for no limit, got {value!r}")
    return value


def checked_domain(
    skin: Any,
    balance: str,
    grid: Sequence[int] | None,
    strategy: str,
    ranks: int,
    graph_plan: str = "curve",
    compile: bool | str = False,
    max_edges_per_chunk: int | None = None,
    recompute: bool = False,
) -> dict[str, Any]:
    """Arguments of `DomainConfig`."""
    from nvdd.config import DomainConfig
    from nvdd.partition import SpatialPartitioner

    if not _is_number(skin) or not math.isfinite(skin):
        raise InputError(f"skin must be a finite number of A, zero or positive, got {skin!r}")
    domain = {
        "skin": float(skin), "balance": balance, "grid_dims": grid, "strategy": strategy, "graph_plan": graph_plan,
        "compile": compile,
        "max_edges_per_chunk": max_edges_per_chunk,
        "recompute": recompute,
    }  # fmt: skip
    DomainConfig(**domain)
    SpatialPartitioner(ranks, grid, balance)
    return domain


def check_atoms(atoms: Any, description: Mapping[str, Any]) -> None:
    """Whether a model, as `Engine.describe` describes it, can compute these atoms."""
    if len(atoms) == 0:
        raise InputError("there are no atoms; the model needs at least one")
    bad = np.flatnonzero(~np.isfinite(atoms.positions).all(1))
    if len(bad):
        shown = ", ".join(f"{i} ({atoms.symbols[i]}): {atoms.positions[i]}" for i in bad[:3])
        raise InputError(
            f"{len(bad)} of {len(atoms)} atoms have positions that are not finite numbers: {shown}; "
            "look at what moved them (too long a time step, overlapping atoms)"
        )
    elements = description["elements"]
    unknown = sorted(set(atoms.numbers.tolist()) - set(elements)) if elements is not None else []
    if unknown:
        from ase.data import chemical_symbols as symbols

        names = ", ".join(symbols[z] for z in unknown)
        known = ", ".join(symbols[z] for z in sorted(elements))
        raise InputError(f"the model does not know {names}; it knows {known}")
    for where, values in (("info", read_info(atoms, description)), ("arrays", read_arrays(atoms, description))):
        for name, value in values.items():
            if value.dtype.kind not in NUMERIC or not np.isfinite(value).all():
                raise InputError(
                    f"the model reads atoms.{where}[{name!r}], which must be finite numbers, not {value!r}"
                )
    Frame.of(atoms.cell.array, atoms.pbc)


def read_info(atoms: Any, description: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Copies of those of the model's inputs of the system that the atoms have."""
    return {k: _copied(atoms.info[k]) for k in description["system_inputs"] if atoms.info.get(k) is not None}


def read_arrays(atoms: Any, description: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Copies of those of the model's inputs by atom that the atoms have; ``charges`` are initial charges, too."""
    found = {}
    for name in description["node_inputs"]:
        if (stored := stored_name(name, atoms.arrays)) is not None:
            found[name] = _copied(atoms.arrays[stored])
    return found


def same(a: Any, b: Any) -> bool:
    """Whether two inputs (numbers, arrays, dictionaries of them, None) are equal."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if a is None or b is None:
        return a is b
    return np.array_equal(_copied(a), _copied(b))


def _copied(value: Any) -> np.ndarray:
    try:
        array = np.array(value)
    except ValueError:  # lists of unequal lengths
        array = np.array(str(value))
    return array.astype(array.dtype.newbyteorder("="))  # as torch wants it


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
