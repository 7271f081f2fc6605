"""Where a model comes from, in words that another process can follow."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nvdd.errors import InputError


@dataclass(frozen=True)
class FactoryRef:
    """A function that makes a wrapper, by name.

    Attributes:
        module: import name, ``""`` if the function is only to be had by its file.
        path: source file, for scripts and test modules, which other processes can't import by name.
        attribute: dotted name in the module.
        args, kwargs: what to call it with.
    """

    module: str
    path: str
    attribute: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.module or self.path}:{self.attribute}"

    def resolve(self) -> Callable[..., Any]:
        """The function, imported in this process."""
        module = importlib.import_module(self.module) if self.module else _load(self.path)
        return functools.reduce(getattr, self.attribute.split("."), module)

    def make(self, device: torch.device | str) -> Any:
        """A wrapper on ``device``; its mode (train or eval) is the factory's.

        Raises:
            InputError: what comes out is no wrapper.
        """
        made = self.resolve()(*self.args, **self.kwargs)
        if not hasattr(made, "model_config") or not callable(made):
            raise InputError(
                f"the model factory {self} gave a {type(made).__name__}, not a wrapper with a model_config (BaseModelMixin)"
            )
        return made.to(device)

    @classmethod
    def of(cls, factory: Any) -> FactoryRef:
        """From a function, a class, a ``functools.partial`` of one, or ``"module:attribute"``.

        Raises:
            InputError: other processes have no way to it (a lambda, a function inside a function, a notebook).
        """
        if isinstance(factory, FactoryRef):
            return factory
        if isinstance(factory, str):
            module, _, attribute = factory.removeprefix("py:").partition(":")
            if not module or not attribute:
                raise InputError(f"model factory {factory!r}: write it as module:attribute")
            return cls(module, "", attribute)
        args, kwargs = (), {}
        while isinstance(factory, functools.partial):
            args, kwargs, factory = factory.args + args, {**factory.keywords, **kwargs}, factory.func
        name, module = getattr(factory, "__qualname__", ""), getattr(factory, "__module__", "")
        if not name or not module:
            raise InputError(
                f"model_factory must be a function that makes a wrapper, not a {type(factory).__name__}: each rank makes "
                "its own model"
            )
        if "<" in name:
            raise InputError(
                f"model_factory {name} is a lambda or stands inside a function, where the ranks can't find it; define it at "
                "the top level of a module or script (functools.partial of such a function works too)"
            )
        if _importable(module):
            return cls(module, "", name, args, kwargs)
        path = getattr(sys.modules.get(module), "__file__", None)
        if path is None or not Path(path).exists():
            raise InputError(
                f"model_factory {name} was defined in no file (a notebook or a prompt), so the ranks can't load it; write "
                "it to a module"
            )
        return cls("", str(Path(path).resolve()), name, args, kwargs)


def _importable(module: str) -> bool:
    """Whether ``import module`` in another process with this one's path gives the same file."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if module == "__main__" or file is None:
        return False
    # what is in sys.modules may have been put there under a name that nobody else finds: search from the top
    places, found, parts = None, None, module.split(".")
    for n in range(1, len(parts) + 1):
        name = ".".join(parts[:n])
        specs = (f.find_spec(name, places) for f in sys.meta_path if hasattr(f, "find_spec"))
        found = next((s for s in specs if s is not None), None)
        if found is None:
            return False
        places = found.submodule_search_locations
    return found.origin is not None and Path(found.origin).resolve() == Path(file).resolve()


# set while a script is loaded for its factory: what it does at its top level must not start ranks again
_loading: ContextVar[str] = ContextVar("loading", default="")


def refuse_while_loading() -> None:
    """Raises where a rank that loads a script for its factory comes upon the validation that has started it."""
    if path := _loading.get():
        raise InputError(
            f"{path} calls trace_and_validate at its top level, which each rank runs to find the model factory; put the call "
            "under if __name__ == '__main__':"
        )


def _load(path: str) -> Any:
    """The module in a file: the one that is loaded, else under a name of its own, which is not ``__main__``."""
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and Path(file).name == Path(path).name and str(Path(file).resolve()) == path:
            return module
    name = f"nvdd_factory_{hashlib.sha1(path.encode()).hexdigest()[:12]}"
    folder = str(Path(path).parent)
    if folder not in sys.path:  # as Python does for scripts
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    token = _loading.set(path)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        _loading.reset(token)
    return module


def checksum(wrapper: torch.nn.Module) -> str:
    """A hash of all weights and buffers: ranks that differ in it compute different models."""
    digest = hashlib.sha256()
    for name, value in sorted(wrapper.state_dict().items()):
        digest.update(name.encode())
        if isinstance(value, torch.Tensor):
            digest.update(str((value.dtype, tuple(value.shape))).encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
