"""`nvdd export`: a model into a `.nvdd` file, proven to give the same energy and forces there."""

from __future__ import annotations

import io
import json
import os
import pickle
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import nvdd
from nvdd.config import DomainConfig
from nvdd.errors import InputError
from nvdd.models import composed, registry
from nvdd.models import configuration as configurations
from nvdd.specs.serialize import spec_to_json
from nvdd_lammps.model_file import DTYPES, FORMAT, SUFFIX, Envelope, cutoff_of, declared_spec, load_bytes, versions
from nvdd_lammps.model_probe import Probe, probe, refuse_difference
from nvdd_lammps.unified import NVDDUnified


def export_model(
    model: str,
    path: str | os.PathLike,
    *,
    options: Any = None,
    dtype: str | torch.dtype | None = None,
    elements: Sequence[str] | None = None,
    allow_pickle: bool = False,
    compile: bool | str = False,
    max_edges_per_chunk: int | None = None,
    recompute: bool = False,
) -> dict[str, Any]:
    """Writes a model for LAMMPS, after proving that the file gives the same energy and forces.

    Args:
        model: as in ASE: ``"sevenn:7net-0"``, ``"mace:my.model"``, ``"lj"``, ``"py:my_module:make"``, or a sum of such:
            ``"mace:my.model + lj"``.
        path: the file; its name ends in ``.nvdd``.
        options: options of the model; of a sum a list, one mapping for each block.
        dtype: ``"float32"`` or ``"float64"``; None for the model's own.
        elements: chemical symbols that a deck may map its atom types to; None for all that the model knows.
        compile: compile the model when LAMMPS first evaluates it, as `nvdd.DomainConfig.compile` says.
        max_edges_per_chunk, recompute: for less memory, as in `nvdd.DomainConfig`.
        allow_pickle: where the model can't be rebuilt from a configuration, put the pickled module into the file.

    Returns:
        The file's meta data: ``elements``, ``cutoff`` (A), ``dtype``, ``pickled``, ...

    Raises:
        InputError: an unknown model, option or element; a model without ``elements`` of its own and none given; one
            that can't be rebuilt, with the reason; one that comes out different.
        MissingDependencyError: the family's package is not installed.
    """
    how: dict[str, Any] = {"compile": compile, "max_edges_per_chunk": max_edges_per_chunk, "recompute": recompute}
    DomainConfig(**how)
    path, options = Path(path), composed.normal_options(model, options)
    if path.suffix != SUFFIX:
        raise InputError(f"{path}: the name of a model file must end in {SUFFIX}, by which LAMMPS knows how to read it")
    if not path.parent.is_dir():
        raise InputError(f"{path}: the folder {path.parent} does not exist")
    wrapper = registry.load(model, dtype=_torch_dtype(dtype), **options)
    wrapper = wrapper.cpu().eval().requires_grad_(False)
    family = configurations.PIPELINE if composed.is_composed(model) else model.partition(":")[0]
    meta: dict[str, Any] = {
        "format": FORMAT,
        "nvdd": nvdd.__version__,
        "packages": versions(model),
        "model": model,
        "family": family,
        "options": _plain_options(options),
        "elements": _elements(model, wrapper, elements),
        "cutoff": float(cutoff_of(wrapper)),
        "dtype": _dtype_name(getattr(wrapper, "dtype", torch.float64)),
        "units": "metal",
        "pickled": False,
        **how,
    }
    NVDDUnified(wrapper, meta)  # refuses what LAMMPS can't give
    original = probe(wrapper, meta["elements"])
    meta["probe"] = original.summary()
    try:
        content = _archive(meta, wrapper, configurations.describe(model, wrapper, meta["options"]))
        _verify(original, content, meta)
    except InputError as reason:
        if not allow_pickle:
            raise InputError(f"{model} can't be exported as configuration and weights: {reason}") from reason
        warnings.warn(
            f"{model} goes into {path} as a pickle, which whoever loads it executes, since {reason}", stacklevel=2
        )
        meta["pickled"] = True
        content = _archive(meta, wrapper, None)
        _verify(original, content, meta)
    _write(path, pickle.dumps(Envelope(content), protocol=4))
    return meta


def _archive(meta: dict[str, Any], wrapper: Any, described: dict[str, Any] | None) -> bytes:
    """The zip; ``described`` None for a pickled module."""
    from safetensors.torch import save

    entries = {"meta.json": _json(meta), "spec.json": _json(spec_to_json(declared_spec(wrapper)))}
    if described is None:
        buffer = io.BytesIO()
        torch.save(wrapper, buffer)
        entries["model.pkl"] = buffer.getvalue()
    else:
        # each by itself: tensors that share memory are refused by safetensors
        weights = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in _weights(wrapper).items()}
        entries |= {"configuration.json": _json(described), "weights.safetensors": save(weights)}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in entries.items():
            entry = zipfile.ZipInfo(name)  # without the time: the same model gives the same file
            entry.compress_type = zipfile.ZIP_DEFLATED if name.endswith(".json") else zipfile.ZIP_STORED
            archive.writestr(entry, data)
    return buffer.getvalue()


def _weights(wrapper: Any) -> dict[str, torch.Tensor]:
    weights = wrapper.state_dict()
    if further := [name for name, value in weights.items() if not isinstance(value, torch.Tensor)]:
        raise InputError(f"its state_dict has entries that are no tensors ({', '.join(further)})")
    return weights


def _json(content: Any) -> bytes:
    try:
        return json.dumps(content, indent=1, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise InputError(f"its configuration has no form in JSON: {error}") from error


def _write(path: Path, content: bytes) -> None:
    """The whole file or none."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _verify(original: Probe, content: bytes, meta: dict[str, Any]) -> None:
    """Raises unless the model in the archive computes what the original does."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            again, _ = load_bytes(content)
    except InputError as error:
        raise InputError(f"it can't be rebuilt: {str(error).removeprefix('model file: ')}") from error
    refuse_difference(original, probe(again, meta["elements"]))


def _elements(model: str, wrapper: Any, wanted: Sequence[str] | None) -> list[str]:
    """Chemical symbols, those of the model by atomic number, those asked for in their order."""
    from ase.data import atomic_numbers, chemical_symbols

    known = wrapper.model_config.elements
    if wanted is None:
        if known is None:
            raise InputError(
                f"{model} takes any element, so the file must be told which: give elements (--elements Si,O), those of your decks"
            )
        return [chemical_symbols[z] for z in sorted(known)]
    if unknown := [symbol for symbol in wanted if atomic_numbers.get(symbol, 0) == 0]:
        raise InputError(f"--elements: {', '.join(unknown)} is no chemical symbol; write e.g. --elements Si,O")
    if len(set(wanted)) != len(wanted) or not wanted:
        raise InputError(f"--elements {','.join(wanted)}: name each element once, and one at least")
    if known is not None and (absent := [symbol for symbol in wanted if atomic_numbers[symbol] not in known]):
        names = ", ".join(chemical_symbols[z] for z in sorted(known))
        raise InputError(f"{model} does not know {', '.join(absent)}; it knows {names}")
    return list(wanted)


def _dtype_name(dtype: torch.dtype) -> str:
    for name, value in DTYPES.items():
        if value is dtype:
            return name
    raise InputError(f"the model's weights are {dtype}; LAMMPS runs float32 or float64: give dtype (--dtype float64)")


def _plain_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options as they come back from JSON; raises for those that JSON can't hold."""
    return json.loads(_json(options))


def _torch_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None or (isinstance(dtype, torch.dtype) and dtype in DTYPES.values()):
        return dtype
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is not known; use float32 or float64, or leave it out for the model's own")
    return DTYPES[dtype]
