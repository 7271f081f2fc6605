"""Calls of scripted functions, brought to dispatch.

torch tells a tensor subclass of calls of scripted modules, but not of free scripted functions: such a function would
gather by an edge index without anybody noticing. While a distributed model runs, dispatch is told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nvdd.adapters.base import Adapter, Installed
from nvdd.adapters.callables import InstalledPatch
from nvdd.adapters.patching import Replacement
from nvdd.context import DDContext
from nvdd.dispatch import dispatch
from nvdd.shard_tensor import ShardTensor


class ScriptedCalls(Adapter):
    """Sends calls of scripted functions with ShardTensors through dispatch; each distributed forward has it."""

    kind = "jit"

    @property
    def target(self) -> str:
        """``torch.jit.ScriptFunction.__call__``."""
        return "torch.jit.ScriptFunction.__call__"

    def install(self, scope: DDContext | None = None) -> Installed:
        """In the forward ``scope`` or everywhere."""
        return InstalledPatch(torch.jit.ScriptFunction, "__call__", Replacement(_call, True, scope), str(self))


def _call(original: Callable, function: Any, *args: Any, **kwargs: Any) -> Any:
    # a handler that runs the function itself has switched torch functions off
    if torch._C._is_torch_function_enabled() and _any_shard((*args, *kwargs.values())):
        return dispatch(function, args, kwargs)
    return original(function, *args, **kwargs)


def _any_shard(values: Any) -> bool:
    return any(isinstance(v, ShardTensor) or (isinstance(v, (list, tuple)) and _any_shard(v)) for v in values)
