"""`DistributionSpec`: the part of a spec that knows nothing of chemistry."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from nvdd.adapters import Adapter, OpAdapter
from nvdd.policy import HaloStoragePolicy, StoragePolicy


@dataclass(frozen=True)
class DistributionSpec:
    """Storage, and what stands between nvdd and code that it cannot see into.

    Attributes:
        policy: storage layout of per-atom tensors, and what gathers and scatters do.
        custom_ops: an `OpAdapter` for each custom operation that the model calls with rows or indices.
        third_party_helpers: `MethodAdapter`, `FunctionAdapter`, `PythonAdapter`, `JitAdapter` for Python code.

    Raises:
        ValueError: no storage policy, an adapter in the wrong one of the two places, or two of one target.
    """

    policy: StoragePolicy = field(default_factory=HaloStoragePolicy)
    custom_ops: tuple[OpAdapter, ...] = ()
    third_party_helpers: tuple[Adapter, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.policy, StoragePolicy):
            raise ValueError(
                f"DistributionSpec: policy={self.policy!r} is not a storage policy, such as HaloStoragePolicy()"
            )
        object.__setattr__(self, "custom_ops", adapters("DistributionSpec: custom_ops", self.custom_ops))
        object.__setattr__(
            self, "third_party_helpers", adapters("DistributionSpec: third_party_helpers", self.third_party_helpers)
        )
        for op in self.custom_ops:
            if not isinstance(op, OpAdapter):
                raise ValueError(f"DistributionSpec: custom_ops has {op}; it belongs to third_party_helpers")
        for helper in self.third_party_helpers:
            if isinstance(helper, OpAdapter):
                raise ValueError(f"DistributionSpec: third_party_helpers has {helper}; it belongs to custom_ops")


def adapters(where: str, given: Iterable[Any]) -> tuple[Adapter, ...]:
    """A tuple of adapters, each target once.

    Raises:
        ValueError: something else is among them, or two of them have one target.
    """
    found: dict[str, Adapter] = {}
    for adapter in given:
        if not isinstance(adapter, Adapter):
            raise ValueError(f"{where} has {adapter!r}, which is not an adapter")
        if adapter.target in found:
            raise ValueError(f"{where} has two adapters for {adapter.target}; leave one out")
        found[adapter.target] = adapter
    return tuple(found.values())
