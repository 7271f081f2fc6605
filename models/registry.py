"""Model families by name, built in or from other packages' ``nvdd.models`` entry points."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Any

from nvdd.errors import InputError, MissingDependencyError

_BUILTIN = {
    "lj": "nvdd.models.lj:FAMILY",
    "mace": "nvdd.models.mace:FAMILY",
    "sevenn": "nvdd.models.sevenn:FAMILY",
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
    """Builds a wrapper from ``"family:checkpoint"``, ``"family"`` or ``"py:module:attribute"``.

    Args:
        model: for example ``"sevenn:7net-0"``, ``"mace:path.model"``, ``"lj"``, ``"py:my_module:my_factory"``.
        dtype: torch.dtype of the weights; None for the model's own.
        options: given to the family's builder or the factory.

    Raises:
        InputError: unknown family, missing module or attribute.
        MissingDependencyError: the family's package is not installed.
    """
    family, _, checkpoint = model.partition(":")
    if family == "py":
        return _load_user_model(model, checkpoint, dtype, options)
    known = families()
    if family not in known:
        raise InputError(
            f"unknown model family {family!r} in {model!r}; known: {', '.join(sorted(known))}, or "
            "'py:module:attribute' for a wrapper of your own (`nvdd models` lists them)"
        )
    entry = known[family]
    if not entry.installed():
        raise MissingDependencyError(
            f"model {model!r} needs the package {entry.package!r}, which is not installed here ({sys.executable}); "
            f"install it with: {entry.install}"
        )
    return entry.build(checkpoint or None, dtype=dtype, **options)


def _load_user_model(model: str, path: str, dtype: Any, options: dict[str, Any]) -> Any:
    module, _, attribute = path.partition(":")
    if not module or not attribute:
        raise InputError(
            f"{model!r}: a model of your own is written py:module:attribute, for example py:my_models:make"
        )
    try:
        factory = _resolve(f"{module}:{attribute}")
    except ModuleNotFoundError as error:
        raise InputError(
            f"{model!r}: no module {error.name!r} on the path {sys.path[:3]}...; put its folder on PYTHONPATH"
        ) from error
    except AttributeError as error:
        raise InputError(f"{model!r}: module {module!r} has no {attribute!r}") from error
    wrapper = factory if _is_wrapper(factory) and not isinstance(factory, type) else factory(**options)
    if not _is_wrapper(wrapper):
        raise InputError(
            f"{model!r} gave a {type(wrapper).__name__}, not a wrapper with a model_config; see nvdd.models.base.BaseModelMixin"
        )
    return wrapper if dtype is None else wrapper.to(dtype)


def _is_wrapper(value: Any) -> bool:
    return hasattr(value, "model_config") and callable(value)
