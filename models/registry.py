"""Model families by name, built in or from other packages' ``nvdd.models`` entry points."""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Any

from nvdd.errors import InputError, MissingDependencyError
from nvdd.models import composed

_BUILTIN = {
    "aimnet2": "nvdd.models.aimnet2:FAMILY",
    "allegro": "nvdd.models.allegro:FAMILY",
    "chgnet": "nvdd.models.chgnet:FAMILY",
    "dftd3": "nvdd.models.dftd3:FAMILY",
    "escn": "nvdd.models.uma:ESCN",
    "ewald": "nvdd.models.ewald:FAMILY",
    "lj": "nvdd.models.lj:FAMILY",
    "mace": "nvdd.models.mace:FAMILY",
    "matgl": "nvdd.models.matgl:FAMILY",
    "mattersim": "nvdd.models.mattersim:FAMILY",
    "nequip": "nvdd.models.nequip:FAMILY",
    "orb": "nvdd.models.orb:FAMILY",
    "pet": "nvdd.models.pet:FAMILY",
    "pme": "nvdd.models.pme:FAMILY",
    "sevenn": "nvdd.models.sevenn:FAMILY",
    "torchani": "nvdd.models.torchani:FAMILY",
    "uma": "nvdd.models.uma:FAMILY",
}


@dataclass(frozen=True)
class ModelFamily:
    """A family of models that share a wrapper.

    Attributes:
        name: the word before the colon in ``family:checkpoint``.
        description: one line for `nvdd models`.
        build: ``build(checkpoint, *, dtype=None, **options)`` gives a wrapper on the CPU; ``checkpoint`` is the
            text after the colon or None, ``dtype`` a torch.dtype or None for the model's own.
        checkpoints: names that work without a file.
        options: option name -> one line about it.
        package: the package that must be installed (import name), or None.
        install: command that installs it.
        licence: licence of the package and of its weights, as far as stated.
        from_calculator: makes a wrapper of the family's own ASE calculator, or returns None if it is not one.
        configuration: what a wrapper is made of, as JSON can hold it; raises InputError with the reason if that
            can't be told. None if the family has no such description.
        rebuild: ``rebuild(configuration, dtype)`` makes a wrapper on the CPU into which the ``state_dict()`` of
            the original can be loaded.
    """

    name: str
    description: str
    build: Callable[..., Any]
    checkpoints: tuple[str, ...] = ()
    options: dict[str, str] | None = None
    package: str | None = None
    install: str = ""
    licence: str = ""
    from_calculator: Callable[[Any], Any | None] | None = None
    configuration: Callable[[Any], dict[str, Any]] | None = None
    rebuild: Callable[[dict[str, Any], Any], Any] | None = None

    def installed(self) -> bool:
        """Whether the family's package can be imported."""
        return self.package is None or importlib.util.find_spec(self.package) is not None


def _resolve(path: str) -> Any:
    module, _, attribute = path.partition(":")
    value = importlib.import_module(module)
    for part in attribute.split("."):
        value = getattr(value, part)
    return value


@lru_cache(maxsize=1)
def families() -> dict[str, ModelFamily]:
    """All families by name. An entry point of another package may add one, not replace a built-in one."""
    found = {name: _resolve(path) for name, path in _BUILTIN.items()}
    for entry in entry_points(group="nvdd.models"):
        if entry.name not in found:
            found[entry.name] = entry.load()
    return found


def load(model: str, *, dtype: Any = None, **options: Any) -> Any:
    """Builds a wrapper from ``"family:checkpoint"``, ``"family"`` or ``"py:module:attribute"``, or a sum of such.

    Args:
        model: for example ``"sevenn:7net-0"``, ``"mace:path.model"``, ``"lj"``, ``"py:my_module:my_factory"``; blocks of
            a sum have `` + `` between them: ``"mace:path.model + lj"``.
        dtype: torch.dtype of the weights; None for the model's own.
        options: given to the family's builder or the factory. Of a sum: ``block_options=[{...}, {...}]``, or keys with the
            block before them (`nvdd.models.composed.normal_options`).

    Raises:
        InputError: unknown family, missing module or attribute.
        MissingDependencyError: the family's package is not installed.
    """
    check(model, options)
    if composed.is_composed(model):
        return composed.load(model, dtype, options)
    family, _, checkpoint = model.partition(":")
    if family == "py":
        return _load_user_model(model, dtype, options)
    return families()[family].build(checkpoint or None, dtype=dtype, **options)


def check(model: str, options: Iterable[str] | Mapping[str, Any] = ()) -> None:
    """What can be said of ``load(model, **options)`` without building anything; raises what it would raise.

    Names of options do for a model by itself; a sum needs their values.
    """
    if composed.is_composed(model):
        composed.check(model, options or {})
        return
    family, _, checkpoint = model.partition(":")
    if family == "py":
        module, _, attribute = checkpoint.partition(":")
        if not module or not attribute:
            raise InputError(
                f"{model!r}: a model of your own is written py:module:attribute, for example py:my_models:make"
            )
        return
    known = families()
    if family not in known:
        raise InputError(
            f"unknown model family {family!r} in {model!r}; known: {', '.join(sorted(known))}, or "
            "'py:module:attribute' for a wrapper of your own (`nvdd models` lists them)"
        )
    entry = known[family]
    if entry.options is not None and (unknown := sorted(set(options) - entry.options.keys())):
        there_are = f"there are {', '.join(entry.options)}" if entry.options else "it has none"
        raise InputError(f"{family}: no option {', '.join(unknown)}; {there_are}")
    if not entry.installed():
        raise MissingDependencyError(
            f"model {model!r} needs the package {entry.package!r}, which is not installed here ({sys.executable}); "
            f"install it with: {entry.install}"
        )


def user_attribute(model: str) -> Any:
    """What ``"py:module:attribute"`` names: a wrapper, or what makes one."""
    check(model)
    _, module_name, attribute = model.split(":", 2)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise InputError(
            f"{model!r}: no module {error.name!r} on the path {sys.path[:3]}...; put its folder on PYTHONPATH"
        ) from error
    try:
        return functools.reduce(getattr, attribute.split("."), module)
    except AttributeError as error:
        raise InputError(f"{model!r}: module {module_name!r} has no {attribute!r}") from error


def _load_user_model(model: str, dtype: Any, options: dict[str, Any]) -> Any:
    value = user_attribute(model)
    if _is_wrapper(value) and not isinstance(value, type):
        if options:
            raise InputError(f"{model!r} is a model, not a function that makes one: it takes no options, got {options}")
        wrapper = copy.deepcopy(value)  # the module's own stays as it is
    else:
        _check_arguments(model, value, options)
        wrapper = value(**options)
    if not _is_wrapper(wrapper):
        raise InputError(
            f"{model!r} gave a {type(wrapper).__name__}, not a wrapper with a model_config; see nvdd.models.base.BaseModelMixin"
        )
    return wrapper if dtype is None else wrapper.to(dtype)


def _check_arguments(model: str, factory: Any, options: dict[str, Any]) -> None:
    if not callable(factory):
        raise InputError(f"{model!r} is a {type(factory).__name__}: neither a wrapper nor a function that makes one")
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # written in C
        return
    try:
        signature.bind(**options)
    except TypeError as error:
        raise InputError(f"{model!r}: {error}; its arguments are {signature}, the options {options}") from None


def _is_wrapper(value: Any) -> bool:
    return hasattr(value, "model_config") and callable(value)
