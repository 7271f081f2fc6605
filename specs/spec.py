"""`MLIPSpec`: everything that a model declares about its distribution."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import Any

from nvdd.policy import HaloStoragePolicy, StoragePolicy
from nvdd.specs.outputs import OutputKind, OutputSpec, Reduce


class ForceStrategy(str, Enum):
    """What the energy is differentiated by to get forces and stress."""

    # the energy depends on the geometry through edge vectors alone: forces, virial and per-atom virial
    # from one derivative; positions and cell are stand-ins that a model may only subtract and multiply
    EDGE_VECTORS = "edge_vectors"
    # the energy is a function of positions and cell: forces by positions, stress by a strain of both
    POSITIONS = "positions"
    # the model differentiates inside its forward and returns forces (and stress)
    MODEL_INTERNAL = "model_internal"
    # the model predicts forces (and stress) directly; they need not be a derivative of the energy
    DIRECT = "direct"


@dataclass(frozen=True)
class DistributionSpec:
    """The part of a spec that knows nothing of chemistry.

    Attributes:
        policy: storage layout of per-atom tensors, and what gathers and scatters do.
    """

    policy: StoragePolicy = field(default_factory=HaloStoragePolicy)


@dataclass(frozen=True, init=False)
class MLIPSpec:
    """What a model needs from the distributed framework.

    Attributes:
        distribution: storage policy.
        outputs: name -> :class:`OutputSpec`.
        force_strategy: what forces are derived from.
        name: for messages.

    Outputs are given by ``outputs={"energies": OutputSpec(OutputKind.PER_NODE)}``, or in three parts by
    ``output_kinds={"energies": OutputKind.PER_NODE}`` with ``all_reduce_outputs`` and ``owned_only_outputs``.
    """

    distribution: DistributionSpec
    outputs: Mapping[str, OutputSpec]
    force_strategy: ForceStrategy
    name: str

    def __init__(
        self,
        distribution: DistributionSpec | None = None,
        outputs: Mapping[str, OutputSpec] | None = None,
        *,
        output_kinds: Mapping[str, OutputKind] | None = None,
        all_reduce_outputs: Iterable[str] = (),
        owned_only_outputs: Iterable[str] = (),
        force_strategy: ForceStrategy = ForceStrategy.EDGE_VECTORS,
        name: str = "",
    ) -> None:
        merged = dict(outputs or {})
        for key, kind in (output_kinds or {}).items():
            if key in merged and merged[key].kind is not OutputKind(kind):
                raise ValueError(
                    f"MLIPSpec: output {key!r} is {merged[key].kind} in outputs and {kind} in output_kinds"
                )
            merged.setdefault(key, OutputSpec(OutputKind(kind)))
        for keys, reduce in ((all_reduce_outputs, Reduce.ALL_REDUCE), (owned_only_outputs, Reduce.OWNED_ONLY)):
            for key in keys:
                if key not in merged:
                    raise ValueError(
                        f"MLIPSpec: {reduce.value} output {key!r} is not declared in outputs or output_kinds"
                    )
                if merged[key].reduce not in (Reduce.NONE, reduce):
                    raise ValueError(
                        f"MLIPSpec: output {key!r} is declared both {merged[key].reduce.value} and {reduce.value}"
                    )
                merged[key] = replace(merged[key], reduce=reduce)
        object.__setattr__(self, "distribution", distribution or DistributionSpec())
        object.__setattr__(self, "outputs", MappingProxyType(merged))
        object.__setattr__(self, "force_strategy", ForceStrategy(force_strategy))
        object.__setattr__(self, "name", name)

    @property
    def output_kinds(self) -> dict[str, OutputKind]:
        """Output name -> kind."""
        return {key: spec.kind for key, spec in self.outputs.items()}

    @property
    def all_reduce_outputs(self) -> frozenset[str]:
        """Outputs of which each rank holds a share."""
        return frozenset(k for k, s in self.outputs.items() if s.reduce is Reduce.ALL_REDUCE)

    @property
    def owned_only_outputs(self) -> frozenset[str]:
        """Per-atom outputs whose owned rows are final as they are."""
        return frozenset(k for k, s in self.outputs.items() if s.reduce is Reduce.OWNED_ONLY)

    def __hash__(self) -> int:
        return hash((self.distribution, tuple(sorted(self.outputs.items())), self.force_strategy, self.name))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.distribution, dict(self.outputs), self.force_strategy, self.name)


def _rebuild(distribution, outputs, force_strategy, name) -> MLIPSpec:
    return MLIPSpec(distribution, outputs, force_strategy=force_strategy, name=name)
