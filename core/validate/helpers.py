"""Helper functions of third-party packages that sum over a system without knowing that it is divided.

``mol_sum(x, idx)`` of a model package gives each rank the sum over its own atoms. Nothing is wrong with the number of
one rank, and nothing raises where the helper is scripted or works on plain tensors; but the ranks' numbers add up to
what the single process has, and that is how such a helper is recognised.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nvdd.roles import Role
from nvdd.shard_tensor import ShardTensor, to_local

_MOST = 65_536  # numbers in an output that may be per system
_OURS = {"torch", "nvdd", "nvdd_ase", "builtins", "numpy", "scipy", "sympy", "ase", "e3nn", "rich", "pytest", "_pytest"}


@dataclass(frozen=True)
class HelperOutput:
    """What a call of a helper returned on one process: its name, the how-manieth call, a small tensor, its role."""

    name: str
    call: int
    value: np.ndarray
    role: str


def packages_of(wrapper: torch.nn.Module) -> tuple[str, ...]:
    """Packages that define the model's modules, or whose functions these import: watched unless others are named."""
    defining = {type(m).__module__ for m in wrapper.modules()}
    names = set(defining)
    for module in [sys.modules[n] for n in defining if n in sys.modules and n.split(".")[0] not in _OURS]:
        for value in list(vars(module).values()):
            if isinstance(value, types.ModuleType):
                names.add(value.__name__)
            elif inspect.isfunction(value):
                names.add(value.__module__ or "")
    tops = {n.split(".")[0] for n in names} - _OURS - set(sys.stdlib_module_names) - {"__main__", ""}
    return tuple(sorted(n for n in tops if not n.startswith("nvdd_factory")))


class HelperWatch:
    """What the watched functions have returned since the last `take`."""

    def __init__(self) -> None:
        self._records: list[HelperOutput] = []
        self._calls: Counter = Counter()

    def take(self) -> list[HelperOutput]:
        """The records so far; the next ones are counted from 1 again."""
        records, self._records = self._records, []
        self._calls.clear()
        return records

    def recorder(self, function: Any, name: str) -> Any:
        """``function``, with its small outputs recorded."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            out = function(*args, **kwargs)
            self._calls[name] += 1
            if isinstance(out, torch.Tensor) and out.is_floating_point() and out.numel() <= _MOST:
                role = out._role.name if isinstance(out, ShardTensor) else ""
                value = to_local(out).detach().to(torch.float64).cpu().numpy().copy()
                self._records.append(HelperOutput(name, self._calls[name], value, role))
            return out

        return call


@contextmanager
def watch_helpers(packages: Iterable[str]) -> Iterator[HelperWatch]:
    """Watches the functions defined in modules of ``packages`` during the block, wherever they were imported to."""
    packages, watch = tuple(packages), HelperWatch()
    inside = lambda name: any(name == p or name.startswith(p + ".") for p in packages)
    # torch and the like call no helpers of a model
    modules = {
        n: m for n, m in list(sys.modules.items()) if isinstance(m, types.ModuleType) and n.split(".")[0] not in _OURS
    }
    functions: dict[int, tuple[Any, Any]] = {}
    for module in [m for n, m in modules.items() if inside(n)]:
        for name, value in list(vars(module).items()):
            own = inspect.isfunction(value) and inside(value.__module__ or "")
            if own or isinstance(value, torch.jit.ScriptFunction):
                functions.setdefault(id(value), (value, watch.recorder(value, f"{module.__name__}.{name}")))
    replaced: list[tuple[Any, str, Any]] = []
    try:
        for module in modules.values() if functions else ():
            for name, value in list(vars(module).items()):
                original, recorder = functions.get(id(value), (None, None))
                if original is value and recorder is not None:
                    setattr(module, name, recorder)
                    replaced.append((module, name, value))
        yield watch
    finally:
        for module, name, value in reversed(replaced):
            setattr(module, name, value)


def undeclared_reductions(
    reference: Sequence[HelperOutput], ranks: Sequence[Sequence[HelperOutput]], rtol: float = 1e-6
) -> list[str]:
    """Helpers whose outputs on the ranks sum to the single process's without being known to be shares."""
    found: dict[str, str] = {}
    if len(ranks) < 2:
        return []
    tables = [{(r.name, r.call): r for r in records} for records in ranks]
    for expected in reference:
        parts = [table.get((expected.name, expected.call)) for table in tables]
        if any(p is None or p.value.shape != expected.value.shape or p.role == Role.SYSTEM.name for p in parts):
            continue
        scale = np.abs(expected.value).max(initial=0.0)
        if scale == 0 or all(np.allclose(p.value, expected.value, rtol, rtol * scale) for p in parts):
            continue
        if np.abs(sum(p.value for p in parts) - expected.value).max() <= rtol * scale:
            found[expected.name] = (
                f"{expected.name} sums over the atoms of one rank: its outputs of shape {expected.value.shape} on the ranks "
                "add up to the single process's"
            )
    return list(found.values())
