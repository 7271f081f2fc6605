"""What a block of code sends through torch.distributed, whichever package calls it.

`CommunicationCounter` stands before the methods of ``ProcessGroup``, which all functions of torch.distributed call, and the
functional collectives, which call its C++ parts; for one block of code, in the whole process. (A dispatch mode, as torch's
``CommDebugMode`` is, misses what custom operators send.)
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

# which argument is what this rank gives; -1 for none
_METHODS = {
    "send": 0, "alltoall": 1, "alltoall_base": 1, "all_to_all_single": 1, "allreduce": 0, "allreduce_coalesced": 0,
    "reduce": 0, "broadcast": 0, "allgather": 1, "_allgather_base": 1, "all_gather_single": 1, "allgather_coalesced": 1,
    "allgather_into_tensor_coalesced": 1, "all_gather_single_coalesced": 1, "reduce_scatter": 1, "_reduce_scatter_base": 1,
    "reduce_scatter_single": 1, "reduce_scatter_tensor_coalesced": 1, "reduce_scatter_single_coalesced": 1, "gather": 1,
    "scatter": 1,
}  # fmt: skip
_FUNCTIONS = {"all_reduce": 0, "all_to_all_single": 0, "all_gather_tensor": 0, "reduce_scatter_tensor": 0, "broadcast": 0}
_TO_SINGLE_RANKS = ("send", "alltoall", "alltoall_base", "all_to_all_single")
_NOT_SEEN = (  # backward passes of their own, and such as neither package calls
    "all_to_all_single_autograd", "all_gather_tensor_autograd", "reduce_scatter_tensor_autograd", "permute_tensor",
    "all_reduce_coalesced", "all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced",
)  # fmt: skip


class CommunicationCounter:
    """A context in which the messages of this rank are counted.

    Attributes:
        calls: name of the method or functional collective -> how often it was called.
        bytes_sent: size of what this rank gave to them; of an all-to-all without the rows for itself. What a reduction or
            a gathering moves on the wire depends on its algorithm and is a multiple of that.

    Raises:
        NotImplementedError: in the context, of a functional collective that would not be counted, or not wholly.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes_sent = 0
        self._saved: list[tuple[Any, str, Any]] = []

    @property
    def exchanges(self) -> int:
        """Messages of rows to single ranks: sends, and all-to-alls, each of which counts once."""
        return sum(self.calls[name] for name in _TO_SINGLE_RANKS)

    @property
    def collectives(self) -> int:
        """Everything else: reductions, gatherings, broadcasts."""
        return sum(self.calls.values()) - self.exchanges

    def __enter__(self) -> CommunicationCounter:
        for name, position in _METHODS.items():
            if hasattr(dist.ProcessGroup, name):  # names differ between versions of torch
                self._replace(dist.ProcessGroup, name, self._counted(name, position + 1))  # after self
        for name, position in _FUNCTIONS.items():
            self._replace(functional, name, self._counted(name, position))
        for name in _NOT_SEEN:
            if hasattr(functional, name):
                self._replace(functional, name, lambda original: _refused(original.__name__))
        return self

    def __exit__(self, *exc: Any) -> None:
        while self._saved:
            owner, name, original = self._saved.pop()
            setattr(owner, name, original)

    def _replace(self, owner: Any, name: str, by: Callable[[Any], Any]) -> None:
        self._saved.append((owner, name, vars(owner)[name]))  # of a class, what binds self
        setattr(owner, name, by(getattr(owner, name)))

    def _counted(self, name: str, position: int) -> Callable[[Any], Any]:
        def around(original: Any) -> Any:
            @functools.wraps(original)
            def call(*args: Any, **kwargs: Any) -> Any:
                values = (*args, *kwargs.values())
                self.calls[name] += 1
                self.bytes_sent += _bytes(name, values[position], values[position + 1 :])
                return original(*args, **kwargs)

            return call

        return around


def _refused(name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"CommunicationCounter does not see all that {name} sends: count it, or call another")

    return call


def _bytes(name: str, given: Any, after: tuple[Any, ...]) -> int:
    """Bytes that this rank gives to ``name``: its input, and the arguments that follow."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if name == "alltoall":  # a tensor for each rank
        return _size(given) - _size(given[rank])
    if name in ("alltoall_base", "all_to_all_single"):
        splits = after[1] or [len(given) // size] * size
        return _size(given) // max(1, len(given)) * (sum(splits) - splits[rank])
    if name == "broadcast":
        root = after[0].rootRank if hasattr(after[0], "rootRank") else after[0]
        return _size(given) if root == rank else 0
    return _size(given)


def _size(given: Any) -> int:
    return given.numel() * given.element_size() if isinstance(given, Tensor) else sum(map(_size, given))
