"""A function of tensors as a graph of torch operations, and what a graph that is used again must not contain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from nvdd.dispatch import call_site
from nvdd.errors import DistributedOpError, InputError
from nvdd.roles import ShardMeta
from nvdd.shard_tensor import ShardTensor, to_local

_DEPENDS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


def traced(function: Callable[..., list[Tensor]], inputs: list[Tensor]) -> fx.GraphModule:
    """The operations that ``function`` does on ``inputs``, which it is called with once.

    Raises:
        DistributedOpError: it looks at values of tensors, or makes shapes of them.
    """

    def watched(*tensors: Tensor) -> list[Tensor]:
        with Watch():
            return function(*tensors)

    try:
        module = make_fx(watched, tracing_mode="real")(*[t.detach().clone() for t in inputs])
    except RuntimeError as error:
        if "tracing tensor" in str(error):  # make_fx's words for .item(), bool(tensor) and the like
            raise _not_static("a look at a value") from error
        raise
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


class Watch(TorchDispatchMode):
    """Refuses operations that depend on values: others would be there in the next step."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if _DEPENDS & set(func.tags) and not (func is torch.ops.aten.index.Tensor and not _chooses(args[1])):
            raise _not_static(func)
        # in a backward torch hands over what the forward has saved, ShardTensors among it
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _chooses(indices: Any) -> bool:
    """Whether one of the indices is a mask, so that the shape of the result is that of its True values."""
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _not_static(what: Any) -> DistributedOpError:
    site = call_site()
    return DistributedOpError(
        f"compile: {what} at {site} depends on the values of its input, which a compiled forward does not have: the shape "
        "of the result, or the path that Python takes, would be that of the first step. Use torch.where and masks "
        "instead of choosing rows, or leave compile out",
        str(what),
        site,
    )


class Unwritten(fx.Interpreter):
    """Runs a graph with NaN in memory that is allocated and not filled.

    Where something writes to such memory behind torch's back, what it wrote in an earlier run may still be there.
    """

    def call_function(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """One operation."""
        out = super().call_function(target, args, kwargs)
        if getattr(target, "overloadpacket", None) in _ALLOCATE:
            out.fill_(torch.nan if out.is_floating_point() else out.dtype is torch.bool or torch.iinfo(out.dtype).max)
        return out


_ALLOCATE = {getattr(torch.ops.aten, name) for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")}


class ChecksLater(TorchFunctionMode):
    """Functions of torch's that look at values only to check them are replaced; `ShardMeta.require` keeps the check.

    Those that hand values to others than torch are refused.

    Args:
        meta: of the forward that is traced.
    """

    def __init__(self, meta: ShardMeta) -> None:
        super().__init__()
        self.meta = meta

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _LEAKS and torch._C._len_torch_dispatch_stack():  # not inside of an operation, which is run as a whole
            raise _not_static(f"Tensor.{func.__name__}")
        if func in _MADE_OF and torch._C._len_torch_dispatch_stack() and _holds_tensors(args[-1] if args else kwargs.get("data")):
            # torch reads the numbers where no mode sees it
            raise _not_static(f"{func.__name__} of a list of tensors (use torch.stack)")
        if func in _ONE_HOT:
            index, classes = _one_hot_arguments(*args, **kwargs)
            # a ShardTensor is first for dispatch, which comes back with torch functions of subclasses off
            own = not isinstance(index, ShardTensor) or not torch._C._is_torch_function_enabled()
            if own and classes > 0:
                with torch._C.DisableTorchFunctionSubclass():
                    return self._one_hot(to_local(index), classes)
        return func(*args, **kwargs)

    def _one_hot(self, index: Tensor, classes: int) -> Tensor:
        known = ((index >= 0) & (index < classes)).all()
        error = InputError(
            f"one_hot at {call_site()}: a class is not between 0 and {classes - 1}: an atom is of an element that the model "
            "does not know"
        )
        self.meta.require(known, error)
        return (index.unsqueeze(-1) == torch.arange(classes, device=index.device)).to(torch.int64)


_LEAKS = (
    torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.tolist, torch.Tensor.__dlpack__, torch.Tensor.__float__,
    torch.Tensor.__repr__,
)  # fmt: skip
_MADE_OF = (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor)


def _holds_tensors(values: Any) -> bool:
    return isinstance(values, (list, tuple)) and any(isinstance(v, Tensor) or _holds_tensors(v) for v in values)


_ONE_HOT = (torch.nn.functional.one_hot, torch._C._nn.one_hot)


def _one_hot_arguments(tensor: Any = None, num_classes: int = -1, **kwargs: Any) -> tuple[Any, int]:
    return kwargs.get("input", kwargs.get("self", tensor)), num_classes
