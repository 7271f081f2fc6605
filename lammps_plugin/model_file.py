"""The `.nvdd` file: a model as its configuration and weights.

LAMMPS loads `pair_style mliap unified FILE` by unpickling it, so the file is a pickle; its only global is
`nvdd_lammps.from_bytes`, and the one argument of that is a zip archive:

* ``meta.json``: format, versions of nvdd and of the family's packages, family, elements, cutoff (A), dtype, units;
* ``spec.json``: the model's `MLIPSpec`;
* ``configuration.json`` and ``weights.safetensors``, from which the model is rebuilt; or, in a file that was exported
  with ``allow_pickle``, ``model.pkl`` in place of the two, which executes code when it is loaded.

`nvdd_lammps.export` writes it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator
from typing import Any

import torch

import nvdd
from nvdd.errors import InputError
from nvdd.models import configuration as configurations
from nvdd.models.composed import families_of
from nvdd.specs import MLIPSpec
from nvdd.specs.declared import spec_of
from nvdd.specs.serialize import spec_from_json

FORMAT = 1
SUFFIX = ".nvdd"
DTYPES = {"float32": torch.float32, "float64": torch.float64}

# distributions whose version may change what a model computes, by family
_PACKAGES = {
    "mace": ("mace-torch", "e3nn"), "sevenn": ("sevenn", "e3nn"), "nequip": ("nequip", "e3nn"),
    "allegro": ("nequip-allegro", "nequip", "e3nn"), "torchani": ("torchani",),
}  # fmt: skip
# constants that e3nn's code generation has as buffers in modules that were unpickled, and as literals in new ones
_TRACED = re.compile(r"\._tensor_constant\d+$")
_META_KEYS = ("format", "nvdd", "packages", "model", "family", "elements", "cutoff", "dtype", "units", "pickled")


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


@contextlib.contextmanager
def _naming(path: Any) -> Iterator[None]:
    """Puts the file's name before the messages of errors."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


class Envelope:
    """What is pickled: a call of `nvdd_lammps.from_bytes`."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def __reduce__(self):
        from nvdd_lammps import from_bytes

        return from_bytes, (self.content,)


class _Reader(pickle.Unpickler):
    """Reads the envelope without calling anything: `from_bytes` gives back its argument."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("nvdd_lammps", "from_bytes"):
            return _unchanged
        raise InputError(
            f"it is a pickle that wants {module}.{name}, which no {SUFFIX} file does: not written by `nvdd export`"
        )


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
    if declared_spec(wrapper) != spec:
        raise InputError(
            f"{meta['model']} declares another distribution here than when it was exported (nvdd {meta['nvdd']}): "
            "export it again"
        )
    if abs(cutoff_of(wrapper) - meta["cutoff"]) > 1e-9:
        raise InputError(
            f"{meta['model']} has a cutoff of {cutoff_of(wrapper)} A here and of {meta['cutoff']} A in the file: export it again"
        )
    return wrapper, meta


def _rebuilt(meta: dict[str, Any], entries: dict[str, bytes]) -> Any:
    from safetensors import SafetensorError
    from safetensors.torch import load

    described, dtype = _parsed(entries, "configuration.json"), DTYPES[meta["dtype"]]
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
            f"written with {_list(meta['packages'])}, here are {_list(versions(meta['model']))}"
        ) from error
    unexpected = [name for name in unexpected if not _TRACED.search(name)]
    if missing or unexpected:
        raise InputError(
            f"the weights of {meta['model']} are not those of the model that its configuration makes (missing: "
            f"{', '.join(missing) or 'none'}; unexpected: {', '.join(unexpected) or 'none'}); the file was written "
            f"with {_list(meta['packages'])}, here are {_list(versions(meta['model']))}"
        )
    return wrapper


def _unpickled(meta: dict[str, Any], entries: dict[str, bytes]) -> Any:
    warnings.warn(
        f"{meta['model']} was exported with --allow-pickle: loading it executes code from the file", stacklevel=4
    )
    if "mace" in families_of(meta["model"]):
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


def declared_spec(wrapper: Any) -> MLIPSpec:
    """The wrapper's spec, from a method or an attribute."""
    spec = spec_of(wrapper)
    if spec is None:
        raise InputError(f"{type(wrapper).__name__} declares no distribution_spec; return a preset from it")
    return spec


def cutoff_of(wrapper: Any) -> float:
    """Of the neighbours that the model reads, A."""
    neighbors = wrapper.model_config.neighbor_config
    if neighbors is None:
        raise InputError(f"{type(wrapper).__name__}.model_config has no neighbor_config, so its cutoff is unknown")
    return neighbors.cutoff


def versions(model: str) -> dict[str, str]:
    """Distribution -> version, of torch and what the model's families need."""
    from importlib import metadata

    found = {"torch": torch.__version__}
    for name in dict.fromkeys(name for family in families_of(model) for name in _PACKAGES.get(family, ())):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found
