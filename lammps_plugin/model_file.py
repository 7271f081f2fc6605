"""The `.nvdd` file: a model as its configuration and weights.

LAMMPS loads `pair_style mliap unified FILE` by unpickling it, so the file is a pickle; its only global is
`nvdd_lammps.from_bytes`, and the one argument of that is a zip archive:

* ``meta.json``: format, versions of nvdd and of the family's packages, family, elements, cutoff (A), dtype, units;
* ``spec.json``: the model's `MLIPSpec`;
* ``configuration.json`` and ``weights.safetensors``, from which the model is rebuilt; or, in a file that was exported
  with ``allow_pickle``, ``model.pkl`` in place of the two, which executes code when it is loaded.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import nvdd
from nvdd.errors import InputError
from nvdd.models import configuration as configurations
from nvdd.models import registry
from nvdd.specs.serialize import spec_from_json, spec_to_json
from nvdd_lammps.model_probe import probe, refuse_difference

FORMAT = 1
SUFFIX = ".nvdd"

_DTYPES = {"float32": torch.float32, "float64": torch.float64}
# distributions whose version may change what a model computes, by family
_PACKAGES = {"mace": ("mace-torch", "e3nn"), "sevenn": ("sevenn", "e3nn")}
# constants that e3nn's code generation has as buffers in modules that were unpickled, and as literals in new ones
_TRACED = re.compile(r"\._tensor_constant\d+$")
_META_KEYS = ("format", "nvdd", "packages", "model", "family", "elements", "cutoff", "dtype", "units", "pickled")


def export_model(
    model: str,
    path: str | os.PathLike,
    *,
    options: dict[str, Any] | None = None,
    dtype: str | torch.dtype | None = None,
    elements: Sequence[str] | None = None,
    allow_pickle: bool = False,
) -> dict[str, Any]:
    """Writes a model for LAMMPS, after proving that the file gives the same energy and forces.

    Args:
        model: as in ASE: ``"sevenn:7net-0"``, ``"mace:my.model"``, ``"lj"``, ``"py:my_module:make"``.
        path: the file; its name ends in ``.nvdd``.
        options: options of the model.
        dtype: ``"float32"`` or ``"float64"``; None for the model's own.
        elements: chemical symbols that a deck may map its atom types to; None for all that the model knows.
        allow_pickle: where the model can't be rebuilt from a configuration, put the pickled module into the file.

    Returns:
        The file's meta data: ``elements``, ``cutoff`` (A), ``dtype``, ``pickled``, ...

    Raises:
        InputError: an unknown model, option or element; a model without ``elements`` of its own and none given; one
            that can't be rebuilt, with the reason; one that comes out different.
        MissingDependencyError: the family's package is not installed.
    """
    path, options = Path(path), dict(options or {})
    if path.suffix != SUFFIX:
        raise InputError(f"{path}: the name of a model file must end in {SUFFIX}, by which LAMMPS knows how to read it")
    if not path.parent.is_dir():
        raise InputError(f"{path}: the folder {path.parent} does not exist")
    wrapper = registry.load(model, dtype=_torch_dtype(dtype), **options)
    wrapper = wrapper.cpu().eval().requires_grad_(False)
    family = model.partition(":")[0]
    meta = {
        "format": FORMAT,
        "nvdd": nvdd.__version__,
        "packages": _versions(family),
        "model": model,
        "family": family,
        "options": _plain_options(options),
        "elements": _elements(model, wrapper, elements),
        "cutoff": float(_cutoff(wrapper)),
        "dtype": _dtype_name(wrapper.dtype),
        "units": "metal",
        "pickled": False,
    }
    try:
        described = configurations.describe(model, wrapper, meta["options"])
        content = _archive(meta, wrapper, described)
        _verify(wrapper, content, meta)
    except InputError as reason:
        if not allow_pickle:
            raise InputError(f"{model} can't be exported as configuration and weights: {reason}") from reason
        warnings.warn(
            f"{model} goes into {path} as a pickle, since {reason}. Whoever loads the file executes it",
            stacklevel=2,
        )
        meta["pickled"] = True
        content = _archive(meta, wrapper, None)
        _verify(wrapper, content, meta)
    meta["probe"] = probe(wrapper, meta["elements"]).summary()
    content = _archive(meta, wrapper, None if meta["pickled"] else described)
    _write(path, pickle.dumps(_Envelope(content), protocol=4))
    return meta


def load_file(path: str | os.PathLike) -> tuple[Any, dict[str, Any]]:
    """The wrapper, on the CPU and for inference, and the meta data of a `.nvdd` file.

    Nothing of the file is executed, unless it was exported with ``allow_pickle``: then a warning says so.

    Raises:
        InputError: no such file; one that is damaged, no `.nvdd` file, or of a newer format; one whose model can't be
            rebuilt here as it was.
        MissingDependencyError: the family's package is not installed.
    """
    with _naming(path):
        return _load(*_unpack(_read(path)))


def load_bytes(content: bytes) -> tuple[Any, dict[str, Any]]:
    """`load_file` of the archive inside; what unpickling the file comes to."""
    with _naming("model file"):
        return _load(*_unpack(content))


def read_meta(path: str | os.PathLike) -> dict[str, Any]:
    """The meta data alone; builds no model."""
    with _naming(path):
        return _unpack(_read(path))[0]


class _naming:
    """Puts the file's name before the messages of errors."""

    def __init__(self, path: Any) -> None:
        self.path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, InputError) and type(error) is InputError:
            raise InputError(f"{self.path}: {error}") from error


# -- writing ------------------------------------------------------------------------------------------------------


class _Envelope:
    def __init__(self, content: bytes) -> None:
        self.content = content

    def __reduce__(self):
        from nvdd_lammps import from_bytes

        return from_bytes, (self.content,)


def _archive(meta: dict[str, Any], wrapper: Any, described: dict[str, Any] | None) -> bytes:
    """The zip; ``described`` None for a pickled module."""
    from safetensors.torch import save

    spec = wrapper.distribution_spec() if callable(wrapper.distribution_spec) else wrapper.distribution_spec
    entries = {"meta.json": _json(meta), "spec.json": _json(spec_to_json(spec))}
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
        return json.dumps(content, indent=1, sort_keys=True, allow_nan=False).encode()
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


def _verify(wrapper: Any, content: bytes, meta: dict[str, Any]) -> None:
    """Raises unless what the archive gives computes what the wrapper computes."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            again, _ = load_bytes(content)
    except InputError as error:
        raise InputError(f"it can't be rebuilt: {str(error).removeprefix('model file: ')}") from error
    refuse_difference(probe(wrapper, meta["elements"]), probe(again, meta["elements"]))


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


def _cutoff(wrapper: Any) -> float:
    neighbors = wrapper.model_config.neighbor_config
    if neighbors is None:
        raise InputError(f"{type(wrapper).__name__}.model_config has no neighbor_config, so its cutoff is unknown")
    return neighbors.cutoff


def _torch_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None or dtype in _DTYPES.values():
        return dtype
    if dtype not in _DTYPES:
        raise InputError(f"dtype {dtype!r} is not known; use float32 or float64, or leave it out for the model's own")
    return _DTYPES[dtype]


def _dtype_name(dtype: torch.dtype) -> str:
    for name, value in _DTYPES.items():
        if value is dtype:
            return name
    raise InputError(f"the model's weights are {dtype}; LAMMPS runs float32 or float64: give dtype (--dtype float64)")


def _plain_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options as they come back from JSON; raises for those that JSON can't hold."""
    return json.loads(_json(options))


def _versions(family: str) -> dict[str, str]:
    from importlib import metadata

    found = {"torch": torch.__version__}
    for name in _PACKAGES.get(family, ()):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found


# -- reading ------------------------------------------------------------------------------------------------------


class _Reader(pickle.Unpickler):
    """Reads the envelope without calling anything: `from_bytes` gives back its argument."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("nvdd_lammps", "from_bytes"):
            return _unchanged
        raise InputError(f"it is a pickle that wants {module}.{name}, which no {SUFFIX} file does: not written by `nvdd export`")


def _unchanged(content: bytes) -> bytes:
    return content


def _read(path: str | os.PathLike) -> bytes:
    """The archive inside the pickle."""
    try:
        with open(path, "rb") as file:
            content = _Reader(file).load()
    except FileNotFoundError:
        raise InputError(f"there is no such file (working directory {os.getcwd()})") from None
    except OSError as error:
        raise InputError(f"it can't be read: {error.strerror}") from error
    except InputError:
        raise
    except Exception as error:  # a damaged pickle raises whatever its bytes lead to
        raise InputError(_damaged(error)) from error
    if not isinstance(content, bytes):
        raise InputError(f"it holds a {type(content).__name__} and no model: it was not written by `nvdd export`")
    return content


def _damaged(error: Exception) -> str:
    return f"it is no {SUFFIX} file or was cut short ({type(error).__name__}: {error}); copy it again, or export the model again"


def _unpack(content: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Meta data, checked, and the archive's entries."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = {name: archive.read(name) for name in archive.namelist()}
        meta = json.loads(entries["meta.json"])
        version = meta["format"]
    except (zipfile.BadZipFile, KeyError, ValueError, TypeError, EOFError, NotImplementedError, RuntimeError) as error:
        raise InputError(_damaged(error)) from error
    if not isinstance(version, int) or version > FORMAT:
        raise InputError(
            f"its format is {version}, written by nvdd {meta.get('nvdd')}; nvdd {nvdd.__version__} here reads format "
            f"{FORMAT}: update nvdd, or export the model again with this one"
        )
    if missing := [key for key in _META_KEYS if key not in meta]:
        raise InputError(_damaged(KeyError(f"meta.json lacks {', '.join(missing)}")))
    return meta, entries


def _load(meta: dict[str, Any], entries: dict[str, bytes]) -> tuple[Any, dict[str, Any]]:
    wrapper = _unpickled(meta, entries) if meta["pickled"] else _rebuilt(meta, entries)
    spec = spec_from_json(_parsed(entries, "spec.json"))
    now = wrapper.distribution_spec() if callable(wrapper.distribution_spec) else wrapper.distribution_spec
    if now != spec:
        raise InputError(
            f"{meta['model']} declares another distribution here than when it was exported (nvdd {meta['nvdd']}): "
            "export it again"
        )
    if abs(_cutoff(wrapper) - meta["cutoff"]) > 1e-9:
        raise InputError(
            f"{meta['model']} has a cutoff of {_cutoff(wrapper)} A here and of {meta['cutoff']} A in the file: export it again"
        )
    return wrapper, meta


def _rebuilt(meta: dict[str, Any], entries: dict[str, bytes]) -> Any:
    from safetensors import SafetensorError
    from safetensors.torch import load

    described, dtype = _parsed(entries, "configuration.json"), _torch_dtype(meta["dtype"])
    try:
        weights = load(entries["weights.safetensors"])
    except (KeyError, SafetensorError) as error:
        raise InputError(_damaged(error)) from error
    try:
        wrapper = configurations.rebuild(meta["family"], described, dtype)
        missing, unexpected = wrapper.load_state_dict(weights, strict=False)
    except (InputError, ImportError):
        raise
    except Exception as error:  # a model's package fails in its own ways when it is not as it was
        raise InputError(
            f"{meta['model']} can't be rebuilt from its configuration ({type(error).__name__}: {error}); the file was "
            f"written with {_list(meta['packages'])}, here are {_list(_versions(meta['family']))}"
        ) from error
    unexpected = [name for name in unexpected if not _TRACED.search(name)]
    if missing or unexpected:
        raise InputError(
            f"the weights of {meta['model']} are not those of the model that its configuration makes (missing: "
            f"{', '.join(missing) or 'none'}; unexpected: {', '.join(unexpected) or 'none'}); the file was written "
            f"with {_list(meta['packages'])}, here are {_list(_versions(meta['family']))}"
        )
    return wrapper


def _unpickled(meta: dict[str, Any], entries: dict[str, bytes]) -> Any:
    warnings.warn(
        f"{meta['model']} was exported with --allow-pickle: loading it executes code from the file", stacklevel=4
    )
    if meta["family"] == "mace":
        import mace  # noqa: F401  before e3nn
    try:
        return torch.load(io.BytesIO(entries["model.pkl"]), map_location="cpu", weights_only=False)
    except Exception as error:  # unpickling raises whatever it meets
        raise InputError(
            f"the pickled model can't be loaded ({type(error).__name__}: {error}); it needs the modules and versions with "
            f"which it was exported: {_list(meta['packages'])}"
        ) from error


def _parsed(entries: dict[str, bytes], name: str) -> Any:
    try:
        return json.loads(entries[name])
    except (KeyError, ValueError) as error:
        raise InputError(_damaged(error)) from error


def _list(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
